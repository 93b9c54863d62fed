"""Compares two large collections of records by identity, in bounded memory: what is missing, what is there too often.

Each record is kept as 48 bytes in one of many files in a scratch folder, chosen by a digest of its identity. So equal
identities meet in one file, and the files are compared one after the other: 10,000,000 records on each side need
960 MB of disk, and the memory of one file. To compare the order of records, each pair of records with the same
identity takes another 40 bytes, in a file chosen by their key.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

_FILES = 128
_BUFFERED = 4096  # records in memory for each file, before they are written
_SHOWN = 10
_MASK = (1 << 64) - 1
_ROW = np.dtype(
    [
        ("low", "<u8"), ("high", "<u8"), ("key", "<u8"), ("side", "<u4"), ("topic", "<u4"), ("partition", "<i8"),
        ("offset", "<i8"),
    ]
)  # fmt: skip
_PAIR = np.dtype(
    [
        ("key", "<u8"), ("from_topic", "<u4"), ("from_partition", "<u4"), ("topic", "<u4"), ("partition", "<u4"),
        ("from_offset", "<i8"), ("offset", "<i8"),
    ]
)  # fmt: skip

SOURCE, OUTPUT, LETTER, UNDECIDED = range(4)
"""Where a record is: in the source range, in an output, in a topic of dead or late letters, or in the part of the
source that was committed while the outputs were read, so that it may be in them or not."""


@dataclass(frozen=True)
class RecordOffset:
    """Where a record is."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True)
class Difference:
    """An identity whose counts differ.

    Args:
        expected: how often it has to be in the outputs and letters together, at least.
        found: how often it is there.
        places: the records of the sources, outputs and letters with this identity, at most ten.
        key: `key_hash` of the first one's key; 0: keys were not given.
    """

    expected: int
    found: int
    places: tuple[RecordOffset, ...]
    key: int = 0


def key_hash(key: bytes | None) -> int:
    """A hash of this process: one of eight bytes is enough, and the fastest. 0: no key."""
    return 0 if key is None else hash(key) & _MASK


def digest_of(*parts: bytes | None) -> bytes:
    """16 bytes that stand for an identity: of each part its presence, its length and its content."""
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(b"\0" if part is None else b"\1" + len(part).to_bytes(8, "little"))
        made.update(part or b"")
    return made.digest()


@dataclass(frozen=True)
class Reordered:
    """Two records of one key in one partition of an output, the later one made of the earlier record of the source."""

    before: RecordOffset
    after: RecordOffset
    source_before: RecordOffset
    source_after: RecordOffset


