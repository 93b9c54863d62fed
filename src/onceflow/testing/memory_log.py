"""Topics in memory, for `MemoryBroker`: the bytes of their record batches, as a broker keeps them in its log."""

from __future__ import annotations

import bisect
import itertools
import struct
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import google_crc32c

from onceflow.protocol.batches import ProducerIdAndEpoch, encode_single
from onceflow.protocol.decode import DecodedBatch, split_batches

#: Kafka's settings of a topic that has none of its own, as far as a flow asks for them.
DEFAULTS: Mapping[str, str] = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "delete.retention.ms": "86400000",
    "max.message.bytes": "1048588",
    "message.timestamp.after.max.ms": "3600000",
    "message.timestamp.before.max.ms": "9223372036854775807",
    "message.timestamp.difference.max.ms": "9223372036854775807",
    "message.timestamp.type": "CreateTime",
    "min.cleanable.dirty.ratio": "0.5",
    "min.insync.replicas": "1",
    "retention.ms": "604800000",
    "segment.bytes": "1073741824",
    "unclean.leader.election.enable": "false",
}

# baseOffset int64, batchLength int32, partitionLeaderEpoch int32, magic int8, crc uint32, attributes int16,
# lastOffsetDelta int32, baseTimestamp int64, maxTimestamp int64, producerId int64, producerEpoch int16
_HEAD = struct.Struct(">qiibIhiqqqh")
_PLACE, _ATTRIBUTES, _CRC = struct.Struct(">qii"), struct.Struct(">h"), struct.Struct(">I")
_LENGTH_FROM, _CRC_AT, _COVERED_FROM = 12, 17, 21
_TRANSACTIONAL, _CONTROL = 0x10, 0x20
_MARKER_KEY, _MARKER_VALUE = struct.Struct(">hh"), struct.Struct(">hi")
_numbers = itertools.count()
#: A leader that never changes.
LEADER_EPOCH = 0


@dataclass(frozen=True)
class StoredBatch:
    """A record batch in a log.

    Args:
        number: of all batches in memory: those that were appended later have higher ones.
        base, last: its first and its last offset.
        producer_id: -1: of a plain producer.
        data: its bytes, with the offsets of this log.
    """

    number: int
    base: int
    last: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    attributes: int
    data: bytes

    def decoded(self) -> DecodedBatch:
        """Its records."""
        (raw,) = split_batches(self.data)
        return raw.decode()


@dataclass(frozen=True)
class Aborted:
    """A transaction that was aborted: its first record in the partition, and its marker."""

    producer_id: int
    first: int
    marker: int


