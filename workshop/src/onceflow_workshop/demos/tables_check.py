"""Holds answers about a table against a fold of its topic. Pure.

Every answer carries a position: for each partition that it is from, the offset up to which it contains everything. So
its rows must be those of the fold at these offsets. A row may also be newer, because rows are read after the position
is taken; but never newer than what was committed when the answer had come.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from onceflow_workshop.demos.audit import EXAMPLES_MAX

Offsets = Mapping[int, int]


class Change(NamedTuple):
    """One committed record of the topic.

    Args:
        value: as JSON was read; None: a tombstone.
    """

    partition: int
    offset: int
    key: str
    value: Any


@dataclass(frozen=True)
class Answer:
    """One answer, and what was asked for.

    Args:
        kind: the kind of question.
        place: the URL of the instance.
        ended_at: when the answer had come, on the monotonic clock.
        position: the offsets that it names.
        least: the offsets that were demanded (``min_position``).
        rows: the value of each key; None: there is none.
        whole: given: the rows are all keys from the first text to below the second one (None: to the end).
        count: given: how many keys the table has.
    """

    kind: str
    place: str
    ended_at: float
    position: Offsets
    least: Offsets
    rows: Mapping[str, Any]
    whole: tuple[str, str | None] | None = None
    count: int | None = None


class _Versions:
    """All values that a key has had, in the order of offsets."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.offsets: list[int] = []
        self.values: list[Any] = []

    def window(self, low: int, high: int) -> list[Any]:
        """The value when everything below ``low`` is applied, then those that come until ``high``."""
        first, end = bisect.bisect_left(self.offsets, low), bisect.bisect_left(self.offsets, high)
        return [self.values[first - 1] if first else None, *self.values[first:end]]


class Fold:
    """The topic as a table, at any offset. Records are applied in offset order per partition.

    Attributes:
        ends: by partition, the offset below which all committed records are applied.
        changes: by partition, these records.
    """

    def __init__(self, partitions: int) -> None:
        self.ends: dict[int, int] = dict.fromkeys(range(partitions), 0)
        self.changes: dict[int, list[Change]] = {partition: [] for partition in range(partitions)}
        self._keys: dict[str, _Versions] = {}
        self._sorted: list[str] = []
        # By partition: offsets, and how many keys there are when everything up to them is applied.
        self._counted: dict[int, tuple[list[int], list[int]]] = {each: ([], []) for each in range(partitions)}

    def apply(self, change: Change) -> None:
        versions = self._keys.get(change.key)
        if versions is None:
            versions = self._keys[change.key] = _Versions(change.partition)
            bisect.insort(self._sorted, change.key)
        offsets, counts = self._counted[change.partition]
        before = versions.values[-1] if versions.values else None
        offsets.append(change.offset)
        counts.append((counts[-1] if counts else 0) + (change.value is not None) - (before is not None))
        versions.offsets.append(change.offset)
        versions.values.append(change.value)
        self.changes[change.partition].append(change)
        self.reach(change.partition, change.offset + 1)

    def reach(self, partition: int, offset: int) -> None:
        """There are no further committed records below this offset."""
        self.ends[partition] = max(self.ends[partition], offset)

    def reached(self, offsets: Offsets) -> bool:
        return all(self.ends[partition] >= offset for partition, offset in offsets.items())

    def partition_of(self, key: str) -> int | None:
        """Where the key is; None: it has never been written."""
        versions = self._keys.get(key)
        return None if versions is None else versions.partition

    def window(self, key: str, low: int, high: int) -> list[Any]:
        """The value of a key at an offset, then those that it got until another offset. None: there is none."""
        return self._keys[key].window(low, high)

    def keys(self, start: str, end: str | None) -> Sequence[str]:
        """All keys that were ever written from a start to below an end, in order."""
        last = len(self._sorted) if end is None else bisect.bisect_left(self._sorted, end)
        return self._sorted[bisect.bisect_left(self._sorted, start) : last]

    def count(self, partition: int, low: int, high: int) -> list[int]:
        """How many keys a partition has at an offset, then after each record until another offset."""
        offsets, counts = self._counted[partition]
        first, end = bisect.bisect_left(offsets, low), bisect.bisect_left(offsets, high)
        return [counts[first - 1] if first else 0, *counts[first:end]]

    def now(self) -> dict[str, Any]:
        """The rows after everything that was applied."""
        last = {key: versions.values[-1] for key, versions in self._keys.items()}
        return {key: value for key, value in last.items() if value is not None}


