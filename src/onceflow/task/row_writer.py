"""Writes rows to Kafka: chooses partitions, encodes, produces, waits for all acknowledgements, and reports.

`WriteTask` is pickled and runs in Spark tasks (``mapInArrow``). For a small batch, the driver calls the same code. Rows
are streamed: memory is limited to one Arrow batch and the producer's unacknowledged bytes, whatever the size of the
micro-batch.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import threading
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa

from onceflow import hooks
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.produce import Acknowledged, Producer
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import missing, topic_limits
from onceflow.client.transaction_requests import add_partitions
from onceflow.clock import clock_ms
from onceflow.errors import (
    BadRecordError,
    BatchAbortedError,
    OnceflowError,
    ProtocolError,
    UnknownTopicError,
    counted,
    located,
)
from onceflow.messages import NotCopartitionedError, OutputTopic, Report, TaskInfo, TaskReport, WriteOrder, report_row
from onceflow.protocol import timestamps
from onceflow.protocol.batches import EncodedBatch, encode_batches, next_sequence
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.output_limits import OutputLimits
from onceflow.protocol.partitioners import group_by_partition, key_partitions
from onceflow.state.api.user_errors import shown
from onceflow.task import task_logs, worker_memory

log = logging.getLogger("onceflow")

_TELL_EVERY_S = 60.0
_GATHERED_BYTES = 256_000  # a small batch of a flow is one request to each broker


def owner_of(topic: str | None, partition: int, tasks: int) -> int:
    """The task that writes a partition. ``ownership._group`` is the same function in Spark SQL.

    Args:
        topic: the topic; None if all rows go to one topic.
    """
    return ((0 if topic is None else zlib.crc32(topic.encode())) + partition) % tasks


class WriteTask:
    """The function given to ``mapInArrow``."""

    def __init__(self, order: WriteOrder) -> None:
        self.order = order

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        info = task_info(self.order)
        with task_logs.of_batch(self.order, info):
            report = write_rows(self.order, info, batches, worker_cluster(self.order.settings))
        yield report_row(report)


def task_info(order: WriteOrder) -> TaskInfo:
    """The Spark task in which this code runs. This function also announces the step ``begin``."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise RuntimeError("the code of a task was called outside a Spark task")
    worker_memory.task_begins()
    hooks.configure(order.faults)
    hooks.at("begin", where="task", flow=order.flow, batch=order.batch, task=context.partitionId())
    return TaskInfo("task", context.partitionId(), context.attemptNumber(), context.stageId())


class Companion(Protocol):
    """What the driver sends beside the rows that it writes itself.

    Args:
        topic_partition: of its record.
    """

    @property
    def topic_partition(self) -> TopicPartition: ...

    def before_rows(self) -> None:
        """Rows are about to be sent. Called once."""
        ...

    def record(self, topics: Collection[str]) -> EncodedBatch | None:
        """The record that goes with the last rows; None: there is none.

        Args:
            topics: to which rows were written.
        """
        ...

    def acknowledged(self, offset: int) -> None:
        """Where its record is."""
        ...


def write_rows(
    order: WriteOrder,
    info: TaskInfo,
    batches: Iterable[pa.RecordBatch],
    cluster: Cluster,
    companion: Companion | None = None,
) -> TaskReport:
    """Write rows and report. Errors of onceflow are reported, not raised: so the driver gets the original class."""
    started = time.monotonic()
    writer = RowWriter(order, info, cluster, companion)
    error: OnceflowError | None = None
    acknowledged: Mapping[TopicPartition, Acknowledged] = {}
    try:
        if info.attempt > 0:
            raise extra_attempt(f"task {info.task} is at attempt {info.attempt}", order)
        for batch in batches:
            writer.write(batch)
        acknowledged = writer.finish()
        if info.where == "task":  # the driver announces the step itself
            hooks.at("write", where="task", flow=order.flow, batch=order.batch, task=info.task)
    except OnceflowError as problem:
        error = problem
    seconds = time.monotonic() - started
    return TaskReport(reports_of(info, acknowledged, rows=writer.rows, seconds=seconds, error=error))


def reports_of(
    info: TaskInfo,
    acknowledged: Mapping[TopicPartition, Acknowledged],
    *,
    rows: int,
    seconds: float,
    error: OnceflowError | None,
) -> tuple[Report, ...]:
    """One report for each partition that was written. If there is none, a report that only says that the task ran."""
    rss_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def report(topic: str | None, partition: int, done: Acknowledged) -> Report:
        return Report(
            task=info.task,
            attempt=info.attempt,
            stage=info.stage,
            topic=topic,
            partition=partition,
            base_offset=done.base_offset,
            count=done.count,
            nbytes=done.nbytes,
            rows=rows,
            seconds=seconds,
            rss_kib=rss_kib,
            error=error,
        )

    written = tuple(report(topic, partition, done) for (topic, partition), done in acknowledged.items())
    return written or (report(None, -1, Acknowledged()),)


