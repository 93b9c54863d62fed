"""Columns with dictionaries are decoded as they are, whatever they hold and however they are nested."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onceflow
from onceflow.state.api.dictionaries import decoded
from onceflow.testing.processor_driver import ProcessorDriver

_VIEW = pa.string_view()


def categories(values: list[str | None], kind: pa.DataType = _VIEW, index: pa.DataType | None = None) -> Any:
    """The values as Polars gives a ``Categorical``."""
    known = sorted({value for value in values if value is not None})
    places = pa.array([None if value is None else known.index(value) for value in values], index or pa.uint32())
    return pa.DictionaryArray.from_arrays(places, pa.array(known, pa.string()).cast(kind))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_values_stay_the_same(data: st.DataObject) -> None:
    texts = st.none() | st.text(st.characters(codec="utf-8"), max_size=14)
    values = data.draw(st.lists(texts, max_size=8))
    kind = data.draw(st.sampled_from([_VIEW, pa.binary_view(), pa.string(), pa.large_string(), pa.binary()]))
    column = categories(values, kind, data.draw(st.sampled_from([pa.uint8(), pa.uint32(), pa.int64()])))
    expected: list[Any] = [None if value is None else value.encode() for value in values]
    if kind in (_VIEW, pa.string(), pa.large_string()):
        expected = [*values]
    for _ in range(data.draw(st.integers(0, 2))):
        missing = data.draw(st.lists(st.booleans(), min_size=len(column), max_size=len(column)))
        mask = pa.array(missing, pa.bool_())
        how = data.draw(st.sampled_from(["struct", "list", "large list", "list of one", "map"]))
        if how == "map":
            names = pa.array(["k"] * len(column), pa.string())
            column = pa.MapArray.from_arrays(pa.array([*range(len(column) + 1)], pa.int32()), names, column, mask=mask)
            expected = [None if gone else [("k", each)] for gone, each in zip(missing, expected, strict=True)]
        elif how == "list of one":
            column = pa.FixedSizeListArray.from_arrays(column, 1, mask=mask)
            expected = [None if gone else [each] for gone, each in zip(missing, expected, strict=True)]
        elif how == "struct":
            column = pa.StructArray.from_arrays([column], names=["a"], mask=mask)
            expected = [None if gone else {"a": each} for gone, each in zip(missing, expected, strict=True)]
        else:
            made = pa.ListArray if how == "list" else pa.LargeListArray
            column = made.from_arrays([*range(len(column) + 1)], column, mask=mask)
            expected = [None if gone else [each] for gone, each in zip(missing, expected, strict=True)]
    begin = data.draw(st.integers(0, len(column)))
    found = decoded(column.slice(begin))
    assert found.to_pylist() == expected[begin:]
    assert not {"dictionary", "view"} & {*re.split(r"\W|_", str(found.type))}
    chunks = decoded(pa.chunked_array([column, column.slice(begin)][: data.draw(st.integers(0, 2))], column.type))
    assert chunks.to_pylist() == (expected + expected[begin:])[: len(chunks)]
    found.validate(full=True)


@pytest.mark.parametrize("kind", [_VIEW, pa.large_string()])
@pytest.mark.parametrize("what", ["key", "value", "topic", "headers", "state"])
def test_a_column_processor_returns_categories(what: str, kind: pa.DataType) -> None:
    """Also as the names of headers, which are inside of lists."""

    class Categories(onceflow.ColumnProcessor):
        state_fields = {"s": "string"}  # noqa: RUF012

        def process(self, records: Any, states: Any, context: Any) -> Any:
            texts = {"key": [*map(bytes.decode, records["key"].to_pylist())], "value": ["v"] * len(records)}
            texts["topic"] = ["other"] * len(records)
            columns: dict[str, Any] = {name: pa.array(column) for name, column in texts.items()}
            if what in columns:
                columns[what] = categories(texts[what], kind)
            names = categories(["h"] * len(records), kind) if what == "headers" else pa.array(["h"] * len(records))
            header = pa.StructArray.from_arrays([names, pa.array([b"1"] * len(records))], names=["key", "value"])
            columns["headers"] = pa.ListArray.from_arrays([*range(len(records) + 1)], header)
            state = categories(["s"] * len(states), kind) if what == "state" else pa.array(["s"] * len(states))
            return pa.table(columns), pa.table({"key": states["key"], "s": state})

    driver = ProcessorDriver(Categories())
    driver.send_many([(b"a", b"1"), (b"b", b"2")])
    found = [(each.key, each.value, each.topic, [*each.headers]) for each in driver.outputs]
    assert found == [(b"a", b"v", "other", [("h", b"1")]), (b"b", b"v", "other", [("h", b"1")])]
    assert driver.states == {b"a": {"s": "s"}, b"b": {"s": "s"}}