@dataclass
class PartitionLog:
    """The log of one partition.

    Attributes:
        open: of producers with an open transaction: the offset of its first record here, and its epoch.
    """

    batches: list[StoredBatch] = field(default_factory=list)
    aborted: list[Aborted] = field(default_factory=list)
    open: dict[int, tuple[int, int]] = field(default_factory=dict)
    _bases: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The high watermark: there is one replica."""
        return self.batches[-1].last + 1 if self.batches else 0

    @property
    def stable_end(self) -> int:
        """The last stable offset."""
        return min((first for first, _ in self.open.values()), default=self.end)

    def append(self, data: bytes) -> int:
        """Append record batches as a producer has sent them. Returns the offset of the first record."""
        first = self.end
        at = 0
        while at < len(data):
            stop = at + _LENGTH_FROM + int.from_bytes(data[at + 8 : at + _LENGTH_FROM], "big")
            self._append_one(data[at:stop])
            at = stop
        return first

    def _append_one(self, sent: bytes) -> None:
        base = self.end
        _, length, _, _, _, attributes, delta, _, max_ms, producer_id, epoch = _HEAD.unpack_from(sent)
        data = _PLACE.pack(base, length, LEADER_EPOCH) + sent[_PLACE.size :]
        self.batches.append(
            StoredBatch(next(_numbers), base, base + delta, max_ms, producer_id, epoch, attributes, data)
        )
        self._bases.append(base)
        if attributes & _TRANSACTIONAL and not attributes & _CONTROL:
            self.open.setdefault(producer_id, (base, epoch))

    def end_transaction(self, producer: ProducerIdAndEpoch, *, committed: bool, now_ms: int) -> None:
        """Append the marker of a transaction."""
        first, _ = self.open.pop(producer.producer_id, (self.end, 0))
        if not committed:
            self.aborted.append(Aborted(producer.producer_id, first, self.end))
        self._append_one(_marker(producer, committed=committed, now_ms=now_ms))

    def fetch(self, start: int, *, committed: bool, most_bytes: int) -> tuple[bytes, list[Aborted]]:
        """Record batches from an offset on, and the aborted transactions among them.

        Args:
            committed: only what is below the last stable offset.
            most_bytes: their size; the first batch is returned even if it is larger.
        """
        until = self.stable_end if committed else self.end
        found: list[bytes] = []
        size, last = 0, start - 1
        for batch in self._from(start):
            if batch.base >= until or (found and size + len(batch.data) > most_bytes):
                break
            found.append(batch.data)
            size, last = size + len(batch.data), batch.last
        aborted = [each for each in self.aborted if each.first <= last and each.marker >= start]
        return b"".join(found), aborted if committed else []

    def at_time(self, timestamp_ms: int) -> tuple[int, int]:
        """Offset and time of the first record with this timestamp or a later one; -1 if there is none."""
        for batch in self.batches:
            if batch.max_timestamp_ms < timestamp_ms or batch.attributes & _CONTROL:
                continue
            decoded = batch.decoded()
            for offset, at_ms in zip(decoded.offsets.tolist(), decoded.timestamps_ms.tolist(), strict=True):
                if at_ms >= timestamp_ms:
                    return offset, at_ms
        return -1, -1

    def committed(self, start: int = 0) -> Iterator[StoredBatch]:
        """The batches of records that a read_committed consumer gets, from the batch with an offset on."""
        gone = {(each.producer_id, each.first): each.marker for each in self.aborted}
        dropped: dict[int, int] = {}  # by producer, until which offset
        for batch in self.batches:
            if (marker := gone.get((batch.producer_id, batch.base))) is not None:
                dropped[batch.producer_id] = marker
            if batch.base >= self.stable_end:
                return
            is_dropped = batch.attributes & _TRANSACTIONAL and batch.base < dropped.get(batch.producer_id, -1)
            if batch.last >= start and not batch.attributes & _CONTROL and not is_dropped:
                yield batch

    def _from(self, offset: int) -> Iterator[StoredBatch]:
        first = max(0, bisect.bisect_right(self._bases, offset) - 1)
        return (self.batches[n] for n in range(first, len(self.batches)) if self.batches[n].last >= offset)


@dataclass
class MemoryTopic:
    """A topic.

    Args:
        configs: its settings, where they are not `DEFAULTS`.
    """

    name: str
    partitions: list[PartitionLog]
    configs: dict[str, str]
    topic_id: uuid.UUID = field(default_factory=uuid.uuid4)

    def setting(self, name: str) -> str | None:
        """The value of a setting; None: there is none of this name."""
        return self.configs.get(name, DEFAULTS.get(name))


def _marker(producer: ProducerIdAndEpoch, *, committed: bool, now_ms: int) -> bytes:
    """The control batch that ends a transaction in a partition (KIP-98)."""
    encoded = encode_single(
        _MARKER_KEY.pack(0, int(committed)),
        _MARKER_VALUE.pack(0, 0),
        timestamp_ms=now_ms,
        identity=producer,
        base_sequence=-1,
    )
    data = bytearray(encoded.head) + encoded.body
    _ATTRIBUTES.pack_into(data, _COVERED_FROM, _TRANSACTIONAL | _CONTROL)
    _CRC.pack_into(data, _CRC_AT, google_crc32c.value(bytes(data[_COVERED_FROM:])))
    return bytes(data)