def extra_attempt(what: str, order: WriteOrder) -> BatchAbortedError:
    """The error for a second attempt of a task (I3). An earlier attempt may have written with this epoch and the same
    sequence numbers, so Kafka would drop the new records as duplicates, without an error."""
    return BatchAbortedError(
        f"Extra attempt: {what}; nothing may be written twice under one epoch",
        flow=order.flow,
        batch=order.batch,
        next_step="none: the batch is aborted and run again under a new epoch",
    )


def refused_topic(topic: str, why: str, rows: pa.RecordBatch) -> BadRecordError:
    """The error for rows that name a topic that outputs must not be written to."""
    key = rows.column("key")[0].as_py() if "key" in rows.schema.names and rows.num_rows else None
    return BadRecordError(
        f"A record names the topic {topic!r}, which {why}",
        topic=topic,
        detail=f"the first of {rows.num_rows} such records of an Arrow batch has the key {key!r:.120}",
        next_step="outputs need topics of their own. If the topic column is the one that was read, give topic= to "
        "Flow.write, or drop the column; else correct it, or Record(topic=...) of the processor",
    )


def refuses(order: WriteOrder, info: TaskInfo, cluster: Cluster, batches: Iterable[pa.RecordBatch]) -> bool:
    """Whether rows cannot be written. Nothing is sent."""
    writer = RowWriter(replace(order, transaction_version=2), info, cluster)
    writer._producer = cast(Producer, _NotSent())
    try:
        for batch in batches:
            writer.write(batch)
    except BadRecordError:
        return True
    return False


class _NotSent:
    """In place of a producer."""

    def send(self, topic: str, partition: int, encoded: EncodedBatch) -> None:
        pass


@contextlib.contextmanager
def _named_by_key(rows: pa.RecordBatch) -> Iterator[None]:
    """Name the row that cannot be encoded by its key."""
    try:
        yield
    except BadRecordError as error:
        if error.row >= 0 and "key" in rows.schema.names:
            key = rows.column("key").cast(pa.binary())[error.row].as_py()
            error.with_detail(f"the row with the key {shown(key)}: {error.detail}")
        raise


