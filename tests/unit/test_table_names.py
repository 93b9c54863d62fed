"""Names of tables: each has two topics, ``NAME`` and ``NAME-internal``, and nothing else may have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow import Processor, Record
from onceflow.errors import OptionError
from onceflow.planning.process import StepOptions, check_options
from onceflow.protocol.names import INTERNAL_SUFFIX


class Kept(Processor):
    def process(self, key: Any, records: Sequence[Record], state: Any) -> Iterator[Record]:
        yield from records


def check(table: str, sources: list[str], tables: list[str]) -> None:
    options = StepOptions(table, None, "fail", None, None, None, "lmdb", None, False, "30 seconds")
    check_options(options, Kept(), flow="f", sources=sources, tables=tables)


names = st.builds(lambda name, suffixes: name + INTERNAL_SUFFIX * suffixes, st.sampled_from("ab"), st.integers(0, 2))


@given(names, names, names)
def test_no_topic_has_two_meanings(table: str, source: str, other: str) -> None:
    taken = {source, other, other + INTERNAL_SUFFIX}
    if taken & {table, table + INTERNAL_SUFFIX}:
        with pytest.raises(OptionError, match=f"table='{table}'"):
            check(table, [source], [other])
    else:
        check(table, [source], [other])


@pytest.mark.parametrize(
    "table, source, other, text",
    [
        ("orders", "in", "orders", "has a step already"),
        ("orders", "orders", "x", "is read by this flow"),
        ("orders", "orders-internal", "x", "orders-internal is read by this flow"),
        ("orders-internal", "in", "orders", "orders-internal is a topic of table orders"),
        ("orders", "in", "orders-internal", "orders-internal is a topic of table orders-internal"),
    ],
)
def test_what_the_error_says(table: str, source: str, other: str, text: str) -> None:
    with pytest.raises(OptionError, match=f"{text}(?s:.*)name|{text}(?s:.*)own"):
        check(table, [source], [other])
