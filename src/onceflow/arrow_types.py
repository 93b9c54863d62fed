"""Arrow types with other types in them, such as lists and structs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa


def made_anew(kind: Any, leaf: Callable[[Any], Any]) -> Any:
    """The type with others in place of those that contain none, and with fields that may be null."""
    if pa.types.is_list(kind):
        return pa.list_(made_anew(kind.value_type, leaf))
    if pa.types.is_map(kind):
        return pa.map_(made_anew(kind.key_type, leaf), made_anew(kind.item_type, leaf))
    if pa.types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        return pa.struct([_nullable(field, made_anew(field.type, leaf)) for field in fields])
    return leaf(kind)


def nullable(schema: pa.Schema) -> pa.Schema:
    """The schema with fields that may all be null, also those inside of others.

    Spark says of the fields of a struct that they are never null, also if the struct itself may be. Arrow refuses to
    cast to such a type, because below a null struct there is nothing but nulls.
    """
    return pa.schema([_nullable(field, made_anew(field.type, lambda kind: kind)) for field in schema])


def _nullable(field: pa.Field, kind: Any) -> pa.Field:
    """The field with another type. Metadata stay: they tell a variant from a struct."""
    return field.with_type(kind).with_nullable(True)
