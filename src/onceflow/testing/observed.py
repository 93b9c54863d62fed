"""What drivers did and what consumers see, as data: histories, tags, final reads. ``history`` compares them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from onceflow.protocol.names import TopicPartition

#: Name of the record header that holds a tag.
HEADER = "onceflow-history"

INVOKE, OK, FAIL, INFO = "invoke", "ok", "fail", "info"
MAX_INT64 = 2**63 - 1

TopicOffsets = Mapping[str, Mapping[int, int]]


class Tag(NamedTuple):
    """Which source record an output was made from, and by which attempt. No two outputs have the same tag.

    Args:
        attempt: ``<producer id>:<epoch>`` of the transaction.
        topic, partition, offset: of the source record.
        n: which output of that record, from 0.
    """

    flow: str
    batch: int
    attempt: str
    topic: str
    partition: int
    offset: int
    n: int = 0

    def encode(self) -> bytes:
        """The header's value: a JSON array."""
        return json.dumps(self, separators=(",", ":")).encode()

    @staticmethod
    def decode(data: bytes) -> Tag:
        """Raises ``ValueError`` when the bytes are no tag."""
        found = json.loads(data)
        if not isinstance(found, list) or len(found) != 7:
            raise ValueError(f"not a tag: {data[:80]!r}")
        tag = Tag(*found)
        flow, batch, attempt, topic, partition, offset, n = found
        texts = type(flow) is str and type(attempt) is str and type(topic) is str
        for number in (batch, partition, offset, n):
            if type(number) is not int or not 0 <= number <= MAX_INT64 or not texts:
                raise ValueError(f"not a tag: {data[:80]!r}")
        return tag


# ---- what drivers did ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """One line of a history.

    Args:
        kind: ``invoke``: an attempt begins; ``ok``: it was certainly committed; ``fail``: it was certainly aborted;
            ``info``: its outcome is unknown. An invoke that nothing follows counts as info.
        attempt: as in ``Tag``. driver: the process that recorded it.
        start, end: source range of an invoke: topic, partition, offset.
    """

    kind: str
    flow: str
    batch: int
    attempt: str
    driver: str
    time_ms: int
    start: TopicOffsets = field(default_factory=dict)
    end: TopicOffsets = field(default_factory=dict)

    def to_json(self) -> str:
        """One line, without its end."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def of(found: Mapping[str, Any]) -> Op:
        """From the JSON object of a line. Raises ``ValueError`` when it is not a line of a history."""
        try:
            op = Op(**{**found, "start": _ints(found["start"]), "end": _ints(found["end"])})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a line of a history: {str(found)[:100]} ({error})") from error
        if op.kind not in (INVOKE, OK, FAIL, INFO):
            raise ValueError(f"not a line of a history: kind {op.kind!r}")
        return op


class Attempt(NamedTuple):
    """What became of one attempt: ``ok``, ``fail`` or ``info``; and its source range, empty when not recorded."""

    status: str
    start: dict[TopicPartition, int]
    end: dict[TopicPartition, int]


class History:
    """What the drivers recorded.

    Args:
        ops: in the order they were written.
        torn: lines that were cut off.
    """

    def __init__(self, ops: Iterable[Op] = (), torn: int = 0) -> None:
        self.ops = list(ops)
        self.torn = torn

    @staticmethod
    def parse(lines: Iterable[str]) -> History:
        """From JSON lines. A driver that is killed may leave its last line cut off: such a line is ignored.

        Raises:
            ValueError: a line is something else, or more lines are cut off than there were drivers.
        """
        ops, torn = [], 0
        for line in lines:
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError:
                torn += 1
                continue
            if not isinstance(found, dict):
                raise ValueError(f"not a line of a history: {line[:100]!r}")
            ops.append(Op.of(found))
        # A driver whose very first line was cut off is not among these names.
        if torn > len({op.driver for op in ops}) + 1:
            raise ValueError(f"not a history: {torn} lines are no JSON")
        return History(ops, torn)

    def attempts(self, flow: str) -> dict[tuple[int, str], Attempt]:
        """What became of the attempts of a flow, by batch and attempt."""
        found: dict[tuple[int, str], Attempt] = {}
        for op in self.ops:
            if op.flow != flow:
                continue
            before = found.get((op.batch, op.attempt), Attempt(INFO, {}, {}))
            # It was begun again under the same producer id and epoch: its earlier outcome does not count any more.
            status = INFO if op.kind == INVOKE else op.kind
            start, end = (flat(op.start), flat(op.end)) if op.end else (before.start, before.end)
            found[op.batch, op.attempt] = Attempt(OK if before.status == OK else status, start, end)
        return found


