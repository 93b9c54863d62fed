"""Deliberately broken builds of the sink, and the faults that show what is broken. Both are patches in the driver.

A fault is what the world does (a crash, a task that fails half-way); the sound build is put through it, too. A mutant
leaves out or swaps one thing that an engine or the sink does for exactly-once. Batches are 20 records from one source
partition, to two output partitions. The driver writes them itself. With Spark's engine, a batch that is run again is
written by a task.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle

from onceflow import BatchAbortedError, OnceflowError, hooks
from onceflow.client.deadline import Deadline
from onceflow.client.produce import Acknowledged, Producer
from onceflow.client.transactions import Transactions
from onceflow.direct import run as direct_module
from onceflow.direct.arrivals import Arrivals
from onceflow.direct.fetched import FetchedPart
from onceflow.direct.source_reader import SourceReader
from onceflow.driver.batch import range_rows
from onceflow.driver.batch.fetched_rows import FetchedRows
from onceflow.driver.kafka import commit as batch_module
from onceflow.driver.kafka import output_writer
from onceflow.driver.kafka.commit import BatchCommit
from onceflow.driver.kafka.delivery import ExactlyOnce
from onceflow.driver.record import progress_log
from onceflow.driver.record.numbering import Numbering
from onceflow.driver.record.progress_ahead import ProgressAhead
from onceflow.messages import TaskReport
from onceflow.protocol.progress import Progress
from onceflow.protocol.transaction import GIVEN, Epoch, Event
from onceflow.spark.checkpoint_files import LocalFolder, look_at
from onceflow.spark.memory_file import MemoryFile
from onceflow.spark.query_facts import QueryFacts
from onceflow.spark.row_program import RowProgram
from onceflow.task import row_writer
from onceflow.testing import faults, recorder
from onceflow_workshop.testing.backlogs import tasks_above

#: What runs the batches. Patches are in the driver, so with tasks that read only some of them work.
DRIVER, BY_TASKS = "driver", "tasks"
#: Spark's micro-batches.
CHECKPOINT = "checkpoint"
#: The driver, with a query that Spark evaluates.
SQL = "sql"
BATCH_ROWS = 20
# The batch that something happens to: neither the first nor the last.
BATCH = 2
Patch = pytest.MonkeyPatch

# Tasks cannot import test modules.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


# ---- faults ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What happens to a flow.

    Args:
        first, second: patches for its first and second run.
        placed: whether user code puts a row somewhere else when it is run again after the fault.
        more: whether there are more source records for the second run; which takes place then in any case.
        restart: whether the flow is started again after an error.
        given_back: whether tasks give back to the driver before all is read, and more records arrive at that moment.
    """

    first: Callable[[Patch, Path], None] | None = None
    second: Callable[[Patch, Path], None] | None = None
    placed: bool = False
    more: bool = False
    restart: bool = True
    given_back: bool = False

    @property
    def leaves_a_trace(self) -> bool:
        """Whether it creates the file that says that it has happened."""
        return self.first is not None or self.second is not None or self.given_back


def half_written(patch: Patch, once: Path) -> None:
    """The rows of the first output partition are with the broker, the others not yet, and the attempt fails."""
    encode = row_writer.RowWriter._encode

    def failing(self: Any, topic: str, partition: int, rows: Any, target: Any) -> None:
        encode(self, topic, partition, rows, target)
        if self._order.batch == BATCH and not once.exists():
            self._producer.flush()
            once.touch()
            raise BatchAbortedError("injected after half of the rows", next_step="none: the batch is run again")

    patch.setattr(row_writer.RowWriter, "_encode", failing)


def failed(step: str) -> Callable[[Patch, Path], None]:
    """An exception in the driver."""

    def fault(patch: Patch, once: Path) -> None:
        faults._fired.clear()
        patch.setenv(hooks.VARIABLE, faults.fault(step, "raise", batch=BATCH, once_file=str(once)))

    return fault


def killed(step: str) -> Callable[[Patch, Path], None]:
    """The driver is gone, as by SIGKILL: nothing is aborted, nothing is recorded, the transaction stays open."""

    def fault(patch: Patch, once: Path) -> None:
        def gone(self: Any, problem: BaseException, batch: int) -> None:
            raise problem

        patch.setattr(BatchCommit, "abort", gone)
        failed(step)(patch, once)

    return fault


