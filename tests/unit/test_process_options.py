"""What Flow.process checks before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from onceflow import ColumnProcessor, Processor, Record
from onceflow.errors import OptionError
from onceflow.planning.process import StepOptions, check_options

OPTIONS = StepOptions("t", None, "dead-letter", "dead", None, None, False, "lmdb", None, False, "30 seconds")


class Misspelled(Processor):
    def proces(self, key: Any, records: Any, state: Any) -> Iterator[Record]:
        yield Record(key)


class Empty(ColumnProcessor):
    pass


class Right(Processor):
    def process(self, key: Any, records: Any, state: Any) -> Iterator[Record]:
        yield Record(key)


class Inherits(Right):
    pass


@pytest.mark.parametrize(
    "processor, hint", [(Misspelled(), "did you mean 'proces'?"), (Empty(), "Define it"), (Processor(), "Define it")]
)
def test_a_processor_without_process_is_refused(processor: Any, hint: str) -> None:
    """With on_error="dead-letter", all records became dead letters."""
    with pytest.raises(OptionError, match=r"does not define process\(\)") as caught:
        check_options(OPTIONS, processor, flow="f", sources=["s"], tables=[])
    assert hint in str(caught.value)


def test_a_processor_may_inherit_process() -> None:
    assert check_options(OPTIONS, Inherits(), flow="f", sources=["s"], tables=[])