class RowWriter:
    """Chooses topic and partition of Arrow rows, encodes the rows, and sends them with the producer."""

    def __init__(self, order: WriteOrder, info: TaskInfo, cluster: Cluster, companion: Companion | None = None) -> None:
        self._order = order
        self._info = info
        self._cluster = cluster
        self._companion = companion
        self._clock: Deadline | None = None
        self._targets = dict(order.targets)
        self._producer: Producer | None = None
        self._sequences: dict[TopicPartition, int] = {}
        self._turns: dict[str, int] = {}
        self._owned: dict[str, list[int]] = {}
        self._checked: set[str] = set()
        self.rows = 0

    @property
    def _deadline(self) -> Deadline:
        """The deadline of this task. The time begins with the first write: a long restore before it does not count."""
        if self._clock is None:
            what = f"writing batch {self._order.batch} of flow {self._order.flow}"
            self._clock = Deadline(self._order.deadline_s, what)
        return self._clock

    def write(self, batch: pa.RecordBatch) -> None:
        """Send one Arrow batch of rows (columns as ``ownership.py`` selects them)."""
        if batch.num_rows == 0 or self._order.without_outputs:
            return
        self.rows += batch.num_rows
        for topic, rows in self._by_topic(batch):
            self._write_topic(topic, rows)

    def write_to(self, topic: str, partition: int, batch: pa.RecordBatch) -> None:
        """Send rows to a partition that the caller has chosen. No other task may write to this partition."""
        without_outputs = self._order.without_outputs and topic not in self._order.own_topics.tables
        if batch.num_rows and not without_outputs:
            self.rows += batch.num_rows
            self._encode(topic, partition, batch, self.target(topic))

    def finish(self) -> Mapping[TopicPartition, Acknowledged]:
        """Wait for all acknowledgements. Returns what was written, by topic and partition."""
        companion = self._companion
        record = None if companion is None else companion.record({topic for topic, _ in self._sequences})
        if companion is None or record is None:
            return {} if self._producer is None else self._producer.flush()
        self._producer = self._producer or self._new_producer()
        self._producer.send(*companion.topic_partition, record)
        found = self._producer.flush()
        companion.acknowledged(found.pop(companion.topic_partition).base_offset)
        return found

    # ---- routing -------------------------------------------------------------------------------------

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self._order.topic is not None:
            yield self._order.topic, batch
            return
        column = batch.column("topic")
        if column.null_count:
            raise BadRecordError(
                f"{counted(column.null_count, 'row')} with a null topic",
                flow=self._order.flow,
                batch=self._order.batch,
                next_step="give every row a topic, or use the topic= argument of Flow.write",
            )
        names = column.dictionary_encode()
        codes = names.indices.to_numpy(zero_copy_only=False)
        for code, indices in group_by_partition(codes, len(names.dictionary)):
            name = names.dictionary[code].as_py()
            rows = batch if len(indices) == batch.num_rows else batch.take(pa.array(indices))
            self.check_topic(name, rows)
            yield name, rows

    def check_topic(self, topic: str, rows: pa.RecordBatch) -> None:
        """Refuse a topic that rows name, if outputs must not be written to it.

        Raises:
            BadRecordError: with the topic and the first of the rows.
        """
        if topic in self._checked:
            return
        why = self._order.own_topics.refusal(topic)
        if why:
            raise refused_topic(topic, why, rows).locate(flow=self._order.flow, batch=self._order.batch)
        self._checked.add(topic)

    def _write_topic(self, topic: str, rows: pa.RecordBatch) -> None:
        target = self.target_of(topic, rows)
        routing = self._order.routing
        if routing.kind == "source":
            self._encode(topic, routing.task_partitions[self._info.task], rows, target)
            return
        names = rows.schema.names
        given = rows.column("partition") if "partition" in names else None
        hashed = key_partitions(rows.column("key"), target.partitions) if routing.hash_key else None
        if given is None and hashed is None:
            self._encode(topic, self._next_owned(topic, target), rows, target)
            return
        partitions = hashed if hashed is not None else np.full(rows.num_rows, -1, np.int32)
        if given is not None:
            partitions = self._as_given(topic, target, given, partitions)
        if partitions.min() < 0:  # no partition given, and no key (murmur2 gives no negative partition)
            partitions = np.where(partitions < 0, np.int32(self._next_owned(topic, target)), partitions)
        if routing.by_number and (partitions % routing.tasks != self._info.task).any():
            raise self._elsewhere(topic)
        low, high = int(partitions.min()), int(partitions.max())
        if low == high:
            self._encode(topic, low, rows, target)
            return
        for partition, indices in group_by_partition(partitions, target.partitions):
            self._encode(topic, partition, rows.take(pa.array(indices)), target)

    def _elsewhere(self, topic: str) -> NotCopartitionedError:
        return NotCopartitionedError(
            f"Rows for {topic} belong to partitions of other tasks than those that have read them",
            next_step="none: the batch runs again, with a shuffle",
        )

    def _as_given(self, topic: str, target: OutputTopic, given: pa.Array, otherwise: Any) -> Any:
        """The partition column, with values of ``otherwise`` where it is null."""
        chosen = given.fill_null(-1).to_numpy(zero_copy_only=False)
        wrong = np.asarray(given.is_valid()) & ((chosen < 0) | (chosen >= target.partitions))
        if wrong.any():
            raise BadRecordError(
                f"A row asks for partition {int(chosen[wrong][0])} of topic {topic}",
                flow=self._order.flow,
                batch=self._order.batch,
                topic=topic,
                detail=f"{counted(int(wrong.sum()), 'row')} of an Arrow batch; the topic has partitions 0 to "
                f"{target.partitions - 1}",
                next_step="correct the partition column, or drop it to partition by key",
            )
        return np.where(np.asarray(given.is_valid()), chosen, otherwise)

    def _next_owned(self, topic: str, target: OutputTopic) -> int:
        """A partition that this task owns, a different one for each Arrow batch."""
        owned = self._owned.get(topic)
        if owned is None:
            tasks, task = self._order.routing.tasks, max(0, self._info.task)
            by_number = self._order.routing.by_number
            name = None if self._order.topic is not None or by_number else topic
            # If the driver did not know the topic, all rows of the topic are in one task.
            known = topic in self._order.targets or by_number
            everything = range(target.partitions)
            owned = [p for p in everything if not known or owner_of(name, p, tasks) == task]
            self._owned[topic] = owned
        if not owned:
            if self._order.routing.by_number:
                raise self._elsewhere(topic)
            raise ProtocolError(
                f"Task {self._info.task} received rows of {topic} and owns no partition of it",
                flow=self._order.flow,
                batch=self._order.batch,
                topic=topic,
                next_step="report this with the query's plan (df.explain())",
            )
        turn = self._turns.get(topic, self._order.batch)
        self._turns[topic] = turn + 1
        return owned[turn % len(owned)]

    def target(self, topic: str) -> OutputTopic:
        """A topic's partitions and size limit, as the driver saw them. If it did not know the topic: from the cluster.

        Raises:
            UnknownTopicError: the topic does not exist.
        """
        if topic not in self._targets:
            try:
                info = self._cluster.topic(topic, self._deadline, fresh=True, patient=True)
            except UnknownTopicError as error:
                raise missing(self._cluster, error, {topic: "output"}, self._deadline) from None
            limits = topic_limits(self._cluster, [topic], self._deadline)[topic]
            self._targets[topic] = OutputTopic(info.partitions, *limits)
        return self._targets[topic]

    def target_of(self, topic: str, rows: pa.RecordBatch) -> OutputTopic:
        """As `target`, for rows that may name the topic: an error names the first of them by its key."""
        try:
            return self.target(topic)
        except UnknownTopicError as error:
            if topic != self._order.topic and "key" in rows.schema.names:
                key = rows.column("key").cast(pa.binary())[0].as_py()
                rest = f", {error.detail}" if error.detail else ""
                error.with_detail(
                    f"named by {counted(rows.num_rows, 'row')}, the first with the key {shown(key)}{rest}"
                )
            raise

    def limits(self, topic: str) -> OutputLimits:
        """What a topic takes.

        Raises:
            UnknownTopicError: the topic does not exist.
        """
        return self.target(topic).limits(topic, self._order.compression)

    # ---- writing -------------------------------------------------------------------------------------

    def _new_producer(self) -> Producer:
        return Producer(
            self._cluster,
            transactional_id=self._order.transactional_id,
            deadline=self._deadline,
            gathered_bytes=_GATHERED_BYTES,
            transaction_version=self._order.transaction_version,
            before=None if self._companion is None else self._companion.before_rows,
        )

    def _encode(self, topic: str, partition: int, rows: pa.RecordBatch, target: OutputTopic) -> None:
        self._producer = self._producer or self._new_producer()
        transactional_id = self._order.transactional_id
        if (topic, partition) not in self._sequences and self._order.transaction_version < 2 and transactional_id:
            # With transaction version 1, a partition must be added to the transaction before it is written to.
            add_partitions(self._cluster, transactional_id, self._order.producer, {topic: [partition]}, self._deadline)
        names = rows.schema.names
        if target.compacted and (nulls := rows.column("key").null_count if "key" in names else rows.num_rows):
            raise BadRecordError(
                f"Topic {topic} is compacted, so its records need a key; {counted(nulls, 'row')} without one",
                flow=self._order.flow,
                topic=f"{topic}-{partition}",
                batch=self._order.batch,
                next_step="give them a key, or write to a topic with cleanup.policy=delete",
            )
        headers = rows.column("headers") if "headers" in names else None
        times, now_ms = None, clock_ms()
        if "timestamp" in names:
            times, headers, refused, example_ms = timestamps.fitted(
                rows.column("timestamp"), headers, target.times, now_ms
            )
            if refused:
                _tell_refused(self._order.flow, topic, refused, example_ms)
        sequence = self._sequences.get((topic, partition), self._order.sequences.get((topic, partition), 0))
        with located(flow=self._order.flow, topic=f"{topic}-{partition}", batch=self._order.batch), _named_by_key(rows):
            for encoded in encode_batches(
                rows.column("key") if "key" in names else None,
                rows.column("value") if "value" in names else None,
                headers,
                times,
                identity=self._order.producer,
                base_sequence=sequence,
                compression=self._order.compression,
                max_batch_bytes=target.max_message_bytes,
                default_timestamp_ms=now_ms,
                stored=target.stored,
            ):
                self._producer.send(topic, partition, encoded)
                sequence = next_sequence(sequence, encoded.count)
        self._sequences[topic, partition] = sequence


