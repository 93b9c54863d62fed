"""Computes the partitions of whole columns of keys.

They are the same as those of the Java producer (``BuiltInPartitioner.partitionForKey``): murmur2 of the key bytes with
the sign bit cleared, modulo the number of partitions. Consumers that join onceflow's topics with others rely on this.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.errors import BadRecordError, OptionError, counted

# org.apache.kafka.common.utils.Utils.murmur2
_SEED = 0x9747B28C
_M = 0x5BD1E995
_M32 = np.uint32(_M)
_MASK = 0xFFFF_FFFF
# One numpy step over all remaining keys costs about as much as this many single words in Python. So if only a few
# keys are left, because they are much longer than the others, each of them is finished by itself.
_FEW_KEYS = 32


def murmur2(keys: Any) -> npt.NDArray[np.int32]:
    """Java's ``Utils.murmur2`` of every key.

    Args:
        keys: binary, large_binary, string or large_string array; a null has the hash of an empty key.

    Returns:
        Signed 32-bit hashes, one per row.
    """
    data, starts, lengths = _bytes_of(keys)
    count = len(lengths)
    hashes = np.uint32(_SEED) ^ lengths.astype(np.uint32)
    if not count:
        return hashes.view(np.int32)
    words = lengths >> 2
    # Longest first: then the keys that have a word number j are a prefix of the array, and no mask is needed.
    order = None if int(words.min()) == int(words.max()) else np.argsort(-words, kind="stable")
    if order is not None:
        hashes, starts, lengths, words = hashes[order], starts[order], lengths[order], words[order]
    _mix_words(hashes, data, starts, words)
    _mix_tail(hashes, data, starts, lengths)
    hashes ^= hashes >> np.uint32(13)
    hashes *= _M32
    hashes ^= hashes >> np.uint32(15)
    if order is not None:
        restored = np.empty_like(hashes)
        restored[order] = hashes
        hashes = restored
    return hashes.view(np.int32)


def key_partitions(keys: Any, partition_count: int) -> npt.NDArray[np.int32]:
    """The partition of every key, as the Java client computes it; -1 for a null key.

    Args:
        keys: as for `murmur2`.
        partition_count: partitions of the topic, at least 1.
    """
    if partition_count < 1:
        raise OptionError(
            f"a topic cannot have {counted(partition_count, 'partition')}", next_step="refresh the topic's metadata."
        )
    if keys.null_count == len(keys):
        return np.full(len(keys), -1, dtype=np.int32)
    partitions = (murmur2(keys) & np.int32(0x7FFF_FFFF)) % np.int32(partition_count)
    if keys.null_count:
        partitions[keys.is_null().to_numpy(zero_copy_only=False)] = -1
    return partitions


def group_by_partition(
    partitions: npt.NDArray[np.integer[Any]], partition_count: int
) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """The row indices of each partition that has rows, sorted by partition. Within a partition, rows keep their order.

    Args:
        partitions: the partition of each row; -1 (not chosen yet) is not allowed.
        partition_count: partitions of the topic.

    Raises:
        BadRecordError: a partition is not in ``0 .. partition_count - 1``.
    """
    if not len(partitions):
        return []
    if int(partitions.min()) < 0 or int(partitions.max()) >= partition_count:
        bad = int(np.argmax((partitions < 0) | (partitions >= partition_count)))
        refused = BadRecordError(
            f"a record names partition {int(partitions[bad])} of a topic with {counted(partition_count, 'partition')}",
            next_step=f"use 0 to {partition_count - 1} in the partition column, or null to let onceflow choose one.",
            detail=f"record {bad} of the rows given",
        )
        refused.row = bad
        raise refused
    # numpy uses radix sort for 16-bit numbers, which is several times faster than its sort of wider ones.
    narrow = partitions.astype(np.int16) if partition_count <= 0x7FFF else partitions
    order = np.argsort(narrow, kind="stable")
    ordered = narrow[order]
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    return [(int(partitions[rows[0]]), rows) for rows in np.split(order, cuts)]


def _bytes_of(keys: Any) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The bytes of the column, and start and length of each key."""
    kind = keys.type
    large = pa.types.is_large_binary(kind) or pa.types.is_large_string(kind)
    if not large and not (pa.types.is_binary(kind) or pa.types.is_string(kind)):
        keys, large = keys.cast(pa.large_binary()), True
    if not len(keys):
        nothing = np.zeros(0, dtype=np.int64)
        return np.zeros(0, dtype=np.uint8), nothing, nothing
    _, raw, body = keys.buffers()
    offsets = np.frombuffer(raw, dtype=np.int64 if large else np.int32)
    starts = offsets[keys.offset : keys.offset + len(keys)].astype(np.int64)
    lengths: npt.NDArray[np.int64] = pc.binary_length(keys).fill_null(0).to_numpy().astype(np.int64)
    data = np.zeros(0, dtype=np.uint8) if body is None else np.frombuffer(body, dtype=np.uint8)
    return data, starts, lengths


def _mix_words(
    hashes: npt.NDArray[np.uint32],
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    words: npt.NDArray[np.int64],
) -> None:
    """Mix the whole 4-byte words of every key, one word of all keys at a time. Keys are sorted, longest first."""
    if not int(words[0]):
        return
    # A little-endian word for every position of the data: a view with a stride of one byte.
    every_word: npt.NDArray[np.uint32] = np.ndarray((len(data) - 3,), dtype="<u4", buffer=data, strides=(1,))
    # alive[j] keys have more than j words.
    alive = np.searchsorted(-words, -np.arange(int(words[0])), side="left") if len(words) > 1 else None
    for step in range(int(words[0])):
        count = len(words) if alive is None else int(alive[step])
        if count <= _FEW_KEYS:
            for key in range(count):
                _mix_long_key(hashes, data, key, int(starts[key]), int(words[key]), step)
            return
        mixed = _scramble(every_word[starts[:count] + 4 * step])
        part = hashes[:count]
        part *= _M32
        part ^= mixed


def _mix_long_key(
    hashes: npt.NDArray[np.uint32],
    data: npt.NDArray[np.uint8],
    key: int,
    start: int,
    words: int,
    done: int,
) -> None:
    """Mix the words ``[done, words)`` of one key. Only the last part of the mixing, which is serial, is in Python."""
    mine = data[start + 4 * done : start + 4 * words].tobytes()
    value = int(hashes[key])
    for word in _scramble(np.frombuffer(mine, dtype="<u4")).tolist():
        value = value * _M & _MASK ^ word
    hashes[key] = value


def _scramble(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    mixed = words * _M32
    mixed ^= mixed >> np.uint32(24)
    mixed *= _M32
    return mixed


def _mix_tail(
    hashes: npt.NDArray[np.uint32],
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> None:
    """Mix the last one to three bytes of the keys that have them."""
    left = lengths & 3
    ends = starts + (lengths - left)
    for extra in (2, 1, 0):
        rows = np.flatnonzero(left > extra)
        hashes[rows] ^= data[ends[rows] + extra].astype(np.uint32) << np.uint32(8 * extra)
    rows = np.flatnonzero(left)
    hashes[rows] *= _M32
