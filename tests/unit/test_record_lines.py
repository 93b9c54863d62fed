"""Lines of text become records, and records lines, without losing anything."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.admin.records.record_lines import (
    as_line,
    compact_json,
    json_object,
    key_and_value,
    load_json,
    to_json,
    value_only,
)
from onceflow.state.api.record import Record

payloads = st.one_of(st.none(), st.binary(max_size=20), st.text(max_size=20).map(str.encode))


def test_a_value_alone() -> None:
    assert value_only(b"a:b \xff") == Record(None, b"a:b \xff")
    assert value_only(b"") == Record(None, b"")


@pytest.mark.parametrize(
    "separator, line, key, value",
    [
        (":", b"ada:5:6", b"ada", b"5:6"),
        (":", b":v", b"", b"v"),
        (":", b"k:", b"k", b""),
        ("=>", "ä=>\N{SNOWMAN}".encode(), "ä".encode(), "\N{SNOWMAN}".encode()),
        ("\t", b"\xff\t\xfe", b"\xff", b"\xfe"),
    ],
)
def test_a_key_and_a_value(separator: str, line: bytes, key: bytes, value: bytes) -> None:
    assert key_and_value(separator)(line) == Record(key, value)


def test_a_line_without_the_separator() -> None:
    with pytest.raises(ValueError, match="there is no ':' between a key and a value"):
        key_and_value(":")(b"ada")


@pytest.mark.parametrize(
    "text, key, value",
    [
        ('{"value": "v"}', None, b"v"),
        ('{"key": "k", "value": null}', b"k", None),
        ('{"key": "", "value": ""}', b"", b""),
        ('{"key": 7, "value": {"amount": 5, "who": "ä"}}', b"7", '{"amount":5,"who":"ä"}'.encode()),
        ('{"value": 123456789012345678901234567890}', None, b"123456789012345678901234567890"),
        ('{"key": true, "value": [1, 2.5]}', b"true", b"[1,2.5]"),
        ('{"key_base64": "/w==", "value_base64": "AA=="}', b"\xff", b"\0"),
        (
            '{"value": "v", "topic": "t", "partition": 3, "offset": 9, "headers": null, "timestamp_ms": null}',
            None,
            b"v",
        ),
    ],
)
def test_an_object(text: str, key: bytes | None, value: bytes | None) -> None:
    assert json_object(text.encode()) == Record(key, value)


def test_headers_and_timestamps() -> None:
    named = json_object(b'{"value": "v", "headers": {"a": "x", "b": null}, "timestamp_ms": 7}')
    assert named == Record(None, b"v", headers=[("a", b"x"), ("b", None)], timestamp_ms=7)
    listed = json_object(
        b'{"value": "v", "headers": [{"name": "a", "value_base64": "/w=="}, {"name": "a", "value": 1}]}'
    )
    assert listed == Record(None, b"v", headers=[("a", b"\xff"), ("a", b"1")])


@pytest.mark.parametrize("text", [b"", b"  \t "])
def test_an_empty_line_is_no_object(text: bytes) -> None:
    assert json_object(text) is None


@pytest.mark.parametrize(
    "text, why",
    [
        (b"ada:5", "it is not JSON: Expecting value"),
        (b"[" * 100_000, "not JSON"),
        (b'{"value": "\xff"}', "not JSON"),
        (b'{"value": NaN}', "NaN is no JSON number"),
        (b'{"value": {"a": 1e999}}', "too large for a double"),
        (b"[1]", "JSON, but not an object"),
        (b'{"key": "k"}', 'no field "value"; for a tombstone give "value": null'),
        (b'{"value": 1, "vlaue": 2}', "unknown field 'vlaue'; known are headers, key,"),
        (b'{"value": "\\ud800"}', "half of a surrogate pair"),
        (b'{"value": 1, "value_base64": "AA=="}', 'both "value" and "value_base64"'),
        (b'{"value_base64": "?"}', '"value_base64" is not base64'),
        (b'{"value_base64": 7}', '"value_base64" is not base64'),
        (b'{"value": 1, "headers": "x"}', "neither an object nor a list"),
        (b'{"value": 1, "headers": [1]}', "a header is an object"),
        (b'{"value": 1, "headers": [{"name": "n", "vlaue": 1}]}', "a header is an object"),
        (b'{"value": 1, "headers": [{"value": 1}]}', "a header is an object"),
        (b'{"value": 1, "timestamp_ms": -1}', "timestamp_ms"),
        (b'{"value": 1, "timestamp_ms": true}', "timestamp_ms"),
        (b'{"value": 1, "timestamp_ms": 9223372036854775808}', "timestamp_ms"),
    ],
)
def test_what_is_no_record(text: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        json_object(text)


LONG, HALF = Decimal("1.00000000000000000001"), "\ud800"
contents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([LONG, Decimal("1e-400"), HALF, "\x7fé", 0.5, ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", HALF]), inner, max_size=2),
    max_leaves=6,
)


@given(contents)
def test_any_document_that_was_read_is_written(content: Any) -> None:
    compact, line = compact_json(content), as_line(content)
    assert load_json(compact) == load_json(line) == content
    assert line.isascii()
    assert compact == compact_json(load_json(compact))
    try:
        compact.encode()
    except UnicodeEncodeError:
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            json_object(f'{{"value": [{line}]}}'.encode())


@pytest.mark.parametrize("inner", [1, LONG, HALF])
@pytest.mark.parametrize("write", [compact_json, as_line])
def test_a_document_that_is_nested_too_deeply_is_an_error_of_values(write: Any, inner: Any) -> None:
    for _ in range(100_000):
        inner = [inner]
    with pytest.raises(ValueError, match="nested too deeply"):
        write(inner)


@given(
    key=payloads,
    value=payloads,
    headers=st.lists(st.tuples(st.text(max_size=10), payloads), max_size=3),
    timestamp_ms=st.integers(-1, 2**63 - 1),
)
def test_what_was_written_is_read(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]], timestamp_ms: int
) -> None:
    line = to_json(Record(key, value, "t", headers, timestamp_ms, 3, 9))
    assert line.isprintable()
    assert json.loads(line)["offset"] == 9
    expected = None if timestamp_ms < 0 else timestamp_ms
    assert json_object(line.encode()) == Record(key, value, headers=headers, timestamp_ms=expected)


@pytest.mark.parametrize("name", ["a", 1, 1.5, True, None])
def test_names_of_fields_are_texts_as_json_dumps_writes_them(name: Any) -> None:
    """Also beside a Decimal, which json.dumps cannot write."""
    assert compact_json({name: Decimal("1.50")}) == json.dumps({name: 1.5}, separators=(",", ":")).replace(
        "1.5}", "1.50}"
    )
