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


class Typos(Right):
    alowed_lateness = "1 minute"
    TTL = "1 day"

    def evnt_time(self, record: Record) -> int:
        return 0

    def on_timers(self, key: Any, timer: Any, state: Any) -> None:
        """Never called."""


class Helped(Right):
    allowed = ()
    amounts = 1

    def processed(self) -> None:
        """A helper of process()."""


def test_names_of_a_class_that_are_almost_known(caplog: pytest.LogCaptureFixture) -> None:
    """They had no effect, and nothing said so: state was kept for ever, and no record was late."""
    check_options(OPTIONS, Typos(), flow="f", sources=["s"], tables=[])
    said = caplog.messages
    assert len(said) == 4
    for name, meant in {
        "alowed_lateness": "allowed_lateness",
        "evnt_time": "event_time",
        "on_timers": "on_timer",
        "TTL": "ttl",
    }.items():
        assert any(f"flow f: Typos has {name!r}" in line and f"did you mean {meant!r}?" in line for line in said)


@pytest.mark.parametrize("processor", [Right(), Inherits(), Helped()])
def test_other_names_of_a_class_are_its_own(processor: Any, caplog: pytest.LogCaptureFixture) -> None:
    check_options(OPTIONS, processor, flow="f", sources=["s"], tables=[])
    assert caplog.messages == []
