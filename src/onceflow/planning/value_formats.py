"""``value_format`` and ``key_format`` of ``Flow.read``: columns with types in place of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from onceflow.errors import BadRecordError, OptionError, located
from onceflow.protocol.headers import behind_header
from onceflow.schema_registry.avro import AvroSerde
from onceflow.schema_registry.avro_columns import AvroColumn
from onceflow.schema_registry.columns import Column
from onceflow.schema_registry.json_columns import JsonSchemaColumn
from onceflow.schema_registry.json_schema import JsonSchemaSerde
from onceflow.schema_registry.protobuf import ProtobufSerde
from onceflow.schema_registry.protobuf_columns import ProtobufColumn
from onceflow.schema_registry.wire_format import KEY_HEADER, VALUE_HEADER
from onceflow.spark.collect import spark_type_of

_SERDES = (AvroSerde, ProtobufSerde, JsonSchemaSerde)
_OF_KAFKA = ("key", "value", "topic", "partition", "offset", "timestamp", "timestamptype", "headers")


class ReadColumns:
    """The function of the map behind a read.

    Args:
        columns: by the name of the column that they replace.
        corrupt: the name of a further column, which says what is wrong with values that cannot be read; None: such a
            value stops the flow.
    """

    def __init__(self, columns: Mapping[str, Column], corrupt: str | None) -> None:
        self.columns = columns
        self.corrupt = corrupt

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        problems: dict[int, str] = {}
        for name, column in self.columns.items():
            at = batch.schema.get_field_index(name)
            found, bad = column.decode(_with_ids(batch, name))
            batch = batch.set_column(at, name, found)
            for row, problem in bad.items():
                problems.setdefault(row, f"{name}: {problem}")
        if self.corrupt is not None:
            texts = [problems.get(row) for row in range(batch.num_rows)]
            return batch.append_column(self.corrupt, pa.array(texts, pa.string()))
        if problems:
            row = min(problems)
            topic, partition, offset = (batch.column(name)[row].as_py() for name in ("topic", "partition", "offset"))
            raise BadRecordError(
                f"The record at offset {offset} cannot be read with the schema of its topic",
                topic=f"{topic}-{partition}",
                detail=problems[row],
                next_step="give Flow.read corrupt_column='problem': then such values are null, and the column says why",
            )
        return batch


def _with_ids(batch: pa.RecordBatch, name: str) -> Any:
    """A column of bytes, each behind the id of its schema if a header has it."""
    values = batch.column(name)
    if "headers" not in batch.schema.names:
        return values
    header = KEY_HEADER if name == "key" else VALUE_HEADER
    found = [
        None if raw is None else behind_header(raw, ((each["key"], each["value"]) for each in headers or ()), header)
        for raw, headers in zip(values.to_pylist(), batch.column("headers").to_pylist(), strict=True)
    ]
    return pa.array(found, values.type)


def _column_of(serde: Any) -> Column:
    if isinstance(serde, ProtobufSerde):
        return ProtobufColumn(serde)
    return JsonSchemaColumn(serde) if isinstance(serde, JsonSchemaSerde) else AvroColumn(serde)


def check_formats(key: Any, value: Any, corrupt: str | None, flow: str) -> ReadColumns | None:
    """What makes the columns; None: there are no formats.

    Raises:
        OptionError: a format is none, or there is such a column already.
        EnvironmentUnusableError: a column cannot have what the schema says, or the registry does not have it.
    """
    formats = {name: serde for name, serde in (("key", key), ("value", value)) if serde is not None}
    for name, serde in formats.items():
        if not isinstance(serde, _SERDES):
            raise OptionError(
                f"{name}_format={serde!r:.100} is no format of columns",
                flow=flow,
                next_step="give a serde of a registry, such as SchemaRegistry(...).avro(subject). Others can be used "
                "in Flow.process, and in the function of Flow.map",
            )
    if corrupt is not None and (not formats or corrupt.lower() in _OF_KAFKA):
        why = "is a column of Kafka" if formats else "is for values with a format"
        raise OptionError(
            f"corrupt_column={corrupt!r} {why}", flow=flow, next_step="choose another name, and give value_format="
        )
    columns = {name: _column_of(serde) for name, serde in formats.items()}
    with located(flow=flow):
        for column in columns.values():
            _ = column.type
    return ReadColumns(columns, corrupt) if columns else None


def columns_behind(function: ReadColumns, given: T.StructType) -> T.StructType:
    """All columns, with types in place of bytes."""
    kinds: dict[str, Any] = {name: spark_type_of(column.type) for name, column in function.columns.items()}
    fields = [T.StructField(f.name, kinds.get(f.name, f.dataType), f.nullable) for f in given.fields]
    if function.corrupt is not None:
        fields.append(T.StructField(function.corrupt, T.StringType()))
    return T.StructType(fields)