class RecordComparison:
    """The records of both sides. Use it as a context manager: the scratch folder is deleted at the end.

    Args:
        folder: where the scratch folder is made; None: the system's folder for temporary files.

    Attributes:
        counts: how many records each side has.
        met: after `differences`, how many identities are both in the sources and in an output.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="onceflow-verify-", dir=folder)
        self._waiting: list[list[tuple[int, ...]]] = [[] for _ in range(_FILES)]
        self._topics: dict[str, int] = {}
        self.counts = [0, 0, 0, 0]
        self.met = 0

    def __enter__(self) -> RecordComparison:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._scratch.cleanup()

    def add(
        self,
        side: int,
        topic: str,
        partition: int,
        records: Iterable[tuple[int, bytes]],
        keys: Iterable[bytes | None] | None = None,
    ) -> None:
        """Add records of a partition: offset, and digest of the identity (`digest_of`).

        Args:
            keys: of the records, for their order and for `Difference.key`; None: neither is asked for.
        """
        number = self._topics.setdefault(topic, len(self._topics))
        for (offset, digest), key in zip(records, repeat(None) if keys is None else keys, strict=False):
            low, high = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
            waiting = self._waiting[low % _FILES]
            waiting.append((low, high, key_hash(key), side, number, partition, offset))
            self.counts[side] += 1
            if len(waiting) >= _BUFFERED:
                self._flush(low % _FILES)

    def differences(self, *, in_each: Sequence[str] = (), ordered: bool = False) -> Iterator[Difference]:
        """Identities that are not as often in the outputs and letters as in the sources.

        Args:
            in_each: a record of the sources has to be in each of these outputs, or else in the letters as often as in
                one output. Empty: in any one of the outputs or letters.
            ordered: prepare for `reordered`.
        """
        for number in range(_FILES):
            self._flush(number)
            path = self._path(number)
            if path.exists():
                yield from self._compare(np.fromfile(path, _ROW), in_each, ordered)
                path.unlink()

    def reordered(self) -> Iterator[Reordered]:
        """Records that are behind later ones of their key. To be called after `differences`.

        Only records are compared whose identity is there once in the sources and once in the output, under the same
        key. They have to be in one partition of a source, and in one partition of an output.
        """
        names = {number: topic for topic, number in self._topics.items()}
        for number in range(_FILES):
            path = self._path(number, "pairs")
            if not path.exists():
                continue
            pairs = np.fromfile(path, _PAIR)
            path.unlink()
            group = ("from_partition", "from_topic", "partition", "topic", "key")
            pairs = pairs[np.lexsort((pairs["offset"], *(pairs[name] for name in group)))]
            before, after = pairs[:-1], pairs[1:]
            wrong = before["from_offset"] > after["from_offset"]
            for name in group:
                wrong &= before[name] == after[name]
            for at in np.flatnonzero(wrong).tolist():
                yield Reordered(*_places(before[at], after[at], names))

    def _compare(self, rows: Any, in_each: Sequence[str], ordered: bool) -> Iterator[Difference]:
        rows = rows[np.lexsort((rows["offset"], rows["side"], rows["high"], rows["low"]))]
        new = np.ones(len(rows), bool)
        new[1:] = (rows["low"][1:] != rows["low"][:-1]) | (rows["high"][1:] != rows["high"][:-1])
        starts = np.flatnonzero(new)
        ends = np.append(starts[1:], len(rows))
        if ordered:
            self._pair(rows, starts, ends, np.cumsum(new) - 1)
        expected = np.add.reduceat((rows["side"] == SOURCE).astype(np.int64), starts)
        most = expected + np.add.reduceat((rows["side"] == UNDECIDED).astype(np.int64), starts)
        outputs = np.add.reduceat((rows["side"] == OUTPUT).astype(np.int64), starts)
        self.met += int(((most > 0) & (outputs > 0)).sum())
        letters = np.add.reduceat((rows["side"] == LETTER).astype(np.int64), starts)
        wrong = np.zeros(len(starts), bool)
        worst = expected.copy()
        numbers = [[self._topics.get(topic, -1)] for topic in in_each] or [sorted(self._topics.values())]
        for group in numbers:
            there = (rows["side"] == OUTPUT) & np.isin(rows["topic"], group)
            found = np.add.reduceat(there.astype(np.int64), starts) + letters
            fresh = ((found < expected) | (found > most)) & ~wrong
            worst[fresh] = found[fresh]
            wrong |= fresh
        names = {number: topic for topic, number in self._topics.items()}
        for at in np.flatnonzero(wrong).tolist():
            same = rows[starts[at] : ends[at]][:_SHOWN]
            places = tuple(RecordOffset(names[int(r["topic"])], int(r["partition"]), int(r["offset"])) for r in same)
            yield Difference(int(expected[at]), int(worst[at]), places, int(same[0]["key"]))

    def _pair(self, rows: Any, starts: Any, ends: Any, group: Any) -> None:
        """Write down where the records of an output come from, if that is certain.

        Args:
            group: of each row, the number of its identity.
        """
        sides = rows["side"]
        from_source = (sides == SOURCE) | (sides == UNDECIDED)
        once = np.add.reduceat(from_source.astype(np.int64), starts) == 1
        # In the order of sides, the source is the first of an identity, and what is undecided the last.
        source = np.where(sides[starts] == SOURCE, starts, ends - 1)
        outputs = np.flatnonzero(sides == OUTPUT)
        place = group[outputs] * len(self._topics) + rows["topic"][outputs]
        _, back, counts = np.unique(place, return_inverse=True, return_counts=True)
        chosen = outputs[(counts[back] == 1) & once[group[outputs]]]
        of = source[group[chosen]]
        same = (rows["key"][chosen] == rows["key"][of]) & (rows["key"][chosen] != 0)
        chosen, of = chosen[same], of[same]
        pairs = np.empty(len(chosen), _PAIR)
        for name in ("key", "topic", "partition", "offset"):
            pairs[name] = rows[name][chosen]
        for name in ("topic", "partition", "offset"):
            pairs[f"from_{name}"] = rows[name][of]
        files = pairs["key"] % np.uint64(_FILES)
        for number in np.unique(files).tolist():
            with self._path(int(number), "pairs").open("ab") as file:
                pairs[files == number].tofile(file)

    def _flush(self, number: int) -> None:
        waiting = self._waiting[number]
        if waiting:
            with self._path(number).open("ab") as file:
                np.array(waiting, _ROW).tofile(file)
            waiting.clear()

    def _path(self, number: int, kind: str = "rows") -> Path:
        return Path(self._scratch.name) / f"{kind}-{number:03}"


def _places(before: Any, after: Any, names: dict[int, str]) -> Iterator[RecordOffset]:
    for which in ("", "from_"):
        for row in (before, after):
            topic, partition, offset = (int(row[which + name]) for name in ("topic", "partition", "offset"))
            yield RecordOffset(names[topic], partition, offset)