# ---- what consumers see ----------------------------------------------------------------------------------


class Read(NamedTuple):
    """One output record as a read_committed consumer sees it. tag: None when it has none that can be read."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    tag: Tag | None


class Reads:
    """Output records, column by column: there may be millions. Their order does not matter."""

    _NAMES = ("place", "offset", "key", "writer", "source", "from_offset", "n")

    def __init__(self, reads: Iterable[Read] = ()) -> None:
        self.places: dict[TopicPartition, int] = {}
        self.keys: dict[bytes | None, int] = {None: 0}
        self.writers: dict[tuple[str, int, str], int] = {}  # flow, batch, attempt
        self.sources: dict[TopicPartition, int] = {}
        self._columns = {name: array("q") for name in self._NAMES}
        self._append = tuple(column.append for column in self._columns.values())
        for read in reads:
            self.add(*read)

    def __len__(self) -> int:
        return len(self._columns["offset"])

    def add(self, topic: str, partition: int, offset: int, key: bytes | None, tag: Tag | bytes | None) -> None:
        """Add a record; a tag in bytes is the header's value, whatever it is."""
        if isinstance(tag, bytes):
            try:
                tag = Tag.decode(tag)
            except (ValueError, RecursionError):
                tag = None
        place, keys = self.places.setdefault((topic, partition), len(self.places)), self.keys
        writer = source = from_offset = n = -1
        if tag is not None:
            writer = self.writers.setdefault(tag[:3], len(self.writers))
            source = self.sources.setdefault(tag[3:5], len(self.sources))
            from_offset, n = tag.offset, tag.n
        row = (place, offset, keys.setdefault(key, len(keys)), writer, source, from_offset, n)
        for append, value in zip(self._append, row, strict=True):
            append(value)

    def column(self, name: str) -> Any:
        """A column as an int64 array: offsets, ``n``, and codes of the rest (place, key, writer, source)."""
        return np.frombuffer(self._columns[name], np.int64) if len(self) else np.zeros(0, np.int64)


@dataclass
class Final:
    """What the topics hold in the end.

    Args:
        progress: batch and end offsets of every progress record, in the order of the log.
        sources: the offsets of the source records that a read_committed consumer sees, ascending.
        complete: whether everything was read to its end. why: why it was not.
        state, replay: the flow's state, and what it must be; both or neither.
    """

    flow: str
    reads: Reads
    progress: Sequence[tuple[int, TopicOffsets]]
    sources: Mapping[TopicPartition, Any]
    complete: bool = True
    why: str = ""
    state: Mapping[Any, Any] | None = None
    replay: Mapping[Any, Any] | None = None


def flat(offsets: TopicOffsets) -> dict[TopicPartition, int]:
    """Offsets by topic and partition."""
    return {(topic, p): offset for topic, partitions in offsets.items() for p, offset in partitions.items()}


def _ints(offsets: Mapping[str, Mapping[Any, Any]]) -> TopicOffsets:
    """Offsets with partitions as numbers again: in JSON, names are strings."""
    return {topic: {int(p): int(offset) for p, offset in found.items()} for topic, found in offsets.items()}
