"""Compares the outputs of a replay with those on topics: for each topic and key, which records there are how often.

The order does not count, because it depends on how the source was divided into batches. Timestamps do not count either.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc

from onceflow.admin.verify.replay import LATE
from onceflow.admin.verify.report import DOUBLED, FOREIGN, LOST, Report
from onceflow.admin.verify.tally import (
    LETTER,
    OUTPUT,
    SOURCE,
    Difference,
    RecordComparison,
    RecordOffset,
    digest_of,
    key_hash,
)
from onceflow.client.committed import Chunk, CommittedReader
from onceflow.errors import OptionError, counted
from onceflow.protocol.headers import Header
from onceflow.protocol.partitioners import key_partitions
from onceflow.state.api.serdes import in_own_schema
from onceflow.state.engine.dead_letters import depends_on_topics

#: In place of a topic: the records that a replay has yielded.
_REPLAY = "the replay"
_LETTER = b"letter"
_KEPT_KEY, _KEPT_VALUE = 80, 160  # bytes of each, for texts
_KEYS_ENOUGH, _ODDS = 64, 1_000_000
_SIZES = struct.Struct("<II")


class ReplayOutputs:
    """The outputs on both sides.

    Args:
        topics: the outputs that are compared. default: the topic of records that name none; None: not known.
        letters: topic of dead and late letters in the replay; None: there are none.
        partitions: of the table.
        scratch: folder for scratch files.

    Attributes:
        serde: of the outputs, if it is known. Another version of its schema may have written them.
    """

    def __init__(
        self,
        tally: RecordComparison,
        topics: Sequence[str],
        default: str | None,
        letters: str | None,
        scratch: Path,
        flow: str,
        partitions: int,
    ) -> None:
        self.serde: Any = None
        self._tally, self._topics, self._default, self._letters = tally, set(topics), default, letters
        self._spool = _Spool(scratch / "yielded")
        self._flow = flow
        self._partitions = partitions
        self._kept: dict[int, set[int]] = defaultdict(set)  # by partition of the table: keys of outputs, by hash
        self._strays = False
        self.side = SOURCE
        self.left_out = 0
        self.sizes_counted = False
        """Whether letters depend on what topics take, which a replay does not know."""

    def __enter__(self) -> ReplayOutputs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._spool.close()

    def yielded(self, batch: pa.RecordBatch, partition: int) -> None:
        """Take records that the replay has yielded. ``side`` says whether they have to be on the topics.

        Raises:
            OptionError: a topic is not among the outputs.
        """
        columns = [batch.column(name).to_pylist() for name in ("key", "value", "topic", "headers")]
        if not self._strays:
            self._note_keys(batch, partition)
        found = [*self._digests(zip(*columns, strict=True))]
        digests = [(at, digest) for _, at, digest in found]
        self._tally.add(self.side, _REPLAY, partition, digests, keys=[key for key, _, _ in found])

    def _note_keys(self, batch: pa.RecordBatch, partition: int) -> None:
        aside = pc.is_in(batch.column("topic"), pa.array([self._letters, LATE], pa.string()), skip_nulls=True)
        keys = batch.column("key").filter(pc.invert(aside))
        self._strays = bool((key_partitions(keys, self._partitions) != partition).any())
        if len(known := self._kept[partition]) < _KEYS_ENOUGH:
            known.update(map(key_hash, pc.unique(keys).to_pylist()))

    @property
    def keeps_keys(self) -> bool:
        """Whether outputs have the key of the state that they follow from: all that were yielded have a key of their
        partition of the table, and these keys are so many that this is no accident."""
        sizes = [len(keys) for keys in self._kept.values() if keys]
        enough = _ODDS.bit_length()  # with two partitions; a power of all keys would be a number of millions of bits
        return not self._strays and len(sizes) > 1 and self._partitions ** min(sum(sizes), enough) >= _ODDS

    def _digests(self, records: Iterable[tuple[Any, ...]]) -> Iterator[tuple[bytes | None, int, bytes]]:
        for key, value, named, headers in records:
            if named is not None and named in (self._letters, LATE):
                if self._letters is None:  # late records are left out
                    self.left_out += 1
                    continue
                digest = digest_of(_LETTER, key, value)
            else:
                topic = named or self._default
                if topic is None or topic not in self._topics:
                    raise self._unknown(topic)
                listed = [(header["key"], header["value"]) for header in headers or ()]
                digest = _digest(topic, key, value, listed)
            yield key, self._spool.add(key, value), digest

    def there(self, chunk: Chunk, topic: str, partition: int, *, letter: bool) -> None:
        """Take records of a topic."""
        rows = zip(chunk.offsets.tolist(), chunk.keys, chunk.values, range(len(chunk.keys)), strict=True)
        if letter:
            self.sizes_counted = self.sizes_counted or any(map(depends_on_topics, chunk.headers.values()))
            found = ((offset, digest_of(_LETTER, key, value)) for offset, key, value, _ in rows)
        else:
            found = (
                (offset, _digest(topic, key, self._as_now(value), chunk.headers.get(row, ())))
                for offset, key, value, row in rows
            )
        self._tally.add(LETTER if letter else OUTPUT, topic, partition, found, keys=chunk.keys)

    def _as_now(self, value: bytes | None) -> bytes | None:
        return None if value is None else in_own_schema(self.serde, value)

    def differences(self) -> Iterator[Difference]:
        """What is not as often on the topics as in the replay."""
        return self._tally.differences()

    def report(self, each: Difference, report: Report, reader: CommittedReader) -> None:
        """Add a difference as a finding, with the key and value of the record."""
        kind, text = LOST, "a replay yields it"
        if each.found > each.expected:
            is_yielded = any(place.topic == _REPLAY for place in each.places)
            kind, text = (DOUBLED, "a replay yields it") if is_yielded else (FOREIGN, "no replay yields it")
        if report.counts.get(kind, 0) < report.limit:
            place = each.places[0]
            key, value = self._spool.read(place.offset) if place.topic == _REPLAY else _record(reader, place)
            times = (
                f" {counted(each.expected, 'time')}, it is there {counted(each.found, 'time')}"
                if kind != FOREIGN
                else ""
            )
            text = f"key {_shown(key)}, value {_shown(value)}: {text}{times}"
        report.add(kind, text, [place for place in each.places if place.topic != _REPLAY])

    def _unknown(self, topic: str | None) -> OptionError:
        if topic is None:
            return OptionError(
                "The replay yields records without a topic, and it is not known where the flow writes them",
                flow=self._flow,
                next_step="name that topic first: --output TOPIC. With --tables-only, outputs are not compared",
            )
        return OptionError(
            f"The replay yields records for {topic}, which is not among the outputs of the flow",
            flow=self._flow,
            next_step=f"name it, too: --output {topic}. Records without a topic go to the first --output",
        )


def _digest(topic: str, key: bytes | None, value: bytes | None, headers: Sequence[Header]) -> bytes:
    parts: list[bytes | None] = [topic.encode(), key, value]
    for name, content in headers:
        parts += [name.encode(), content]
    return digest_of(*parts)


def _record(reader: CommittedReader, place: RecordOffset) -> tuple[bytes | None, bytes | None]:
    for chunk in reader.read(place.topic, place.partition, place.offset, place.offset + 1):
        if chunk.keys:
            return chunk.keys[0], chunk.values[0]
    return None, None


def _shown(raw: bytes | None) -> str:
    if raw is None:
        return "null"
    text = raw[:_KEPT_VALUE].decode(errors="backslashreplace")
    return text if text.isprintable() else repr(raw[:_KEPT_VALUE])


class _Spool:
    """Beginnings of keys and values in a file, so that a record of a replay can be named."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("w+b")
        self._end = 0

    def add(self, key: bytes | None, value: bytes | None) -> int:
        """Returns where it is."""
        parts = [None if key is None else key[:_KEPT_KEY], None if value is None else value[:_KEPT_VALUE]]
        sizes = [0 if part is None else len(part) + 1 for part in parts]
        raw = b"".join((_SIZES.pack(*sizes), *(part or b"" for part in parts)))
        at, self._end = self._end, self._end + len(raw)
        self._file.write(raw)
        return at

    def read(self, at: int) -> tuple[bytes | None, bytes | None]:
        self._file.seek(at)
        sizes = _SIZES.unpack(self._file.read(_SIZES.size))
        key, value = (self._file.read(size - 1) if size else None for size in sizes)
        return key, value

    def close(self) -> None:
        self._file.close()
