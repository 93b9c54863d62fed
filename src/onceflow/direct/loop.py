"""The loop of the direct engine: it fetches, and runs a batch at every trigger for which there are records.

It is one thread. A batch takes what has arrived, up to a size that fits the interval of the trigger; the size follows
from how long the last batches have taken. While a batch runs, brokers prepare their next answers.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from uuid import uuid4

from pyspark.sql import SparkSession

from onceflow.clock import clock_ms
from onceflow.direct.arrivals import Limits, Taken
from onceflow.direct.backlog import Backlog
from onceflow.direct.batches import DirectBatches
from onceflow.direct.fetched import merged
from onceflow.direct.pacing import BATCH_BYTES, FULL, BatchSize
from onceflow.direct.shares import Shares
from onceflow.direct.source_reader import BUFFER_BYTES, SourceReader
from onceflow.driver.batch.fetched_rows import FetchedRows
from onceflow.driver.batch.range_rows import RangeRows, RangeSource
from onceflow.driver.record import handover
from onceflow.driver.record.offset_log import SourceRange, TopicOffsets
from onceflow.errors import BatchAbortedError, EnvironmentUnusableError, ProcessorError
from onceflow.host.garbage import SetAside
from onceflow.logs import log_context
from onceflow.messages import forget_driver_properties
from onceflow.spark import driver_jvm
from onceflow.spark.jvm import SPARK_ERRORS, is_stopped
from onceflow.spark.query_progress import ProgressReports, left
from onceflow.spark.row_program import RowPrograms

_WAIT_S = 0.1  # how long a Fetch is waited for, before stops and timers are looked at again
# Offsets without records (transaction markers, aborted records) need no batch of their own at once.
_OFFSETS_WAIT_S = 1.0
_SET_ASIDE_S = 5.0  # the age of a run that is worth a full collection of garbage
_LOOK_EVERY_S = 0.5  # answers of brokers are taken so often, also while enough waits for batches
_UNPACED, _BATCHES_MAX = 10_000_000, 10_000  # in `run_through`: records of a batch, and batches
# A batch that tasks read takes about so long: it starts a Spark job.
_TASKS_S = 1.0
_TASKS_RECORDS_FIRST, _TASKS_RECORDS_MIN, _TASKS_RECORDS_MAX = 100_000, 20_000, 5_000_000


class DirectLoop:
    """Runs from ``start`` until it is stopped, has failed, or has read everything up to its end.

    Args:
        reader: used by this thread alone.
        spark: prepares large stores in tasks.
        trigger_s: how often a batch begins; 0: as soon as there are records.
        records_per_batch: most offsets of one batch, by topic.
        until: the query ends when it has read everything before these offsets; None: it does not end.
        backlog: decides who reads. tasks: what tasks need to read by themselves.
        programs: of Spark's operators.

    Attributes:
        lag: offsets left to read, as they were known at the last look.
        error: what has ended the loop.
        waiting: whether it waits for records or for the next trigger.
    """

    def __init__(
        self,
        batches: DirectBatches,
        reader: SourceReader,
        *,
        spark: SparkSession,
        trigger_s: float,
        records_per_batch: Mapping[str, int],
        until: TopicOffsets | None,
        backlog: Backlog,
        tasks: RangeSource,
        programs: RowPrograms,
    ) -> None:
        self._batches = batches
        self._reader = reader
        self._spark = spark
        self._trigger_s = trigger_s
        self._records_per_batch = records_per_batch
        self._until = until
        self._backlog = backlog
        self._tasks = tasks
        self._programs = programs
        self._reports: ProgressReports | None = None
        self._ended: Callable[[], None] = lambda: None
        self._size = BatchSize(trigger_s)
        self._tasks_size = BatchSize(
            _TASKS_S, first=_TASKS_RECORDS_FIRST, least=_TASKS_RECORDS_MIN, most=_TASKS_RECORDS_MAX
        )
        self._stop, self._start_lock = threading.Event(), threading.Lock()
        self._next_at = 0.0  # when the next batch may begin; 0: none has run yet
        self._offsets_since: float | None = None  # since when there are offsets without records
        self._busy_s = 0.0  # for fetching, since the last batch
        self._ahead_s = 0.0  # for fetching, while a batch ends
        self._fetch_problem: Exception | None = None
        self._fetched_at = float("-inf")
        self._job_group = f"onceflow-direct-{uuid4()}"
        self._shares = Shares(records_per_batch)
        self._memory, self._memory_at = SetAside(), math.inf
        self.lag: TopicOffsets = reader.lag()
        self.error: BaseException | None = None
        self.waiting = False
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"onceflow-direct-{batches.flow}")

    def prepare(self, reports: ProgressReports, ended: Callable[[], None]) -> None:
        """It is going to report every batch, and to call ``ended`` at its end, also if it is never started."""
        self._reports, self._ended = reports, ended

    def start(self) -> None:
        """Start the thread, unless it was stopped before."""
        with self._start_lock:
            if not self._stop.is_set():
                self._thread.start()

    @property
    def read(self) -> dict[str, list[int]]:
        """The partitions that are read, by topic."""
        return {topic: sorted(offsets) for topic, offsets in self._reader.arrivals.taken.items()}

    def stop(self) -> None:
        """Let the loop end after the batch that runs. A loop that was not started releases what it holds."""
        with self._start_lock:
            self._stop.set()
            is_started = self._thread.ident is not None
        if not is_started:
            self._close()

    def cancel_tasks(self) -> None:
        """End the tasks that read a batch, or prepare for one. It is aborted, and the next start runs it again."""
        if self._thread.ident is not None:
            with contextlib.suppress(Exception):  # Spark may be gone; SparkContext.stop leaves no JVM to ask
                self._spark.sparkContext.cancelJobGroup(self._job_group)
                self._programs.interrupt()

    def _run(self) -> None:
        log_context.add(flow=self._batches.flow)
        self._memory_at = time.monotonic() + _SET_ASIDE_S
        try:
            with self._failure_noted():
                group = f"flow {self._batches.flow}"
                self._spark.sparkContext.setJobGroup(self._job_group, group, interruptOnCancel=True)
                if self._is_complete() and self._is_due(time.monotonic()):
                    self._run_batch()  # there is nothing to read, but timers are due
                while not self._stop.is_set() and not self._is_complete():
                    self._step()
        finally:
            self._close()

    def run_through(self) -> None:
        """Run batches in the calling thread until everything is committed that is in the sources now, and no timer is
        due. For a loop that was not started. When it fails it has ended, as `error` says.

        All that is there is one batch, if limits of records and bytes allow it, however long it takes.
        """
        try:
            with self._failure_noted():
                self._size = BatchSize(0, first=_UNPACED, least=_UNPACED, most=_UNPACED)
                self._run_up_to(self._reader.look())
        finally:
            forget_driver_properties()
        if self.error is not None:
            self._close()

    def _run_up_to(self, ends: TopicOffsets) -> None:
        reader = self._reader
        for _ in range(_BATCHES_MAX):
            is_full = reader.has_enough or reader.arrivals.nbytes >= BATCH_BYTES
            if reader.is_short_of(ends) and not is_full:
                self._fetch(_WAIT_S)
            elif self._has_work():
                self._run_batch()
            else:
                return
        raise ProcessorError(
            f"there is more to do after {_BATCHES_MAX} batches",
            flow=self._batches.flow,
            next_step="does a timer register another one for a time that has come already? Register it for later",
        )

    def _has_work(self) -> bool:
        arrivals = self._reader.arrivals
        waits = arrivals.has_records or arrivals.has_offsets
        return waits or self._batches.wants_batch(arrivals.nothing(), self._reader.caught_up())

    @contextlib.contextmanager
    def _failure_noted(self) -> Iterator[None]:
        """Report what is raised inside, and keep it in `error`."""
        try:
            yield
        except BaseException as error:
            stopped = self._batches.stopping and isinstance(error, (BatchAbortedError, *SPARK_ERRORS, OSError))
            if not stopped and self._batches.failure is None:
                error = driver_jvm.ended(self._spark, error) or error
                self._batches.failed(error)
            if not stopped or self._batches.failure is not None:  # a batch has failed before the stop could end it
                self.error = error

    def _close(self) -> None:
        self._memory.release()
        try:
            self._reader.close()
        finally:
            self._ended()

    def _is_complete(self) -> bool:
        return self._until is not None and self._reader.reached(self._until)

    def _step(self) -> None:
        """Run a batch, or wait for records, a timer or the next trigger."""
        if self._fetch_problem is not None:
            raise self._fetch_problem
        if self._batches.taken_over is not None:
            raise self._batches.taken_over
        if is_stopped(self._spark):
            raise EnvironmentUnusableError(
                "Spark was stopped, and the query with it",
                flow=self._batches.flow,
                next_step="call query.stop() before spark.stop(); the next start continues where progress ends",
            )
        now = time.monotonic()
        if now < self._next_at:
            self._wait(self._next_at - now)
        elif self._backlog.by_tasks:
            if not self._run_by_tasks():
                self._reader.go_on(self._batches.progress.epochs)
        elif self._is_due(now):
            wanted = _total(self._wanted())
            self._backlog.looked(wanted, now=now)
            if not self._backlog.by_tasks:
                self._size.looked(wanted)
                self._fill()
                self._run_batch()
        elif not self._fetch(_WAIT_S) and not self._reader.is_behind:
            self._batches.idle = True
            self._set_aside()

    def _is_due(self, now: float) -> bool:
        """Whether there is something for a batch to do."""
        if self._reader.arrivals.has_records:
            return True
        if not self._reader.arrivals.has_offsets:
            self._offsets_since = None
            return self._batches.wants_batch(self._reader.arrivals.nothing(), self._reader.caught_up())
        if self._offsets_since is None:
            self._offsets_since = now
        ends = self._until is not None or self._batches.progress.handover is not None
        return ends or self._reader.has_enough or now - self._offsets_since >= _OFFSETS_WAIT_S

    def _wait(self, seconds: float) -> None:
        """Wait for the trigger. If more is left to read than a batch takes, fetch it meanwhile."""
        if not self._backlog.by_tasks and self._reader.is_behind and self._reader.arrivals.nbytes < 2 * BATCH_BYTES:
            self._fetch(min(seconds, _WAIT_S))
            return
        if self._set_aside():
            return
        self.waiting = True
        self._stop.wait(min(seconds, _WAIT_S))
        self.waiting = False

    def _set_aside(self) -> bool:
        """Set aside what is in memory, once, when nothing is urgent. Returns whether it took its time."""
        if time.monotonic() < self._memory_at:
            return False
        self._memory.hold()
        self._memory_at = math.inf
        return True

    def _fetch(self, seconds: float) -> bool:
        """Wait for an answer of a broker. Returns whether there was one."""
        started = time.monotonic()
        self.waiting = True
        self._reader.end_at(self._bounds())
        self._fetched_at = started
        try:
            arrived = self._reader.fetch(seconds)
        finally:
            self.waiting = False
        if arrived:
            self._busy_s += time.monotonic() - started
        self.lag = self._reader.lag()
        return arrived

    def _fill(self) -> None:
        """With a backlog, fetch until there is enough for a batch. Look from time to time also if there is enough, at
        topics and partitions of which nothing waits."""
        reader, arrivals = self._reader, self._reader.arrivals
        if time.monotonic() - self._fetched_at > _LOOK_EVERY_S and arrivals.nbytes < BUFFER_BYTES:
            self._fetch(0)
        while (
            reader.is_behind
            and arrivals.takeable(self._records_per_batch) < self._size.records
            and arrivals.nbytes < BATCH_BYTES
        ):
            if self._stop.is_set() or not self._fetch(_WAIT_S):
                return

    def _run_batch(self) -> None:
        limits = Limits(self._records_per_batch, self._size.records, BATCH_BYTES)
        taken = self._reader.arrivals.take(limits, self._ends_of_shares())
        caught_up = self._reader.caught_up()
        if not taken.source.max_rows and not self._batches.wants_batch(taken.source, caught_up):
            self._fetch(_WAIT_S)  # what waits may not be taken yet
            return
        self._offsets_since = None
        now = time.monotonic()
        backlog = self._reader.has_more
        if backlog:
            self._reader.fetch_ahead()
        started_ms = clock_ms()
        self._programs.now_us = started_ms * 1000  # the same for all attempts
        program = self._tasks.program
        meanwhile = self._take_arrived if backlog else None
        rows: FetchedRows | RangeRows = FetchedRows(self._spark, merged(taken.parts, program.query), program, meanwhile)
        if self._tasks.all_batches and not taken.source.max_rows:  # timers
            rows = RangeRows(self._tasks, taken.source, started_ms * 1000)
        self._batches(rows, taken.source, backlog=backlog, caught_up=caught_up)
        if not self._reader.has_more:
            self._batches.settle_copies()
        seconds = self._accounted(now)
        if self._size.ran(taken.source.max_rows, seconds) or taken.limited:
            self._backlog.ran(taken.source.max_rows, seconds, now=time.monotonic())
        self.lag = self._reader.lag()
        self._report(taken.source, _records_of(taken), started_ms, seconds)
        self._busy_s, self._ahead_s = self._ahead_s, 0.0
        self._ran(now, behind=self._reader.has_more)

    def _ends_of_shares(self) -> TopicOffsets | None:
        """Where the next batch has to end. If more of a topic waits than its limit, each partition has its share."""
        arrivals, bounds = self._reader.arrivals, self._bounds()
        if all(arrivals.offsets[topic] <= most for topic, most in self._records_per_batch.items()):
            return bounds
        left = self._within_bounds(self._reader.lag())
        return _ends(arrivals.taken, self._shares.of_waiting(arrivals.waiting(bounds), left, self._size.records))

    def _take_arrived(self) -> None:
        """While brokers commit a batch, the records of the next one are decoded. What goes wrong says nothing about the
        outcome: it is raised when the batch has ended."""
        started = time.monotonic()
        try:
            self._reader.take_arrived()
        except Exception as problem:
            self._fetch_problem = problem
        self._ahead_s += time.monotonic() - started

    def _run_by_tasks(self) -> bool:
        """Run a batch whose records tasks read by themselves. False: the driver is to read again."""
        ends = self._reader.look_ahead()
        if ends is None:
            self._backlog.give_back("a leader of the sources does not answer", now=time.monotonic())
            return False
        self._reader.end_at(self._bounds())
        self.lag = self._reader.lag()
        wanted = self._without_held_back(self._within_bounds(left(self._reader.arrivals.taken, ends)))
        self._backlog.looked(_total(wanted), now=time.monotonic())
        if not self._backlog.by_tasks:
            return False
        most = min(self._tasks_size.records, self._backlog.records_max())
        arrivals = self._reader.arrivals
        source = arrivals.take_unread(_ends(arrivals.taken, self._shares.next(wanted, most)))
        started_ms, started = clock_ms(), time.monotonic()
        self._programs.now_us = started_ms * 1000  # for timers that are left
        rows = RangeRows(self._tasks, source, started_ms * 1000)
        self._batches(rows, source, backlog=True, caught_up=self._reader.caught_up())
        seconds = self._accounted(started)
        read, limits = source.by_topic(), self._records_per_batch
        full = self._tasks_size.ran(source.max_rows, seconds) or source.max_rows >= FULL * most
        if full or any(read[topic] >= limits[topic] for topic in limits):
            self._backlog.ran(source.max_rows, seconds, now=time.monotonic())
        self.lag = self._reader.lag()
        self._report(source, {**dict.fromkeys(source.end, 0), **rows.read}, started_ms, seconds)
        self._ran(started, behind=_total(left(source.end, ends)) > 0)
        return self._backlog.by_tasks

    def _without_held_back(self, wanted: TopicOffsets) -> TopicOffsets:
        """Nothing of partitions whose state is being restored while others go on."""
        is_held_back = self._batches.held_back()
        if is_held_back is None:
            return wanted
        return {
            topic: {n: 0 if is_held_back(n) else count for n, count in offsets.items()}
            for topic, offsets in wanted.items()
        }

    def _accounted(self, started: float) -> float:
        """The seconds of a batch that began then, with fetching. Its summary accounts for all of them."""
        seconds = time.monotonic() - started + self._busy_s - self._ahead_s
        if (summary := self._batches.summary) is not None:
            steps = {"fetch": self._busy_s, **summary.seconds}
            if self._ahead_s:
                steps["end"] -= self._ahead_s  # it is a part of the next batch
            steps["other"] = max(0.0, seconds - sum(steps.values()) - self._batches.timers_s)
            summary.seconds = steps
        return seconds

    def _ran(self, started: float, *, behind: bool) -> None:
        """A batch that began then has run. With a backlog, the next one begins at once: a batch is limited, so the flow
        would fall behind further."""
        due = self._next_at or started
        self._next_at = started if behind else max(due, started - self._trigger_s) + self._trigger_s

    def _report(self, source: SourceRange, rows: Mapping[str, int], started_ms: int, seconds: float) -> None:
        if self._reports is None or self._batches.summary is None:
            return
        latest = {
            topic: {n: end + self.lag.get(topic, {}).get(n, 0) for n, end in ends.items()}
            for topic, ends in source.end.items()
        }
        self._reports.committed(
            self._batches.summary,
            source,
            latest,
            rows,
            started_ms=started_ms,
            duration_s=seconds,
            fetch_s=self._busy_s,
        )

    def _wanted(self) -> TopicOffsets:
        """Of the offsets that are left to read, those that the next batch may take. Driver and tasks are chosen by
        these alone: what is behind the bounds would be handed over again and again, and nobody may read it."""
        return self._within_bounds(self._reader.lag(readable=True))

    def _within_bounds(self, lag: TopicOffsets) -> TopicOffsets:
        bounds = self._bounds()
        if bounds is None:
            return lag
        most = left(self._reader.arrivals.taken, bounds)
        return {
            topic: {n: min(count, most.get(topic, {}).get(n, 0)) for n, count in offsets.items()}
            for topic, offsets in lag.items()
        }

    def _bounds(self) -> TopicOffsets | None:
        """Where this batch has to end."""
        first = handover.first_range_end(self._batches.progress)
        return first if first is not None else self._until


def _records_of(taken: Taken) -> dict[str, int]:
    """How many records of each topic a batch has taken."""
    rows = dict.fromkeys(taken.source.end, 0)
    for part in taken.parts:
        rows[part.topic_partition[0]] += part.records
    return rows


def _ends(taken: TopicOffsets, shares: TopicOffsets) -> TopicOffsets:
    """Where a batch ends that takes so many offsets of each partition."""
    return {topic: {n: taken[topic][n] + count for n, count in offsets.items()} for topic, offsets in shares.items()}


def _total(lag: TopicOffsets) -> int:
    return sum(count for offsets in lag.values() for count in offsets.values())
