"""Audits a flow by replaying: runs its processor over the committed source range, and compares table and outputs.

The flow may run meanwhile. Progress is read before and after the outputs: what the replay yields up to the first
position has to be in the outputs, what it yields between both may be.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from onceflow.admin.records import letter_replay
from onceflow.admin.verify.progress_history import last_of, read_history
from onceflow.admin.verify.replay import BATCH_RECORDS, CALLS, CLOCK, NOT_IN_ORDER, Replay, Replayed
from onceflow.admin.verify.replay_outputs import ReplayOutputs
from onceflow.admin.verify.replay_steps import (
    Step,
    begun_at,
    check_export,
    current_life,
    first_start,
    lives,
    steps,
    was_changed,
    went_back,
)
from onceflow.admin.verify.report import STATE, Report, Tell, unknown_past
from onceflow.admin.verify.table_contents import (
    Position,
    RowDifference,
    WatchedReader,
    WrittenLater,
    differences,
    restored,
    rows_of,
    what_of,
)
from onceflow.admin.verify.tally import SOURCE, UNDECIDED, Difference, RecordComparison, key_hash
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import EARLIEST, LATEST, list_offsets
from onceflow.client.topics import find_topics
from onceflow.clock import clock_ms
from onceflow.errors import OptionError, PermissionDeniedError, ProcessorError, counted
from onceflow.protocol.names import INTERNAL_SUFFIX, Names
from onceflow.protocol.progress import Offsets, Progress
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.api.serdes import in_own_schema
from onceflow.state.api.user_errors import shown
from onceflow.state.engine import dead_letters
from onceflow.state.format import rows
from onceflow.state.local.format import KINDS

_CALL_S = 60.0
_TWICE = "the flow was moved back in time, and has read records twice"
_SIZES = "some records became letters, or were shortened, because of what topics take, which a replay does not know"
_CHANGED = "a command such as `onceflow reset` has deleted or changed rows of the table"

_TRIAL_RECORDS = 2_000
_TRIAL_LATER_MS = 400 * 24 * 3600 * 1000  # another minute, hour, weekday and year


@dataclass(frozen=True)
class ReplayOptions:
    """What a user says about a replay.

    Args:
        processor: that of the flow.
        table: the table of its step; None: the only one of the flow.
        sources: topics that the step reads; empty: all that the flow reads.
        outputs: topics of its outputs, the first one for records that name no topic; empty: as progress names them.
        letters: topics of dead and late letters. tables_only: outputs are not compared.
        begin: where each source begins, by topic and partition; what is not named begins where the flow has begun.
        since: progress whose state is taken from the table's topics; None: the state is empty at the beginning.
    """

    processor: Processor | ColumnProcessor
    table: str | None = None
    sources: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    letters: tuple[str, ...] = ()
    tables_only: bool = False
    begin: Offsets | None = None
    since: Progress | None = None


class ReplayAudit:
    """One audit of a flow by replaying.

    Args:
        report: findings are added to it.
        scratch: folder for scratch files; None: the system's.
        tell: is told what is read, how much of it is done, and of how much.
        check: called while something is waited for. It may raise, to end it.
    """

    def __init__(
        self,
        cluster: Cluster,
        names: Names,
        wanted: ReplayOptions,
        report: Report,
        *,
        scratch: Path | None,
        tell: Tell,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._cluster, self._names, self._wanted, self._report, self._tell = cluster, names, wanted, report, tell
        self._scratch = scratch
        self._check = check
        self._reader = CommittedReader(cluster, _CALL_S, check=check)
        self._reasons: list[str] = []
        self._has_begun_later = self._was_reset = False
        self._depends: Callable[[], Iterator[str]] | None = None
        self._unjudged = {"outputs": 0, "rows": 0}
        self._is_spread = False
        self._older_rows = 0

    def run(self) -> None:
        """Replay and compare.

        Raises:
            OptionError: this cannot be replayed, or an option is missing. ProcessorError: the processor has raised.
            OnceflowError: something cannot be read.
        """
        with contextlib.ExitStack() as stack:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="onceflow-verify-", dir=self._scratch))
            )
            self._run(folder, stack)

    def _run(self, folder: Path, stack: contextlib.ExitStack) -> None:
        history = read_history(self._cluster, self._names, self._check)
        progress, life = last_of(history, self._names), current_life(history)
        self._was_reset = len(lives(history)) > 1
        what = self._what(progress)
        self._tell_of_replayed_letters()
        begin = self._beginning(life, what)
        topics = self._outputs_of(life)
        default = self._wanted.outputs[0] if self._wanted.outputs else topics[0] if len(topics) == 1 else None
        tally = stack.enter_context(RecordComparison(folder))
        outputs = stack.enter_context(
            ReplayOutputs(tally, topics, default, what.letters, folder, self._names.flow, what.partitions)
        )
        outputs.serde = getattr(self._wanted.processor, "output", None)
        if not self._wanted.tables_only:
            self._read_outputs(outputs, topics)
        later = current_life(read_history(self._cluster, self._names, self._check))
        total = sum(
            max(0, end - begin.offsets.get(t, {}).get(p, 0))
            for t in what.sources
            for p, end in progress.offsets[t].items()
        )
        replay = Replay(
            what,
            self._reader,
            folder / "state",
            emit=lambda batch, partition: None if self._wanted.tables_only else outputs.yielded(batch, partition),
            tell=lambda done: self._tell("replaying", done, total),
        )
        # Asked only if something differs.
        self._depends = lambda: dependences(what, self._reader, begin.offsets, progress.offsets, folder)
        if begin.state is not None:
            self._seed(replay, what, begin.state)
        for step in steps(begin.offsets, begin.before, begin.life, what.table):
            outputs.side = UNDECIDED if step.without_outputs else SOURCE
            replay.run(step)
        self._compare_table(replay, what, progress, folder)
        self._report.checked["replayed records"] = replay.records
        if not self._wanted.tables_only:
            outputs.side = UNDECIDED
            since = [each for each in later if each.batch_id > progress.batch_id]
            for step in steps(progress.offsets, progress, since, what.table):
                replay.run(step)
            self._compare_outputs(outputs, replay, life)
            if outputs.left_out:
                self._report.unjudged.append(f"{outputs.left_out} late records: name --dead-letter TOPIC")
        self._tell_unjudged([*replay.reasons, *self._reasons, *([NOT_IN_ORDER] if self._is_spread else [])])

    # ---- what is replayed ----------------------------------------------------------------------------

    def _what(self, progress: Progress) -> Replayed:
        flow, wanted = self._names.flow, self._wanted
        if progress.joined:
            raise OptionError(
                f"The flow joins with {', '.join(progress.joined)}, and a replay cannot know what each batch saw there",
                flow=flow,
                next_step="compare records by their ids: --id",
            )
        tables = [name for name in progress.tables if not name.endswith(INTERNAL_SUFFIX)]
        table = wanted.table or (tables[0] if len(tables) == 1 else None)
        if table is None or table not in tables:
            named = f"the flow has {', '.join(tables)}" if tables else "the flow has no table"
            raise OptionError(
                f"Which table is to be replayed? {named}"
                if table is None
                else f"The flow has no table {table}: {named}",
                flow=flow,
                next_step="name the table of the processor's step: --table TABLE"
                if tables
                else "a flow without Flow.process has nothing to replay: compare its records by their ids, --id",
            )
        known = progress.tables[table]
        if known.open_ended:
            raise OptionError(
                f"Table {table} was written without transactions, so batches may be in it more than once",
                flow=flow,
                next_step='only a flow with guarantee="exactly_once" can be verified by a replay',
            )
        sources = wanted.sources or tuple(sorted(progress.offsets))
        if missing := sorted(set(sources) - set(progress.offsets)):
            raise OptionError(
                f"The flow has not read {', '.join(missing)}; it reads {', '.join(sorted(progress.offsets))}",
                flow=flow,
                next_step="name a topic that it reads: --source TOPIC",
            )
        count = known.local.partitions if known.local is not None else len(progress.changelogs[table])
        letters = wanted.letters[0] if wanted.letters else None
        side_topics = tuple(sorted(progress.side_topics))
        return Replayed(flow, wanted.processor, table, count, sources, letters, side_topics)

    def _tell_of_replayed_letters(self) -> None:
        """Say that the processor was probably mended meanwhile. As it was, it has made other letters and other rows."""
        for topic in self._wanted.letters:
            with contextlib.suppress(PermissionDeniedError):
                deadline = Deadline(_CALL_S, f"looking for replayed letters of {topic}")
                if again := len(letter_replay.replayed_in(self._cluster, topic, deadline)):
                    self._report.notes.append(
                        f"{counted(again, 'letter')} of {topic} replayed before: if the processor was changed for "
                        "that, what it did before the change differs from this replay"
                    )

    def _beginning(self, life: Sequence[Progress], what: Replayed) -> Beginning:
        """Where the replay begins.

        Raises:
            OptionError: the export is not one of this flow, or records from there on are gone.
        """
        since = self._wanted.since
        if since is None:
            found = from_progress(life, what.table, self._wanted.begin)
        else:
            if since.batch_id > life[-1].batch_id or what.table not in since.changelogs:
                has = f"of batch {since.batch_id}, and has {', '.join(since.changelogs) or 'no table'}"
                raise OptionError(
                    f"The export is {has}; the flow is at batch {life[-1].batch_id}, and its table is {what.table}",
                    flow=self._names.flow,
                    next_step="give an export of this flow, from before now and with this table",
                )
            check_export(since, life[-1], what.table, self._names.flow)
            found = Beginning(since.offsets, since, [each for each in life if each.batch_id >= since.batch_id], since)
        if went_back(found.life):
            self._reasons.append(_TWICE)
        if was_changed(found.life, what.table):
            self._reasons.append(_CHANGED)
        # A fork that was promoted writes to topics that have the outputs of the earlier version.
        self._has_begun_later = found.before is not None or life[-1].forked is not None or self._was_reset
        if promoted := life[-1].promoted:
            self._report.unjudged.append(
                f"what the earlier version of this flow has written, whose place {promoted.flow} has taken"
            )
        deadline = Deadline(_CALL_S, "reading the first offsets of sources")
        span = {topic: sorted(life[-1].offsets[topic]) for topic in what.sources}
        for topic, offsets in list_offsets(self._cluster, span, EARLIEST, deadline).items():
            for partition, offset in offsets.items():
                start = found.offsets.get(topic, {}).get(partition, 0)
                if offset > start:
                    raise OptionError(
                        f"A replay begins at offset {start} of {topic}-{partition}, whose records are gone: the first "
                        f"one that is left is {offset}",
                        flow=self._names.flow,
                        next_step="begin with the state of a later time: --since FILE, of `onceflow progress export`. "
                        "For a flow that was started behind the first records, say where: --from",
                    )
        return found

    def _outputs_of(self, life: Sequence[Progress]) -> list[str]:
        named = self._wanted.outputs or sorted({topic for each in life for topic in each.outputs})
        return [topic for topic in dict.fromkeys(named) if topic not in self._wanted.letters]

    def _seed(self, replay: Replay, what: Replayed, since: Progress) -> None:
        for at in positions(since, what.table):
            reader = WatchedReader(self._reader)
            scratch = replay.folder(at.partition).parent / f"since-{at.partition}"
            store = restored(scratch, at, reader, lambda count: self._tell(f"reading {what.table}", count, None))
            try:
                if not reader.whole and WrittenLater(self._reader, at).keys:
                    raise OptionError(
                        f"The state with which the replay begins is not known any more: table {at.name} was written "
                        f"since offset {at.table_end}, and compaction has removed older rows",
                        flow=self._names.flow,
                        next_step="give a newer export: --since FILE, of `onceflow progress export`",
                    )
                replay.seed(at.partition, rows_of(store))
            finally:
                store.close()

    # ---- replay and comparison -----------------------------------------------------------------------

    def _read_outputs(self, outputs: ReplayOutputs, topics: Sequence[str]) -> None:
        for topic in dict.fromkeys([*topics, *self._wanted.letters]):
            deadline = Deadline(_CALL_S, f"reading the offsets of {topic}")
            span = {topic: sorted(find_topics(self._cluster, {topic: ""}, deadline)[topic].leaders)}
            first = list_offsets(self._cluster, span, EARLIEST, deadline)[topic]
            ends = list_offsets(self._cluster, span, LATEST, deadline, committed=False)[topic]
            letter, done = topic in self._wanted.letters, 0
            for partition, end in sorted(ends.items()):
                for chunk in self._reader.read(topic, partition, first[partition], end):
                    outputs.there(chunk, topic, partition, letter=letter)
                    done += len(chunk.keys)
                    self._tell(f"reading {topic}", done, None)
            if outputs.sizes_counted and _SIZES not in self._reasons:
                self._reasons.append(_SIZES)
            name = "letters" if letter else "output records"
            self._report.checked[name] = self._report.checked.get(name, 0) + done

    def _compare_table(self, replay: Replay, what: Replayed, progress: Progress, folder: Path) -> None:
        if progress.tables[what.table].local is not None:
            self._report.unjudged.append(f"the rows of table {what.table}: it has no changelog")
            return
        count = 0
        with contextlib.ExitStack() as stack:
            stores = replay.stores()
            for store in stores.values():
                stack.callback(store.close)
            reader = WatchedReader(self._reader)
            for at in positions(progress, what.table):
                store = restored(
                    folder / f"table-{at.partition}",
                    at,
                    reader,
                    lambda read: self._tell(f"reading {what.table}", read, None),
                )
                stack.callback(store.close)
                # Also by the ttl of Flow.process, which the processor does not know.
                if reader.expires or next(store.scan(rows.EXPIRY_INDEX, rows.after(rows.EXPIRY_INDEX)), None):
                    replay.doubt(CLOCK)
                found = differences(rows_of(stores[at.partition]), rows_of(store), self._same)
                self._judge_rows(found, at, replay)
                count += store.row_count()
        self._report.checked["table rows"] = count

    def _same(self, expected: bytes, found: bytes) -> bool:
        """Whether two rows are the same. When they expire depends on the time at which they were written, and their
        version on the code that has written them, as does the version of a schema in a registry."""
        if expected == found:
            return True
        payloads = [rows.unpack(row).payload for row in (expected, found)]
        serde = getattr(self._wanted.processor, "state", None)
        return payloads[0] == payloads[1] or payloads[0] == in_own_schema(serde, payloads[1])

    def _judge_rows(self, found: Iterator[RowDifference], at: Position, replay: Replay) -> None:
        later = WrittenLater(self._reader, at)
        for each in found:
            if each.key in later:
                continue
            if each.found is not None and rows.unpack(each.found).version < self._wanted.processor.version:
                self._older_rows += 1
                continue
            self._try(replay)
            is_spread = key_hash(each.key) in replay.spread
            if replay.reasons or self._reasons or is_spread:
                self._unjudged["rows"] += 1
                self._is_spread |= is_spread
                continue
            what = "not there" if each.found is None else "different"
            if each.expected is None:
                what = "there, and a replay does not have it"
            self._report.add(STATE, f"table {at.name}, key {shown(each.key)}: {what_of(each.row_key)} is {what}")

    def _compare_outputs(self, outputs: ReplayOutputs, replay: Replay, life: Sequence[Progress]) -> None:
        keeps_keys = outputs.keeps_keys
        for each in outputs.differences():
            self._try(replay)
            is_spread = bool(replay.spread) and (not keeps_keys or each.key in replay.spread)
            if replay.reasons or self._reasons or self._is_from_before(each) or is_spread:
                self._unjudged["outputs"] += 1
                self._is_spread |= is_spread
            else:
                outputs.report(each, self._report, self._reader)
        if not self._has_begun_later and (note := unknown_past(life, self._report)):
            self._report.notes.append(note)

    def _try(self, replay: Replay) -> None:
        """Something differs: find out, once, whether that may be for want of the batches' divisions and times."""
        if self._depends is not None and not replay.reasons and not self._reasons:
            for reason in self._depends():
                replay.doubt(reason)
        self._depends = None

    def _is_from_before(self, each: Difference) -> bool:
        """Whether a record that is there too often may have been written before the replay begins."""
        return self._has_begun_later and each.found > each.expected

    def _tell_unjudged(self, reasons: Sequence[str]) -> None:
        for what, count in self._unjudged.items():
            if count:
                when = "the flow was reset" if self._was_reset else "the replay begins"
                why = "; ".join(dict.fromkeys(reasons)) or f"they may be from before {when}"
                self._report.unjudged.append(f"{count} {what} that differ from the replay: {why}")
        if self._older_rows:
            self._report.unjudged.append(
                f"{counted(self._older_rows, 'row')} with other content than in the replay: an earlier version of "
                "the processor has written them"
            )


