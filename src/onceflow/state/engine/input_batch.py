"""Input records of an engine: Arrow batches with uniform column types, their metadata as lists, and groups by key."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.errors import SchemaError
from onceflow.protocol import timestamps
from onceflow.protocol.headers import Header
from onceflow.protocol.timestamps import LATEST_MS

# The first float of each type that may stand for another whole number.
_FIRST_ROUNDED = {"halffloat": 2.0**11, "float": 2.0**24, "double": 2.0**53}
_TYPES = {"topic": pa.string(), "partition": pa.int32(), "offset": pa.int64()}


def normalised(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with known columns only, each of a fixed type: key, value, and if present topic, partition, offset,
    timestamp (int64 epoch milliseconds, null: it has no time) and headers.

    Raises:
        SchemaError: key or value is missing, or is not bytes or text.
    """
    columns = {}
    for name in ("key", "value", "topic", "partition", "offset", "timestamp", "headers"):
        at = batch.schema.get_field_index(name)
        if at < 0:
            continue
        column = batch.column(at)
        if name in ("key", "value"):
            column = binary(column, name)
        elif name == "timestamp":
            column = timestamps.known_times(milliseconds(column))
        elif name in _TYPES and column.type != _TYPES[name]:
            column = column.cast(_TYPES[name])
        columns[name] = column
    if "key" not in columns or "value" not in columns:
        raise SchemaError(f"records need the columns key and value, got {batch.schema.names}")
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def binary(column: Any, name: str) -> Any:
    """The column as 32-bit binary.

    Raises:
        SchemaError: the column is neither bytes nor text.
    """
    kind = column.type
    if kind == pa.binary():
        return column
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    for is_type in (
        pa.types.is_string,
        pa.types.is_binary,
        pa.types.is_large_string,
        pa.types.is_large_binary,
        pa.types.is_fixed_size_binary,
        pa.types.is_string_view,
        pa.types.is_binary_view,
        pa.types.is_null,
    ):
        if is_type(kind):
            if pa.types.is_string(column.type) or pa.types.is_large_binary(column.type):
                return column.cast(pa.binary())
            # Not every type can be cast to binary directly.
            text = (
                pa.types.is_dictionary(column.type) or pa.types.is_string_view(kind) or pa.types.is_large_string(kind)
            )
            return column.cast(pa.string()).cast(pa.binary()) if text else column.cast(pa.binary())
    raise SchemaError(f"column {name} has type {column.type}; it must be binary or string")


