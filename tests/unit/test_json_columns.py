"""JSON in columns: every row is read as itself or refused by its index."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.state.api.json_columns import JsonRowError, format_json, parse_json

SCHEMA = pa.schema([("id", pa.string()), ("amount", pa.int64()), ("rate", pa.float64()), ("open", pa.bool_())])

texts = st.text(st.characters(exclude_categories=["Cs"]))
rows = st.fixed_dictionaries(
    {},
    optional={
        "id": st.none() | texts,
        "amount": st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
        "rate": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "open": st.none() | st.booleans(),
        "more": st.recursive(
            texts | st.integers(0, 9), lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=12
        ),
    },
)


def parse(*values: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = parse_json(pa.array(values, pa.binary()), SCHEMA).to_pylist()
    return found


@pytest.mark.parametrize("examples", [30, pytest.param(100, marks=pytest.mark.long)])
def test_what_is_parsed(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(st.lists(rows), st.sampled_from([None, 1]), st.booleans(), st.integers(0, 3))
    def check(values: list[dict[str, Any]], indent: int | None, ascii_only: bool, skip: int) -> None:
        raws = [json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode() for value in values]
        table = parse_json(pa.array(raws, pa.binary()).slice(skip), SCHEMA)
        assert table.schema == SCHEMA
        assert table.to_pylist() == [{name: value.get(name) for name in SCHEMA.names} for value in values[skip:]]

    check()


@settings(deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "id": st.none() | texts | st.text('"\\\n\0\x1f\x7fa'),
                "amount": st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
                "rate": st.none() | st.floats(allow_nan=False, allow_infinity=False),
                "open": st.none() | st.booleans(),
            }
        )
    ),
    st.integers(0, 3),
)
def test_what_is_formatted_can_be_read_by_anyone(values: list[dict[str, Any]], skip: int) -> None:
    table = pa.Table.from_pylist(values, SCHEMA).slice(skip)
    formatted = format_json(table)
    assert formatted.type == pa.binary()
    assert [json.loads(raw) for raw in formatted.to_pylist()] == values[skip:]
    assert parse_json(formatted, SCHEMA).to_pylist() == values[skip:]


def test_column_types_of_both() -> None:
    nothing = {"id": None, "amount": None, "rate": None, "open": None}
    raw = b'{"amount":1}'
    for values in (
        pa.array([raw, None]),
        pa.chunked_array([[raw], [None]]),
        pa.array([raw.decode(), None]),
        pa.array([raw, None], pa.large_binary()),
        pa.array([raw.decode(), None], pa.large_string()),
    ):
        assert parse_json(values, SCHEMA).to_pylist() == [{**nothing, "amount": 1}, nothing]
    assert parse_json(pa.array([], pa.binary()), SCHEMA).num_rows == 0
    assert parse_json(pa.chunked_array([], pa.binary()), SCHEMA).schema == SCHEMA
    table = pa.table(
        {
            'a"b': pa.array(["x"]).dictionary_encode(),
            "raw": [b"y"],
            "large": pa.array(["\n"], pa.large_string()),
            "none": pa.nulls(1),
            "u8": pa.array([7], pa.uint8()),
            "f32": pa.array([0.5], pa.float32()),
        }
    )
    assert format_json(table).to_pylist() == [b'{"a\\"b":"x","raw":"y","large":"\\u000a","none":null,"u8":7,"f32":0.5}']
    assert format_json(table.slice(1)).to_pylist() == []
    assert format_json(pa.table({"x": pa.chunked_array([[1], [2]])})).to_pylist() == [b'{"x":1}', b'{"x":2}']
    with pytest.raises(TypeError, match="column x has type list"):
        format_json(pa.table({"x": [[1]]}))


def test_white_space_and_line_breaks_do_not_matter() -> None:
    found = parse(b' {"amount":\n1}\r\n', b'{"id":"a\\nb"}\n', b"\t{}", b'{"more":[\n{},\n{}\n]}')
    assert [(each["amount"], each["id"]) for each in found] == [(1, None), (None, "a\nb"), (None, None), (None, None)]


@pytest.mark.parametrize(
    "values, index",
    [
        ([b"{}", b"", b"{}{}"], 1),
        ([b"{}", b"{}{}", b""], 1),
        ([b'{"amount":1', b',"id":"2"}', b"{}{}"], 0),
        ([b'{"id":"}', b"{}{}"], 0),
        ([b'{"more":', b"{}}{}"], 0),
        ([b"{}{}"], 0),
        ([b"{}", b"{},"], 1),
        ([b"{}", b"[]"], 1),
        ([b"{}", b"null"], 1),
        ([b"{}", b'{"id":"\xff"}'], 1),
        ([b"{}", b"{}", b'{"amount":1.5}', b'{"amount":"x"}'], 2),
        ([b"{}", b'{"amount":99999999999999999999}'], 1),
        ([b"{}"] * 100 + [b'{"id":5}'] + [b"{}"] * 100, 100),
        ([b"{}", b'{"rate":NaN}'], 1),
        ([b"{}", b'{"rate":1e999}'], 1),
        ([b"{}", b'{"amount":1,"amount":2}'], 1),
        ([b"{ }\n", b'{"open":1}'], 1),
    ],
)
def test_a_bad_row_is_named(values: list[bytes], index: int) -> None:
    with pytest.raises(JsonRowError, match=f"row {index}: ") as raised:
        parse(*values)
    assert raised.value.index == index
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_rows_longer_than_a_block_of_the_reader() -> None:
    long = "x" * (3 << 20)
    assert [each["id"] for each in parse(b"{}", json.dumps({"id": long}).encode(), b'{"id":"y"}')] == [None, long, "y"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_json_does_not_have(bad: float) -> None:
    with pytest.raises(JsonRowError, match=r"row 2: rate is (nan|inf)"):
        format_json(pa.table({"rate": [None, 1.0, bad]}))


@pytest.mark.parametrize("bad", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "row, kind",
    [
        ("[1.5, {}]", pa.list_(pa.float64())),
        ("[[], [{}]]", pa.list_(pa.list_(pa.float32()))),
        ('{{"b": {}}}', pa.struct([("a", pa.int64()), ("b", pa.float64())])),
        ('[{{"b": [{}]}}]', pa.list_(pa.struct([("b", pa.list_(pa.float64()))]))),
    ],
)
def test_numbers_that_json_does_not_have_are_found_at_any_depth(row: str, kind: pa.DataType, bad: str) -> None:
    rows = [b'{"c":%s}' % each for each in (b"null", row.format("2").encode(), row.format(bad).encode())]
    schema = pa.schema([("c", kind)])
    assert parse_json(pa.array(rows[:2]), schema).num_rows == 2
    with pytest.raises(JsonRowError, match=r"row 3: .*(finite|too big)") as raised:
        parse_json(pa.array([rows[1], *rows]), schema)
    assert raised.value.index == 3
