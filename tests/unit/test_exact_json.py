"""Numbers of JSON keep their value, from the document to Python and back; what cannot is an error."""

from __future__ import annotations

import contextlib
import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import onceflow
from onceflow import Record, serdes
from onceflow.admin.records import record_lines
from onceflow.admin.verify.identity import identity_of
from onceflow.server.formats import KEYS
from onceflow.server.problems import Problem
from onceflow.state.api.serdes import JSON
from onceflow.state.format import exact_json
from onceflow.testing.joined_tables import joined_table
from onceflow.testing.processor_driver import ProcessorDriver

digits = st.text("0123456789", min_size=1, max_size=40).map(lambda text: text.lstrip("0") or "0")
numbers = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["", "-"]),
    digits,
    st.just("") | st.text("0123456789", min_size=1, max_size=30).map(".{}".format),
    st.just("")
    | st.builds("{}{}{}".format, st.sampled_from("eE"), st.sampled_from(["", "+", "-"]), st.integers(0, 450)),
)
ordinary = st.integers(-(1 << 63), (1 << 64) - 1).map(str) | st.floats(allow_nan=False, allow_infinity=False).map(repr)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | numbers
written = st.recursive(
    numbers | ordinary | st.sampled_from(["null", "true", "false"]) | texts.map(json.dumps),
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda each: f"[{', '.join(each)}]")
        | st.dictionaries(texts.map(json.dumps), inner, max_size=3).map(
            lambda each: "{" + ",\n".join(f"{name} : {value}" for name, value in each.items()) + "}"
        )
    ),
    max_leaves=6,
)


