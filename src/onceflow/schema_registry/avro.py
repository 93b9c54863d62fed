"""``AvroSerde``: Avro values whose schemas are in a registry."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

from onceflow.schema_registry import wire_format
from onceflow.schema_registry.avro_checks import Check, check_of
from onceflow.schema_registry.base import RegistrySerde
from onceflow.schema_registry.client import RegisteredSchema
from onceflow.schema_registry.wire_format import SchemaId

#: A union of several records, enums or fixed values names the one it has: ``("shop.Order", {...})``.
_NAMED = {"return_named_type": True, "return_named_type_override": True}
_MOST_SHOWN = 300


class AvroSerde(RegistrySerde[Any]):
    """A serde of Avro. Made by `SchemaRegistry.avro`.

    ``decode`` reads a value with the schema that has written it, and gives it the fields of this serde's schema: fields
    that it lacks are skipped, and fields that were added get their defaults. Python has the values as fastavro gives
    them: dicts for records and maps, ``decimal.Decimal``, ``uuid.UUID``, and ``datetime`` objects with a time zone for
    timestamps. A value of a union with several records, enums or fixed types is a pair: the type's name, the value.

    ``encode`` refuses what would not come back as it was: an int beyond its 32 bits, a float beyond its range, a
    timestamp without a time zone or with more digits than the schema has, a field that the schema lacks.
    """

    kind = "AVRO"

    def encode(self, value: Any) -> bytes:
        """The bytes of a value, with the id of the schema.

        Raises:
            ValueError: it does not fit the schema.
            EnvironmentUnusableError: see `RegistrySerde.own`.
        """
        from fastavro import schemaless_writer
        from fastavro.validation import ValidationError, validate

        (schema, check), before = self._ours()
        buffer = io.BytesIO()
        buffer.write(before)
        try:
            validate(value, schema, strict=False)
            if check is not None:
                check(value)
            schemaless_writer(buffer, schema, value, strict_allow_default=True)
        except ValidationError as error:
            raise ValueError(f"it does not fit the schema: {_said(error)}") from None
        except (TypeError, ValueError, OverflowError, ArithmeticError, AttributeError, KeyError) as error:
            raise ValueError(f"it does not fit the schema: {error}"[:_MOST_SHOWN]) from None
        return buffer.getvalue()

    def decode(self, raw: bytes) -> Any:
        """The value.

        Raises:
            ValueError: it is not Avro of a known schema, or its schema cannot be read with this serde's.
            EnvironmentUnusableError: see `RegistrySerde.own`.
        """
        return self.read(raw, self.writer, self.own_schema(), **_NAMED)

    def own_schema(self) -> Any:
        """The own schema, as fastavro has parsed it. Raises: as `own`."""
        return self._ours()[0][0]

    def writer(self, schema_id: SchemaId) -> Any:
        """The schema that a value was written with, as fastavro has parsed it. Raises: ValueError: there is none."""
        return self._writer(schema_id)[0]

    def read(self, raw: bytes, writer_of: Callable[[SchemaId], Any], reader: Any, **options: bool) -> Any:
        """The value, as `decode`.

        Args:
            writer_of: the schema that it was written with. reader: the one whose fields it gets. options: of fastavro.
        """
        from fastavro import schemaless_reader
        from fastavro.read import SchemaResolutionError

        schema_id, at = wire_format.split(raw)
        writer = writer_of(schema_id)
        data = io.BytesIO(raw)
        data.seek(at)
        try:
            value = schemaless_reader(data, writer, None if reader == writer else reader, **options)  # type: ignore[arg-type]
        except SchemaResolutionError as error:
            raise ValueError(
                f"its schema with {schema_id} cannot be read with that of {self.subject}: {error}"
            ) from None
        except EOFError:
            raise ValueError(f"it ends too early for its schema with {schema_id}: {len(raw)} bytes") from None
        except (TypeError, ValueError, OverflowError, ArithmeticError, LookupError, RecursionError) as error:
            raise ValueError(
                f"it does not fit its schema with {schema_id}: {type(error).__name__}: {error}"[:_MOST_SHOWN]
            ) from None
        if data.tell() != len(raw):
            raise ValueError(f"{len(raw) - data.tell()} bytes follow the value of its schema with {schema_id}")
        return value

    def _parse(self, schema: RegisteredSchema) -> tuple[Any, Check | None]:
        parsed = parsed_schema(schema)
        return parsed, check_of(parsed)


def parsed_schema(schema: RegisteredSchema) -> Any:
    """A schema for fastavro, with the types that it refers to.

    Raises:
        ValueError: it is no Avro schema.
    """
    from fastavro import parse_schema
    from fastavro.schema import SchemaParseException

    named: dict[str, Any] = {}
    seen: set[str] = set()

    def read(each: RegisteredSchema) -> Any:
        for name, referenced in each.references:
            if name not in seen:
                seen.add(name)
                read(referenced)
        return parse_schema(json.loads(each.text), named_schemas=named)

    try:
        return read(schema)
    except (SchemaParseException, ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"it is no Avro schema: {error}"[:_MOST_SHOWN]) from None


def _said(error: Exception) -> str:
    """What fastavro says of a value, in one line."""
    try:
        lines = json.loads(str(error))
    except ValueError:
        lines = [str(error)]
    return "; ".join(str(line).strip() for line in lines)[:_MOST_SHOWN]
