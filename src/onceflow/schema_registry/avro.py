"""``AvroSerde``: Avro values whose schemas are in a registry."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from onceflow.schema_registry import wire_format
from onceflow.schema_registry.avro_changes import unreadable
from onceflow.schema_registry.avro_defaults import filled
from onceflow.schema_registry.avro_schema import AvroSchema, value_of
from onceflow.schema_registry.base import RegistrySerde, shortened
from onceflow.schema_registry.client import RegisteredSchema

_MOST_SHOWN = 300
#: So many bytes cannot be nested deeper than the stack of a thread is.
_SHALLOW_BYTES = 500
#: What fastavro raises for bytes that are no value of a schema.
_UNREADABLE = (
    TypeError, ValueError, OverflowError, ArithmeticError, LookupError, RecursionError, MemoryError,
)  # fmt: skip


class AvroSerde(RegistrySerde[AvroSchema]):
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
        schema, before = self._ours()
        buffer = io.BytesIO()
        buffer.write(before)
        try:
            schema.write(buffer, value)
        except ValueError as error:
            raise ValueError(f"it does not fit the schema: {error}"[:_MOST_SHOWN]) from None
        return buffer.getvalue()

    def decode(self, raw: bytes) -> Any:
        """The value.

        Raises:
            ValueError: it is not Avro of a known schema, or its schema cannot be read with this serde's.
            EnvironmentUnusableError: see `RegistrySerde.own`.
        """
        return self.read(raw, self._ours()[0], plain=False)

    def own_schema(self) -> AvroSchema:
        """The own schema. Raises: as `own`."""
        return self._ours()[0]

    def read(self, raw: bytes, reader: AvroSchema | None, *, plain: bool) -> Any:
        """The value, as `decode`.

        Args:
            reader: the schema whose fields it gets; None: that which has written it.
            plain: numbers in place of times, and each value of a type with a name in a union with that name.
        """
        schema_id, at = wire_format.split(raw)
        writer = self._writer(schema_id)
        wanted = writer if reader is None else reader
        try:
            if plain and (quick := wanted.plain_of(writer)) is not None:
                return quick(raw, at)
            return _read(raw, at, writer, wanted, plain)
        except _UnresolvedError as error:
            why = shortened(unreadable(writer, wanted)) or error
            of = f"its schema with {schema_id}"
            raise ValueError(f"{of} cannot be read with that of {self.subject}: {why}"[:_MOST_SHOWN]) from None
        except EOFError:
            raise ValueError(f"it ends too early for its schema with {schema_id}: {len(raw)} bytes") from None
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError, MemoryError) as error:
            what = f"it does not fit its schema with {schema_id}: {type(error).__name__}: {error}"
            raise ValueError(what[:_MOST_SHOWN]) from None

    def _parse(self, schema: RegisteredSchema) -> AvroSchema:
        return AvroSchema(schema)

    def _changes(self, writer: AvroSchema, reader: AvroSchema) -> list[str]:
        return unreadable(writer, reader)


class _UnresolvedError(Exception):
    """A value cannot get the fields of another schema."""


def _read(raw: bytes, at: int, writer: AvroSchema, reader: AvroSchema, plain: bool) -> Any:
    from fastavro import _read_py, schemaless_reader
    from fastavro.read import SchemaResolutionError

    writer.check(raw, at)
    # The compiled reader has no limit for nested values, and ends the process.
    is_deep = (writer.is_recursive or reader.is_recursive) and len(raw) > _SHALLOW_BYTES
    read: Callable[..., Any] = _read_py.schemaless_reader if is_deep else schemaless_reader
    given, wanted = (each.reading_plain if plain else each.reading for each in (writer, reader))
    data = io.BytesIO(raw)
    data.seek(at)
    named = {"return_named_type": True, "return_named_type_override": not plain}
    try:
        found = value_of(read(data, given, None if given is wanted else wanted, **named))
    except SchemaResolutionError as error:
        raise _UnresolvedError(str(error)) from None
    return found if given is wanted else filled(found)
