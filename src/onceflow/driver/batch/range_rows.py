"""Rows that tasks read by themselves: the driver only plans the ranges."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from onceflow.client.settings import ClientSettings
from onceflow.driver.batch.blame import Alike, culprit_of_range
from onceflow.driver.batch.driver_program import DriverProgram
from onceflow.driver.record.offset_log import SourceRange
from onceflow.errors import OptionError
from onceflow.messages import StateOrder, TaskReport, WriteOrder, decoded
from onceflow.planning.direct_plan import DirectPlan
from onceflow.planning.placement import HomeTasks
from onceflow.planning.range_tasks import dealt
from onceflow.spark import batch_plan, plans
from onceflow.spark.jvm import SPARK_ERRORS
from onceflow.spark.placed_jobs import PlacedJobs
from onceflow.spark.query_facts import Node, SourceNode, node_of
from onceflow.spark.row_program import RowPrograms
from onceflow.task.range_reader import ReadOrder
from onceflow.task.range_tasks import RangeTask, ReadTask
from onceflow.task.source_rows import QueryRows
from onceflow.task.task_program import TaskProgram, TopicProgram


@dataclass(frozen=True)
class RangeSource:
    """What tasks need to read batches of a query by themselves. It is the same for all batches.

    Args:
        settings: how to connect. topic_ids: of the sources.
        plan: of the query.
        program: makes rows of the records, as the sink or the process step takes them.
        schema: of the rows for Spark.
        deadline_s: how long a task may wait without getting any records.
        spark: the session of the query.
        programs: of the operators that the driver evaluates. Tasks have the same settings.
        node: the root of its analyzed plan.
        all_batches: whether tasks also run batches without records, because the state is where they run.
    """

    flow: str
    settings: ClientSettings
    topic_ids: Mapping[str, str]
    plan: DirectPlan
    program: DriverProgram
    schema: T.StructType
    deadline_s: float
    spark: SparkSession
    programs: RowPrograms
    node: Any
    all_batches: bool = False

    @property
    def frames(self) -> SparkSession:
        """The session in which rows become DataFrames."""
        return self.programs.session

    @cached_property
    def reads(self) -> list[tuple[Node, SourceNode]]:
        """The sources in the query's plan."""
        return [(node, node.source) for node in node_of(self.spark, self.node).nodes() if node.source is not None]

    @cached_property
    def other_times(self) -> bool:
        """See `batch_plan.has_other_times`."""
        return batch_plan.has_other_times(self.spark, self.node)


@dataclass(frozen=True)
class RangeRows:
    """Rows of a batch that tasks are going to read.

    Args:
        range: what they read.
        now_us: the time of the batch, in microseconds of the epoch.
        read: how many records of each topic they have read, when `run` has ended; after `frame`: how many offsets.
    """

    source: RangeSource
    range: SourceRange
    now_us: int
    read: dict[str, int] = field(default_factory=dict)

    @property
    def sparkSession(self) -> SparkSession:
        """Named as that of a DataFrame."""
        return self.source.spark

    @property
    def program(self) -> DriverProgram:
        """What makes rows of the records. If it needs nothing of Spark, tasks get its part for records."""
        return self.source.program

    @property
    def needs_frame(self) -> bool:
        """See `DirectPlan.needs_frame`."""
        return self.source.plan.needs_frame

    def run(self, order: WriteOrder | StateOrder, tasks: int) -> TaskReport:
        """Read, process and write in tasks. Each partition of a target belongs to the task that its number gives, see
        ``planning/range_tasks.py``."""
        context = self.sparkSession.sparkContext
        task = RangeTask(self._order(self.program.query, tasks), order)
        return self._done(context.parallelize(range(tasks), tasks).mapPartitions(task).collect())

    def run_at(self, order: StateOrder, at: HomeTasks, jobs: PlacedJobs | None) -> TaskReport:
        """As `run`, in tasks that run where the local copies are."""
        if jobs is None:
            raise RuntimeError("there are no homes without jobs for them")
        tasks = len(at.executors)
        task = RangeTask(self._order(self.program.query, tasks, at.owners.task_of), order)
        return self._done(jobs.run(at.executors, task))

    def _done(self, reports: Iterable[bytes]) -> TaskReport:
        report = decoded(reports)
        self.read.clear()
        self.read.update(report.read)
        return report

    def frame(self, tasks: int) -> DataFrame:
        """The rows as a DataFrame of Spark, for what needs a shuffle."""
        self.read.clear()
        for topic, _, start, end in self.range.ranges():
            self.read[topic] = self.read.get(topic, 0) + end - start
        source = self.source
        numbers = source.frames.range(0, tasks, 1, tasks)
        if not self.needs_frame:
            return numbers.mapInArrow(
                ReadTask(self._order(QueryRows(self.program.query.program), tasks)), source.schema
            )
        new = {}
        for node, read in source.reads:
            plain = replace(source.plan.reads[str(read.topic)], include_headers="headers" in node.names)
            program = TaskProgram((TopicProgram(plain),), plain.columns)
            leaf = plans.at(source.node, node.path)
            rows = numbers.mapInArrow(ReadTask(self._order(QueryRows(program), tasks)), plans.struct_of(leaf))
            new[node.path] = plans.named_as(rows, leaf)
        made = plans.grafted(source.frames, source.node, new)
        made = batch_plan.of_batch(source.frames, made, self.now_us, other_times=source.other_times)
        return plans.frame(source.frames, made)

    def culprit(self, alike: Alike) -> str:
        """The record of which the query cannot make rows, see `blame.culprit_of_range`."""
        return culprit_of_range(self.range.ranges(), partial(self._fails, alike))

    def _fails(self, alike: Alike, topic: str, partition: int, start: int, end: int) -> bool:
        part = replace(self, range=SourceRange({topic: {partition: start}}, {topic: {partition: end}}), read={})
        try:
            part.frame(1).write.format("noop").mode("append").save()
        except SPARK_ERRORS as error:
            return alike(error)
        return False

    def _order(self, query: QueryRows, tasks: int, task_of: Callable[[int], int] | None = None) -> ReadOrder:
        """``task_of``: see `dealt`."""
        source, topics = self.source, query.program.reads
        shares = dealt([each for each in self.range.ranges() if each[0] in topics], tasks, task_of)
        return ReadOrder(source.flow, source.settings, shares, source.topic_ids, query, source.deadline_s)


@contextmanager
def sent(flow: str) -> Iterator[None]:
    """Explain why user code cannot be sent to tasks that could be sent when the flow was started."""
    try:
        yield
    except pickle.PicklingError as error:
        raise OptionError(
            "User code cannot be sent to tasks",
            flow=flow,
            detail=str(error).splitlines()[0][:300],
            next_step="the driver has called it, and its variables have other values since then: keep connections and "
            "the like in self, set in open(), or in a module that tasks can import; or let the driver read all "
            "batches, with engine='driver'",
        ) from error
