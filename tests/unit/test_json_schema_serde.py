"""JSON with a schema in a registry: checked both ways, and what Confluent's own serializers read and write."""

from __future__ import annotations

import contextlib
import json
import pickle
import uuid
from decimal import Decimal
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from onceflow.errors import EnvironmentUnusableError
from onceflow.schema_registry.json_quick import quick_check
from onceflow.schema_registry.json_rules import exact_validator
from onceflow.schema_registry.json_schema import JsonSchemaSerde
from onceflow.schema_registry.registry import SchemaRegistry

PAYMENT = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Payment",
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 1}, "note": {"type": "string"}},
    "required": ["id"],
    "additionalProperties": False,
}


def registry() -> SchemaRegistry:
    """A new one, in memory."""
    return SchemaRegistry(f"mock://{uuid.uuid4()}")


def serde(schema: Any = PAYMENT) -> JsonSchemaSerde:
    return registry().json_schema("payments-value", json.dumps(schema), register=True)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("aé\U0001f600"),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text("abc"), values, max_size=3),
    max_leaves=8,
)


@given(JSON_VALUES)
def test_any_json_comes_back_as_it_was(value: Any) -> None:
    ours = pickle.loads(pickle.dumps(ANYTHING))
    assert ours.decode(ANYTHING.encode(value)) == value


ANYTHING = serde({})


@pytest.mark.parametrize(
    "value, said",
    [
        ({}, r"\$: 'id' is a required property"),
        ({"id": 0}, r"\$\.id: 0 is less than the minimum of 1"),
        ({"id": "1"}, r"\$\.id: '1' is not of type 'integer'"),
        ({"id": 1, "note": 5}, r"\$\.note: 5 is not of type 'string'"),
        ({"id": 1, "nte": "x"}, r"\$: Additional properties are not allowed"),
        ([], r"\$: \[\] is not of type 'object'"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_both_ways(value: Any, said: str) -> None:
    ours = serde()
    with pytest.raises(ValueError, match=said):
        ours.encode(value)
    before = ours.encode({"id": 1})[:5]
    with pytest.raises(ValueError, match=f"its schema with id 1: {said}"):
        ours.decode(before + json.dumps(value).encode())


def test_numbers_keep_their_digits() -> None:
    ours = serde({"type": "number", "multipleOf": 0.01})
    for value in (Decimal("12345678901234567.25"), 0.29, 0.3, 7, 10**300):
        assert ours.decode(ours.encode(value)) == value
    for value in (Decimal("12345678901234567.255"), 0.001):
        with pytest.raises(ValueError, match="is not a multiple of"):
            ours.encode(value)


NUMBERS = st.decimals(allow_nan=False, allow_infinity=False, min_value=-5, max_value=5, places=20) | st.integers(-5, 5)


@given(NUMBERS | st.floats(-5, 5), NUMBERS | st.floats(-5, 5))
def test_numbers_are_compared_by_their_digits(value: Any, limit: Any) -> None:
    number, bound = (Decimal(repr(each)) if isinstance(each, float) else Decimal(each) for each in (value, limit))
    for name, fits in (
        ("minimum", number >= bound),
        ("maximum", number <= bound),
        ("exclusiveMinimum", number > bound),
        ("exclusiveMaximum", number < bound),
        ("const", number == bound),
    ):
        ours = registry().json_schema("s", f'{{"{name}": {bound:f}}}', register=True)
        try:
            raw = ours.encode(value)
        except ValueError:
            assert not fits, name
            continue
        assert fits, name
        found = ours.decode(raw)
        assert (Decimal(repr(found)) if isinstance(found, float) else found) == number


LIMITS = st.integers(-2, 3) | st.sampled_from([0.5, 1.0])
SCHEMAS = st.recursive(
    st.booleans()
    | st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["null", "boolean", "string", "integer", "number", "array", "object"])
            | st.lists(st.sampled_from(["null", "string", "integer"]), min_size=1, unique=True),
            "enum": st.lists(JSON_VALUES, min_size=1, max_size=2),
            "const": JSON_VALUES,
            "minimum": LIMITS,
            "exclusiveMaximum": LIMITS,
            "minLength": st.integers(0, 2),
            "maxItems": st.integers(0, 2),
            "title": st.just("t"),
            "format": st.just("date-time"),
            "minProperties": st.just(1),
        },
    ),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(st.text("abc", max_size=1), inner, max_size=2),
            "required": st.lists(st.text("abc", max_size=1), max_size=2, unique=True),
            "additionalProperties": inner,
            "items": inner,
        },
    ),
    max_leaves=5,
)


@given(SCHEMAS, JSON_VALUES)
def test_a_value_that_surely_fits_fits(schema: Any, value: Any) -> None:
    quick = quick_check(schema)
    if quick is not None and quick(value):
        fits = exact_validator(Draft7Validator)(schema)
        assert not [*fits.iter_errors(value)]


