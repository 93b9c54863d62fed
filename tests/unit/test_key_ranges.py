"""A range of keys has the keys between its bounds, or says why not: their order is that of their bytes."""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow import OptionError, Processor, serdes
from onceflow.state.api.joined_table import JoinedTable
from onceflow.state.format import rows
from onceflow.state.stores.base import Store
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.state.stores.stored_rows import StoredRows
from onceflow.tables.lookups import Lookups
from onceflow.testing.processor_driver import ProcessorDriver

_Ranges = dict[str, Callable[..., Any]]


def ranges(serde: Any, keys: list[Any]) -> _Ranges:
    """Everything that has ranges, with these keys."""
    folder = Path(uuid.uuid4().hex)  # it is only a name
    store = MemoryStore.open(folder)
    MemoryStore.remove(folder)
    assert store.write({rows.value_key(serde.encode(key)): rows.pack(b"1") for key in keys})
    return {
        "joined": joined(store, serde).range,
        "table": View(store, serde).range,
        "map": lambda *bounds: in_processor(serde, keys, lambda state: state.map("m", key=serde).items(*bounds)),
        "state": lambda *bounds: in_processor(serde, keys, lambda state: state.range(*bounds)),
    }


class View(Lookups):
    topic = "t"

    def __init__(self, store: Store, key: Any) -> None:
        super().__init__(key, serdes.BYTES)
        self._store = store

    def _readable(self) -> StoredRows:
        return StoredRows(lambda: contextlib.nullcontext({0: self._store}), partitions=1)


def joined(store: Store, key: Any) -> JoinedTable:
    return JoinedTable(
        "t",
        lambda: contextlib.nullcontext({0: store}),
        partitions=1,
        key=key,
        value=serdes.BYTES,
        now_ms=0,
        position="",
        own_partition=None,
    )


def in_processor(serde: Any, keys: list[Any], asked: Callable[[Any], Any]) -> list[Any]:
    found: list[Any] = []

    class Asks(Processor):
        key = serde

        def process(self, key: Any, records: Any, state: Any) -> None:
            state.put(b"1")
            entries = state.map("m", key=serde)
            for each in keys:
                entries.put(each, b"1")
            if records[-1].value == b"ask":
                try:
                    found.append([*asked(state)])
                except ValueError as error:
                    found.append(error)

    driver = ProcessorDriver(Asks())
    driver.send_many([(key, b"") for key in keys])
    driver.send(keys[0], b"ask")
    if isinstance(found[0], ValueError):
        raise found[0]
    return list(found[0])


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_range_of_numbers_is_whole_or_refused(data: st.DataObject) -> None:
    whole = data.draw(st.booleans())
    serde = serdes.LONG if whole else serdes.DOUBLE
    numbers: st.SearchStrategy[Any] = st.integers(-9, 9) | st.sampled_from([-(2**63), 2**63 - 1])
    if not whole:
        numbers = st.sampled_from([-math.inf, -2.5, -1.0, 0.0, 0.5, 1e300, math.inf])
    keys = data.draw(st.lists(numbers, min_size=1, max_size=6, unique=True))
    start, end = data.draw(numbers), data.draw(numbers)
    expected = {key for key in keys if start <= key < end}
    for name, asked in ranges(serde, keys).items():
        try:
            found = {key for key, _ in asked(start, end)}
        except (ValueError, OptionError) as error:
            assert "comes after end" in str(error), name  # noqa: PT017
            assert start < end, name
            assert serde.encode(start) > serde.encode(end), name
        else:
            assert start >= end or found == expected, name


@pytest.mark.parametrize("name", ["joined", "table", "map", "state"])
@pytest.mark.parametrize(
    "serde, start, end",
    [(serdes.LONG, -5, 5), (serdes.DOUBLE, -2.0, -1.0), (serdes.JSON, 9, 10), (serdes.JSON, {"b": 1}, {"a": 1})],
)
def test_a_range_against_the_order_of_its_bytes(name: str, serde: Any, start: Any, end: Any) -> None:
    asked = ranges(serde, [start, end])[name]
    with pytest.raises((ValueError, OptionError), match=r"comes after end .* in the order of the keys' bytes"):
        asked(start, end)
    assert [key for key, _ in asked(end, None)] == [end, start]


@pytest.mark.parametrize("name", ["joined", "table", "map", "state"])
@pytest.mark.parametrize("serde, start, end", [(serdes.LONG, 9, 3), (serdes.STRING, "b", "a"), (serdes.LONG, -1, -1)])
def test_a_range_that_ends_before_it_starts_is_empty(name: str, serde: Any, start: Any, end: Any) -> None:
    assert list(ranges(serde, [start])[name](start, end)) == []