def wrong_ahead(patch: Patch, once: Path) -> None:
    """The progress that the driver sends with the rows of a batch says too little. It is killed in the next batch."""
    record, wrong = ProgressAhead.record, []

    def stepped_back(progress: Progress) -> Progress:
        offsets = {topic: {n: end - 5 for n, end in ends.items()} for topic, ends in progress.offsets.items()}
        return replace(progress, offsets=offsets)

    def sent(self: Any, topics: Any) -> Any:
        known = self._progress
        if not wrong and known(topics).batch_id == BATCH:  # of the first one in a run, nothing is sent ahead
            wrong.append(self)
            once.touch()
            self._progress = lambda topics: stepped_back(known(topics))
        return record(self, topics)

    def gone(self: Any, problem: BaseException, batch: int) -> None:
        if batch == BATCH + 1:
            raise problem
        abort(self, problem, batch)

    abort = BatchCommit.abort
    patch.setattr(ProgressAhead, "record", sent)
    patch.setattr(BatchCommit, "abort", gone)
    faults._fired.clear()
    rule = faults.fault("write", "raise", batch=BATCH + 1, once_file=str(once.with_name("killed")))
    patch.setenv(hooks.VARIABLE, rule)


def only_offsets(patch: Patch, once: Path) -> None:
    """The driver is gone when the group's offsets are in the transaction, and nothing else is."""
    write = row_writer.RowWriter.write

    def gone(self: Any, problem: BaseException, batch: int) -> None:
        raise problem

    def failing(self: Any, rows: Any) -> None:
        if self._order.batch == BATCH and not once.exists():
            assert self._producer is None
            self._companion.before_rows()  # they are acknowledged
            once.touch()
            raise BatchAbortedError("injected at the first row", next_step="none")
        write(self, rows)

    patch.setattr(BatchCommit, "abort", gone)
    patch.setattr(row_writer.RowWriter, "write", failing)


def stale_start(patch: Patch, once: Path) -> None:
    """The engine reads from some records before the place where progress ends. (A checkpoint of Spark does so when it
    was restored from a backup.)"""
    reader = direct_module.SourceReader
    once.touch()
    checkpoint = once.with_name("checkpoint")
    if checkpoint.exists():
        last = look_at(LocalFolder(checkpoint)).committed
        for name in (f"{last}", f".{last}.crc"):
            for log in ("offsets", "commits"):
                (checkpoint / log / name).unlink()

    def earlier(offsets: Any) -> Any:
        return {partition: offset - 5 for partition, offset in offsets.items()}

    def read(settings: Any, plan: Any, starts: Any, *rest: Any, **options: Any) -> Any:
        return reader(settings, plan, {topic: earlier(starts[topic]) for topic in starts}, *rest, **options)

    patch.setattr(direct_module, "SourceReader", read)


