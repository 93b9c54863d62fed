"""Encodes the Produce request, versions 9 to 12, as a list of buffers.

kafka-python can encode this request, but copies each records section twice. The records are most of the data that
onceflow sends, so the frame is built here: small byte strings between the Arrow buffers, which are not copied. The
layout is that of Kafka's ProduceRequest.json. Versions 9 to 12 have the same layout; version 12 also adds partitions to
the transaction implicitly (KIP-890).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from onceflow.protocol.batches import EncodedBatch

API_KEY = 0
MIN_VERSION, MAX_VERSION = 9, 12
_NO_TAGS = b"\x00"


def _uvarint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _compact_string(text: str | None) -> bytes:
    if text is None:
        return b"\x00"
    raw = text.encode()
    return _uvarint(len(raw) + 1) + raw


def encode_produce(
    topics: Sequence[tuple[str, Sequence[tuple[int, EncodedBatch]]]],
    *,
    transactional_id: str | None,
    timeout_ms: int,
    version: int,
    correlation_id: int,
    client_id: str,
) -> list[Any]:
    """Encode one request, with its size in front.

    Args:
        topics: for each topic its (partition, batch) pairs. Kafka allows one batch for each partition.
        transactional_id: None for a producer without transactions.
        timeout_ms: how long the broker may wait for replicas to acknowledge.
        version: 9 to 12.

    Returns:
        Buffers to write one after the other. The first one starts with the size of the frame.
    """
    client = client_id.encode()
    gap = bytearray()  # the bytes before the next records section
    gap += struct.pack(">hhih", API_KEY, version, correlation_id, len(client)) + client + _NO_TAGS
    gap += _compact_string(transactional_id)
    gap += struct.pack(">hi", -1, timeout_ms)  # acks=-1: all in-sync replicas
    gap += _uvarint(len(topics) + 1)
    buffers: list[Any] = []
    for name, batches in topics:
        gap += _compact_string(name) + _uvarint(len(batches) + 1)
        for partition, batch in batches:
            gap += struct.pack(">i", partition) + _uvarint(batch.nbytes + 1) + batch.head
            buffers += [bytes(gap), batch.body]
            gap = bytearray(_NO_TAGS)  # ends this partition
        gap += _NO_TAGS  # ends this topic
    gap += _NO_TAGS  # ends the request
    buffers.append(bytes(gap))
    size = sum(memoryview(b).nbytes for b in buffers)
    buffers[0] = struct.pack(">i", size) + buffers[0]
    return buffers
