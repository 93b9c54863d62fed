"""Audits what a flow has committed, from Kafka alone and read_committed. Nobody is fenced; the flow may run meanwhile.

A running flow commits while its outputs are read. So progress is read before and after: records below the first
position have to be in the outputs, those between both positions may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from onceflow.admin.verify.identity import Identity, has_ids, kind_of
from onceflow.admin.verify.progress_history import breaks, last_of, read_history
from onceflow.admin.verify.replay_steps import begun_at, lives, steps
from onceflow.admin.verify.report import (
    DOUBLED,
    FOREIGN,
    GROUP,
    LOST,
    MISPLACED,
    PROGRESS,
    REORDERED,
    TABLE,
    Report,
    Tell,
    unknown_past,
)
from onceflow.admin.verify.tally import LETTER, OUTPUT, SOURCE, UNDECIDED, Difference, RecordComparison, RecordOffset
from onceflow.client.cluster import Cluster
from onceflow.client.committed import Chunk, CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.log_reader import LogRecord
from onceflow.client.offsets import EARLIEST, LATEST, fetch_committed, list_offsets
from onceflow.client.topics import find_topic, find_topics
from onceflow.driver.record.handover import first_range_end
from onceflow.errors import OptionError, PermissionDeniedError, UnknownTopicError, counted
from onceflow.protocol.names import INTERNAL_SUFFIX, Names
from onceflow.protocol.partitioners import key_partitions
from onceflow.protocol.progress import Offsets, Progress

_CALL_S = 60.0
_TRIES = 20
_OF_ID = (
    "--id is for one output per source record. If the flow writes others, such as sums or windows, use --replay or "
    "--tables"
)

#: The first offset, and the one behind the last.
Span = tuple[int, int]


@dataclass(frozen=True)
class Outputs:
    """What a user says about the outputs of a flow.

    Args:
        identity: what makes an output record the same as a source record; None: records are not compared.
        topics: the outputs; empty: those that progress names. letters: topics of dead and late letters; empty: as
            progress names them.
        in_each: whether every record is in each output, not in one of them.
        filtered: whether the flow leaves out records, so that a missing one is not lost.
        by_key: whether a record has to be in the partition that the Java client would choose for its key.
        ordered: whether the outputs of a key are in the order of their source records.
        begin: where the flow has begun to read, by topic and partition; what is not named: as progress says.
        place: where a record has its id, as the user has named it; None: the record as a whole is its id.
    """

    identity: Identity | None = None
    topics: tuple[str, ...] = ()
    letters: tuple[str, ...] = ()
    in_each: bool = False
    filtered: bool = False
    by_key: bool = True
    ordered: bool = True
    begin: Offsets | None = None
    place: str | None = None


class Audit:
    """One audit of a flow.

    Args:
        limit: how many findings of each kind are described; all are counted.
        tell: is told what is read, how much of it is done, and of how much.
        check: called while something is waited for. It may raise, to end the audit.
    """

    def __init__(
        self,
        cluster: Cluster,
        names: Names,
        outputs: Outputs,
        *,
        limit: int,
        tell: Tell,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._cluster, self._names, self._outputs, self._tell = cluster, names, outputs, tell
        self._check = check
        self._reader = CommittedReader(cluster, _CALL_S, check=check)
        self.report = Report(limit)
        self._with_ids: set[tuple[int, str]] = set()  # sides and topics
        self._without_ids: set[str] = set()  # outputs in which no record has the id that the user has named
        self._kinds: dict[int, set[str]] = {}  # what the ids of each side are, as JSON

    def run(self, tally: RecordComparison) -> Report:
        """Check progress, group and tables, and compare the records if an identity is given.

        Raises:
            OptionError: the flow has no progress. OnceflowError: something cannot be read.
        """
        history = self._history()
        progress = self._last(history)
        for text in breaks(history):
            self.report.add(PROGRESS, text)
        self.report.checked["progress records"] = len(history)
        self._check_positions(progress)
        self._check_now()
        if self._outputs.identity is not None:
            self._compare(history, tally, self._outputs.identity)
        return self.report

    # ---- progress ------------------------------------------------------------------------------------

    def _history(self) -> list[LogRecord]:
        return read_history(self._cluster, self._names, self._check)

    def _last(self, history: Sequence[LogRecord]) -> Progress:
        return last_of(history, self._names, self._cluster)

    def _check_positions(self, progress: Progress) -> None:
        deadline = Deadline(_CALL_S, "reading offsets of sources")
        for topic, offsets in progress.offsets.items():
            info = find_topic(self._cluster, topic, "READ", deadline)
            if info is None:
                self.report.notes.append(f"source {topic} does not exist any more")
                continue
            if progress.topic_ids.get(topic, info.topic_id) != info.topic_id:
                self.report.add(PROGRESS, f"source {topic} was deleted and created again; progress is of the old one")
                continue
            span = {topic: sorted(offsets)}
            first = list_offsets(self._cluster, span, EARLIEST, deadline)[topic]
            end = list_offsets(self._cluster, span, LATEST, deadline, committed=False)[topic]
            for partition, offset in offsets.items():
                if offset > end[partition]:
                    self.report.add(
                        PROGRESS, f"{topic}-{partition}: progress {offset} is behind its end {end[partition]}"
                    )
                elif offset < first[partition]:
                    lost = first[partition] - offset
                    self.report.notes.append(
                        f"{topic}-{partition}: {counted(lost, 'offset')} expired before the flow read them"
                    )

    def _check_now(self) -> None:
        """What has to agree with the newest progress. While batches are committed, it is looked at again."""
        for _ in range(_TRIES):
            before = self._last(self._history())
            group = self._group(before)
            rows = dict(self._beyond(before))
            if self._last(self._history()) == before:
                break
        else:
            self.report.unjudged.append("the group and the ends of tables: the flow commits too often")
            return
        for text in group:
            self.report.add(GROUP, text)
        for place, count in rows.items():
            self.report.add(TABLE, f"table {place}: {counted(count, 'record')} behind the end that progress knows")

    def _group(self, progress: Progress) -> list[str]:
        wanted = {topic: sorted(offsets) for topic, offsets in progress.offsets.items()}
        deadline = Deadline(_CALL_S, "reading the offsets of the group")
        found = fetch_committed(self._cluster, self._names.group_id, wanted, deadline)
        different = []
        for topic, offsets in progress.offsets.items():
            for partition, offset in offsets.items():
                given = found.get(topic, {}).get(partition)
                if given is not None and given[0] != offset:
                    different.append(
                        f"group {self._names.group_id} is at {given[0]} of {topic}-{partition}, progress at {offset}"
                    )
        self.report.checked["group offsets"] = sum(map(len, found.values()))
        return different

    def _beyond(self, progress: Progress) -> Iterator[tuple[str, int]]:
        """Committed records of tables that are behind the end which the progress record names."""
        deadline = Deadline(_CALL_S, "reading the ends of tables")
        for topic, offsets in progress.changelogs.items():
            known = progress.tables.get(topic.removesuffix(INTERNAL_SUFFIX))
            if known is not None and known.open_ended:
                continue
            stable = list_offsets(self._cluster, {topic: sorted(offsets)}, LATEST, deadline)[topic]
            for partition, end in offsets.items():
                chunks = self._reader.read(topic, partition, end, stable[partition])
                count = sum(len(chunk.keys) for chunk in chunks)
                if count:
                    yield f"{topic}-{partition}", count
            self.report.checked["table partitions"] = self.report.checked.get("table partitions", 0) + len(offsets)

    # ---- records -------------------------------------------------------------------------------------

    def _compare(self, history: Sequence[LogRecord], tally: RecordComparison, identity: Identity) -> None:
        progress, (*earlier, life) = self._last(history), lives(history)
        named = {topic for each in (*life, progress) for topic in each.outputs}
        aside = progress.side_topics.keys() & named - set(self._outputs.topics)
        letters = self._outputs.letters or tuple(sorted(aside))
        outputs = self._outputs.topics or tuple(sorted(named - set(letters)))
        if not outputs:  # one topic is for both, and its records are looked for there
            outputs, letters = tuple(sorted(named)), self._outputs.letters
        if not outputs:
            raise OptionError(
                "The outputs of the flow are not known", flow=self._names.flow, next_step="name them: --output TOPIC"
            )
        for side, topics in ((OUTPUT, outputs), (LETTER, letters)):
            for topic in topics:
                self._take_written(tally, side, topic, identity)
        later = self._last(self._history())
        starts = begun_at(life, self._outputs.begin)
        written = first_range_end(progress) or progress.offsets  # after a promotion, outputs are ahead of progress
        whole = self._take_sources(tally, [*earlier, life], written, later, identity)
        self.report.checked |= {"source records": tally.counts[SOURCE], "output records": tally.counts[OUTPUT]}
        if letters:
            self.report.checked["letters"] = tally.counts[LETTER]
        unjudged = 0
        ordered = self._outputs.ordered and self._outputs.by_key
        for each in tally.differences(in_each=sorted(outputs) if self._outputs.in_each else (), ordered=ordered):
            unjudged += not self._judge(each, whole, written)
        is_lost = self._outputs.filtered or self.report.counts.get(LOST)  # not in the letters either
        strangers = is_lost and tally.counts[SOURCE] and (self._without_ids or (tally.counts[OUTPUT] and not tally.met))
        if strangers and not self._is_judged(met=bool(tally.met)):
            unjudged = 0
        for pair in tally.reordered() if ordered else ():
            text = "its key's record before it was made of a later source record"
            self.report.add(REORDERED, text, [pair.after, pair.before, pair.source_after, pair.source_before])
        if ordered and self.report.counts.get(REORDERED) and progress.tables:
            self.report.notes.append(
                "the flow has state: records that wait there, as those of onceflow.Retry do, are out of order rightly. "
                "--unordered does not look at the order"
            )
        if note := unknown_past(life, self.report):
            self.report.notes.append(note)
        guessed = sorted(written.keys() - starts.keys())
        if guessed and self.report.counts.get(LOST):
            self.report.notes.append(
                f"where the flow has begun to read {', '.join(guessed)} is not known, because that progress record is "
                "gone: from the first record on was assumed. --from says otherwise"
            )
        if unjudged:
            self.report.unjudged.append(f"{unjudged} output records: a source does not begin at 0 any more")

    def _take_sources(
        self,
        tally: RecordComparison,
        found: Sequence[Sequence[Progress]],
        written: Offsets,
        later: Progress,
        identity: Identity,
    ) -> bool:
        """Take what the flow has read, and what it may have read.

        Args:
            found: its progress records, see `lives`. written: the end of what it has read.

        Returns:
            Whether the sources still have every record that it has read.
        """
        *earlier, life = found
        read = readings(life, self._outputs.begin)
        before = [readings(each, None) for each in earlier]
        starts = begun_at(life, self._outputs.begin)
        whole, again, skipped = True, 0, 0
        for topic, offsets in written.items():
            span = {topic: sorted(offsets)}
            first = list_offsets(self._cluster, span, EARLIEST, Deadline(_CALL_S, "reading offsets"))[topic]
            last = list_offsets(self._cluster, span, LATEST, Deadline(_CALL_S, "reading offsets"))[topic]
            begin = {p: starts.get(topic, {}).get(p, 0) for p in offsets}
            whole &= all(first[p] <= begin[p] for p in offsets)
            # Otherwise it was deleted and created again.
            whole &= len({p.topic_ids[topic] for each in found for p in each if topic in p.topic_ids}) <= 1
            now = later.offsets.get(topic, {})
            once: list[tuple[int, int, int]] = []
            maybe: list[tuple[int, int, int]] = []
            for p, end in sorted(offsets.items()):
                known = read.setdefault((topic, p), Readings())
                for part in known.missing(life[-1].offsets.get(topic, {}).get(p, end), end):
                    known.add(*part)  # after a promotion
                twice = [*known.again, *(part for each in before for part in each.get((topic, p), Readings()).all)]
                gaps = known.missing(begin[p], end)
                again += sum(b - a for a, b in twice)
                skipped += sum(b - a for a, b in gaps)
                # What is beyond the end of the source is a finding already.
                once += [(p, max(first[p], a), min(b, last[p])) for a, b in known.once]
                # The flow has not read what is before its beginning. But it may have, before it was reset.
                parts = [(first[p], begin[p]), *gaps, *twice, (end, now.get(p, end))]
                maybe += [(p, max(first[p], a), min(b, last[p])) for a, b in parts]
            maybe += [(p, 0, end) for p, end in sorted(now.items()) if p not in offsets]
            self._take(tally, SOURCE, topic, [each for each in once if each[1] < each[2]], identity)
            self._take(tally, UNDECIDED, topic, [each for each in maybe if each[1] < each[2]], identity)
        if again:
            self.report.notes.append(
                f"the flow was reset, and has read {counted(again, 'offset')} again: outputs of these may "
                "be there again"
            )
        if skipped:
            self.report.notes.append(
                f"the flow was reset, and has skipped {counted(skipped, 'offset')}: no outputs are expected"
            )
        return whole

    def _judge(self, each: Difference, whole: bool, sources: Offsets) -> bool:
        if each.found < each.expected:
            if not self._outputs.filtered:
                self.report.add(LOST, _counts(each), each.places)
        elif each.expected or any(place.topic in sources for place in each.places):
            self.report.add(DOUBLED, _counts(each), each.places)
        elif whole:
            self.report.add(FOREIGN, "no source record has this identity", each.places)
        else:
            return False
        return True

    def _is_judged(self, *, met: bool) -> bool:
        """Whether the records are judged, although the sources and the outputs have none in common, or (``met``) an
        output has no ids.

        Probably the flow is not one that --id can check. But if the outputs have an id, all records may really be lost.
        """
        place = self._outputs.place
        sides = {side for side, _ in self._with_ids}
        of_source, of_output = (self._kinds.get(side, set()) for side in (SOURCE, OUTPUT))
        if place is not None and SOURCE not in sides and OUTPUT in sides and not met:
            known = f"no record of the sources has {place}, and outputs have it"
        elif of_source and of_output and not of_source & of_output and not met:
            kinds = " and ".join(sorted(of_source)), " and ".join(sorted(of_output))
            known = f"the ids of the sources are {kinds[0]}, those of the outputs {kinds[1]}, so none can be the same"
        elif not self._without_ids:
            what = "is the same as a source record" if place is None else f"has the {place} of a source record"
            self.report.notes.append(f"no output {what}. {_OF_ID}")
            return True
        elif OUTPUT in sides:
            known = (
                f"no record of {', '.join(sorted(self._without_ids))} has {place}, and other outputs have it. Name "
                "those that have it (--output), and the topics of dead letters (--dead-letter)"
            )
        elif SOURCE not in sides:
            known = f"neither the sources nor the outputs have {place}"
        else:
            known = f"no output has {place}, so this flow does not pass it on"
        self.report.drop(LOST, FOREIGN)
        self.report.not_checked.append(f"records: {known}. {_OF_ID}")
        return False

    def _take_written(self, tally: RecordComparison, side: int, topic: str, identity: Identity) -> None:
        """Take all records of an output, or of a topic of records that were set aside. One that only progress names is
        left out if it cannot be read."""
        try:
            spans = self._ends(topic)
        except (UnknownTopicError, PermissionDeniedError) as error:
            if side == OUTPUT or self._outputs.letters:
                raise
            self.report.notes.append(f"records that were set aside in {topic} are not looked for: {error.what}")
            return
        self._take(tally, side, topic, [(partition, *span) for partition, span in sorted(spans.items())], identity)

    def _ends(self, topic: str) -> dict[int, tuple[int, int]]:
        """From the first offsets to the end offsets: transactions that are open there are waited for."""
        deadline = Deadline(_CALL_S, f"reading the offsets of {topic}")
        span = {topic: sorted(find_topics(self._cluster, {topic: ""}, deadline)[topic].leaders)}
        first = list_offsets(self._cluster, span, EARLIEST, deadline)[topic]
        end = list_offsets(self._cluster, span, LATEST, deadline, committed=False)[topic]
        return {partition: (first[partition], end[partition]) for partition in end}

    def _take(
        self, tally: RecordComparison, side: int, topic: str, spans: Sequence[tuple[int, int, int]], identity: Identity
    ) -> None:
        """Take the records of a topic: partition, first offset and end offset of each part."""
        total = sum(max(0, end - start) for _, start, end in spans)
        done = 0
        for partition, start, end in spans:
            at = start
            for chunk in self._reader.read(topic, partition, start, end):
                offsets = chunk.offsets.tolist()
                rows = zip(offsets, chunk.keys, chunk.values, range(len(offsets)), strict=True)
                found = ((offset, identity(key, value, chunk.headers.get(row, ()))) for offset, key, value, row in rows)
                tally.add(side, topic, partition, found, chunk.keys)
                if self._outputs.place is not None and (side, topic) not in self._with_ids:
                    self._note_ids(side, topic, chunk, identity)
                if side == OUTPUT and self._outputs.by_key:
                    self._check_places(topic, partition, chunk.keys, offsets, len(spans))
                done, at = done + chunk.next_offset - at, chunk.next_offset
                self._tell(f"reading {topic}", done, total)

    def _note_ids(self, side: int, topic: str, chunk: Chunk, identity: Identity) -> None:
        if has_ids(chunk, identity):
            self._with_ids.add((side, topic))
            self._without_ids.discard(topic)
            if side in (SOURCE, OUTPUT) and self._outputs.place is not None:
                kinds = {*map(kind_of(self._outputs.place), chunk.values)}
                self._kinds.setdefault(side, set()).update(kind for kind in kinds if kind is not None)
        elif side == OUTPUT and len(chunk.keys):
            self._without_ids.add(topic)

    def _check_places(self, topic: str, partition: int, keys: Any, offsets: Sequence[int], count: int) -> None:
        right = key_partitions(pa.array(keys, pa.large_binary()), count)
        for row in np.flatnonzero((right >= 0) & (right != partition)).tolist():
            text = f"its key belongs to partition {right[row]} of {count}"
            self.report.add(MISPLACED, text, [RecordOffset(topic, partition, offsets[row])])


def _counts(each: Difference) -> str:
    return f"expected {counted(each.expected, 'time')}, found {counted(each.found, 'time')}"


@dataclass
class Readings:
    """What a flow has read of one partition of a source.

    Attributes:
        once: what it has read at least once, in order and without overlaps.
        again: what it has read once more, each time.
    """

    once: list[Span] = field(default_factory=list)
    again: list[Span] = field(default_factory=list)

    @property
    def all(self) -> list[Span]:
        """Each part as often as it was read."""
        return [*self.once, *self.again]

    def add(self, start: int, end: int) -> None:
        """Add a part that was read."""
        if start >= end:
            return
        if self.once and self.once[-1][1] == start:  # nearly always
            self.once[-1] = (self.once[-1][0], end)
            return
        for a, b in self.once:
            span = (max(a, start), min(b, end))
            if span[0] >= span[1]:
                continue
            if self.again and self.again[-1][1] == span[0]:
                self.again[-1] = (self.again[-1][0], span[1])
            else:
                self.again.append(span)
        self.once = _united([*self.once, (start, end)])

    def missing(self, first: int, end: int) -> list[Span]:
        """The parts of a range that it has not read."""
        found, at = [], first
        for a, b in self.once:
            if at < min(a, end):
                found.append((at, min(a, end)))
            at = max(at, b)
        return [*found, (at, end)] if at < end else found


def readings(life: Sequence[Progress], given: Offsets | None) -> dict[tuple[str, int], Readings]:
    """What a flow has read, by topic and partition, from its progress records since its progress was deleted last.

    What is read without outputs after a promotion (``driver/record/handover.py``) counts once, because the earlier
    version has written them.

    Args:
        given: where it has begun, as somebody says, see `begun_at`.
    """
    found: dict[tuple[str, int], Readings] = {}
    for topic, partition, start, end, without_outputs in _parts(life, given):
        known = found.setdefault((topic, partition), Readings())
        if without_outputs:
            for span in known.missing(start, end):
                known.add(*span)
        else:
            known.add(start, end)
    return found


def _parts(life: Sequence[Progress], given: Offsets | None) -> Iterator[tuple[str, int, int, int, bool]]:
    # What the first records say of the beginning does not count if somebody says something else.
    known = life if given is None else [each for each in life if each.batch_id]
    for step in steps(begun_at(life, given), None, known, ""):
        for topic, offsets in step.end.items():
            for partition, end in offsets.items():
                yield topic, partition, step.start[topic][partition], end, step.without_outputs


def _united(spans: Sequence[Span]) -> list[Span]:
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
