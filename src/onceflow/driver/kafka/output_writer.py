"""Step ``write``: where the rows of a batch go, and who writes them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from functools import partial

from pyspark.sql import DataFrame

from onceflow import hooks
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.driver.batch.audit import Audit, Part, in_tasks
from onceflow.driver.batch.fetched_rows import FetchedRows, Rows
from onceflow.driver.batch.range_rows import RangeRows, sent
from onceflow.driver.batch.retries import Attempt
from onceflow.driver.kafka.delivery import Delivery
from onceflow.driver.kafka.targets import load_targets
from onceflow.driver.record.numbering import Numbering
from onceflow.driver.record.offset_log import SourceRange
from onceflow.driver.step.state_step import StateStep
from onceflow.errors import BadRecordError
from onceflow.messages import (
    DRIVER,
    REPORT_SPARK_SCHEMA,
    OutputTopic,
    Routing,
    WriteOrder,
    from_rows,
)
from onceflow.planning import placement
from onceflow.planning.options import EXACTLY_ONCE, BatchSummary, SinkOptions
from onceflow.planning.ownership import Columns, Outgoing, prepare
from onceflow.planning.range_tasks import reading_tasks
from onceflow.protocol.names import OwnTopics
from onceflow.protocol.output_limits import OutputLimits
from onceflow.spark.collect import collect
from onceflow.task.row_writer import WriteTask, refuses, write_rows

# Connecting and finding a leader may take longer than a short transaction timeout. The broker enforces the timeout.
_MIN_PATIENCE_S = 30.0
_MAX_METADATA_AGE_S = 30.0
# A larger batch is never written by the driver, even if it has few rows.
_DRIVER_BYTES_MAX = 8_000_000
_TASK_BYTES = 16_000_000
_GUESSED_ROW_BYTES = 1_000
# A task costs Spark a few milliseconds of processor time. This many for each core still share the work evenly.
_READ_TASKS_PER_CORE = 2
_NO_ROUTING = Routing("key", 1, False)  # for an order whose stages choose their own routing


class OutputWriter:
    """Writes the rows of attempts: by the driver when they are few, by tasks otherwise.

    Args:
        columns: the columns of the rows, which have been checked.
        source_partitions: partition count of every source topic.

    Attributes:
        cores: returns how many tasks Spark can run at once. Called for every batch, because executors come and go.
    """

    def __init__(
        self,
        flow: str,
        *,
        cluster: Cluster,
        delivery: Delivery,
        options: SinkOptions,
        columns: Columns,
        cores: Callable[[], int],
        source_partitions: Mapping[str, int],
        state: StateStep | None,
        numbering: Numbering | None,
    ) -> None:
        self._flow = flow
        self._cluster = cluster
        self._delivery = delivery
        self._options = options
        self._columns = columns
        self.cores = cores
        self._source_partitions = dict(source_partitions)
        self._state = state
        self._numbering = numbering
        self._targets: dict[str, OutputTopic] = {}
        self._targets_at = float("-inf")
        self._all_targets: dict[
            str, OutputTopic
        ] = {}  # all topics, for rows that name their topic after a process step
        self._all_targets_at = float("-inf")
        self._row_bytes: float | None = None  # average size of a written row in the last batch; unknown at first
        self._last_records: int | None = None  # of the last batch in this run
        self._rows_elsewhere = False  # rows belonged to other tasks than those that had read them
        self._rows_out = 1.0  # most rows written per row read in a batch so far: a query may explode rows

    def deadline(self, what: str) -> Deadline:
        """The transaction timeout, but long enough to connect and to find leaders."""
        return Deadline(self._patience_s, f"{what} (flow {self._flow})")

    @property
    def _patience_s(self) -> float:
        return max(self._options.transaction_timeout_s, _MIN_PATIENCE_S)

    def refresh_targets(self) -> None:
        """Partition counts and size limits of the output topics; all tasks of a batch see the same."""
        if time.monotonic() - self._targets_at < _MAX_METADATA_AGE_S:
            return
        more = None if self._state is None else self._state.topic_roles
        deadline = self.deadline("reading topic metadata")
        self._targets = load_targets(self._cluster, self._options.topic, deadline, more=more)
        self._targets_at = time.monotonic()

    def limits(self, topics: Iterable[str]) -> dict[str, OutputLimits]:
        """What those of these topics take that are known."""
        known = {topic: self._targets[topic] for topic in topics if topic in self._targets}
        return {topic: target.limits(topic, self._options.compression) for topic, target in known.items()}

    def write(self, rows: Rows, attempt: Attempt) -> list[Part]:
        """Produce every row under the producer id and epoch of the attempt, and collect what was acknowledged."""
        if isinstance(rows, FetchedRows):
            return self._write_fetched(rows, attempt)
        if isinstance(rows, RangeRows):
            with sent(self._flow):
                return self._write_ranges(rows, attempt)
        return self._write_micro_batch(rows, attempt)

    def _write_micro_batch(self, df: DataFrame, attempt: Attempt) -> list[Part]:
        """A micro-batch of Spark: the driver writes it if few rows are expected, else tasks do."""
        expected_rows = self._expected_rows(attempt.source)
        expected_bytes = expected_rows * (self._row_bytes or _GUESSED_ROW_BYTES)
        on_driver = (
            expected_rows <= self._options.driver_rows
            and expected_bytes <= _DRIVER_BYTES_MAX
            and attempt.summary.attempts == 1
        )
        cores = 1 if on_driver else self.cores()
        if not math.isfinite(expected_rows):
            expected_bytes = float(cores * _TASK_BYTES)  # not known: use all cores
        return self._write_outgoing(self._outgoing(df), attempt, self._tasks_for(expected_bytes, cores), on_driver)

    def _write_frame(self, rows: RangeRows, tasks: int, attempt: Attempt) -> list[Part]:
        """Rows that tasks read, and which Spark brings to others."""
        df, source = rows.frame(tasks), attempt.source
        outgoing = self._outgoing(df)
        if self._state is not None:
            order = self._order(attempt, outgoing.topic, self._targets)
            place = self._state.place(source.max_rows)
            if place.way == "fused":
                attempt.summary.path, parts = self._state.write(df, place, order, self._cluster)
                return parts
            outgoing = self._state.outgoing(df, place, order)
        expected_bytes = source.max_rows * self._rows_out * (self._row_bytes or _GUESSED_ROW_BYTES)
        return self._write_outgoing(outgoing, attempt, self._tasks_for(expected_bytes, self.cores()), on_driver=False)

    def _outgoing(self, df: DataFrame) -> Outgoing:
        return Outgoing(df, self._columns, self._options.topic)

    def _tasks_for(self, nbytes: float, cores: int) -> int:
        return max(1, min(cores, round(nbytes / _TASK_BYTES + 0.5)))

    def _write_fetched(self, rows: FetchedRows, attempt: Attempt) -> list[Part]:
        """Rows of the direct engine: the driver writes them, or runs the process step itself."""
        attempt.summary.path = "driver"
        topic, state = self._options.topic, self._state
        if state is not None and state.written_as_is:
            order = self._order(attempt, topic, self._targets)
            return state.write_fetched(rows, order, self._cluster, attempt.companion)
        targets = self._targets if topic is not None else self._every_target()
        hash_key = self._columns.key and self._options.partitioner == "key"
        order = self._order(attempt, topic, targets, Routing("key", 1, hash_key))
        if state is not None:
            return state.write_fetched(rows, order, self._cluster, attempt.companion)
        with closing(rows.batches()) as batches:  # also after an error: Spark may have more of them
            written = write_rows(order, DRIVER, batches, self._cluster, attempt.companion).written
        for report in written:
            if isinstance(report.error, BadRecordError):
                self._name_source(report.error, rows, order)
        return [Part(written, None, False)]

    def _name_source(self, error: BadRecordError, rows: FetchedRows, order: WriteOrder) -> None:
        """Say of which record the row was made that cannot be written."""
        if source := rows.culprit(partial(refuses, order, DRIVER, self._cluster)):
            error.with_detail("; ".join(filter(None, [f"made of record {source}", error.detail])))

    def _write_ranges(self, rows: RangeRows, attempt: Attempt) -> list[Part]:
        """Rows that tasks read by themselves. If these tasks cannot also write them, Spark moves the rows to others.

        A task fails at a row that belongs to another one. Only a transaction takes back what was written until then. So
        with a weaker guarantee, rows are moved wherever that could happen.
        """
        cores, topic = self.cores(), self._options.topic
        targets = self._targets if topic is not None or self._state is not None else self._every_target()
        read = list(self._source_partitions.values())
        written = [] if topic is None else [targets[topic].partitions]
        partitioner = None if self._state is not None else self._options.partitioner
        stay = partitioner == "source"  # rows stay where they were read: no shuffle
        anywhere = stay or (partitioner == "round_robin" and topic is not None)
        if rows.needs_frame or self._rows_elsewhere or (self._options.guarantee != EXACTLY_ONCE and not anywhere):
            tasks = None
        elif self._state is not None:
            tasks = self._state.range_tasks(read, cores)
        elif self._options.partitioner != "key":  # each task writes any of its partitions, or those it has read
            tasks = min([cores, max(read), *written])
        else:
            tasks = reading_tasks([*read, *written], cores)
        if tasks is None or (tasks == 1 and cores > 1 and not stay):
            return self._write_frame(rows, min(cores, max(read)), attempt)
        if self._state is not None:
            order = self._order(attempt, topic, targets)
            attempt.summary.path, parts = self._state.write_ranges(rows, tasks, order, self._cluster)
            return parts
        attempt.summary.path = f"{tasks} reading tasks" if tasks > 1 else "1 reading task"
        hash_key = self._columns.key and self._options.partitioner == "key"
        order = self._order(attempt, topic, targets, Routing("key", tasks, hash_key, by_number=True))
        return [Part(rows.run(order, tasks).written, tasks, False)]

    def held_back(self) -> Callable[[int], bool] | None:
        """See `StateStep.held_back`."""
        if self._state is None or self._rows_elsewhere or self._options.guarantee != EXACTLY_ONCE:
            return None
        if self._state.range_tasks(self._source_partitions.values(), self.cores()) is None:
            return None
        return self._state.held_back()

    def believe(self, found: Collection[str]) -> None:
        """What attempts have found, also those of earlier drivers: `placement.KEYS`, for one."""
        self._rows_elsewhere = placement.KEYS in found

    def _write_outgoing(self, outgoing: Outgoing, attempt: Attempt, max_tasks: int, on_driver: bool) -> list[Part]:
        targets = self._targets if outgoing.topic == self._options.topic else self._every_target()
        prepared = prepare(
            outgoing.df,
            outgoing.columns,
            partitioner=self._options.partitioner,
            topic=outgoing.topic,
            targets=targets,
            source=self._source_partitions,
            max_tasks=max_tasks,
            on_driver=on_driver,
            read_tasks=self._read_tasks(attempt.source),
            # One task for all partitions of Spark's state would be slow, even if few rows come out of them.
            keep_tasks=self._state is not None or self._options.stateful,
        )
        order = self._order(attempt, outgoing.topic, targets, prepared.routing)
        if on_driver:
            rows = collect(prepared.df, interpreted=self._options.reads_little)
            parts = [Part(write_rows(order, DRIVER, rows, self._cluster).written, None, False)]
        else:
            collected = prepared.df.mapInArrow(WriteTask(order), REPORT_SPARK_SCHEMA).collect()
            parts = [Part(from_rows(collected).written, prepared.routing.tasks, prepared.shuffled)]
        if not outgoing.in_front:
            attempt.summary.path = "driver" if on_driver else in_tasks(prepared.routing.tasks)
        else:  # "2 + 1 tasks": the word is for the sum
            written_by = "driver" if on_driver else f"{prepared.routing.tasks} tasks"
            attempt.summary.path = f"{outgoing.in_front} + {written_by}"
        return parts if self._state is None else parts + self._state.gather(order, self._cluster)

    def _read_tasks(self, source: SourceRange) -> int | None:
        """How many tasks read the source partitions of a batch; None: each partition has its own."""
        if not self._options.merges_tasks:
            return None
        partitions = len(source.news())
        if partitions <= _READ_TASKS_PER_CORE:  # most topics of a small flow; without a call to Spark
            return None
        most = _READ_TASKS_PER_CORE * self.cores()
        return most if partitions > most else None

    def on_commit(self, checked: Audit, summary: BatchSummary) -> None:
        """The batch is committed. Estimates for the next batch are based on it."""
        if checked.records:
            self._row_bytes = checked.nbytes / checked.records
            self._rows_out = max(self._rows_out, checked.records / max(1, summary.max_rows))
        self._last_records = summary.records

    def on_lost(self) -> None:
        """The batch was given up."""
        self._last_records = 0

    def _expected_rows(self, source: SourceRange) -> float:
        """Upper estimate of the rows that a batch writes; infinite when there is no basis for an estimate."""
        rows = source.max_rows * self._rows_out
        if self._numbering is None or not (self._options.stateful or source.others):
            return rows
        # Windows close, joined rows expire, and other sources are not counted. So the last batch is the only hint, and
        # all rows in Spark's state may come out at once.
        if self._last_records is None:
            return math.inf
        return rows + self._numbering.rows_kept() + 2 * self._last_records

    def _every_target(self) -> dict[str, OutputTopic]:
        """All topics of the cluster, for rows that name their topic. At most `_MAX_METADATA_AGE_S` old."""
        if time.monotonic() - self._all_targets_at >= _MAX_METADATA_AGE_S:
            self._all_targets = load_targets(self._cluster, None, self.deadline("reading topic metadata"))
            self._all_targets_at = time.monotonic()
        return self._all_targets

    def _order(
        self, attempt: Attempt, topic: str | None, targets: Mapping[str, OutputTopic], routing: Routing = _NO_ROUTING
    ) -> WriteOrder:
        """The order for the tasks of a stage."""
        tables = set() if self._state is None else self._state.topics
        return WriteOrder(
            flow=self._flow,
            batch=attempt.batch,
            settings=self._cluster.settings,
            transactional_id=self._delivery.transactional_id,
            producer=attempt.producer,
            sequences=self._delivery.sequences,
            compression=self._options.compression,
            topic=topic,
            targets=targets,
            routing=routing,
            transaction_version=self._cluster.transaction_version,
            deadline_s=self._patience_s,
            calls_s=max(0.001, self._options.transaction_timeout_s - attempt.open_s),
            own_topics=OwnTopics(frozenset(self._source_partitions), frozenset(tables)),
            without_outputs=attempt.without_outputs,
            faults=hooks.configured(),
        )