_told_refused: dict[tuple[str, str], float] = {}


def _tell_refused(flow: str, topic: str, count: int, example_ms: int) -> None:
    """Log that a topic refuses timestamps: at most once a minute in a process."""
    now = time.monotonic()
    if now - _told_refused.get((flow, topic), -math.inf) >= _TELL_EVERY_S:
        _told_refused[flow, topic] = now
        log.warning(
            "flow %s: topic %s does not accept the timestamps of %d records, for example %d (%s); its settings are "
            "message.timestamp.before.max.ms and after.max.ms. They get the time of writing, and the header %s has "
            "their own",
            flow,
            topic,
            count,
            example_ms,
            timestamps.in_utc(example_ms),
            timestamps.ORIGINAL_TIMESTAMP,
        )


# Python workers are reused for many batches, so the connections are kept. They must not be used across a fork. Only one
# task at a time runs in a worker.
_clusters: dict[tuple[int, str, str], Cluster] = {}
_clusters_lock = threading.Lock()


def worker_cluster(settings: ClientSettings, use: str = "write") -> Cluster:
    """The connections of this worker process to the cluster of ``settings``.

    Args:
        use: each use has connections of its own.
    """
    key = (os.getpid(), use, repr((settings.bootstrap_servers, sorted(settings.options.items()))))
    with _clusters_lock:
        if key not in _clusters:
            _clusters[key] = Cluster(settings, refused_s=None)
        return _clusters[key]