def same(found: Any, expected: Any) -> bool:
    """Whether a value is that of a document that was read with Decimal for all numbers."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if type(found) is float:  # of two numbers that it stands for: the shortest, and that of 17 digits
        return expected in (Decimal(repr(found)), Decimal(f"{found:.17g}"))
    return type(found) in (type(expected), int) and bool(found == expected)


def floats_of(value: Any) -> list[float]:
    if isinstance(value, (dict, list)):
        inner = value.values() if isinstance(value, dict) else value
        return [number for each in inner for number in floats_of(each)]
    return [value] if isinstance(value, float) else []


def decimals(document: bytes) -> Any:
    return json.loads(document, parse_float=Decimal, parse_int=Decimal)


@given(written)
def test_every_number_of_a_document_keeps_its_value_or_the_document_is_refused(text: str) -> None:
    expected = json.loads(text, parse_float=Decimal)
    try:
        found = JSON.decode(text.encode())
    except ValueError:
        assert math.isinf(max(map(abs, floats_of(json.loads(text))), default=0))  # no float can be it
        return
    assert same(found, expected)
    again = JSON.encode(found)
    assert same(found, json.loads(again, parse_float=Decimal))
    assert JSON.decode(again) == found


@given(ordinary)
def test_what_programs_write_of_their_own_numbers_is_a_float_or_an_int(text: str) -> None:
    found = JSON.decode(text.encode())
    assert type(found) in (int, float)
    assert found == json.loads(text)


@pytest.mark.parametrize(
    "text, value",
    [
        ("18446744073709551615", (1 << 64) - 1),
        ("18446744073709551616", 1 << 64),
        ("-9223372036854775809", -(1 << 63) - 1),
        ("0.1234567890123456789", Decimal("0.1234567890123456789")),
        ("9007199254740993.0", Decimal("9007199254740993.0")),
        ("0.10000000000000001", 0.1),  # as printf("%.17g") writes it
        ("33.333333333333336", 33.333333333333336),
        ("1e-400", Decimal("1e-400")),
        ("1E5", 100000.0),
    ],
)
def test_what_numbers_become(text: str, value: Any) -> None:
    found = JSON.decode(b'{"n": %s}' % text.encode())["n"]
    assert found == value
    assert type(found) is type(value)


@dataclass
class Point:
    x: Any


class Level(Enum):
    LOW = math.nan


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, Decimal("NaN"), Decimal("Infinity")])
@pytest.mark.parametrize(
    "place",
    [
        lambda bad: bad,
        lambda bad: {"avg": bad},
        lambda bad: [[bad]],
        lambda bad: (1, {"a": None, "b": [bad]}),
        lambda bad: {"big": 1 << 70, "bad": bad},
        lambda bad: OrderedDict(a=OrderedDict(b=bad)),
        lambda bad: {"p": Point(bad)},
        lambda bad: [Point([Point({"a": bad})])],
    ],
)
def test_nan_and_infinity_are_refused_wherever_they_are(bad: Any, place: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"does not exist in JSON|serializable"):
        JSON.encode(place(bad))


def test_nan_of_an_enum_is_refused() -> None:
    with pytest.raises(ValueError, match="does not exist in JSON"):
        JSON.encode({"level": Level.LOW})


def test_nulls_and_large_numbers_are_written() -> None:
    assert JSON.encode({"a": None, "b": [None, 1.5], "c": "null"}) == b'{"a":null,"b":[null,1.5],"c":"null"}'
    assert JSON.encode({"a": (1 << 70, Decimal("1.10")), "p": Point(Decimal(7))}) == (
        b'{"a":[1180591620717411303424,1.10],"p":{"x":7}}'
    )
    with pytest.raises(TypeError, match="set"):
        JSON.encode({"big": 1 << 70, "set": {1}})


@pytest.mark.parametrize(
    "one, other", [("18446744073709551616", "18446744073709551617"), ("0.10000000000000000000001", "0.1")]
)
def test_ids_that_differ_in_their_last_digit_are_different_ids(one: str, other: str) -> None:
    of = identity_of("$.id")
    assert of(None, b'{"id": %s}' % one.encode(), ()) != of(None, b'{"id": %s}' % other.encode(), ())
    assert of(None, b'{"id": %s}' % one.encode(), ()) == of(None, b'{ "id":%s }' % one.encode(), ())


@given(written)
def test_records_of_text_keep_their_numbers(text: str) -> None:
    """`onceflow produce`, and what the commands of tables print."""
    expected = json.loads(text, parse_float=Decimal)
    try:
        record = record_lines.json_object(b'{"value": {"v": %s}}' % text.encode())
    except ValueError:
        assert math.isinf(max(map(abs, floats_of(json.loads(text))), default=0))
        return
    assert record is not None
    assert record.value is not None
    assert same(record_lines.load_json(record.value), {"v": expected})
    line = record_lines.as_line(record_lines.load_json(record.value))
    assert line.isascii()
    assert same(record_lines.load_json(line), {"v": expected})


@pytest.mark.parametrize("number", [b"18446744073709551616", b"7.00000000000000000001"])
def test_a_large_number_is_no_key_of_a_table_of_integers(number: bytes) -> None:
    with pytest.raises(Problem, match="64-bit integer"):
        KEYS["long"].key(exact_json.loads(number))


@given(written, st.randoms(use_true_random=False))
def test_documents_of_one_value_have_one_canonical_form(text: str, random: Any) -> None:
    try:
        canonical = exact_json.canonical(text.encode())
    except ValueError:
        return
    value = json.loads(text, parse_float=Decimal)
    again = JSON.encode(JSON.decode(text.encode()))
    assert decimals(canonical) == decimals(again)

    def shuffled(value: Any) -> str:
        if isinstance(value, dict):
            names = list(value)
            random.shuffle(names)
            fields = (f"{json.dumps(name)}:\n{shuffled(value[name])}" for name in names)
            return f"{{ {' ,'.join(fields)}}}"
        if isinstance(value, list):
            return f"[{','.join(map(shuffled, value))} ]"
        return str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=random.random() < 0.5)

    assert exact_json.canonical(shuffled(value).encode()) == canonical
    assert exact_json.canonical(canonical) == canonical


@pytest.mark.parametrize("text", ["1", "1.0", "1.00", "1e0", "10E-1", "0.1e1"])
def test_numbers_of_one_value_have_one_canonical_form(text: str) -> None:
    assert exact_json.canonical(b'{"b":[-%s], "a":true}' % text.encode()) == b'{"a":true,"b":[-1]}'


whole = st.integers(-(10**308), 10**308) | st.builds(lambda n, e: n * 10**e, st.integers(-99, 99), st.integers(0, 306))
values = (
    whole | st.floats(allow_nan=False, allow_infinity=False) | st.decimals(-(10**300), 10**300, places=40)
    | st.floats(1e15, 1.7e308) | st.sampled_from([10**41, 1e41, Decimal("1e41"), 1 << 64, 2.0**64, 1.5e308, -0.0])
)  # fmt: skip


def in_digits(value: Any) -> Decimal:
    """The value as it stands in a document."""
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


def spellings(value: Decimal) -> list[str]:
    """The same number, written in other ways."""
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    whole = ("-" if sign else "") + ("".join(map(str, digits)).lstrip("0") or "0")
    plain = f"{value:f}"
    zeros = plain + "0" if "." in plain else plain + ".0"
    return [plain, zeros, f"{whole}e{exponent}", f"{whole}.00E{exponent:+d}", f"{whole}0e{exponent - 1}"]


@given(values, values)
@example(10**41, 1e41)
@example(Decimal("1.23456789012345678901e60"), 1234567890123456789010 * 10**39)
@example(int(1.5e308), 1.5e308)
def test_equal_numbers_of_any_type_are_equal_keys(one: Any, other: Any) -> None:
    known: dict[Decimal, bytes] = {}
    for value in (one, other):
        for text in spellings(in_digits(value)):
            try:
                read = exact_json.loads(text)
            except ValueError:  # just beyond the largest float
                continue
            form = exact_json.canonical(f"[{text}]".encode())
            assert known.setdefault(in_digits(read), form) == form
            assert exact_json.canonical(form) == form
    assert len(set(known.values())) == len(known), "other numbers are other keys"


@pytest.mark.parametrize("number", ["1", "1.00000000000000000001", "1e-400", "1" * 30])
@pytest.mark.parametrize("levels", [300, 990, 1020])
def test_documents_that_are_nested_deeply_are_read_or_refused(number: str, levels: int) -> None:
    raw = b"[" * levels + number.encode() + b"]" * levels
    for read in (exact_json.loads, exact_json.canonical):
        with contextlib.suppress(ValueError):
            read(raw)


@pytest.mark.parametrize("leaf", [1, Decimal(1), 1 << 70])
@pytest.mark.parametrize("levels", [255, 300, 990, 5000])
def test_values_that_are_nested_too_deeply_are_a_value_error(leaf: Any, levels: int) -> None:
    for nest in (lambda value: [value], lambda value: {"a": value}):
        value = leaf
        for _ in range(levels):
            value = nest(value)
        with pytest.raises(ValueError, match="nested too deeply"):
            exact_json.dumps(value)
    with pytest.raises(TypeError):
        exact_json.dumps([object()])


@given(st.lists(st.floats() | st.integers(0, 1 << 65) | st.text('a"\\ é\n', max_size=4)), st.sampled_from([None, 0, 1]))
def test_documents_with_blanks_keep_their_numbers(found: list[Any], indent: int | None) -> None:
    found = [each for each in found if each == each and each not in (math.inf, -math.inf)]
    for in_ascii in (False, True):
        raw = json.dumps({"a b": found}, indent=indent, ensure_ascii=in_ascii).encode()
        assert exact_json.loads(raw) == {"a b": found}
        assert list(map(type, exact_json.loads(raw)["a b"])) == list(map(type, found))


@given(st.lists(written.map(str.encode) | st.none() | st.just(b"1e-400")))
def test_many_documents_are_read_as_each_of_them(raws: list[bytes | None]) -> None:
    load = exact_json.loader(raws)
    for raw in raws:
        try:
            expected = None if raw is None else exact_json.loads(raw)
        except ValueError:
            continue
        assert raw is None or repr(load(raw)) == repr(expected)


@pytest.mark.parametrize("raw", [b'{"id":"0d7e2c1e-111-4","t":"a1e-400b"}', b"[1.5e-10, 2E-99, 0.0]", b'"1e-4000x"'])
def test_what_looks_like_a_tiny_number_is_not_looked_at_twice(raw: bytes) -> None:
    assert exact_json.has_only_short_numbers(raw)


class Copy(onceflow.Processor):
    key = serdes.STRING
    value = state = output = JSON

    def process(self, key: str, records: list[Record], state: onceflow.State) -> Any:
        for record in records:
            state.put(record.value)
            state.map("m").put("a", record.value)
            state.list("l").append(record.value)
            yield Record(key, [state.get(), state.map("m").get("a"), list(state.list("l"))[-1]])


@given(st.lists(written, min_size=1, max_size=5))
def test_a_processor_that_copies_keeps_numbers(documents: list[str]) -> None:
    """Through its state, a map and a list, too. What cannot be kept is a dead letter."""
    driver = ProcessorDriver(Copy(), on_error="dead-letter")
    driver.send_many([Record(f"k{at}", text.encode()) for at, text in enumerate(documents)])
    outputs = {record.key: record.value for record in driver.outputs}
    for at, text in enumerate(documents):
        expected = json.loads(text, parse_float=Decimal)
        if f"k{at}" in outputs:
            assert same(outputs[f"k{at}"], [expected] * 3)
        else:
            assert expected is None or math.isinf(max(map(abs, floats_of(json.loads(text))), default=0))
    assert len(driver.dead_letters) == len(documents) - len(outputs)


class Put(Copy):
    value = serdes.STRING

    def process(self, key: str, records: list[Record], state: onceflow.State) -> Any:
        for record in records:
            bad = [{"avg": float(record.value)}]
            {"state": state.put, "map": lambda it: state.map("m").put("a", it), "list": state.list("l").append}.get(
                key, lambda it: None
            )(bad)
            yield Record(key, bad if key == "output" else 1)


@pytest.mark.parametrize("key", ["state", "map", "list", "output"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_processor_that_writes_nan_gets_a_dead_letter(key: str, value: str) -> None:
    driver = ProcessorDriver(Put(), on_error="dead-letter")
    assert driver.send(key, value) == []
    (letter,) = driver.dead_letters
    headers = dict(letter.headers)
    assert b"does not exist in JSON" in (headers["onceflow.error.message"] or b"")
    assert driver.send(key, "1.5")


def test_a_key_beyond_64_bits_finds_its_own_row() -> None:
    """Not that of another key, which is the same float."""
    one, other = 1 << 64, (1 << 64) + 1
    content = {JSON.encode({"id": one}): b"1", JSON.encode({"id": other}): b"2"}
    found = joined_table("t", content, 0)
    assert [found.get(JSON.encode(JSON.decode(b'{"id":%d}' % each))) for each in (one, other)] == [b"1", b"2"]


@given(st.integers(300, 320), st.integers(-1, 1), st.sampled_from([1, -1]))
def test_what_is_written_can_be_read_again(digits: int, more: int, sign: int) -> None:
    """The parser refuses integers that are too large for a double, so they are not written."""
    value = {"n": [sign * (10**digits + more)]}
    try:
        raw = exact_json.dumps(value)
    except ValueError:
        assert abs(value["n"][0]) > 10**308
        return
    assert exact_json.loads(raw) == value


decimals_of_17_digits = st.builds(
    lambda sign, digits, exponent: Decimal((sign, digits, exponent)),
    st.integers(0, 1),
    st.lists(st.integers(0, 9), min_size=1, max_size=20).map(tuple),
    st.integers(-330, 280),
) | st.floats(allow_nan=False, allow_infinity=False).map(lambda real: Decimal(f"{real:.17g}"))


@given(st.lists(decimals_of_17_digits))
@example([Decimal("0.10000000000000001"), Decimal("5873096.6686475901"), Decimal("-1.1000000000000001E-7")])
def test_a_decimal_that_is_written_is_read_as_the_same_number(given: list[Decimal]) -> None:
    """Also if its 17 digits are those of a float with fewer, for which a document of another program is taken."""
    raw = exact_json.dumps(given)
    assert json.loads(raw, parse_float=Decimal, parse_int=Decimal) == given
    read = exact_json.loads(raw)
    assert [Decimal(repr(each)) if type(each) is float else Decimal(each) for each in read] == given
    assert exact_json.dumps(exact_json.loads(exact_json.dumps(read))) == exact_json.dumps(read)
    assert exact_json.loads(exact_json.written({"n": given}).encode())["n"] == read
