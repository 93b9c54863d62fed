"""Runs a processor over source records again, with the code that tasks run, in this process and without Spark.

Nothing is written to Kafka. The state is in local stores in a scratch folder, and batches are small. So memory does not
grow with the number of records or keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.admin.verify.replay_steps import Step
from onceflow.admin.verify.tally import key_hash
from onceflow.client.committed import Chunk, CommittedReader
from onceflow.client.produce import Acknowledged
from onceflow.clock import clock_ms
from onceflow.errors import OnceflowError, ProcessorError
from onceflow.options.durations import duration_ms
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.protocol.partitioners import key_partitions
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.changelog.topics import TableTopics
from onceflow.state.engine.base import TIMERS_PER_BATCH
from onceflow.state.engine.output_collector import SCHEMA
from onceflow.state.engine.watermark import Origin, Watermark
from onceflow.state.format import rows
from onceflow.state.local.format import COMMIT_RECORD, Columns, CommitId, CommitRecord, Goal, partition_folder
from onceflow.state.local.opening import settle
from onceflow.state.spec import AttemptContext, ProcessSpec, StateReport
from onceflow.state.stores.base import Store
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.task.state_run import StateRun

# Of a part of the source that is not known to be one batch. A batch with few records for each partition costs as much
# as one with many.
BATCH_RECORDS = 50_000
_INPUT = pa.schema([*SCHEMA, ("partition", pa.int32()), ("offset", pa.int64())])
_NO_ID = "replay"
_MAX_KEYS = 1_000_000  # about 100 MB
#: In place of a topic, for late records, if the flow's topic of letters is not known. No topic of Kafka has this name.
LATE = "late records"

NOT_IN_ORDER = "keys have records in several partitions of the sources, and their order among each other is not known"
CLOCK = "the processor uses processing time: it asks for it, sets timers of that clock, or rows have a time to live"
BATCHES_UNKNOWN = "the processor uses event time, and the progress records of some batches are gone"
CALLS = "the results depend on how many records of a key process() gets at once, and this is not known for all batches"
IDLE = "the processor uses event time, and the watermark did not follow from the records alone: a partition was idle"
HANDED_OVER = "a promotion has handed over timers, and which of them the earlier version had fired is not known exactly"

Emit = Callable[[pa.RecordBatch, int], None]


@dataclass(frozen=True)
class Replayed:
    """What is replayed: the processor of which flow and table, and how.

    Args:
        letters: topic of dead and late letters; None: a record that cannot be processed ends the replay, and late
            records are left out.
        sources: topics that the step reads.
        partitions: of the table.
        side_topics: where the flow sets records aside, in this step or in another one. For errors.
    """

    flow: str
    processor: Processor | ColumnProcessor
    table: str
    partitions: int
    sources: Sequence[str]
    letters: str | None = None
    side_topics: tuple[str, ...] = ()


class Replay:
    """A replay that goes on from step to step.

    Args:
        folder: scratch folder for the state.
        emit: called with the outputs, and with the partition of the table that has yielded them.
        tell: called with the number of source records so far.
        at_once: how many records of a source partition are handed to the processor together, at most.

    Attributes:
        records: how many source records were processed.
        reasons: why a difference from what the flow has written may be no mistake.
    """

    def __init__(
        self,
        what: Replayed,
        reader: CommittedReader,
        folder: Path,
        *,
        emit: Emit,
        tell: Callable[[int], None],
        at_once: int = BATCH_RECORDS,
    ) -> None:
        self._what, self._reader, self._emit, self._tell = what, reader, emit, tell
        self._at_once = at_once
        internal = what.table + INTERNAL_SUFFIX
        topics = TableTopics(what.table, internal, _NO_ID, _NO_ID, what.partitions, 1 << 62, 1 << 31)
        self._spec = ProcessSpec(
            what.flow,
            what.flow,
            what.processor,
            topics,
            LmdbStore,
            folder,
            on_error="fail" if what.letters is None else "dead-letter",
            dead_letter_topic=what.letters,
            late_topic=what.letters or LATE,
            max_timers_per_batch=TIMERS_PER_BATCH,
        )
        self._folder = folder
        self._changelog = _Changelog()
        self._ends = [dict.fromkeys(range(what.partitions), 0), dict.fromkeys(range(what.partitions), 0)]
        self._last: dict[int, CommitId] = {}
        self._timers: dict[int, Mapping[str, int | None]] = {}
        self._verified = frozenset((self._spec.location(), partition) for partition in range(what.partitions))
        self._batch = 0
        self.records = 0
        self.reasons: list[str] = []
        self._lateness_ms = None
        if what.processor.allowed_lateness is not None:
            self._lateness_ms = duration_ms(what.processor.allowed_lateness)
        self._watermark: Watermark | None = None
        self._key_partitions = _KeyPartitions()
        if len(what.sources) > 1:
            self.doubt(NOT_IN_ORDER)

    @property
    def table(self) -> str:
        """The table of the step."""
        return self._what.table

    @property
    def spread(self) -> set[int]:
        """`key_hash` of the keys with records in several partitions of the source. What follows from them depends on
        their order among each other, which is not known."""
        return self._key_partitions.spread

    def seed(self, partition: int, found: Iterator[tuple[bytes, bytes]]) -> None:
        """Begin with these rows of a partition, before anything is run."""
        what = self._what
        goal = Goal(what.flow, what.table, partition, _NO_ID, _NO_ID, 0, 0)
        blobs = {COMMIT_RECORD: CommitRecord.of(goal, clock_ms()).encode()}
        store = LmdbStore.open(self.folder(partition))
        try:
            while part := list(islice(found, BATCH_RECORDS)):
                if any(_uses_clock(key, row) for key, row in part):
                    self.doubt(CLOCK)
                store.write(part, blobs, index=True)
        finally:
            store.close()

    def run(self, step: Step) -> None:
        """Process the records of a step.

        Raises:
            ProcessorError: the processor or a serde has raised.
            OnceflowError: records cannot be read, or the scratch folder cannot be used.
        """
        if self._lateness_ms is not None and not step.is_batch:
            self.doubt(BATCHES_UNKNOWN)
        if step.timers_until:
            self.doubt(HANDED_OVER)
        latest: dict[Origin, int] = {}
        untimed: set[Origin] = set()
        for inputs in self._parts(step):
            for report in self._run_batch(inputs, step):
                for origin, ms in report.max_event_ms.items():
                    latest[origin] = max(ms, latest.get(origin, ms))
                untimed |= report.untimed
        if self._lateness_ms is not None and step.is_batch:
            self._follow(step, latest, untimed)

    def stores(self) -> dict[int, Store]:
        """The state after the last step, by partition. The caller closes the stores."""
        opened: dict[int, Store] = {}
        for partition in range(self._what.partitions):
            folder = self.folder(partition)
            if partition in self._last:
                settle(folder, LmdbStore, self._last[partition])
            opened[partition] = LmdbStore.open(folder)
        return opened

    def folder(self, partition: int) -> Path:
        """The folder of a partition's state."""
        return partition_folder(self._folder, self._what.flow, self._what.table, partition)

    # ---- inside --------------------------------------------------------------------------------------

    def _parts(self, step: Step) -> Iterator[Iterator[pa.RecordBatch]]:
        """The records of a step, for one batch after the other."""
        inputs = self._inputs(step)
        if step.is_batch:
            yield inputs
            return
        for first in inputs:
            yield self._some(first, inputs)

    def _some(self, first: pa.RecordBatch, more: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        count = first.num_rows
        yield first
        while count < BATCH_RECORDS and (batch := next(more, None)) is not None:
            count += batch.num_rows
            yield batch

    def _inputs(self, step: Step) -> Iterator[pa.RecordBatch]:
        for topic in sorted(step.end.keys() & set(self._what.sources)):
            for partition, end in sorted(step.end[topic].items()):
                for chunk in self._reader.read(topic, partition, step.start[topic][partition], end):
                    if not chunk.keys:
                        continue
                    batch = input_of(chunk, topic, partition)
                    if len(self._what.sources) == 1 and not self._key_partitions.note(
                        batch, partition, len(step.end[topic])
                    ):
                        self.doubt(NOT_IN_ORDER)
                    for start in range(0, batch.num_rows, self._at_once):
                        yield batch.slice(start, self._at_once)
                    self.records += batch.num_rows
                    self._tell(self.records)

    def _run_batch(self, inputs: Iterator[pa.RecordBatch], step: Step) -> list[StateReport]:
        self._batch += 1
        moment = AttemptContext(
            self._batch,
            CommitId(self._batch, 0, 0),
            step.now_ms,
            step.watermark_ms,
            dict(self._ends[0]),
            dict(self._ends[1]),
            dict(self._last),
            self._verified,
        )
        if step.timers_until is not None:
            moment = moment.limited(step.timers_until, step.unfired)
        run = StateRun(self._spec, moment, source=_NoTopics(), changelog=self._changelog, emit=self._emit)
        try:
            run.open(self._due(step))  # others are opened for their records
            for batch in inputs:
                run.feed(batch, null_keys_to=0)
            run.finish()
            reports = run.leave_pending(self._changelog.acknowledged())
            if run.uses_clock:
                self.doubt(CLOCK)
        except OnceflowError as error:
            raise self._explained(error) from error
        finally:
            run.close()
        for report in reports:
            for ends, end in zip(self._ends, (report.table_end, report.internal_end), strict=True):
                if end is not None:
                    ends[report.partition] = end
            self._timers[report.partition] = report.next_timer_ms
            if report.changed:
                self._last[report.partition] = moment.commit
        return reports

    def _due(self, step: Step) -> list[int]:
        """The partitions with something that is due, or that may have it."""
        limits = {"event": step.watermark_ms, "processing": step.now_ms}
        found = []
        for partition in range(self._what.partitions):
            known = self._timers.get(partition)
            if known is None or any(
                (at_ms := known.get(clock)) is not None and until is not None and at_ms <= until
                for clock, until in limits.items()
            ):
                found.append(partition)
        return found

    def _follow(self, step: Step, latest: Mapping[Origin, int], untimed: Collection[Origin]) -> None:
        """Whether the watermark that the flow has committed is that of partitions that are never idle."""
        origins = [(topic, p) for topic in self._what.sources for p in step.end.get(topic, ())]
        if self._watermark is None:
            lateness_ms = self._lateness_ms or 0
            self._watermark = Watermark(
                origins, lateness_ms=lateness_ms, idle_s=math.inf, value_ms=step.watermark_ms, clock=lambda: 0.0
            )
        expected, committed_ms = self._watermark.after(latest, untimed), step.watermark_after_ms
        if committed_ms is not None and (expected is None or committed_ms > expected):
            self.doubt(IDLE)
        self._watermark.on_commit(latest, expected if committed_ms is None else committed_ms, untimed)

    def doubt(self, reason: str) -> None:
        """Note why a difference may be no mistake."""
        if reason not in self.reasons:
            self.reasons.append(reason)

    def _explained(self, error: OnceflowError) -> OnceflowError:
        """The error of a batch of the replay, whose number says nothing to the reader."""
        if isinstance(error, ProcessorError):
            step = "correct the processor, or name the one that has written the outputs"
            if self._what.letters is None:
                topic = " or ".join(self._what.side_topics) or "TOPIC"
                step += f"; if the flow writes such records to a topic of dead letters, name it: --dead-letter {topic}"
            fields = {**error.fields(), "batch": None, "next_step": step}
            return ProcessorError(f"The replay ends: {error.what}", **fields)
        return error


def input_of(chunk: Chunk, topic: str, partition: int) -> pa.RecordBatch:
    """Committed records as an engine takes them."""
    count = len(chunk.keys)
    headers = None
    if chunk.headers:
        headers = [
            [{"key": name, "value": value} for name, value in chunk.headers[row]] if row in chunk.headers else None
            for row in range(count)
        ]
    columns: list[Any] = [
        pa.array(chunk.keys, pa.binary()),
        pa.array(chunk.values, pa.binary()),
        pa.array([topic] * count, pa.string()),
        pa.nulls(count, SCHEMA.field("headers").type) if headers is None else pa.array(headers, SCHEMA.field(3).type),
        pa.array(chunk.timestamps_ms, pa.int64()),
        pa.array(np.full(count, partition, np.int32)),
        pa.array(chunk.offsets, pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_INPUT)


class _Changelog:
    """Takes the place of the table's topics: counts the records.

    A store needs end offsets only to know whether its pending changes are committed. So these may be made up.
    """

    def __init__(self) -> None:
        self._written: dict[tuple[str, int], Acknowledged] = {}
        self._ends: dict[tuple[str, int], int] = {}

    def write_to(self, topic: str, partition: int, batch: pa.RecordBatch) -> None:
        topic_partition = (topic, partition)
        self._ends[topic_partition] = self._ends.get(topic_partition, 0) + batch.num_rows
        self._written[topic_partition] = Acknowledged(count=batch.num_rows, end_offset=self._ends[topic_partition])

    def acknowledged(self) -> dict[tuple[str, int], Acknowledged]:
        """What was written since the last call."""
        written, self._written = self._written, {}
        return written


def _uses_clock(row_key: bytes, row: bytes) -> bool:
    if row_key[:1] == rows.TIMER:
        return rows.unpack(row).payload[:1] == b"p"
    return rows.expiry_of(row) is not None


class _KeyPartitions:
    """In which partition of the source each key is. A producer need not have Kafka's default partitioner: what counts
    for the order is that each key has all of its records in one partition.

    Attributes:
        spread: the keys with records in several partitions, as `key_hash`.
    """

    def __init__(self) -> None:
        self.spread: set[int] = set()
        self._partitions: dict[int, int] | None = {}  # by hash of the key; None: they are too many
        self._strays = False

    def note(self, batch: pa.RecordBatch, partition: int, partitions: int) -> bool:
        """Note the keys of a partition's records. False: keys may be in several partitions that are not in ``spread``.

        Args:
            partitions: of the source.
        """
        keys = pc.unique(batch.column("key")).drop_null()
        self._strays = self._strays or bool((key_partitions(keys, partitions) != partition).any())
        if self._partitions is None:
            return not self._strays
        known = self._partitions
        hashes = map(key_hash, keys.to_pylist())
        self.spread.update(key for key in hashes if known.setdefault(key, partition) != partition)
        if len(known) > _MAX_KEYS:
            self._partitions = None
        return True


class _NoTopics:
    """The source of a copy that is never read from Kafka."""

    def read_columns(self, topic: str, partition: int, start: int, end: int, *, headers: bool) -> Iterator[Columns]:
        raise RuntimeError(f"the state of a replay was to be read from {topic}-{partition}")

    def end(self, topic: str, partition: int) -> int:
        raise RuntimeError(f"the state of a replay was to be read from {topic}-{partition}")