def two_arrow_batches(patch: Patch, once: Path) -> None:
    """The rows of a batch come in two halves."""

    def halved(original: Callable[..., Any]) -> Callable[..., Any]:
        def halves(*arguments: Any, **options: Any) -> Iterator[pa.RecordBatch]:
            once.touch()
            table = pa.Table.from_batches(original(*arguments, **options)).combine_chunks()
            for half in (table[: BATCH_ROWS // 2], table[BATCH_ROWS // 2 :]):
                yield from half.to_batches()

        return halves

    patch.setattr(output_writer, "collect", halved(output_writer.collect))
    patch.setattr(FetchedRows, "batches", halved(FetchedRows.batches))


def more_when_given_back(patch: Patch, once: Path, pipe: Any) -> None:
    """The driver has fetched 50 records before tasks took over. They give back when 10 are left, and 10 more come."""
    go_on = SourceReader.go_on

    def fill_first(self: Any, *epochs: Any) -> None:
        if not once.exists():
            once.touch()
            pipe.fill(BATCH_ROWS // 2)
        go_on(self, *epochs)

    patch.setattr(SourceReader, "go_on", fill_first)


FAULTS = {
    "none": Fault(),
    "an attempt fails half-way": Fault(first=half_written, placed=True),
    "killed after write": Fault(first=killed("write")),
    "killed after the offsets alone": Fault(first=only_offsets),
    "killed after progress": Fault(first=killed("progress")),
    "failed after write, and not started again": Fault(first=failed("write"), restart=False),
    "stopped and started again": Fault(more=True),
    "started again too early in the source": Fault(more=True, second=stale_start),
    "rows come in two equal halves": Fault(first=two_arrow_batches, placed=True),
    "rows come in two halves, by key": Fault(first=two_arrow_batches),
    "progress sent ahead is wrong, killed after the next write": Fault(first=wrong_ahead),
    "tasks give back, and more records come": Fault(given_back=True),
}


# ---- mutants ---------------------------------------------------------------------------------------------


def sound(patch: Patch) -> None:
    """The build as it is."""


#: What the broker answered to writes that came too late.
refused: list[OnceflowError] = []


def commit_before_flush(patch: Patch) -> None:
    """Rows are reported as acknowledged at once; they are sent when the transaction has ended."""
    late: list[Any] = []
    refused.clear()

    def queue_only(self: Any, topic: str, partition: int, encoded: Any) -> None:
        with patch.context() as inner:
            inner.setattr(Producer, "_pump", lambda self, *, wait: None)
            send(self, topic, partition, encoded)

    def finish(self: Any) -> Mapping[tuple[str, int], Acknowledged]:
        late.append(self._producer)
        return {place: Acknowledged(0, count) for place, count in self._sequences.items()}

    def end(self: Any, *arguments: Any) -> Any:
        outcome = original(self, *arguments)
        while late:
            try:
                late.pop().flush()
            except OnceflowError as error:
                refused.append(error)
        return outcome

    send, original = Producer.send, ExactlyOnce.end
    patch.setattr(Producer, "send", queue_only)
    patch.setattr(row_writer.RowWriter, "finish", finish)
    patch.setattr(ExactlyOnce, "end", end)


def next_attempt_continues(patch: Patch) -> None:
    """An attempt that failed is not aborted: the next one goes on in its transaction, under its epoch."""

    def abort(self: Any, deadline: Deadline) -> None:
        self.machine.state = GIVEN

    patch.setattr(ExactlyOnce, "abort", abort)


def abort_keeps_the_epoch(patch: Patch) -> None:
    """The transaction is aborted, and the next one is begun under the same epoch."""

    def abort(self: Any, deadline: Deadline) -> None:
        identity = self.identity
        self.end(deadline, commit=False)
        self._identity = identity
        self.machine.state = self.machine.state._replace(epoch=Epoch.FRESH)

    patch.setattr(Transactions, "abort", abort)


def retry_under_one_epoch(patch: Patch) -> None:
    """Writes that failed are tried again where they are, and the audit sees the second try only."""
    original = BatchCommit._write

    def write(self: Any, *arguments: Any) -> Any:
        parts = original(self, *arguments)
        if any(report.error is not None for part in parts for report in part.reports):
            return original(self, *arguments)
        return parts

    patch.setattr(BatchCommit, "_write", write)


def progress_outside_the_transaction(patch: Patch) -> None:
    """Progress is written without the transaction, just before its end."""
    original = progress_log.write_progress

    def plain(cluster: Any, transactions: Any, names: Any, progress: Any, *rest: Any, **_: Any) -> int:
        written = original(cluster, None if progress.batch_id else transactions, names, progress, *rest)
        if progress.batch_id:
            transactions.machine.on(Event.PROGRESS_WRITTEN)
        return written

    patch.setattr(ExactlyOnce, "ahead", lambda *_: None)
    patch.setattr(progress_log, "write_progress", plain)


def progress_in_a_transaction_before(patch: Patch) -> None:
    """Two transactions: first progress, then rows."""
    original = BatchCommit.attempt

    def attempt(self: Any, df: Any, attempt: Any) -> bool:
        attempt.producer = self._delivery.begin(Deadline(30, "mutant"))
        self._delivery.written([])
        progress = self._progress(attempt, ())
        self._delivery.end(Deadline(30, "mutant"))

        def moved(*_: Any) -> Any:
            self._delivery.machine.on(Event.PROGRESS_WRITTEN)
            return progress

        self._move_progress = moved
        return original(self, df, attempt)

    patch.setattr(BatchCommit, "attempt", attempt)


def plan_is_off_by_one(patch: Patch) -> None:
    """Ends are taken for inclusive: one more is committed than was read, in all batches alike."""
    read_range, take = Numbering.read_range, Arrivals.take

    def moved(offsets: Any) -> Any:
        return {topic: {p: offset + 1 for p, offset in found.items()} for topic, found in offsets.items()}

    def shifted(found: Any, *, first: bool) -> Any:
        return replace(found, start=found.start if first else moved(found.start), end=moved(found.end))

    def read(self: Any, batch: int, partitions: Any) -> Any:
        return shifted(read_range(self, batch, partitions), first=not batch)

    def taken(self: Any, *arguments: Any) -> Any:
        first, self.begun = not hasattr(self, "begun"), True
        found = take(self, *arguments)
        return replace(found, source=shifted(found.source, first=first))

    patch.setattr(Numbering, "read_range", read)
    patch.setattr(Arrivals, "take", taken)


def no_contiguity_check(patch: Patch) -> None:
    """A batch may start anywhere."""
    patch.setattr(batch_module, "check_contiguous", lambda *_, **__: None)


def two_transactions(patch: Patch) -> None:
    """A batch takes two transactions, half of its rows in each."""
    original, write_rows = BatchCommit._write, output_writer.write_rows

    def write(self: Any, *arguments: Any) -> Any:
        def halves(order: Any, place: Any, rows: Any, cluster: Any, companion: None = None) -> TaskReport:
            table = pa.Table.from_batches(rows)
            half = table.num_rows // 2
            first = write_rows(order, place, table[:half].to_batches(), cluster).written
            self._delivery.written([])
            self._delivery.machine.on(Event.PROGRESS_WRITTEN)
            self._delivery.end(Deadline(30, "mutant"))
            order = replace(order, producer=self._delivery.begin(Deadline(30, "mutant")))
            second = write_rows(order, place, table[half:].to_batches(), cluster).written
            counts = {(r.topic, r.partition): r.count for r in first}
            whole = (replace(r, count=r.count + counts[r.topic, r.partition], rows=table.num_rows) for r in second)
            return TaskReport(tuple(whole))

        with patch.context() as inner:
            inner.setattr(output_writer, "write_rows", halves)
            return original(self, *arguments)

    patch.setattr(BatchCommit, "_write", write)
    patch.setattr(ExactlyOnce, "ahead", lambda *_: None)


def sequences_start_anew(patch: Patch) -> None:
    """Every Arrow batch is numbered from 0 again."""
    original = row_writer.RowWriter._encode

    def encode(self: Any, topic: str, partition: int, rows: Any, target: Any) -> None:
        self._sequences.pop((topic, partition), None)
        original(self, topic, partition, rows, target)

    patch.setattr(row_writer.RowWriter, "_encode", encode)


# ---- mutants of the direct engine --------------------------------------------------------------------------


def arrived_counts_as_taken(patch: Patch) -> None:
    """Progress is moved to the end of what has arrived, not of what the batch has taken."""
    take = Arrivals.take

    def taken(self: Any, *arguments: Any) -> Any:
        last = getattr(self, "last", self.nothing().start)
        found = take(self, *arguments)
        self.last = found.source.end
        for part in self._waiting:
            topic, partition = part.topic_partition
            self.last[topic][partition] = max(self.last[topic][partition], part.end)
        return replace(found, source=replace(found.source, start=last, end=self.last))

    patch.setattr(Arrivals, "take", taken)


def rest_begins_too_early(patch: Patch) -> None:
    """What is left of a response when a batch has taken its part begins with the last record of that part."""

    def split(self: Any, offset: int) -> tuple[Any, Any]:
        return replace(self, end=offset), replace(self, start=offset - 1)

    patch.setattr(FetchedPart, "split", split)


def rows_are_there_once(patch: Patch) -> None:
    """An attempt uses up the records that were fetched: another one finds none."""
    original = FetchedPart.rows
    used: list[FetchedPart] = []  # kept, so that each has an identity of its own

    def rows(self: Any, query: Any) -> Iterator[pa.RecordBatch]:
        if not any(each is self for each in used):
            used.append(self)
            yield from original(self, query)

    patch.setattr(FetchedPart, "rows", rows)


def ahead_is_not_compared(patch: Patch) -> None:
    """What was sent ahead counts, whatever the batch has come to."""
    patch.setattr(ProgressAhead, "checked", lambda self, progress: progress)


def tasks_begin_too_early(patch: Patch) -> None:
    """Tasks read a range from one record before it on."""
    original = range_rows.dealt

    def dealt(places: Any, *others: Any) -> Any:
        return original([(topic, n, max(0, start - 1), end) for topic, n, start, end in places], *others)

    patch.setattr(range_rows, "dealt", dealt)


def driver_reads_on_where_it_stood(patch: Patch) -> None:
    """After batches of tasks, the driver reads on behind what it had fetched before them, and has given up."""
    patch.setattr(SourceReader, "go_on", lambda self, epochs: None)


def rows_of_the_last_batch_stay(patch: Patch) -> None:
    """The file with the rows that Spark makes in the driver is not emptied before a batch."""
    patch.setattr(MemoryFile, "clear", lambda self: None)


def spark_gets_the_batch_before(patch: Patch) -> None:
    """Spark evaluates the records that were there before, if there were any."""
    original, last = RowProgram._given, {}

    def given(self: Any, columns: Any, rows: int) -> pa.RecordBatch:
        now = original(self, columns, rows)
        return last.setdefault("given", now) if last.get("given", now).num_rows == now.num_rows else now

    patch.setattr(RowProgram, "_given", given)


# ---- a run -----------------------------------------------------------------------------------------------


class Placed:
    """User code whose result differs from run to run: rows go to the two partitions in turn, from either on."""

    SCHEMA = f"{recorder.TAGGED_SCHEMA}, partition int"

    def __init__(self, once: Path) -> None:
        self.once = once

    def place(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """As a function of ``Flow.map``."""
        partitions = (np.arange(rows.num_rows) + self.once.exists()) % 2
        return rows.append_column("partition", pa.array(partitions, pa.int32()))


def written_rows(flow: Any, pipe: Any, fault: Fault, once: Path, engine: str) -> Any:
    """The rows of the flow with their tags, as a query that the engine can run."""
    read = flow.read(pipe.source, max_records_per_batch=BATCH_ROWS)
    rows = read.selectExpr("key", "value", "topic", "partition", "offset", "0L AS n")
    rows = flow.map(rows, functools.partial(recorder.tagged_rows, flow=pipe.flow), schema=recorder.TAGGED_SCHEMA)
    if engine == SQL:
        computed = "unbase64(base64(value)) AS value", "transform(headers, each -> each) AS headers"
        rows = rows.selectExpr("key", *computed)
    return flow.map(rows, Placed(once).place, schema=Placed.SCHEMA) if fault.placed else rows


def write_everything(pipe: Any, fault: Fault, once: Path, engine: str) -> BaseException | None:
    """One run of the flow; what stopped it, if something did."""
    flow = pipe.open()
    try:
        rows = written_rows(flow, pipe, fault, once, engine)
        options: dict[str, Any] = {"engine": DRIVER if engine == SQL else engine}
        if engine == CHECKPOINT:
            options = {"checkpoint": str(pipe.tmp_path / "checkpoint")}
        if fault.given_back:
            options = {}
        # The driver takes over when no more than half of this is left.
        with Patch.context() as patch, tasks_above(BATCH_ROWS) if fault.given_back else contextlib.nullcontext():
            patch.setattr(QueryFacts, "may_make_many", False)  # so the driver writes micro-batches
            query = flow.write(rows, topic=pipe.target, **options).start()
            try:
                query.processAllAvailable()
            finally:
                query.stop()
    except Exception as error:
        return error
    finally:
        flow.close()
    return None


def is_out_of_date(end: BaseException | None) -> bool:
    """Whether a run has ended because the code has changed that a mutant changes, and not in the way it breaks."""
    while end is not None:
        if isinstance(end, TypeError | AttributeError | NameError):
            return True
        end = end.__cause__ or end.__context__
    return False


def run(
    pipe: Any, mutant: Callable[[Patch], None], fault: Fault, engine: str
) -> tuple[Any, list[BaseException | None]]:
    """The verdict on a build that was put through a fault, and how each of its runs ended."""
    once, path = pipe.tmp_path / "fired", pipe.tmp_path / "history"
    pipe.fill(2 * BATCH_ROWS + BATCH_ROWS // 2)
    ends = []
    with Patch.context() as broken, recorder.Recorder(path):
        mutant(broken)
        runs = [fault.first, *([fault.second] if fault.more else []), None, None]
        for number, happens in enumerate(runs):
            with Patch.context() as patch:
                if happens is not None:
                    happens(patch, once)
                if fault.given_back:
                    more_when_given_back(patch, once, pipe)
                ends.append(write_everything(pipe, fault, once, engine))
            if not fault.restart or (ends[-1] is None and not (fault.more and number == 0)):
                break
            if fault.more and number == 0:
                pipe.fill(BATCH_ROWS)
    assert not any(map(is_out_of_date, ends)), f"the mutant does not fit the code that it changes: {ends}"
    assert once.exists() == fault.leaves_a_trace, "the fault has not happened"
    verdict = recorder.verify(path, pipe.bootstrap, pipe.flow, sources=[pipe.source], outputs=[pipe.target], seconds=30)
    return verdict, ends