@dataclass
class Checked:
    """What was found in answers of one kind.

    Attributes:
        rows: how many values (or counts) were compared.
        newer: those that were newer than their position.
        wrong: answers with a value, a row or a position that must not be.
        stale: answers that were older than demanded; they are wrong, too.
    """

    answers: int = 0
    rows: int = 0
    newer: int = 0
    wrong: int = 0
    stale: int = 0
    examples: list[str] = field(default_factory=list)

    def note(self, problem: str) -> None:
        self.wrong += 1
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(problem)


def check(fold: Fold, answer: Answer, bounds: Offsets, checked: Checked) -> None:
    """Compare one answer with the fold, which has reached ``bounds``.

    Args:
        bounds: by partition, the last stable offset at a moment after the answer had come.
        checked: gets the result.
    """
    checked.answers += 1
    named = f"{answer.kind}, {answer.place}, position {dict(answer.position)}"
    if late := [p for p, offset in answer.position.items() if offset > bounds.get(p, -1)]:
        checked.note(f"{named}: beyond what is committed in partition {late[0]}, {bounds.get(late[0])}")
        return
    if any(answer.position.get(p, offset) < offset for p, offset in answer.least.items()):
        checked.stale += 1
        checked.note(f"{named}: stale, {dict(answer.least)} was demanded")
        return
    problems = [*_wrong_rows(fold, answer, bounds, checked), *_wrong_count(fold, answer, bounds, checked)]
    if problems:
        checked.note(f"{named}: {problems[0]}" + (f" ({len(problems)} rows)" if len(problems) > 1 else ""))


def _wrong_rows(fold: Fold, answer: Answer, bounds: Offsets, checked: Checked) -> list[str]:
    """What is wrong with the rows, one text each."""
    problems = []
    missing = () if answer.whole is None else [k for k in fold.keys(*answer.whole) if k not in answer.rows]
    for key, value in (*answer.rows.items(), *((key, None) for key in missing)):
        checked.rows += 1
        partition = fold.partition_of(key)
        if partition is None:
            if value is not None:
                problems.append(f"{key} was never written, answered was {value}")
            continue
        low = answer.position.get(partition)
        if low is None:
            problems.append(f"{key} is in partition {partition}, which the position does not name")
            continue
        at_position, *later = fold.window(key, low, bounds[partition])
        if value == at_position:
            continue
        if value in later:
            checked.newer += 1
        else:
            problems.append(f"{key} is {at_position} at this position, answered was {value}")
    return problems


def _wrong_count(fold: Fold, answer: Answer, bounds: Offsets, checked: Checked) -> list[str]:
    if answer.count is None:
        return []
    checked.rows += 1
    if answer.position.keys() != bounds.keys():
        return [f"a count of all partitions names {sorted(answer.position)} only"]
    found = [fold.count(partition, low, bounds[partition]) for partition, low in answer.position.items()]
    exact, least, most = (sum(map(of, found)) for of in (lambda counts: counts[0], min, max))
    if not least <= answer.count <= most:
        return [f"{exact} keys at this position, answered was {answer.count}"]
    checked.newer += answer.count != exact
    return []


class StreamCheck:
    """Whether a stream of changes has every committed record once, in order.

    Attributes:
        at: by partition, up to where the stream has been compared; empty before it has begun.
    """

    def __init__(self) -> None:
        self.at: dict[int, int] = {}
        self.changes = 0

    def begin(self, position: Offsets) -> None:
        """The position with which the stream begins."""
        self.at = dict(position)

    def see(self, fold: Fold, change: Change, checked: Checked) -> None:
        """Compare the next change. The fold has reached it."""
        self.changes += 1
        checked.answers += 1
        checked.rows += 1
        records = fold.changes[change.partition]
        offset = self.at[change.partition]
        next_one = bisect.bisect_left(records, offset, key=lambda record: record.offset)
        expected = records[next_one] if next_one < len(records) else None
        if change != expected:
            checked.note(f"changes: after offset {offset} came {change}, must be {expected}")
        self.at[change.partition] = max(offset, change.offset + 1)

    def left(self, fold: Fold) -> int:
        """How many of the applied records the stream has not had yet."""
        return sum(
            len(records) - bisect.bisect_left(records, self.at.get(partition, 0), key=lambda record: record.offset)
            for partition, records in fold.changes.items()
        )
