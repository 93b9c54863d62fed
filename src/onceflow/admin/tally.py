"""Compares two large collections of records by identity, in bounded memory: what is missing, what is there too often.

Each record is kept as 40 bytes in one of many files in a scratch folder, chosen by a digest of its identity. So equal
identities meet in one file, and the files are compared one after the other: 10,000,000 records on each side need
800 MB of disk, and the memory of one file.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

_FILES = 128
_BUFFERED = 4096  # records in memory for each file, before they are written
_SHOWN = 10
_ROW = np.dtype(
    [("low", "<u8"), ("high", "<u8"), ("side", "<u4"), ("topic", "<u4"), ("partition", "<i8"), ("offset", "<i8")]
)

SOURCE, OUTPUT, LETTER, UNDECIDED = range(4)
"""Where a record is: in the source range, in an output, in a topic of dead or late letters, or in the part of the
source that was committed while the outputs were read, so that it may be in them or not."""


@dataclass(frozen=True)
class Place:
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
    """

    expected: int
    found: int
    places: tuple[Place, ...]


def digest_of(*parts: bytes | None) -> bytes:
    """16 bytes that stand for an identity: of each part its presence, its length and its content."""
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(b"\0" if part is None else b"\1" + len(part).to_bytes(8, "little"))
        made.update(part or b"")
    return made.digest()


class Tally:
    """The records of both sides. Use it as a context manager: the scratch folder is deleted at the end.

    Args:
        folder: where the scratch folder is made; None: the system's folder for temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="onceflow-verify-", dir=folder)
        self._waiting: list[list[tuple[int, int, int, int, int, int]]] = [[] for _ in range(_FILES)]
        self._topics: dict[str, int] = {}
        self.counts = [0, 0, 0, 0]

    def __enter__(self) -> Tally:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._scratch.cleanup()

    def add(self, side: int, topic: str, partition: int, records: Iterable[tuple[int, bytes]]) -> None:
        """Add records of a partition: offset, and digest of the identity (`digest_of`)."""
        number = self._topics.setdefault(topic, len(self._topics))
        for offset, digest in records:
            low, high = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
            waiting = self._waiting[low % _FILES]
            waiting.append((low, high, side, number, partition, offset))
            self.counts[side] += 1
            if len(waiting) >= _BUFFERED:
                self._flush(low % _FILES)

    def differences(self, *, in_each: Sequence[str] = ()) -> Iterator[Difference]:
        """Identities that are not as often in the outputs and letters as in the sources.

        Args:
            in_each: a record of the sources has to be in each of these outputs, or else in the letters as often as in
                one output. Empty: in any one of the outputs or letters.
        """
        for number in range(_FILES):
            self._flush(number)
            path = self._path(number)
            if path.exists():
                yield from self._compare(np.fromfile(path, _ROW), in_each)
                path.unlink()

    def _compare(self, rows: Any, in_each: Sequence[str]) -> Iterator[Difference]:
        rows = rows[np.lexsort((rows["offset"], rows["side"], rows["high"], rows["low"]))]
        new = np.ones(len(rows), bool)
        new[1:] = (rows["low"][1:] != rows["low"][:-1]) | (rows["high"][1:] != rows["high"][:-1])
        starts = np.flatnonzero(new)
        ends = np.append(starts[1:], len(rows))
        expected = np.add.reduceat((rows["side"] == SOURCE).astype(np.int64), starts)
        most = expected + np.add.reduceat((rows["side"] == UNDECIDED).astype(np.int64), starts)
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
            places = tuple(Place(names[int(r["topic"])], int(r["partition"]), int(r["offset"])) for r in same)
            yield Difference(int(expected[at]), int(worst[at]), places)

    def _flush(self, number: int) -> None:
        waiting = self._waiting[number]
        if waiting:
            with self._path(number).open("ab") as file:
                np.array(waiting, _ROW).tofile(file)
            waiting.clear()

    def _path(self, number: int) -> Path:
        return Path(self._scratch.name) / f"{number:03}"