def positions(progress: Progress, table: str) -> list[Position]:
    """Where the partitions of a table are, by progress."""
    internal: Mapping[int, int] = progress.changelogs.get(table + INTERNAL_SUFFIX, {})
    ends = progress.changelogs[table]
    return [Position(table, partition, end, internal.get(partition, 0)) for partition, end in sorted(ends.items())]


@dataclass(frozen=True)
class Beginning:
    """Where a replay begins.

    Args:
        offsets: of the sources. before: the progress there; None: the flow has written no outputs before.
        life: the progress records from there on.
        state: whose state it begins with; None: an empty one.
    """

    offsets: Offsets
    before: Progress | None
    life: Sequence[Progress]
    state: Progress | None


def from_progress(life: Sequence[Progress], table: str, given: Offsets | None) -> Beginning:
    """Where the step of a table has begun, by the progress records that are left.

    A start that adds a table commits that, with the end offsets of a topic whose rows the flow has adopted. The flow
    may have run without the table before.
    """
    first = next(at for at, each in enumerate(life) if table in each.tables)
    start, number = life[first], life[first - 1].batch_id if first else 0
    if start.batch_id != number and start.handover is None:
        origin = start.promoted or start.forked
        if origin is not None:
            command = "fork" if start.promoted is None else "promote"
            raise OptionError(
                f"The flow has got its state from {origin.flow} (onceflow {command}), and the state with which it "
                "began is not known any more",
                flow=start.flow,
                next_step="begin with the state of a later time: --since FILE, of `onceflow progress export`",
            )
        return Beginning(begun_at(life, given), None, life, None)  # that record is gone
    state = start if _has_rows(start, table) else None
    if start.batch_id or start.promoted is not None:
        return Beginning(start.offsets, start, life[first:], state)
    if given is None:
        return Beginning(first_start(life), None, life, state)
    return Beginning(begun_at(life, given), None, [each for each in life if each.batch_id], state)