def milliseconds(column: Any) -> Any:
    """A column of times as int64 epoch milliseconds, rounded down. A time zone does not change the moments.

    Raises:
        ValueError, pa.ArrowInvalid, pa.ArrowNotImplementedError: it has no such times.
    """
    if not pa.types.is_timestamp(column.type):
        return column if column.type == pa.int64() else _whole_numbers(column)
    numbers, unit = column.view(pa.int64()), column.type.unit
    if unit == "ms" or not len(numbers):
        return numbers
    # Not by Arrow's functions for times: they round towards 1970, or fail for the earliest and latest times.
    nulls = numbers.is_null().to_numpy(zero_copy_only=False) if numbers.null_count else None
    ticks = (pc.fill_null(numbers, 0) if numbers.null_count else numbers).to_numpy()
    if unit == "s":
        return pa.array(np.clip(ticks, -LATEST_MS, LATEST_MS) * 1000, mask=nulls)
    return pa.array(ticks // (1000 if unit == "us" else 1_000_000), mask=nulls)


def _whole_numbers(column: Any) -> Any:
    kind = column.type
    # Arrow would cast these to numbers, which are no times.
    if pa.types.is_boolean(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind):
        raise ValueError(f"a column of the type {kind} has no times: give timestamps, or milliseconds since 1970")
    if pa.types.is_floating(kind):
        values = column.cast(pa.float64())
        is_large = pc.greater_equal(pc.abs(values), _FIRST_ROUNDED[str(kind)])
        large = values.filter(pc.and_(pc.is_finite(values), is_large))
        if len(large):
            raise ValueError(
                f"a time is the {kind} {large[0].as_py()!r}, which may be another one, rounded: give timestamps, or "
                "whole milliseconds since 1970"
            )
    return column.cast(pa.int64())


def usable_keys(batch: pa.RecordBatch) -> npt.NDArray[np.bool_] | None:
    """Which records have a key that is usable for state; None: all."""
    keys = batch.column("key")
    if not keys.null_count:
        return None
    usable: npt.NDArray[np.bool_] = keys.is_valid().to_numpy(zero_copy_only=False)
    return usable


#: What is wrong with a key that is not usable.
NO_KEY = "the record has no key: state is kept by key"


class Metadata(NamedTuple):
    """What a record has besides key and value, for every record of a batch."""

    topics: Iterable[str | None]
    headers: Iterable[tuple[Header, ...]]
    timestamps: Iterable[int | None]
    partitions: Iterable[int | None]
    offsets: Iterable[int | None]
    read_from: Iterable[str | None]


def metadata(batch: pa.RecordBatch, source_topic: str | None) -> Metadata:
    """Columns of a normalised batch as lists.

    Args:
        source_topic: topic of records that have no topic column.
    """
    topics = _topics(batch, source_topic)
    return Metadata(
        topics,
        _headers(batch),
        _numbers(batch, "timestamp"),
        _numbers(batch, "partition"),
        _numbers(batch, "offset"),
        topics,
    )


def by_key(batch: pa.RecordBatch) -> tuple[list[bytes], list[int], pa.RecordBatch]:
    """A normalised batch sorted by key. The keys are in the order in which they first appear, and the records of each
    key in the order of arrival.

    Returns:
        The distinct keys, the index at which the records of each key end, and the sorted batch.
    """
    encoded = batch.column("key").dictionary_encode()
    keys: list[bytes] = encoded.dictionary.to_pylist()
    if len(keys) == batch.num_rows:
        return keys, list(range(1, len(keys) + 1)), batch
    codes = encoded.indices.to_numpy()
    # For 16-bit numbers, NumPy's stable sort is a radix sort, which is faster.
    order = np.argsort(codes.astype(np.uint16) if len(keys) <= 65_536 else codes, kind="stable")
    return keys, np.cumsum(np.bincount(codes)).tolist(), batch.take(pa.array(order))


def latest(
    batch: pa.RecordBatch, times: Any, source_topic: str | None, table_partition: int
) -> Iterable[tuple[tuple[str | None, int], int]]:
    """The latest time of every source partition.

    Args:
        batch: a normalised batch.
        times: int64 Arrow array, null where the time is not known.
        source_topic: topic of records that have no topic column.
        table_partition: used if the source's partition is not known.
    """
    known = times.is_valid() if times.null_count else None
    if known is not None:
        batch, times = batch.filter(known), times.filter(known)
    if not len(times):
        return
    found, of_place = _places(batch, source_topic, table_partition)
    greatest = np.full(len(found), np.iinfo(np.int64).min)
    np.maximum.at(greatest, of_place, times.to_numpy())
    yield from zip(found, greatest.tolist(), strict=True)


def places(batch: pa.RecordBatch, source_topic: str | None, table_partition: int) -> list[tuple[str | None, int]]:
    """The source partitions of the records of a normalised batch. Arguments as of `latest`."""
    return _places(batch, source_topic, table_partition)[0] if batch.num_rows else []


def _places(
    batch: pa.RecordBatch, source_topic: str | None, table_partition: int
) -> tuple[list[tuple[str | None, int]], Any]:
    """The source partitions, and for each record which of them it comes from."""
    count = batch.num_rows
    topics: list[str | None] = [source_topic]
    codes = np.zeros(count, dtype=np.int64)
    if "topic" in batch.schema.names:
        encoded = batch.column("topic").dictionary_encode("encode")
        topics, codes = _topic_names(encoded, source_topic), encoded.indices.to_numpy().astype(np.int64)
    partitions = np.full(count, table_partition, dtype=np.int64)
    if "partition" in batch.schema.names:
        partitions = batch.column("partition").fill_null(table_partition).to_numpy().astype(np.int64)
    found, of_place = np.unique(codes << 32 | partitions, return_inverse=True)
    return [(topics[place >> 32], place & 0xFFFF_FFFF) for place in found.tolist()], of_place


def _topics(batch: pa.RecordBatch, source_topic: str | None) -> Iterable[str | None]:
    if "topic" not in batch.schema.names or not batch.num_rows:
        return repeat(source_topic)
    encoded = batch.column("topic").dictionary_encode("encode")
    names = _topic_names(encoded, source_topic)
    if len(names) == 1:
        return repeat(names[0])
    return [names[i] for i in encoded.indices.to_pylist()]


def _topic_names(encoded: Any, source_topic: str | None) -> list[str | None]:
    return [source_topic if name is None else name for name in encoded.dictionary.to_pylist()]


def _numbers(batch: pa.RecordBatch, name: str) -> Iterable[int | None]:
    if name not in batch.schema.names:
        return repeat(None)
    column = batch.column(name)
    numbers: list[int | None] = column.to_pylist() if column.null_count else column.to_numpy().tolist()
    return numbers


def _headers(batch: pa.RecordBatch) -> Iterable[tuple[Header, ...]]:
    if "headers" not in batch.schema.names:
        return repeat(())
    column = batch.column("headers")
    counts = pc.list_value_length(column).fill_null(0).to_numpy()
    if not counts.any():
        return repeat(())
    flat = column.flatten()  # leaves out elements under null lists
    names = pc.struct_field(flat, 0).to_pylist()
    contents = binary(pc.struct_field(flat, 1), "headers").to_pylist()
    pairs = list(zip(names, contents, strict=True))
    ends = np.cumsum(counts).tolist()
    return [tuple(pairs[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
