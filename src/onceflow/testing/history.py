"""Checks recorded histories, as Jepsen does: whether what consumers see agrees with what drivers did.

Drivers record each attempt and its outcome (``Op``). Every output names the attempt that wrote it and the source record
that it was made from (``Tag``). In the end an independent reader reads everything (``Final``). ``check`` compares the
three. It does not depend on how the sink works, so it finds what the sink's own checks overlook. It does no I/O:
``onceflow.testing.recorder`` records and reads. The rules are those of ``exactly_once``; see docs/verification.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from onceflow.protocol.names import TopicPartition
from onceflow.testing.observed import (
    FAIL,
    HEADER,
    INFO,
    INVOKE,
    MAX_INT64,
    OK,
    Attempt,
    Final,
    History,
    Op,
    Read,
    Reads,
    Tag,
    TopicOffsets,
    flat,
)

__all__ = [
    "ABORTED_READ", "DUPLICATE", "FAIL", "FAILED", "FOREIGN", "GAP", "HEADER", "INFO", "INVOKE", "KINDS", "LOST", "OK",
    "ORDER", "PASSED", "STATE", "TORN", "UNKNOWN", "Anomaly", "Attempt", "Final", "History", "Op", "Read", "Reads",
    "Tag", "Verdict", "check",
]  # fmt: skip

LOST = "lost write"
ABORTED_READ = "aborted read"
DUPLICATE = "duplicate"
TORN = "torn transaction"
GAP = "gap or overlap"
ORDER = "order"
STATE = "state differs"
FOREIGN = "foreign"
KINDS = (LOST, ABORTED_READ, DUPLICATE, TORN, GAP, ORDER, STATE, FOREIGN)

PASSED, FAILED, UNKNOWN = "passed", "failed", "unknown"
_MAX_EXAMPLES = 20


@dataclass(frozen=True)
class Anomaly:
    """A violation. ``count`` says how many records or batches it concerns; the other fields describe one of them."""

    kind: str
    detail: str
    batch: int | None = None
    attempt: str | None = None
    place: TopicPartition | None = None
    offset: int | None = None
    count: int = 1


@dataclass(frozen=True)
class Verdict:
    """``passed``, ``failed`` (there are anomalies) or ``unknown`` (``why`` says what is missing).

    Args:
        anomalies: the first 20 of each kind. counts: how much was checked, and how many records each kind concerns.
    """

    verdict: str
    anomalies: tuple[Anomaly, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    why: str = ""

    @property
    def kinds(self) -> set[str]:
        """The kinds of anomalies there are."""
        return {anomaly.kind for anomaly in self.anomalies}

    def as_json(self) -> dict[str, Any]:
        """For ``json.dumps``."""
        return asdict(self)


OutputsOf = int | Callable[[str, int, int], int]


def check(
    history: History,
    final: Final,
    *,
    outputs_of: OutputsOf = 1,
    ordered: bool = True,
    start: TopicOffsets | None = None,
    foreign: bool = False,
) -> Verdict:
    """Compare what drivers did with what consumers see.

    Args:
        outputs_of: how many outputs a source record has: a number, or a function of topic, partition and offset.
        ordered: whether outputs of one key from one source partition must keep their order within a partition.
        start: offsets from which on every source record must have its outputs; by default where the flow started.
        foreign: accept outputs without a tag, outputs of other flows, and outputs of drivers that did not record.
    """
    attempts = history.attempts(final.flow)
    statuses = Counter(attempt.status for attempt in attempts.values())
    counts = {"reads": len(final.reads), "torn_lines": history.torn, **{s: statuses[s] for s in (OK, FAIL, INFO)}}
    if not attempts:
        return Verdict(UNKNOWN, (), counts, "nothing was recorded")
    if not final.complete:
        return Verdict(UNKNOWN, (), counts, f"the final read is not complete: {final.why}")
    if (final.state is None) != (final.replay is None):
        return Verdict(UNKNOWN, (), counts, "there is a state without a replay, or a replay without a state")
    found = _Findings(foreign)
    progress = _Progress(final, attempts, found)
    _check_attempts(attempts, progress, found)
    rows = _Rows(final.reads, final.flow)
    _check_writers(rows, attempts, progress, found)
    first = progress.first if start is None else {**progress.first, **flat(start)}
    counts["expected"] = _OutputCheck(rows, final, attempts, progress, first, outputs_of, found).run()
    if ordered:
        _check_order(rows, final.reads, found)
    if final.state is not None and final.replay is not None:
        _check_state(final.state, final.replay, found)
        counts["state"] = len(final.state)
    counts |= {"committed": len(progress.commits), **found.counts}
    if found.anomalies:
        return Verdict(FAILED, tuple(found.anomalies), counts)
    if not progress.commits:
        return Verdict(UNKNOWN, (), counts, "no batch was committed: there is nothing to check")
    return Verdict(PASSED, (), counts)


class _Findings:
    def __init__(self, foreign: bool) -> None:
        self.foreign = foreign
        self.anomalies: list[Anomaly] = []
        self.counts: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()

    def add(self, kind: str, detail: str, **where: Any) -> None:
        if kind == FOREIGN and self.foreign:
            return
        self.counts[kind] += int(where.get("count", 1))
        self._kept[kind] += 1
        if self._kept[kind] <= _MAX_EXAMPLES:
            self.anomalies.append(Anomaly(kind, detail, **where))


class _Progress:
    """Which batches are committed, and their ranges, from the progress records."""

    def __init__(self, final: Final, attempts: Mapping[tuple[int, str], Attempt], found: _Findings) -> None:
        self.commits: dict[int, tuple[dict[TopicPartition, int], dict[TopicPartition, int]]] = {}
        self.first: dict[TopicPartition, int] = {}
        self.base = -1  # batches up to this one are committed, but their ranges are not known any more
        now: dict[TopicPartition, int] = {}
        last = -1
        for index, (batch, offsets) in enumerate(final.progress):
            before, now = now, flat(offsets)
            known = [a for (b, _), a in attempts.items() if b == batch and a.status != FAIL]
            if index == 0:
                # The first record says where the flow starts, unless compaction has removed it.
                self.base, last, self.first = batch, batch, dict(now)
                whole = [a for a in known if a.end == now and batch > 0]
                if whole:
                    self.base, self.first = batch - 1, dict(whole[0].start)
                    self.commits[batch] = whole[0].start, now
                continue
            for place, offset in before.items():
                if now.get(place, -1) < offset:
                    where = {"batch": batch, "place": place, "offset": now.get(place)}
                    found.add(GAP, f"progress goes back from {offset} to {now.get(place)}", **where)
            begun = {p: next((a.start[p] for a in known if p in a.start), 0) for p in now if p not in before}
            if batch != last:
                if batch != last + 1 and index == 1 and last > 0:  # compaction left one record of what was before
                    self.base, self.first, self.commits, last = batch, dict(now), {}, batch
                    continue
                if batch != last + 1:
                    found.add(GAP, f"progress of batch {batch} follows that of batch {last}", batch=batch)
                self.commits[batch] = {**before, **begun}, now
                self.first |= begun
            else:  # written by a start: it may add topics, but must not move any
                self.first |= {place: now[place] for place in begun}
                if any(now[place] > offset for place, offset in before.items() if place in now):
                    found.add(GAP, f"progress of batch {batch} was moved twice", batch=batch)
            last = batch
        self.last = now


def _check_attempts(attempts: Mapping[tuple[int, str], Attempt], progress: _Progress, found: _Findings) -> None:
    """Acknowledged batches are in progress; each progress record is that of a possible attempt, with its range."""
    by_batch: dict[int, dict[str, Attempt]] = {}
    for (batch, name), attempt in attempts.items():
        by_batch.setdefault(batch, {})[name] = attempt
        if attempt.status == OK and batch > progress.base and batch not in progress.commits:
            found.add(LOST, "acknowledged, and its progress is not there", batch=batch, attempt=name)
    for batch, (start, end) in progress.commits.items():
        tried = by_batch.get(batch, {})
        if not tried:
            found.add(FOREIGN, "committed by a driver that recorded nothing", batch=batch)
            continue
        acknowledged = {name: attempt for name, attempt in tried.items() if attempt.status == OK}
        if len(acknowledged) > 1:
            found.add(DUPLICATE, f"acknowledged more than once: {', '.join(acknowledged)}", batch=batch)
        possible = acknowledged or {name: attempt for name, attempt in tried.items() if attempt.status == INFO}
        if not possible:
            found.add(ABORTED_READ, "its progress is visible, and all its attempts were aborted", batch=batch)
            continue
        if not any(_same_range(attempt, start, end) for attempt in possible.values()):
            name, attempt = next(iter(possible.items()))
            read, moved = _ranges(attempt.start, attempt.end), _ranges(start, end)
            place = next((p for p in {**read, **moved} if read.get(p) != moved.get(p)), None)
            detail = f"read (from, to) {read.get(place)}, progress moved {moved.get(place)}"
            found.add(GAP, detail, batch=batch, attempt=name, place=place)


def _same_range(attempt: Attempt, start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int]) -> bool:
    """Whether progress moved over the range of an attempt. Topics that are not read any more keep their offsets."""
    if not attempt.end:
        return True  # not recorded
    whole = {**start, **attempt.end}
    return dict(end) == whole and all(attempt.start.get(place, 0) == start.get(place, 0) for place in attempt.end)


def _ranges(
    start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int]
) -> dict[TopicPartition | None, tuple[int, int]]:
    """First and end offset of each partition."""
    return {place: (start.get(place, 0), offset) for place, offset in end.items()}


class _Rows:
    """The outputs of the flow, sorted by source record."""

    def __init__(self, reads: Reads, flow: str) -> None:
        self.reads = reads
        self.writers = list(reads.writers)
        writer = reads.column("writer")
        ours = np.array([name[0] == flow for name in self.writers] + [False])  # the last: -1, without a tag
        self.others = np.flatnonzero(~ours[writer])
        index = np.flatnonzero(ours[writer])
        source, offset, n = (reads.column(name)[index] for name in ("source", "from_offset", "n"))
        order = np.lexsort((n, offset, source))
        self.index = index[order]
        self.source, self.offset, self.n, self.writer = source[order], offset[order], n[order], writer[self.index]

    def example(self, chosen: Any, *, count: int | None = None) -> dict[str, Any]:
        """Position and writer of the first of the chosen rows, and how many rows are chosen."""
        row = int(self.index[np.flatnonzero(chosen)[0] if chosen.dtype == bool else chosen[0]])
        _, batch, attempt = self.writers[int(self.reads.column("writer")[row])]
        size = int(chosen.sum()) if chosen.dtype == bool else len(chosen)
        return {"batch": batch, "attempt": attempt, **_place(self.reads, row), "count": count or size}


def _place(reads: Reads, row: int) -> dict[str, Any]:
    place = list(reads.places)[int(reads.column("place")[row])]
    return {"place": place, "offset": int(reads.column("offset")[row])}


def _check_writers(
    rows: _Rows, attempts: Mapping[tuple[int, str], Attempt], progress: _Progress, found: _Findings
) -> None:
    """Only outputs of committed batches are visible, and only those of the attempt that was committed."""
    if len(rows.others):
        where = _place(rows.reads, int(rows.others[0]))
        found.add(FOREIGN, "outputs without a tag, or of another flow", count=len(rows.others), **where)
    acknowledged = {batch: name for (batch, name), attempt in attempts.items() if attempt.status == OK}
    visible: dict[int, str] = {}
    for code, count in enumerate(np.bincount(rows.writer, minlength=len(rows.writers))):
        if not count:
            continue
        _, batch, name = rows.writers[code]
        where = {"batch": batch, "attempt": name, "count": int(count)}
        attempt = attempts.get((batch, name))
        if attempt is None:
            found.add(FOREIGN, "outputs of an attempt that nobody recorded", **where)
        elif attempt.status == FAIL:
            found.add(ABORTED_READ, "outputs of an aborted attempt are visible", **where)
        elif acknowledged.get(batch, name) != name:
            found.add(ABORTED_READ, f"visible, but {acknowledged[batch]} committed the batch", **where)
        if batch not in progress.commits and (batch > progress.base or progress.base <= 0):
            found.add(TORN, "outputs are visible, and the batch's progress is not", **where)
        if visible.setdefault(batch, name) != name:
            found.add(DUPLICATE, f"two attempts of the batch are visible, {visible[batch]} too", **where)


class _OutputCheck:
    """Checks that every source record before the end of progress has its outputs once, from the batch that read it."""

    def __init__(
        self,
        rows: _Rows,
        final: Final,
        attempts: Mapping[tuple[int, str], Attempt],
        progress: _Progress,
        first: Mapping[TopicPartition, int],
        outputs_of: OutputsOf,
        found: _Findings,
    ) -> None:
        self._rows, self._final, self._progress = rows, final, progress
        self._first, self._outputs_of, self._found = first, outputs_of, found
        self._batches = np.array(list(progress.commits), np.int64)
        # By batch: how many outputs are missing, and how many are expected.
        self._missing, self._wanted = np.zeros(len(self._batches), np.int64), np.zeros(len(self._batches), np.int64)
        self._writers = [attempts.get(name[1:]) for name in rows.writers]
        same = (np.diff(rows.source) == 0) & (np.diff(rows.offset) == 0) & (np.diff(rows.n) == 0)
        self._again = np.concatenate(([False], same)) if len(rows.index) else np.zeros(0, bool)

    def run(self) -> int:
        """Check all partitions. Returns how many outputs are expected."""
        if self._again.any():
            self._found.add(DUPLICATE, "outputs that are there before", **self._rows.example(self._again))
        for place in sorted({*self._final.sources, *self._rows.reads.sources}):
            self._check_partition(place)
        for i in np.flatnonzero(self._missing):
            missing, wanted = self._missing[i], self._wanted[i]
            how = "its outputs are not" if missing == wanted else f"{missing} of its {wanted} outputs are not"
            self._found.add(
                TORN, f"progress is visible, and {how}", batch=int(self._batches[i]), count=int(self._missing[i])
            )
        return int(self._wanted.sum())

    def _check_partition(self, place: TopicPartition) -> None:
        """The outputs of the records of one source partition."""
        rows = self._rows
        code = rows.reads.sources.get(place, -1)
        low, high = np.searchsorted(rows.source, (code, code + 1)) if code >= 0 else (0, 0)
        offset, n, writer = rows.offset[low:high], rows.n[low:high], rows.writer[low:high]
        name = f"{place[0]}-{place[1]}"

        def add(kind: str, detail: str, wrong: Any) -> None:
            if wrong.any():
                self._found.add(kind, detail, **rows.example(np.flatnonzero(wrong) + int(low)))

        # Without a range of its attempt a row may be from anywhere.
        begun = np.array([a.start.get(place, 0) if a and a.end else 0 for a in self._writers] or [0])
        ended = np.array([a.end.get(place, 0) if a and a.end else MAX_INT64 for a in self._writers] or [0])
        outside = (offset < begun[writer]) | (offset >= ended[writer])
        add(GAP, f"outputs of records of {name} that the batch has not read", outside)
        there = np.asarray(self._final.sources.get(place, ()), np.int64)
        at = np.searchsorted(there, offset)
        hit = np.append(there, -1)[at] == offset
        add(ABORTED_READ, f"outputs of records that no consumer of {name} sees", ~hit)
        if callable(self._outputs_of):
            want = np.fromiter((self._outputs_of(*place, int(o)) for o in there), np.int64, len(there))
        else:
            want = np.full(len(there), self._outputs_of, np.int64)
        more = hit & (n >= np.append(want, 0)[at])
        add(DUPLICATE, f"more outputs of records of {name} than there should be", more)
        got = np.bincount(at[hit & ~more & ~self._again[low:high]], minlength=len(there))
        self._check_covered(place, there, want, got)

    def _check_covered(self, place: TopicPartition, there: Any, want: Any, got: Any) -> None:
        """Count what is missing, by batch.

        Args:
            there: offsets of the source records. want, got: how many outputs each should have, and has.
        """
        covered = (there >= self._first.get(place, 0)) & (there < self._progress.last.get(place, 0))
        less = np.where(covered, want - got, 0)
        ends = np.array([end.get(place, 0) for _, end in self._progress.commits.values()], np.int64)
        of_batch = np.searchsorted(np.maximum.accumulate(ends), there, side="right")
        covered &= of_batch < len(self._batches)
        np.add.at(self._missing, of_batch[covered], less[covered])
        np.add.at(self._wanted, of_batch[covered], want[covered])
        if less.any():
            at = int(np.flatnonzero(less)[0])
            batch = int(self._batches[of_batch[at]]) if covered[at] else None
            text = f"outputs of records of {place[0]}-{place[1]} from offset {there[at]} on are not there"
            self._found.add(LOST, text, batch=batch, place=place, offset=int(there[at]), count=int(less.sum()))


def _check_order(rows: _Rows, reads: Reads, found: _Findings) -> None:
    """Within a partition, outputs of one key from one source partition are in the order of their source records."""
    place, offset, key = (reads.column(name)[rows.index] for name in ("place", "offset", "key"))
    order = np.lexsort((offset, rows.source, key, place))
    order = order[key[order] > 0]  # without a key there is no order
    before, after = order[:-1], order[1:]
    same = (place[before] == place[after]) & (key[before] == key[after]) & (rows.source[before] == rows.source[after])
    back = rows.offset[after] < rows.offset[before]
    back |= (rows.offset[after] == rows.offset[before]) & (rows.n[after] < rows.n[before])
    wrong = after[same & back]
    if len(wrong):
        found.add(ORDER, "outputs behind later ones of the same key", **rows.example(wrong))


def _check_state(state: Mapping[Any, Any], replay: Mapping[Any, Any], found: _Findings) -> None:
    for key in [*replay, *(key for key in state if key not in replay)]:
        if key not in state:
            found.add(STATE, f"{key!r} is not there, it must be {_short(replay[key])}")
        elif key not in replay:
            found.add(STATE, f"{key!r} is {_short(state[key])}, it must not be there")
        elif state[key] != replay[key]:
            found.add(STATE, f"{key!r} is {_short(state[key])}, it must be {_short(replay[key])}")


def _short(value: Any) -> str:
    return repr(value)[:200]
