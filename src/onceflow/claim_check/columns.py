"""Stores and loads the values of a column, in tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from onceflow.errors import ClaimCheckError, SchemaError
from onceflow.options.column_names import did_you_mean
from onceflow.spark.arrow_maps import map_in_arrow

Convert = Callable[[bytes], bytes]

_BATCH_BYTES = 32_000_000
_PLACE = ("topic", "partition", "offset")


def with_column(df: DataFrame, column: str, convert: Convert, what: str) -> DataFrame:
    """The DataFrame with other content of a column.

    Args:
        convert: what becomes of a value.
        what: ``store`` or ``load``.

    Raises:
        SchemaError: there is no such column, or it has another type.
    """
    fields = [field for field in df.schema.fields if field.name == column]
    if len(fields) != 1:
        meant = did_you_mean(column, df.columns)
        raise SchemaError(
            f"ClaimCheck.{what}: there {'are several columns' if fields else 'is no column'} {column!r}",
            next_step="drop or rename the others" if fields else f"{meant}Choose one of {', '.join(df.columns)}",
        )
    found = fields[0]
    if not isinstance(found.dataType, (BinaryType, StringType) if what == "store" else BinaryType):
        raise SchemaError(
            f"ClaimCheck.{what}: column {column!r} is {found.dataType.simpleString()}",
            next_step="cast it to binary" if what == "load" else "cast it to binary or string",
        )
    changed = [StructField(f.name, BinaryType() if f.name == column else f.dataType, f.nullable) for f in df.schema]
    return map_in_arrow(df, ColumnTask(convert, column), StructType(changed))


class ColumnTask:
    """Runs in a task, over the Arrow batches of a partition."""

    def __init__(self, convert: Convert, column: str) -> None:
        self.convert, self.column = convert, column

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from self._converted(batch)

    def _converted(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The batch in parts of limited size: small references may become large values."""
        at = batch.schema.get_field_index(self.column)
        values: list[bytes | None] = []
        start = size = 0
        given = batch.column(at)
        kind = pa.large_binary() if given.type in (pa.large_binary(), pa.large_string()) else pa.binary()
        for row, value in enumerate(given.cast(kind)):
            new = self._new(batch, row, value.as_py())
            values.append(new)
            size += len(new or b"")
            if size >= _BATCH_BYTES:
                yield _replaced(batch.slice(start, len(values)), at, pa.array(values, kind))
                start, size, values = row + 1, 0, []
        if values:
            yield _replaced(batch.slice(start), at, pa.array(values, kind))

    def _new(self, batch: pa.RecordBatch, row: int, value: bytes | None) -> bytes | None:
        if value is None:
            return None
        try:
            return self.convert(value)
        except ClaimCheckError as error:
            place: list[Any] = [batch.column(name)[row].as_py() for name in _PLACE if name in batch.schema.names]
            if len(place) == len(_PLACE):
                error.detail += f"; the record is {place[0]}-{place[1]} at offset {place[2]}"
                error.locate(topic=f"{place[0]}-{place[1]}")
            raise


def _replaced(batch: pa.RecordBatch, at: int, values: pa.Array) -> pa.RecordBatch:
    columns = [values if i == at else batch.column(i) for i in range(batch.num_columns)]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
