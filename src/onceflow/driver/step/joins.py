"""The tables that a flow joins with, as the driver knows them: at which offsets each batch sees them."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import find_topic
from onceflow.driver.batch.fetched_rows import FetchedRows, Rows
from onceflow.driver.batch.properties import set_property
from onceflow.driver.record.committed_progress import CommittedProgress
from onceflow.errors import (
    BadRecordError,
    DeadlineExceededError,
    OnceflowError,
    PermissionDeniedError,
    ProgressConflictError,
    SchemaError,
    UnknownTopicError,
    counted,
    located,
)
from onceflow.messages import JOINED_PROPERTY, CopiesOrder, JoinOrder
from onceflow.planning.join_columns import columns_of_join
from onceflow.protocol import acls
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.protocol.position import Position
from onceflow.protocol.progress import Progress, writer_of
from onceflow.spark.arrow_maps import map_in_arrow
from onceflow.spark.jvm import SPARK_ERRORS
from onceflow.spark.master import is_local
from onceflow.spark.shuffles import drop_shuffles
from onceflow.state.changelog.compacted_topic import CompactedTopic, find_compacted
from onceflow.state.changelog.topics import check_readable
from onceflow.state.joins.copies import INEXACT
from onceflow.state.joins.spec import Ends, JoinSpec
from onceflow.task.join_task import CopiesTask, JoinTask

log = logging.getLogger("onceflow")

_LOOK_EVERY_S = 3.0
_ROWS_WAIT_S = 30.0
_INEXACT_TOPICS = re.compile(re.escape(INEXACT) + r": ([\w.,-]+)")
# As a worker's traceback shows it.
_BAD_RECORD = re.compile(
    r"onceflow\.errors\.BadRecordError: (.+) \[flow=[^,\]]*, topic=([^\]]*)\]\n  detail: (.*)\n  next step: (.*)"
)
_RESUME = 'on_checkpoint_conflict="resume"'
_MOVES = 30  # attempts that are not counted, because a host has read its copies in them


def find_joined(cluster: Cluster, topic: str, deadline: Deadline) -> CompactedTopic:
    """Look up a table that a flow joins with, and check that it may be read: no batch has to find out.

    If it has got more partitions, it waits until the rows have moved, see `_await_rows`.

    Raises:
        UnknownTopicError, PermissionDeniedError: it does not exist, or may not be read.
        OptionError: it is not compacted.
        ProgressConflictError: its rows have not moved to new partitions in time.
    """
    try:
        found = find_compacted(cluster, topic, deadline)
        check_readable(cluster, list_offsets(cluster, {topic: [0]}, LATEST, deadline), deadline)
    except PermissionDeniedError as error:
        raise PermissionDeniedError(
            f"This principal may not read table {topic}",
            topic=topic,
            detail=error.detail,
            next_step=acls.grant("READ", acls.TOPIC, topic),
        ) from error
    _await_rows(cluster, found.info, deadline)
    return found


def _await_rows(cluster: Cluster, info: TopicInfo, deadline: Deadline) -> None:
    """Wait while ``onceflow table repartition`` moves rows, and until its transaction is visible in all partitions.

    A batch that sees the tombstone of a row in its old partition, and not yet the row in the new one, would join with
    nothing. A flow that joins already stops when the table gets more partitions, so only starts are concerned.

    Raises:
        ProgressConflictError: the rows have not moved in time.
    """
    topic, reader, attempt = info.name, CommittedProgress(), 0
    with contextlib.suppress(PermissionDeniedError):
        if find_topic(cluster, topic + INTERNAL_SUFFIX, "DESCRIBE", deadline) is None:
            return  # no flow writes it
    while True:
        writer = writer_of(topic, info.topic_id, reader.decoded(cluster, deadline))
        if writer is None:
            return  # nobody moves rows of a table that no flow writes
        spread = len(writer.changelogs[topic])
        if spread >= info.partitions:
            break
        if attempt == 0:
            log.warning(
                "table %s has %d partitions, and its rows are in the first %d: waiting until they have moved",
                *(topic, info.partitions, spread),
            )
        elif deadline.remaining < deadline.seconds - _ROWS_WAIT_S:
            raise ProgressConflictError(
                f"Table {topic} has {counted(info.partitions, 'partition')}, and its rows are still in the first "
                f"{spread}",
                topic=topic,
                next_step=f"`onceflow table repartition {writer.flow} {topic} --partitions {info.partitions}` moves "
                "them; then start this flow",
            )
        deadline.pause(attempt + 5, f"the rows of {topic} have not moved to its new partitions")
        attempt += 1
    if writer.driver is not None:
        return  # a driver has committed since: what was moved before is visible everywhere
    span = {topic: sorted(info.leaders)}
    ends = list_offsets(cluster, span, LATEST, deadline, committed=False)[topic]
    while any(at < ends[p] for p, at in list_offsets(cluster, span, LATEST, deadline)[topic].items()):
        deadline.pause(attempt, f"a transaction in {topic} is not decided in all partitions")
        attempt += 1


def join_order(
    df: DataFrame,
    spec: JoinSpec,
    settings: ClientSettings,
    *,
    on: str,
    how: str,
    columns: Any,
    corrupt: str | None,
    flow: str,
) -> tuple[JoinOrder, StructType]:
    """The order for a join, and the columns that come out of it.

    Raises:
        OptionError, SchemaError: the arguments or columns do not fit.
    """
    wanted, added = columns_of_join(df, spec, on=on, how=how, columns=columns, corrupt=corrupt, flow=flow)
    return JoinOrder(spec, settings, on, how == "inner", added, isinstance(columns, str), flow, corrupt), wanted


def join_frame(df: DataFrame, task: JoinTask, wanted: StructType) -> DataFrame:
    """What ``Flow.join_table`` returns.

    Raises:
        SchemaError: Spark cannot give a column to Python.
    """
    try:
        return map_in_arrow(df, task, wanted)
    except PySparkException as error:
        raise SchemaError(
            "Spark cannot give all columns of the DataFrame to Python",
            flow=task.order.flow,
            detail=str(error).splitlines()[0],
            next_step="before join_table, drop or cast columns of types that Arrow lacks, such as INTERVAL YEAR",
        ) from error


class Joins:
    """The joined tables of one query.

    Args:
        specs: one for each call of ``Flow.join_table`` and each table of a process step. Several may have one topic.

    Attributes:
        ends: the offsets at which the current batch sees them, by topic and partition. They stay the same for all
            attempts of the batch.
    """

    def __init__(
        self,
        specs: Sequence[JoinSpec],
        cluster: Cluster,
        progress: Progress,
        *,
        flow: str,
    ) -> None:
        self._specs = {spec.topic: spec for spec in specs}
        self._every = tuple(specs)
        self._cluster = cluster
        self._flow = flow
        self._looked_at: float | None = None
        self._moves = 0
        self._has_moved = False
        self._now_ms = 0
        self.ends: Ends = {topic: ends for topic, ends in progress.joined.items() if topic in self._specs}

    # ---- offsets -------------------------------------------------------------------------------------

    def pin(self, deadline: Callable[[str], Deadline]) -> None:
        """Fix the offsets for the next batch: everything that is committed now.

        Args:
            deadline: of the writer, made from what is being done.

        Raises:
            UnknownTopicError: a topic was deleted, created again, or has another number of partitions.
            DeadlineExceededError: partitions of a topic have no leader, or it does not answer.
        """
        if not self._specs:
            return
        self._moves = 0
        self._pin(deadline)

    def failed(self, problem: BaseException, deadline: Callable[[str], Deadline]) -> bool:
        """Fix newer offsets, if an attempt has failed because a table cannot be seen as it was at the old ones.

        Returns whether the next attempt gets further: the copies that were read are exact from now on.

        Raises:
            BadRecordError: a task could not read a key or a value; no other attempt can.
        """
        if not self._specs:
            return False
        text = str(problem)
        if INEXACT not in text:
            if not isinstance(problem, OnceflowError) and (refused := _BAD_RECORD.search(text)):
                what, topic, detail, next_step = refused.groups()
                raise BadRecordError(what, flow=self._flow, topic=topic, detail=detail, next_step=next_step)
            return False
        self._pin(deadline)
        self._moves += 1
        self._has_moved = True
        return self._moves <= _MOVES

    def forget_attempt(self, rows: Rows) -> None:
        """Let Spark compute rows again that an attempt has joined at offsets which do not hold any more."""
        if self._has_moved:
            if isinstance(rows, DataFrame):
                drop_shuffles(rows)
            self._has_moved = False

    def _pin(self, deadline: Callable[[str], Deadline]) -> None:
        tables = ", ".join(sorted(self._specs))
        limit = deadline(f"looking for the ends of table {tables}, at which the batch sees it")
        wanted = {topic: list(range(spec.partitions)) for topic, spec in self._specs.items()}
        try:
            self._check_topics(limit)
            found = list_offsets(self._cluster, wanted, LATEST, limit)
        except DeadlineExceededError as error:
            raise DeadlineExceededError(
                error.what,
                flow=self._flow,
                topic=tables,
                detail=error.detail,
                next_step="check that brokers lead all partitions of the table: kafka-topics.sh --describe --topic "
                f"{next(iter(self._specs))}; the batch has not begun, a flow that is started again continues with it",
            ) from error
        self.ends = {topic: dict(ends) for topic, ends in found.items()}

    # ---- a batch -------------------------------------------------------------------------------------

    def begin(self, rows: Rows, now_ms: int) -> None:
        """An attempt begins: its tasks see the tables at this time."""
        self._now_ms = now_ms
        self.publish(rows, self.ends, now_ms)

    def prepare(self, rows: Rows, cores: Callable[[], int]) -> None:
        """Bring the copies of all hosts to the offsets of the batch, for a batch that nothing may try again.

        Raises:
            InexactCopyError: a copy is not exact at its offset. The next attempt has newer offsets.
            OnceflowError: a table could not be read.
        """
        if not self._specs:
            return
        task = CopiesTask(CopiesOrder(self._every, self.ends, self._cluster.settings))
        if isinstance(rows, FetchedRows):
            found = [task(0)]
        else:
            spark = rows.sparkSession
            shared = is_local(spark) and all(spec.store.on_disk for spec in self._every)
            # A task for each core: Spark then gives every executor at least one.
            tasks = 1 if shared else max(1, cores())
            found = spark.sparkContext.parallelize(range(tasks), tasks).map(task).collect()
        for problem in found:
            if isinstance(problem, OnceflowError):
                raise problem

    def publish(self, rows: Rows, ends: Ends, now_ms: int) -> None:
        """Put time and offsets where the tasks of this thread's jobs can read them."""
        if self._specs:
            described = json.dumps(
                {"now_ms": now_ms, "ends": {topic: sorted(by_part.items()) for topic, by_part in ends.items()}}
            )
            set_property(rows, JOINED_PROPERTY, described)

    def withdraw(self, rows: Rows) -> None:
        """Remove the offsets from where tasks read them, so that no job outside of a batch takes old ones."""
        if self._specs:
            with contextlib.suppress(Exception):  # Spark may have ended; then no task reads them either
                set_property(rows, JOINED_PROPERTY, None)

    def progress(self, progress: Progress) -> Progress:
        """The progress of the batch, completed with the offsets and the time at which it has seen the tables."""
        if not self._specs:
            return replace(progress, joined={}, joined_ms=None)
        # Of a topic that the flow has read as a source, the id belongs to the offsets in progress.
        ids = {topic: spec.topic_id for topic, spec in self._specs.items() if topic not in progress.offsets}
        topic_ids = {**progress.topic_ids, **ids}
        return replace(progress, joined=self.ends, joined_ms=self._now_ms, topic_ids=topic_ids)

    # ---- drain ---------------------------------------------------------------------------------------

    def drain(self, df: DataFrame, progress: Progress) -> None:
        """Run a committed batch for Spark's state only, with the tables as the batch has seen them.

        Raises:
            ProgressConflictError: they cannot be seen like that any more.
        """
        for topic, spec in self._specs.items():
            if topic not in progress.joined:
                raise self._not_drained(
                    progress,
                    topic,
                    f"the query joins with {topic} now, and did not join with it then",
                    instead="start the flow once with the query as it was",
                )
            recorded = progress.topic_ids.get(topic)
            if recorded not in (None, spec.topic_id):
                raise self._not_drained(
                    progress,
                    topic,
                    f"topic {topic} was deleted and created again since",
                    detail=f"topic id {spec.topic_id}, in the progress record {recorded}",
                )
        # A progress record of an earlier version has no such time. It was written a moment later.
        now_ms = progress.time_ms if progress.joined_ms is None else progress.joined_ms
        self.publish(df, progress.joined, now_ms)
        try:
            df.write.format("noop").mode("append").save()
        except SPARK_ERRORS as error:
            inexact = _INEXACT_TOPICS.search(str(error))
            if inexact is None:
                raise
            raise self._not_drained(
                progress,
                inexact[1],
                f"topic {inexact[1]} was compacted since, so its rows as they were then are lost",
                detail=f"the batch saw {Position(progress.joined)}",
                instead="start the flow on a host with its local copies from that time (state_dir)",
            ) from None

    def _not_drained(
        self, progress: Progress, topic: str, why: str, *, detail: str = "", instead: str = ""
    ) -> ProgressConflictError:
        """A committed batch that Spark's state lacks, and why it cannot be added."""
        choices = [
            instead,
            f"continue at the committed offsets with empty Spark state: give an empty folder and {_RESUME}",
            f"read everything again: `onceflow reset {self._flow}` and an empty folder",
        ]
        return ProgressConflictError(
            f"Batch {progress.batch_id} is committed, but it cannot be run again for Spark's state: {why}",
            flow=self._flow,
            topic=topic,
            batch=progress.batch_id,
            detail=detail,
            next_step="; ".join(f"{number}. {choice}" for number, choice in enumerate(filter(None, choices), 1)),
        )

    def _check_topics(self, deadline: Deadline) -> None:
        now = time.monotonic()
        if self._looked_at is not None and now - self._looked_at < _LOOK_EVERY_S:
            return
        found = self._cluster.topics(self._specs, deadline, patient=True)
        self._looked_at = now
        for topic, spec in self._specs.items():
            with located(flow=self._flow):
                found[topic].check_same(spec.topic_id)
            if found[topic].partitions != spec.partitions:
                raise UnknownTopicError(
                    f"Topic {topic} has {counted(found[topic].partitions, 'partition')} now, it had {spec.partitions}",
                    flow=self._flow,
                    topic=topic,
                    next_step="start the flow again: it joins with all partitions then",
                )