def _has_rows(progress: Progress, table: str) -> bool:
    """Whether anything was written to the topics of a table. A processor may have maps and timers only."""
    return any(any(progress.changelogs.get(topic, {}).values()) for topic in (table, table + INTERNAL_SUFFIX))


def dependences(what: Replayed, reader: CommittedReader, begin: Offsets, end: Offsets, folder: Path) -> Iterator[str]:
    """What the results depend on, as reasons why a difference may be no mistake.

    One is how many records of a key process() gets at once, as one output for each call does. The other one is
    processing time, which a replay does not notice in a column processor. The first records are processed from an empty
    state each time.
    """
    share = max(1, _TRIAL_RECORDS // max(1, sum(len(end[topic]) for topic in what.sources)))
    start = {topic: {p: begin.get(topic, {}).get(p, 0) for p in end[topic]} for topic in what.sources}
    part = {topic: {p: min(end[topic][p], at + share) for p, at in each.items()} for topic, each in start.items()}
    now_ms = clock_ms()

    def results(name: str, at_once: int, now_ms: int) -> Counter[Any]:
        step = Step(start, part, None, None, now_ms, True)
        return _results(what, reader, step, folder / f"trial-{name}", at_once)

    try:
        together = results("together", BATCH_RECORDS, now_ms)
        if results("single", 1, now_ms) != together:
            yield CALLS
        if results("later", BATCH_RECORDS, now_ms + _TRIAL_LATER_MS) != together:
            yield CLOCK
    except ProcessorError:
        return  # for example, it needs the state that it begins with


def _results(what: Replayed, reader: CommittedReader, step: Step, folder: Path, at_once: int) -> Counter[Any]:
    found: Counter[Any] = Counter()

    def emit(batch: pa.RecordBatch, partition: int) -> None:
        for row in batch.to_pylist():
            # Where in onceflow's own code process() was called is no result.
            headers = [each for each in row["headers"] or () if each["key"] != dead_letters.ERROR_STACK]
            found[repr({**row, "headers": headers})] += 1

    trial = Replay(what, reader, folder, emit=emit, tell=lambda done: None, at_once=at_once)
    trial.run(step)
    for store in trial.stores().values():
        found.update(
            (key, rows.unpack(row).payload) for kind in sorted(KINDS) for key, row in store.scan(kind, rows.after(kind))
        )
        store.close()
    return found
