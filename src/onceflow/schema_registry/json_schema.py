"""``JsonSchemaSerde``: JSON that is checked by a schema in a registry."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urljoin

from onceflow.errors import EnvironmentUnusableError
from onceflow.schema_registry import wire_format
from onceflow.schema_registry.base import RegistrySerde
from onceflow.schema_registry.client import RegisteredSchema
from onceflow.schema_registry.json_changes import unreadable
from onceflow.schema_registry.json_quick import Fits, quick_check
from onceflow.schema_registry.json_reach import check_reach
from onceflow.schema_registry.json_rules import exact_validator
from onceflow.state.format import exact_json

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_MOST_SHOWN = 300


class JsonSchemaSerde(RegistrySerde["_Checked"]):
    """A serde of JSON with a schema. Made by `SchemaRegistry.json_schema`.

    Values are those of ``serdes.JSON``. ``encode`` checks a value by this serde's schema. ``decode`` checks it by the
    schema that it was written with, as Confluent's deserializer does, and then by this serde's.
    """

    kind = "JSON"

    def prepare(self) -> None:
        """See `RegistrySerde.prepare`. What the schema refers to has to be there as well."""
        super().prepare()
        try:
            check_reach(self.document(), self.resolver())
        except ValueError as error:
            raise EnvironmentUnusableError(f"The schema of {self.subject!r} cannot be used: {error}") from None

    def encode(self, value: Any) -> bytes:
        """The bytes of a value, with the id of the schema.

        Raises:
            ValueError: it does not fit the schema, or is no JSON.
            EnvironmentUnusableError: see `RegistrySerde.own`.
        """
        own, before = self._ours()
        try:
            raw = exact_json.dumps(value)
        except TypeError as error:
            raise ValueError(f"it is no JSON: {error}"[:_MOST_SHOWN]) from None
        _check(own, value, "the schema")
        return before + raw

    def decode(self, raw: bytes) -> Any:
        """The value.

        Raises:
            ValueError: it is not JSON, or does not fit one of the two schemas.
            EnvironmentUnusableError: see `RegistrySerde.own`.
        """
        schema_id, at = wire_format.split(raw)
        writer = self._writer(schema_id)
        reader, _ = self._ours()
        value = exact_json.loads(raw[at:])
        _check(writer, value, f"its schema with {schema_id}")
        if reader.schema[:3] != writer.schema[:3]:  # with all that they refer to
            _check(reader, value, f"the schema of {self.subject}")
        return value

    def document(self) -> Any:
        """The own schema. Raises: as `own`."""
        return self._ours()[0].validator.schema

    def resolver(self) -> Any:
        """What finds the schemas that the own one refers to; see ``referencing``. Raises: as `own`."""
        return self._ours()[0].resolver

    def _changes(self, writer: _Checked, reader: _Checked) -> list[str]:
        if reader.schema[:3] == writer.schema[:3]:
            return []
        return unreadable(*(json.loads(each.schema.text) for each in (writer, reader)))

    def _parse(self, schema: RegisteredSchema) -> _Checked:
        from jsonschema import Draft7Validator, validators
        from jsonschema.exceptions import SchemaError
        from jsonschema_specifications import REGISTRY
        from referencing import Resource
        from referencing.jsonschema import DRAFT7

        try:
            contents = exact_json.loads(schema.text)
            base = contents.get("$id", "") if isinstance(contents, dict) else ""
            registry: Any = REGISTRY  # with those of JSON Schema itself
            for name, each in _all_references(schema).items():
                resource = Resource.from_contents(exact_json.loads(each), DRAFT7)
                # A name that is relative to the $id of the schema is looked up as a whole URL.
                for uri in {name, urljoin(base, name)}:
                    registry = registry.with_resource(uri, resource)
            found: Any = validators.validator_for(contents, default=Draft7Validator)
            found.check_schema(contents)
            resolver = registry.resolver_with_root(Resource.from_contents(contents, DRAFT7))
            validator = exact_validator(found)(contents, registry=registry)
            return _Checked(schema, validator, resolver, quick_check(contents))
        except SchemaError as error:
            is_pattern = error.validator == "format" and error.validator_value == "regex"
            what = f"Python does not understand the pattern {error.instance!r:.100}" if is_pattern else error.message
            raise ValueError(f"it is no JSON Schema: {what}"[:_MOST_SHOWN]) from None
        except Exception as error:  # jsonschema raises its own, and what a malformed schema makes its code raise
            raise ValueError(f"it is no JSON Schema: {type(error).__name__}: {error}"[:_MOST_SHOWN]) from None


class _Checked(NamedTuple):
    """A schema, what checks values by it, what finds those that it refers to, and what knows most values that fit."""

    schema: RegisteredSchema
    validator: Validator
    resolver: Any
    quick: Fits | None


def _all_references(schema: RegisteredSchema) -> dict[str, str]:
    """The texts of all schemas that a schema refers to, by the names by which it does."""
    found: dict[str, str] = {}
    for name, each in schema.references:
        found.update({name: each.text, **_all_references(each)})
    return found


def _check(by: _Checked, value: Any, schema: str) -> None:
    from jsonschema.exceptions import best_match

    if by.quick is not None and by.quick(value):
        return
    try:
        error = best_match(by.validator.iter_errors(value))
    except Exception as unresolvable:  # a reference to nothing, or what a malformed schema makes its code raise
        raise ValueError(f"{schema} cannot be used: {unresolvable}"[:_MOST_SHOWN]) from None
    if error is not None:
        raise ValueError(f"it does not fit {schema}: {error.json_path}: {error.message}"[:_MOST_SHOWN])