def test_values_of_usual_schemas_surely_fit() -> None:
    quick = quick_check(PAYMENT)
    assert quick is not None
    assert quick({"id": 7, "note": "x"})
    assert not any(map(quick, [{"id": 0}, {"note": "x"}, {"id": 1, "more": 1}, [], {"id": 1.5}, {"id": True}]))
    assert quick_check({"$ref": "#"}) is None


@pytest.mark.parametrize(
    "schema, good, bad",
    [
        ({"enum": [0.1, [1, {"a": 2.0}]]}, [Decimal("0.1"), 0.1, [1.0, {"a": 2}]], [0.2, [True, {"a": 2}], 1]),
        ({"const": 1}, [1, 1.0, Decimal("1.00")], [True, "1", 2]),
        ({"const": False}, [False], [0, None]),
        ({"type": "integer"}, [1, 1.0, Decimal(5), 10**400], [1.5, Decimal("1.5"), True]),
        ({"multipleOf": 0.1}, [0.3, Decimal("0.30"), 0], [0.35, Decimal("1e-300")]),
        ({"type": "number", "minimum": 0.1}, [Decimal("0.10000000000000000001"), 0.1], [0.09]),
    ],
    ids=str,
)
def test_rules_of_numbers(schema: Any, good: list[Any], bad: list[Any]) -> None:
    ours = serde(schema)
    for value in good:
        if value != 10**400:  # which JSON of this kind does not have
            ours.encode(value)
    for value in bad:
        with pytest.raises(ValueError, match="does not fit the schema"):
            ours.encode(value)


@pytest.mark.parametrize(
    "schema, said",
    [
        ({"$ref": "nowhere.json"}, r"its reference 'nowhere.json' leads nowhere"),
        ({"properties": {"a": {"items": {"$ref": "#/definitions/b"}}}}, r"its reference '#/definitions/b' leads nowh"),
        ({"$ref": "#/definitions/a", "definitions": {"a": {"$ref": "#/definitions/b"}}}, r"'#/definitions/b' leads"),
        ({"properties": {"a": {"pattern": r"^\p{L}+$"}}}, r"Python does not understand the pattern .*p\{L"),
        ({"patternProperties": {"(?<name>x)": {}}}, r"Python does not understand the pattern"),
    ],
)
def test_what_a_schema_lacks_is_said_where_the_flow_is_defined(schema: Any, said: str) -> None:
    with pytest.raises(EnvironmentUnusableError, match=said):
        serde(schema).prepare()


def test_what_values_do_not_need_may_be_missing() -> None:
    schema = {
        "definitions": {"unused": {"$ref": "nowhere.json"}},
        "properties": {"$ref": {"type": "string"}, "pattern": {"const": "("}, "of": {"$ref": "#/definitions/node"}},
        "enum": [{"$ref": "x"}, {"of": {"next": {}}}],
    }
    schema["definitions"]["node"] = {"properties": {"next": {"$ref": "#/definitions/node"}}}
    serde(schema).prepare()
    meta = serde({"$ref": "http://json-schema.org/draft-07/schema#"})
    meta.prepare()
    assert meta.decode(meta.encode({"type": "string"})) == {"type": "string"}
    with pytest.raises(ValueError, match="does not fit the schema"):
        meta.encode({"type": "strin"})


@given(st.binary(max_size=20))
def test_any_bytes_are_a_value_or_a_value_error(garbage: bytes) -> None:
    for raw in (garbage, ANYTHING.encode(1)[:5] + garbage):
        with contextlib.suppress(ValueError):
            ANYTHING.decode(raw)


def test_references_are_read() -> None:
    there = registry()
    client = there.client.library
    client.register_schema("money", Schema('{"type": "integer", "minimum": 0}', "JSON"))
    text = json.dumps({"type": "object", "properties": {"price": {"$ref": "money.json"}}})
    client.register_schema("payments-value", Schema(text, "JSON", [SchemaReference("money.json", "money", 1)]))
    ours = pickle.loads(pickle.dumps(there.json_schema("payments-value")))
    assert ours.decode(ours.encode({"price": 5})) == {"price": 5}
    with pytest.raises(ValueError, match=r"\$\.price: -1 is less"):
        ours.encode({"price": -1})
    lost = there.json_schema("lost-value", json.dumps({"$ref": "nowhere.json"}), register=True)
    with pytest.raises(ValueError, match="the schema cannot be used"):
        lost.encode({})


def test_confluents_serializers_read_and_write_the_same() -> None:
    there = registry()
    text = json.dumps(PAYMENT)
    context = SerializationContext("payments", MessageField.VALUE)
    ours = there.json_schema("payments-value", text, register=True)
    value = {"id": 7, "note": "é"}
    raw = ours.encode(value)
    serializer = JSONSerializer(text, there.client.library, conf={"auto.register.schemas": False})
    theirs = serializer(value, context)
    assert theirs is not None
    assert theirs[:5] == raw[:5]
    assert ours.decode(theirs) == value
    assert JSONDeserializer(None, schema_registry_client=there.client.library)(raw, context) == value
