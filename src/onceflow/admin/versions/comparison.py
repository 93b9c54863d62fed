"""Compares a flow with a copy of it that runs beside it: what both have written since the copy was made, and their
tables. It reads committed records only, and fences nobody.

With an id, both may run: of each source record between the copy and the position of the flow that is further behind,
the outputs with its id have to be the same on both sides. Without an id, all outputs since the copy are compared, and
tables always. That needs both flows at the same position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from onceflow.admin.change.move import known
from onceflow.admin.change.settled_progress import SettledProgress
from onceflow.admin.verify.identity import Identity, has_ids
from onceflow.admin.verify.report import Report, Tell
from onceflow.admin.verify.tally import OUTPUT, SOURCE, Difference, RecordComparison, RecordOffset, digest_of
from onceflow.admin.versions.differing import described, without
from onceflow.admin.versions.output_ends import behind
from onceflow.client.cluster import Cluster
from onceflow.client.committed import Chunk, CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import EARLIEST, LATEST, list_offsets
from onceflow.client.topics import find_topics
from onceflow.errors import OptionError, ProgressConflictError, counted
from onceflow.protocol.names import INTERNAL_SUFFIX, Names
from onceflow.protocol.progress import ForkOrigin, Offsets, Progress

OUTPUTS, TABLES = "output", "table"
_CALL_S, _SCAN_S = 60.0, 3600.0
_LOOKED_AT = 10  # times the limit: both versions of a record are found among so many differences

Span = Mapping[int, tuple[int, int]]
"""By partition, the first offset and the one behind the last."""


@dataclass(frozen=True)
class Compared:
    """What a user says about both flows.

    Args:
        outputs: by output of the flow, the one of the copy; empty: as both have written lately, if each has one.
        tables: by table, its copy, where it is not that of the fork.
        identity: what makes an output record one of a source record; None: records are compared as a whole.
        wait_s: how long to wait until both are at the same position.
        ignored: fields of JSON values that do not count.
    """

    outputs: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)
    identity: Identity | None = None
    wait_s: float = 30.0
    ignored: Sequence[str] = ()


class Comparison:
    """One comparison of a flow with its copy.

    Args:
        scratch: makes a tally, which is deleted at its end.
        limit: how many differences of each kind are described; all are counted.
        tell: is told what is read, how much of it is done, and of how much.
    """

    def __init__(
        self,
        cluster: Cluster,
        names: Names,
        other: Names,
        compared: Compared,
        *,
        scratch: Callable[[], RecordComparison],
        limit: int,
        tell: Tell,
    ) -> None:
        self._cluster, self._compared, self._tell = cluster, compared, tell
        self._names, self._other = names, other
        self._scratch = scratch
        self._old, self._new = SettledProgress(cluster, names), SettledProgress(cluster, other)
        self._reader = CommittedReader(cluster, _CALL_S)
        self._limit = limit
        self.report = Report(limit)
        self._is_known = False  # which outputs belong together
        self._has_ids = False  # a source record has the id, and not only itself
        self._others = {SOURCE: 0, OUTPUT: 0}  # outputs whose id no record has that both have read
        self._left = without(compared.ignored)

    def run(self) -> Report:
        """Compare outputs and tables. The report says so if there was nothing to compare.

        Raises:
            OptionError: a flow has no progress, or it is not known which outputs belong together.
            UnknownTopicError: an output does not exist.
            ProgressConflictError: the one is no copy of the other; or both do not stand still at the same position.
            OnceflowError: something cannot be read.
        """
        if self._compared.outputs:  # before it is waited for both flows
            self._find(self._compared.outputs)
        self._compare()
        outputs = sum(self.report.checked.get(f"output records{side}", 0) for side in ("", " of the copy"))
        given = self._compared.identity is not None or self._compared.outputs
        if not outputs and (given or not self.report.checked.get("rows of tables")):
            self.report.not_checked.append(f"outputs: {self._why_nothing()}")
        return self.report

    def _compare(self) -> None:
        if self._compared.identity is not None:
            old, new = self._both()
            ids = self._ids(old, new)
            if self._has_ids:
                self._outputs(old, new, ids)
            if _level(old, new):
                self._tables(old, new)
                if self._both() != (old, new):
                    self._drop_tables()
            else:
                self.report.notes.append("tables are not compared: the flows are at different positions")
            return
        deadline = Deadline(self._compared.wait_s, "waiting until both flows are at the same position")
        while True:
            old, new = self._both()
            if _level(old, new):
                self.report = Report(self._limit)
                self._outputs(old, new, None)
                self._tables(old, new)
                if self._both() == (old, new):
                    return
            if not deadline.wait(9):
                raise ProgressConflictError(
                    f"Both flows were not at the same position for long enough within {deadline.seconds:g} s",
                    flow=self._other.flow,
                    detail=", ".join(_apart(old, new)) or "they go on while they are compared",
                    next_step="compare when the source gets no records for a while, or give --id: then only records "
                    "are compared that both have read",
                )

    def _both(self) -> tuple[Progress, Progress]:
        deadline = Deadline(_CALL_S, "reading the progress of both flows")
        old = known(self._old.read(deadline), self._names, self._cluster)
        new = known(self._new.read(deadline), self._other, self._cluster)
        if new.forked is None or new.forked.flow != self._names.progress_key:
            raise ProgressConflictError(
                f"Flow {self._other.flow!r} is not a copy of {self._names.flow!r}",
                flow=self._other.flow,
                next_step=f"make one: `onceflow fork {self._names.flow} NEW`",
            )
        return old, new

    def _drop_tables(self) -> None:
        self.report.drop(TABLES)
        self.report.notes.append("tables are not compared: the flows went on meanwhile")

    def _why_nothing(self) -> str:
        """Why no output was compared, and what to do."""
        flow, copy, checked = self._names.flow, self._other.flow, self.report.checked
        if self._compared.identity is not None and not checked["source records"]:
            return (
                f"{flow} and {copy} have not both read any source record since the copy was made. Start {copy}, and "
                "compare when it has committed a batch"
            )
        if self._compared.identity is not None and not self._has_ids:
            return (
                f"none of the {checked['source records']:,} source records that {flow} and {copy} have both read since "
                "the copy was made has the id; correct --id"
            )
        if not self._is_known:
            return f"none of {flow} and {copy} is known; name them with --output OLD=NEW"
        if self._compared.identity is not None:
            return (
                "none has an id of the source records that both flows have read. --id is for outputs with the id of a "
                "source record. If the flows write others, such as sums or windows, compare without --id"
            )
        return f"neither {flow} nor {copy} has written any since the copy was made. Compare when both have"

    # ---- outputs -------------------------------------------------------------------------------------

    def _outputs(self, old: Progress, new: Progress, ids: Any) -> None:
        pairs = self._compared.outputs or self._pairs(old, new)
        self._is_known = bool(pairs)
        if pairs:
            self._find(pairs)
        else:
            self.report.notes.append("outputs are not compared: none is known; name them with --output OLD=NEW")
        with self._scratch() as tally:
            for output, copy in sorted(pairs.items()):
                self._add(tally, SOURCE, output, self._span(output, self._beginning(new.forked, output, ids)), ids)
                self._add(tally, OUTPUT, copy, self._span_of_copy(copy, new.forked), ids)
            self._judge(OUTPUTS, tally, pairs)
            self._tell_of_others(pairs)
            self.report.checked["output records"] = tally.counts[SOURCE]
            self.report.checked["output records of the copy"] = tally.counts[OUTPUT]

    def _find(self, pairs: Mapping[str, str]) -> None:
        deadline = Deadline(_CALL_S, "looking for the outputs")
        find_topics(self._cluster, {topic: "" for pair in pairs.items() for topic in pair}, deadline)

    def _tell_of_others(self, pairs: Mapping[str, str]) -> None:
        """Say how many outputs were left out. They may be of records that only one flow has read, or be wrong."""
        for side, flow in ((SOURCE, self._names.flow), (OUTPUT, self._other.flow)):
            if count := self._others[side]:
                some = counted(count, "output")
                self.report.notes.append(
                    f"{some} of {flow} left out: they have the id of no source record that both flows have read since "
                    "the copy was made"
                )
        if pairs:
            self.report.notes.append("outputs are compared by key and value; headers and timestamps are not compared")

    def _pairs(self, old: Progress, new: Progress) -> dict[str, str]:
        before, after = sorted(self._old.outputs - set(old.changelogs)), sorted(self._new.outputs - set(new.changelogs))
        if len(before) > 1 or len(after) > 1:
            raise OptionError(
                "It is not known which outputs belong together",
                flow=self._names.flow,
                detail=f"{self._names.flow} writes {', '.join(before)}; {self._other.flow} writes {', '.join(after)}",
                next_step="name them: --output OLD=NEW, which may be repeated",
            )
        return dict(zip(before, after, strict=False))

    def _beginning(self, forked: ForkOrigin | None, output: str, ids: Any) -> Mapping[int, int]:
        """Where the output stood when the copy was made."""
        found = {} if forked is None else forked.outputs.get(output, {})
        if not found and ids is None:
            raise OptionError(
                f"It is not known where {output} stood when the copy was made",
                topic=output,
                detail="the flow had not written to it lately",
                next_step="give --id: then records are compared by the source records that they belong to",
            )
        return found

    def _span(self, topic: str, starts: Mapping[int, int]) -> Span:
        """From the starts, or the first offsets, to the last stable offsets."""
        deadline = Deadline(_CALL_S, f"reading the offsets of {topic}")
        place = {topic: sorted(find_topics(self._cluster, {topic: ""}, deadline)[topic].leaders)}
        first = list_offsets(self._cluster, place, EARLIEST, deadline)[topic]
        end = list_offsets(self._cluster, place, LATEST, deadline)[topic]
        return {partition: (max(first[partition], starts.get(partition, 0)), end[partition]) for partition in end}

    def _span_of_copy(self, topic: str, forked: ForkOrigin | None) -> Span:
        """All of an output of the copy, without what an earlier flow with its name has written: one that was compared,
        and forgotten with `onceflow reset`."""
        span = self._span(topic, {})
        if forked is None or forked.producer_id < 0:
            return span
        producer = forked.producer_id, forked.producer_epoch
        deadline = Deadline(_SCAN_S, f"looking for the first outputs of {self._other.flow} in {topic}")
        found = {p: behind(self._cluster, producer, (topic, p), each, deadline) for p, each in span.items()}
        if any(found[p] > start for p, (start, _) in span.items()):
            self.report.notes.append(
                f"outputs in {topic} that an earlier flow with the name {self._other.flow} has written do not count"
            )
        return {p: (found[p], end) for p, (_, end) in span.items()}

    def _add(self, tally: RecordComparison, side: int, topic: str, span: Span, ids: Any) -> None:
        identity, left = self._compared.identity, self._left
        for partition, chunk in self._chunks(topic, span):
            offsets = chunk.offsets.tolist()
            rows: Iterator[tuple[int, bytes]]
            if identity is None or ids is None:
                rows = (
                    (offset, digest_of(key, left(value)))
                    for offset, key, value in zip(offsets, chunk.keys, chunk.values, strict=True)
                )
            else:
                found = _identities(chunk, identity)
                there = np.isin(np.array([_low(each) for each in found], np.uint64), ids)
                self._others[side] += len(there) - int(np.count_nonzero(there))
                rows = (
                    (offsets[n], digest_of(found[n], chunk.keys[n], left(chunk.values[n])))
                    for n in np.flatnonzero(there).tolist()
                )
            tally.add(side, topic, partition, rows)

    def _ids(self, old: Progress, new: Progress) -> Any:
        """The ids of the source records that both flows have read since the copy was made, sorted."""
        identity, forked = self._compared.identity, new.forked
        if identity is None or forked is None:
            raise ValueError("there is no id")
        found: list[int] = []
        for topic, starts in forked.offsets.items():
            before, after = old.offsets.get(topic, {}), new.offsets.get(topic, {})
            span = {p: (starts.get(p, 0), min(end, after[p])) for p, end in before.items() if p in after}
            for _, chunk in self._chunks(topic, span):
                found += [_low(each) for each in _identities(chunk, identity)]
                self._has_ids = self._has_ids or has_ids(chunk, identity)
        self.report.checked["source records"] = len(found)
        return np.unique(np.array(found, np.uint64))

    def _chunks(self, topic: str, span: Span) -> Iterator[tuple[int, Chunk]]:
        total, done = sum(max(0, end - start) for start, end in span.values()), 0
        for partition, (start, end) in sorted(span.items()):
            at = start
            for chunk in self._reader.read(topic, partition, start, end):
                yield partition, chunk
                done, at = done + chunk.next_offset - at, chunk.next_offset
                self._tell(f"reading {topic}", done, total)

    # ---- tables --------------------------------------------------------------------------------------

    def _tables(self, old: Progress, new: Progress) -> None:
        made: Mapping[str, str] = {} if new.forked is None else new.forked.tables
        pairs = {**made, **self._compared.tables}
        unknown = sorted({*pairs} - {*old.tables} | {*pairs.values()} - {*new.tables})
        if unknown:
            raise OptionError(
                f"{unknown[0]} is a table of neither flow",
                flow=self._names.flow,
                detail=f"tables: {', '.join(sorted({*old.tables, *new.tables})) or 'none'}",
                next_step="correct --table OLD=NEW",
            )
        for table, copy in sorted(pairs.items()):
            for suffix in ("", INTERNAL_SUFFIX):
                with self._scratch() as tally:
                    self._rows(tally, SOURCE, table + suffix, old.changelogs)
                    self._rows(tally, OUTPUT, copy + suffix, new.changelogs)
                    self._judge(TABLES, tally, {table + suffix: copy + suffix})
                    rows = self.report.checked.get("rows of tables", 0)
                    self.report.checked["rows of tables"] = rows + tally.counts[SOURCE]

    def _rows(self, tally: RecordComparison, side: int, topic: str, changelogs: Offsets) -> None:
        """The rows of a table topic at a progress record: the last record of each key, if it has a value."""
        for partition, end in changelogs.get(topic, {}).items():
            last: dict[bytes | None, tuple[int, bytes]] = {}
            for _, chunk in self._chunks(topic, {partition: (0, end)}):
                for n, offset in enumerate(chunk.offsets.tolist()):
                    key, value = chunk.keys[n], chunk.values[n]
                    if value is None:
                        last.pop(key, None)
                    else:
                        last[key] = offset, digest_of(key, self._left(value), *_headers(chunk, n))
            tally.add(side, topic, partition, last.values())

    # ---- differences ---------------------------------------------------------------------------------

    def _judge(self, kind: str, tally: RecordComparison, pairs: Mapping[str, str]) -> None:
        """Count what differs, and describe some of it.

        Args:
            pairs: by topic of the flow, that of its copy.
        """
        count, some = 0, list[Difference]()
        for each in tally.differences():
            count += 1
            if len(some) < self._limit * _LOOKED_AT:
                some.append(each)
        if not count:
            return
        names = self._names.flow, self._other.flow
        examples = islice(described(some, (pairs, names), self._reader, self._left), self._limit)
        self.report.add_all(kind, count, examples)


def _level(old: Progress, new: Progress) -> bool:
    return not _apart(old, new)


def _apart(old: Progress, new: Progress) -> list[str]:
    """Partitions that both read, and where they are at different offsets."""
    return [
        f"{topic}-{partition}: {old.offsets[topic].get(partition)} and {offset}"
        for topic in sorted(set(old.offsets) & set(new.offsets))
        for partition, offset in sorted(new.offsets[topic].items())
        if old.offsets[topic].get(partition) != offset
    ]


def _identities(chunk: Chunk, identity: Identity) -> Sequence[bytes]:
    return [identity(key, chunk.values[n], chunk.headers.get(n, ())) for n, key in enumerate(chunk.keys)]


def _headers(chunk: Chunk, row: int) -> Iterable[bytes | None]:
    for name, value in chunk.headers.get(row, ()):
        yield name.encode()
        yield value


def _low(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


__all__ = ["OUTPUTS", "TABLES", "Compared", "Comparison", "RecordOffset"]
