"""``Flow.join_table`` in tasks: adds columns of a table to rows, as the table was at the offsets of the batch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow import user_code
from onceflow.client.committed import CommittedReader
from onceflow.errors import BadRecordError, EnvironmentUnusableError, OnceflowError, OptionError
from onceflow.messages import JOINED_PROPERTY, CopiesOrder, JoinOrder, batch_property
from onceflow.spark import function_names
from onceflow.state.api import serdes
from onceflow.state.api.json_columns import parse_json
from onceflow.state.api.whole_numbers import changed
from onceflow.state.joins.copies import InexactCopyError, JoinedCopies
from onceflow.task.row_writer import worker_cluster


class JoinTask:
    """The function given to ``mapInArrow``. In a small batch the driver calls it.

    Args:
        number: of the function in its flow, for its name in plans.
    """

    def __init__(self, order: JoinOrder, number: int = 0) -> None:
        self.order = order
        self.__name__ = f"{function_names.join_name(order.spec.topic)}-{number}"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        now_ms, ends = self._pinned()
        # The partitions of the batch, also if the topic has got more since it was committed.
        spec = replace(self.order.spec, partitions=len(ends))
        source = CommittedReader(worker_cluster(self.order.settings))
        copies = JoinedCopies({spec.name: spec}, {spec.topic: ends}, source)
        with contextlib.closing(copies):
            for batch in batches:
                yield self._joined(batch, copies, now_ms)

    def _pinned(self) -> tuple[int, dict[int, int]]:
        """The time and the offsets of the batch."""
        described = batch_property(JOINED_PROPERTY)
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
        (spec,) = copies.specs.values()
        encoded = self._keys(batch.column(self.order.on))
        # All of them: in other bytes, with another partitioner, or since partitions were added, a key may be in any.
        copies.open(range(spec.partitions))
        found = copies.handle(spec.name, now_ms, None).values_of(encoded.dictionary)
        matched = found.take(encoded.indices)
        if self.order.inner:
            exists = matched.is_valid()
            batch, matched = batch.filter(exists), matched.filter(exists)
        fields = [*self.order.fields]
        if self.order.corrupt is None:
            columns = self._columns(matched, batch.column(self.order.on))
        else:
            columns = self._readable(matched)
            fields.append(pa.field(self.order.corrupt, pa.binary()))
        return pa.RecordBatch.from_arrays([*batch.columns, *columns], schema=pa.schema([*batch.schema, *fields]))

    def _keys(self, column: pa.Array) -> pa.DictionaryArray:
        """The keys of the rows as the table has them: bytes, each distinct key once."""
        serde = self.order.spec.key
        if serde in (None, serdes.STRING, serdes.BYTES):
            return column.cast(pa.binary()).dictionary_encode()
        try:
            if pa.types.is_nested(column.type):  # Arrow finds no distinct ones of them
                return pa.array([self._key(each) for each in column.to_pylist()], pa.binary()).dictionary_encode()
            encoded = column.dictionary_encode()
            keys = pa.array([self._key(each) for each in encoded.dictionary.to_pylist()], pa.binary())
            return pa.DictionaryArray.from_arrays(encoded.indices, keys)
        except EnvironmentUnusableError:  # of storage or of a registry that does not answer, as below
            raise
        except Exception as error:
            raise BadRecordError(
                f"A value of column {self.order.on!r} is no key of table {self.order.spec.topic}",
                flow=self.order.flow,
                topic=self.order.spec.topic,
                detail=f"{serde!r}: {user_code.in_words(error)}",
                next_step="cast or correct the column before join_table, or give JoinTable the serde that fits it",
            ) from error

    def _key(self, value: Any) -> bytes | None:
        return None if value is None else self.order.spec.key.encode(value)

    def _columns(self, matched: pa.Array, keys: pa.Array) -> list[pa.Array]:
        """The columns to add, from values in bytes.

        Args:
            keys: of the same rows, for errors.
        """
        kind = self.order.fields.field(0).type
        if self.order.raw and pa.types.is_binary(kind):
            return [matched]
        encoded = matched.dictionary_encode()
        try:
            return [column.take(encoded.indices) for column in self._read(encoded.dictionary)]
        except EnvironmentUnusableError:
            raise
        except Exception as error:
            raise BadRecordError(
                f"A value of table {self.order.spec.topic} cannot be read as "
                + ", ".join(f"{field.name} {field.type}" for field in self.order.fields),
                flow=self.order.flow,
                topic=self.order.spec.topic,
                detail=self._unreadable(encoded, keys) or user_code.in_words(error),
                next_step="correct the row; or give join_table corrupt_column='name', which such values go to; or take "
                "the whole value (columns='name', value=serdes.BYTES) and parse it in the query",
            ) from error

    def _readable(self, matched: pa.Array) -> list[pa.Array]:
        """The columns to add, and the values that cannot be read as them."""
        encoded = matched.dictionary_encode()
        distinct = encoded.dictionary
        parts: list[list[pa.Array]] = []
        corrupt = np.zeros(len(distinct), np.bool_)
        left = [(0, len(distinct))]
        while left:
            start, count = left.pop()
            try:
                parts.append(self._read(distinct.slice(start, count)))
            except EnvironmentUnusableError:
                raise
            except Exception:
                if count > 1:  # few are bad, so most of the halves are read as a whole
                    half = count // 2
                    left += [(start + half, count - half), (start, half)]
                else:
                    corrupt[start] = True
                    parts.append([pa.nulls(1, field.type) for field in self.order.fields])
        found = [pa.concat_arrays([part[at] for part in parts]) for at in range(len(self.order.fields))]
        found.append(pc.if_else(pa.array(corrupt), distinct, pa.scalar(None, pa.binary())))
        return [column.take(encoded.indices) for column in found]

    def _unreadable(self, encoded: pa.DictionaryArray, keys: pa.Array) -> str:
        """The first row that cannot be read, and why."""
        for number, raw in enumerate(encoded.dictionary.to_pylist()):
            try:
                self._read(encoded.dictionary.slice(number, 1))
            except Exception as error:
                key = keys[pc.index(encoded.indices, pa.scalar(number, encoded.indices.type)).as_py()].as_py()
                value = "" if repr(raw) in user_code.said(error) else f", value {raw!r:.200}"
                return f"key {key!r:.200}{value}: {user_code.in_words(error)}"
        return ""

    def _read(self, distinct: pa.Array) -> list[pa.Array]:
        """The columns to add for distinct values."""
        if not self.order.raw:
            return self._parsed(distinct)
        kind = self.order.fields.field(0).type
        if pa.types.is_binary(kind) or pa.types.is_string(kind):
            return [distinct.cast(kind)]
        serde = self.order.spec.value
        values = [None if raw is None else serde.decode(raw) for raw in distinct.to_pylist()]
        return [pa.array(values, self.order.fields.field(0).type)]

    def _parsed(self, distinct: pa.Array) -> list[pa.Array]:
        if self.order.spec.value == serdes.JSON or not isinstance(self.order.spec.value, serdes.Struct):
            parsed: Any = parse_json(distinct, self.order.fields)
        else:
            decoded = [None if raw is None else self.order.spec.value.decode(raw) for raw in distinct.to_pylist()]
            documents = [document or {} for document in decoded]
            parsed = {field.name: self._field(documents, field) for field in self.order.fields}
        columns = [parsed[name] for name in self.order.fields.names]
        return [
            pc.cast(one.combine_chunks() if isinstance(one, pa.ChunkedArray) else one, field.type)
            for one, field in zip(columns, self.order.fields, strict=True)
        ]

    def _field(self, documents: list[dict[str, Any]], field: pa.Field) -> pa.Array:
        """A field of structs as the type that is asked for.

        Raises:
            ValueError: a value would be another one. Arrow's own errors also say so.
        """
        values = [document.get(field.name) for document in documents]
        given = self.order.spec.value.schema.field(field.name).type
        if not (pa.types.is_floating(given) and (pa.types.is_floating(field.type) or pa.types.is_integer(field.type))):
            return pa.array(values, field.type)
        floats = pa.array(values, given)
        if (other := changed(floats, field.type)) is not None:
            raise ValueError(f"{other!r} of the field {field.name} would be another number as {field.type}")
        return floats.cast(field.type)  # to make integers of Python's floats cuts their digits


class CopiesTask:
    """A function that brings all copies of its host to the offsets of a batch. Its argument means nothing."""

    def __init__(self, order: CopiesOrder) -> None:
        self.order = order

    def __call__(self, _: int) -> OnceflowError | None:
        order = self.order
        source = CommittedReader(worker_cluster(order.settings))
        refused: list[InexactCopyError] = []
        try:
            for spec in order.specs:
                with contextlib.closing(JoinedCopies({spec.name: spec}, order.ends, source)) as copies:
                    try:
                        copies.open(range(spec.partitions))
                    except InexactCopyError as error:  # the others are read, too
                        refused.append(error)
        except OnceflowError as problem:  # returned, not raised, so that the driver gets the original class
            return problem
        return refused[0] if refused else None
