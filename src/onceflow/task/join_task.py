"""``Flow.join_table`` in tasks: adds columns of a table to rows, as the table was at the offsets of the batch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.client.committed import CommittedReader
from onceflow.errors import BadRecordError, OptionError
from onceflow.messages import JOINED_PROPERTY, JoinOrder
from onceflow.protocol.partitioners import key_partitions
from onceflow.state.api import serdes
from onceflow.state.api.json_columns import parse_json
from onceflow.state.joins.copies import JoinedCopies
from onceflow.task.row_writer import worker_cluster


class JoinTask:
    """The function given to ``mapInArrow``."""

    def __init__(self, order: JoinOrder) -> None:
        self.order = order

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        spec = self.order.spec
        now_ms, ends = self._pinned()
        source = CommittedReader(worker_cluster(self.order.settings))
        copies = JoinedCopies({spec.name: spec}, {spec.topic: ends}, source)
        with contextlib.closing(copies):
            for batch in batches:
                yield self._joined(batch, copies, now_ms)

    def _pinned(self) -> tuple[int, dict[int, int]]:
        """The time and the offsets of the batch."""
        from pyspark import TaskContext

        context = TaskContext.get()
        described = None if context is None else context.getLocalProperty(JOINED_PROPERTY)
        found = {} if described is None else json.loads(described)
        if self.order.spec.topic not in found.get("ends", {}):
            raise OptionError(
                f"The join with table {self.order.spec.topic} does not run outside a batch of its flow",
                flow=self.order.flow,
                next_step="write the DataFrame with Flow.write(...).start() of the flow that made it. Operators that "
                "Spark runs before a batch begins (broadcast, repartitionByRange) cannot stand behind join_table",
            )
        return int(found["now_ms"]), dict(found["ends"][self.order.spec.topic])

    def _joined(self, batch: pa.RecordBatch, copies: JoinedCopies, now_ms: int) -> pa.RecordBatch:
        spec = self.order.spec
        encoded = batch.column(self.order.on).dictionary_encode()
        keys = self._keys(encoded.dictionary)
        places = key_partitions(keys, spec.partitions)
        copies.open(np.unique(places[places >= 0]).tolist())
        found = copies.handle(spec.name, now_ms, None).values_of(keys)
        matched = found.take(encoded.indices)
        if self.order.inner:
            exists = matched.is_valid()
            batch, matched = batch.filter(exists), matched.filter(exists)
        arrays = [*batch.columns, *self._columns(matched)]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([*batch.schema, *self.order.fields]))

    def _keys(self, distinct: pa.Array) -> pa.Array:
        """The keys of the table, in bytes."""
        serde = self.order.spec.key
        if serde is None:
            return distinct.cast(pa.binary())
        return pa.array([None if key is None else serde.encode(key) for key in distinct.to_pylist()], pa.binary())

    def _columns(self, matched: pa.Array) -> list[pa.Array]:
        serde = self.order.spec.value
        kind = self.order.fields.field(0).type
        if self.order.raw and pa.types.is_binary(kind):
            return [matched]
        encoded = matched.dictionary_encode()
        distinct = encoded.dictionary
        if self.order.raw and pa.types.is_string(kind):
            return [matched.cast(pa.string())]
        try:
            if self.order.raw:
                values = [None if raw is None else serde.decode(raw) for raw in distinct.to_pylist()]
                return [pa.array(values, kind).take(encoded.indices)]
            return [column.take(encoded.indices) for column in self._parsed(distinct)]
        except Exception as error:
            raise BadRecordError(
                f"A value of table {self.order.spec.topic} cannot be read as {', '.join(map(str, self.order.fields))}",
                flow=self.order.flow,
                topic=self.order.spec.topic,
                detail=f"{type(error).__name__}: {error}",
                next_step="correct the row, or take the whole value (columns='name', value=serdes.BYTES) and parse "
                "it in the query",
            ) from error

    def _parsed(self, distinct: pa.Array) -> list[pa.Array]:
        if self.order.spec.value == serdes.JSON or not isinstance(self.order.spec.value, serdes.Struct):
            parsed: Any = parse_json(distinct, self.order.fields)
        else:
            documents = [None if raw is None else self.order.spec.value.decode(raw) for raw in distinct.to_pylist()]
            parsed = pa.Table.from_pylist([document or {} for document in documents], schema=self.order.fields)
        columns = [parsed[name] for name in self.order.fields.names]
        return [
            pc.cast(one.combine_chunks() if isinstance(one, pa.ChunkedArray) else one, field.type)
            for one, field in zip(columns, self.order.fields, strict=True)
        ]
