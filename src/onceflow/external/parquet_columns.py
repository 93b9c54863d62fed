"""The columns of Parquet files: which types can be written, and how rows are divided by columns."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as types

from onceflow.errors import OptionError, SchemaError

_LONG_NAME = 100  # bytes of a value in the name of a folder; a name has at most 255


def written_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of the files for rows with this schema. It does not depend on Spark's settings.

    Raises:
        SchemaError: a type cannot be written, or two columns have the same name.
    """
    names = [name.lower() for name in schema.names]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise SchemaError(f"Several columns are named {', '.join(double)}", next_step="rename them: Spark ignores case")
    return pa.schema([pa.field(field.name, _written(field.type, field.name)) for field in schema])


def _written(given: Any, column: str) -> Any:
    if types.is_null(given) or types.is_duration(given) or types.is_interval(given):
        raise SchemaError(
            f"Column {column} has the type {given}, which readers of Parquet do not know",
            next_step="cast it, for example to string or to a number",
        )
    if types.is_timestamp(given) and given.tz is not None:
        return pa.timestamp(given.unit, "UTC")
    if types.is_large_string(given):
        return pa.string()
    if types.is_large_binary(given):
        return pa.binary()
    if types.is_struct(given):
        return pa.struct([pa.field(each.name, _written(each.type, column)) for each in given])
    if types.is_map(given):
        return pa.map_(_written(given.key_type, column), _written(given.item_type, column))
    if types.is_list(given) or types.is_large_list(given):
        return pa.list_(pa.field("element", _written(given.value_type, column)))
    return given


def check_same(known: pa.Schema, schema: pa.Schema, target: str) -> None:
    """Check that rows have the columns of earlier files. Their order does not matter.

    Raises:
        SchemaError: they have not.
    """
    old, new = ({field.name: str(field.type) for field in each} for each in (known, schema))
    if old != new:
        changes = [f"{name} was {old.get(name, 'missing')}, is {new.get(name, 'missing')}"
                   for name in sorted({*old, *new}) if old.get(name) != new.get(name)]  # fmt: skip
        raise SchemaError(
            f"The files in {target} have other columns",
            detail="; ".join(changes),
            next_step="select and cast the same columns, or write to a new folder",
        )


def check_partition_by(names: Sequence[str], schema: pa.Schema) -> None:
    """Check that files can be divided by these columns.

    Raises:
        OptionError: a column is named twice.
        SchemaError: there is no such column, or its values are no names.
    """
    if len(set(names)) < len(names):
        raise OptionError(f"partition_by={list(names)} names a column twice", next_step="name each column once")
    for name in names:
        if name not in schema.names:
            raise SchemaError(
                f"There is no column {name}, by which files are divided",
                detail=f"the columns are {', '.join(schema.names)}",
                next_step="select it, or change partition_by=",
            )
        kind = schema.field(name).type
        if not (types.is_string(kind) or types.is_integer(kind) or types.is_boolean(kind) or types.is_date(kind)):
            raise SchemaError(
                f"Files cannot be divided by column {name}, which has the type {kind}",
                next_step="use a string, a whole number, a boolean or a date",
            )


def divided(batch: pa.RecordBatch, names: Sequence[str]) -> Iterator[tuple[tuple[str | None, ...], pa.RecordBatch]]:
    """The rows by the values of these columns, as text. Rows keep their order."""
    if not names:
        yield (), batch
        return
    codes = np.zeros(batch.num_rows, dtype=np.int64)
    for name in names:
        column = batch.column(name).dictionary_encode(null_encoding="encode")
        codes = codes * max(1, len(column.dictionary)) + column.indices.to_numpy(zero_copy_only=False)
        _, codes = np.unique(codes, return_inverse=True)  # so that they stay small
    order = np.argsort(codes, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
        if len(rows):
            first = int(rows[0])
            yield tuple(_text(batch.column(name)[first].as_py()) for name in names), batch.take(pa.array(rows))


def folder_name(column: str, value: str | None) -> str:
    """The folder of the files with a value, for people: what a file has is in the manifest, and in the file itself."""
    if value is None:
        return f"{_safe(column)}=__HIVE_DEFAULT_PARTITION__"
    return f"{_safe(column)}={_safe(value)}"


def _safe(text: str) -> str:
    found = re.sub(r"[^\w .-]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), text)
    if len(found.encode()) > _LONG_NAME:
        found = f"{found[: _LONG_NAME // 4]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return found


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else str(value)
