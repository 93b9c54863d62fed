"""The driver's part of ``Flow.process`` in a batch: what tasks are told, where they run, what comes back."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.accumulators import AccumulatorParam
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from onceflow import hooks
from onceflow.client.cluster import Cluster
from onceflow.errors import OptionError, SchemaError, UnsupportedQueryError
from onceflow.sink import jvm, queries, reports
from onceflow.sink.collect import collect
from onceflow.sink.ownership import check_columns, prepare
from onceflow.sink.state_tasks import (
    OUTPUT_SPARK_SCHEMA,
    TOGETHER_SPARK_SCHEMA,
    NotColocatedError,
    NotCopartitionedError,
    StateOrder,
    StateWork,
    TogetherTask,
    done_from_rows,
    place_of_task,
    run_together,
)
from onceflow.sink.tasks import Routing, Target, TaskPlace, WriteOrder, WriteTask, worker_cluster, write_rows
from onceflow.state.local import Commit, partition_folder, settle
from onceflow.state.spec import Moment, ProcessSpec, StateReport
from onceflow.state.table_state import TableState
from onceflow.wire.batches import BatchHeader
from onceflow.wire.progress import Progress

log = logging.getLogger("onceflow.state")

PROPERTY = "onceflow.state."
_TASK_ROWS = 10_000
# Two Python tasks cost more than the driver needs for so many rows (more than for a plain write: opening stores).
_SMALL_BATCH_ROWS = 10_000
_SPREAD_MOST, _TASKS_MOST = 4, 16


@dataclass(frozen=True)
class Part:
    """Reports of the tasks of one stage, or of the driver.

    Args:
        tasks: how many there must be; None: the driver wrote.
        shuffled: whether Spark may have attempted the stage again.
    """

    reports: list[reports.Report]
    tasks: int | None
    shuffled: bool


class Collected(AccumulatorParam[list[bytes]]):
    """What state tasks tell the driver when their rows go on to other tasks: an accumulator of pickled reports."""

    def zero(self, value: list[bytes]) -> list[bytes]:
        return []

    def addInPlace(self, value1: list[bytes], value2: list[bytes]) -> list[bytes]:
        return value1 + value2


def state_columns(df: DataFrame, flow: str, *, one_topic: bool) -> DataFrame:
    """The columns a process step takes, and no other: every column is copied several times on its way.

    Args:
        one_topic: all rows come from one topic, which they need not name.

    Raises:
        SchemaError: key or value is missing, or a column has a wrong type.
    """
    types = {field.name: field.dataType for field in df.schema.fields}
    for name in ("key", "value"):
        if not isinstance(types.get(name), (T.StringType, T.BinaryType)):
            there = types[name].simpleString() if name in types else "missing"
            raise SchemaError(
                f"Flow.process needs the column {name!r} as string or binary; it is {there}",
                flow=flow,
                next_step="select key and value (and topic, partition, offset, timestamp, headers where there are any)",
            )
    wanted: list[Column] = []
    for name in types:
        kind = _OPTIONAL.get(name)
        if name in ("key", "value"):
            binary = isinstance(types[name], T.BinaryType)
            wanted.append(F.col(name) if binary else F.col(name).cast("binary").alias(name))
        elif kind is not None and isinstance(types[name], kind) and not (name == "topic" and one_topic):
            wanted.append(F.col(name))
    return df.select(*wanted)


_OPTIONAL: dict[str, type[T.DataType]] = {
    "topic": T.StringType,
    "partition": T.IntegerType,
    "offset": T.LongType,
    "timestamp": T.TimestampType,
    "headers": T.ArrayType,
}


def task_count(partitions: int, wanted: int) -> int:
    """How many tasks share the partitions of a table.

    A divisor of their number, where one is near: then equal keys of topics with a multiple of it fall to the same task,
    and outputs are written by the step's own tasks. A prime number has none; then every partition is a task, or, where
    those would be too many, tasks have unequal numbers of partitions and outputs go through a stage of their own.
    """
    wanted = max(1, min(wanted, partitions))
    divisors = [n for n in range(1, partitions + 1) if partitions % n == 0]
    above = next(n for n in divisors if n >= wanted)
    below = max(n for n in divisors if n <= wanted)
    if above <= _SPREAD_MOST * wanted:
        return above
    if 2 * below >= wanted:
        return below
    return above if above <= _TASKS_MOST * wanted else wanted


def partition_of_key(df: DataFrame, partitions: int) -> Column:
    """Where Kafka's default partitioner puts a row's key; 0 for rows without one."""
    hashed = jvm.murmur2(df.sparkSession, F.col("key")).bitwiseAND(F.lit(0x7FFFFFFF))
    return F.coalesce(hashed % F.lit(partitions), F.lit(0)).cast("int")


class RowsTask:
    """The function given to ``mapInArrow`` when outputs are rows again.

    Args:
        order: what to do; None in a step that is part of the query: then it is read from a local property, which
            tells ``moment`` and the rest of what changes from batch to batch.
        template: of ``order.write`` and so on, for such a step.
    """

    def __init__(self, order: StateOrder, collected: Any, *, streamed: bool) -> None:
        self.order = order
        self.collected = collected
        self.streamed = streamed
        self.__name__ = f"{queries.STEP_NAME}{order.spec.table}"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        order = self._from_property() if self.streamed else self.order
        place = place_of_task(order.write)
        work = StateWork(order, place, worker_cluster(order.write.settings))
        yield from work.rows(_without_ticks(batches))
        done = work.done()
        self.collected.add([pickle.dumps((done.reports, done.states))])

    def _from_property(self) -> StateOrder:
        from pyspark import TaskContext

        context = TaskContext.get()
        text = None if context is None else context.getLocalProperty(PROPERTY + self.order.spec.table)
        if text is None:
            raise OptionError(
                f"The table {self.order.spec.table} is not part of a running flow",
                next_step="start the query with Flow.write(...).start() of the flow that made it",
            )
        told = json.loads(text)
        moment = Moment.from_json(told["moment"])
        write = replace(
            self.order.write,
            batch=moment.batch,
            identity=BatchHeader(moment.commit.producer_id, moment.commit.producer_epoch),
            deadline_s=told["deadline_s"],
            faults=told["faults"],
        )
        return replace(self.order, moment=moment, write=write, due=frozenset(told["due"]))


#: Column of the rows that only wake a step up; the task they are for.
TICK = "__onceflow_tick"


class StateStep:
    """The process steps of one query.

    Args:
        together: the step whose outputs are written as they are, if there is one. Its input is the query's DataFrame.
        streamed: steps inside the query, with where their reports arrive.
        topic: where outputs go that name no topic.
        source_keys: whether the keys of the first are those of the source: else they are not in its partitions.
        local: whether tasks run on this machine, so that the driver may process small batches itself.
    """

    def __init__(
        self,
        *,
        together: TableState | None,
        streamed: Sequence[tuple[TableState, Any]],
        topic: str | None,
        cores: int,
        local: bool,
        small_batch_rows: int | None,
        source_partitions: Mapping[str, int],
        source_keys: bool,
        collected: Any,
    ) -> None:
        self._together = together
        self._streamed = list(streamed)
        self.tables = ([together] if together is not None else []) + [table for table, _ in streamed]
        self._topic = topic
        self._cores = cores
        self._local = local
        self._small_batch_rows = _SMALL_BATCH_ROWS if small_batch_rows is None else small_batch_rows
        self._collected = collected
        self._apart = False
        self._by_source: bool | None = None if source_keys else False
        self._source_partitions = dict(source_partitions)
        self._moments: dict[str, Moment] = {}
        self._reports: dict[str, list[StateReport]] = {}
        self._due: dict[str, frozenset[int]] = {}

    @property
    def writes(self) -> bool:
        """Whether the batch's DataFrame is the input of a step, which this class writes."""
        return self._together is not None

    @property
    def topics(self) -> set[str]:
        """All topics of the tables."""
        return {name for table in self.tables for name in table.spec.topics.ids}

    @property
    def written_topics(self) -> set[str]:
        """Those, and the ones that late and dead letters go to."""
        letters = {
            name for table in self.tables for name in (table.spec.late_topic, table.spec.dead_letter_topic) if name
        }
        return self.topics | letters

    def due(self, now_ms: int) -> bool:
        """Whether a batch without rows would do anything."""
        return any(table.due(now_ms) for table in self.tables)

    # ---- steps of a batch ----------------------------------------------------------------------------

    def begin(self, df: DataFrame, batch: int, identity: BatchHeader, now_ms: int, deadline_s: float) -> None:
        """Tell the tasks of the query's own steps what this attempt is."""
        commit = Commit(batch, identity.producer_id, identity.producer_epoch)
        self._reports = {}
        for table in self.tables:
            moment = table.moment(batch, commit, now_ms)
            name = table.spec.table
            self._moments[name] = moment
            self._due[name] = frozenset(table.due(moment.now_ms))
        for table, collected in self._streamed:
            collected.value = []
            name = table.spec.table
            told = {
                "moment": self._moments[name].to_json(),
                "due": sorted(self._due[name]),
                "deadline_s": deadline_s,
                "faults": hooks.configured(),
            }
            df.sparkSession.sparkContext.setLocalProperty(PROPERTY + name, json.dumps(told))

    def write(
        self,
        df: DataFrame,
        *,
        rows_most: int,
        order: Callable[[Routing], WriteOrder],
        cluster: Cluster,
        targets: Callable[[], Mapping[str, Target]],
        on_driver: bool,
        reads_little: bool = False,
    ) -> tuple[str, list[Part]]:
        """Process the batch and write what comes out. Returns how, in words, and the reports.

        Args:
            on_driver: whether the driver may do it, if there are few rows.
            reads_little: see ``queries.reads_little``.
        """
        table = self._together
        if table is None:
            raise RuntimeError("the query writes its rows itself")
        spec = table.spec
        base = StateOrder(
            spec=spec,
            moment=self._moments[spec.table],
            write=order(Routing("key", 1, False)),
            together=True,
            topic=self._topic,
            modulus=1,
            due=self._due[spec.table],
        )
        if self._local and on_driver and rows_most <= self._small_batch_rows:
            rows = collect(df, interpreted=reads_little)
            done = run_together(base, TaskPlace("driver", -1, 0), rows, cluster)
            self._reports[spec.table] = done.states
            return "driver", [Part(done.reports, None, False)]
        by_source = self._straight(df, table)
        moved, tasks = self._moved(df, spec, rows_most, by_source)
        modulus = spec.topics.partitions if by_source else tasks
        state_order = replace(base, modulus=modulus, by_source=by_source)
        shuffled = jvm.has_shuffle(moved)
        if self._apart:
            return self._write_apart(moved, state_order, tasks, shuffled, order, targets())
        collected = moved.mapInArrow(TogetherTask(state_order), TOGETHER_SPARK_SCHEMA).collect()
        found, states, returned = done_from_rows(collected)
        self._reports[spec.table] = states
        parts = [Part(found, tasks, shuffled)]
        if returned and not any(report.error is not None for report in found):
            write = replace(base.write, topic=None, routing=Routing("key", 1, True))
            rows = [_as_written(batch) for one in returned for batch in one.to_batches()]
            parts.append(Part(write_rows(write, TaskPlace("driver", -1, 0), rows, cluster), None, False))
        return f"{tasks} tasks", parts

    def gather(self) -> list[Part]:
        """What the steps inside the query have told."""
        parts = []
        for table, collected in self._streamed:
            runs = len(collected.value)
            found, states = _told(collected)
            self._reports[table.spec.table] = states
            tasks = _tasks_of(table.spec.topics.partitions, self._cores)
            if runs == tasks and len({report.task for report in found}) < tasks:
                raise UnsupportedQueryError(
                    f"The tasks of table {table.spec.table} were merged by a coalesce that follows Flow.process",
                    next_step="use repartition instead of coalesce, or leave it out: the sink chooses its tasks itself",
                )
            parts.append(Part(found, tasks, True))
        return parts

    def audit(self) -> None:
        """Every partition of every table in one task, of this attempt."""
        for table in self.tables:
            table.check(self._reports.get(table.spec.table, []), self._moments[table.spec.table])

    def progress(self, progress: Progress) -> Progress:
        """The batch's progress, with what it says of the tables."""
        changelogs = {name: dict(ends) for name, ends in progress.changelogs.items()}
        known = dict(progress.tables)
        for table in self.tables:
            ends, more = table.progress_after(self._reports.get(table.spec.table, []))
            changelogs |= ends
            known[table.spec.table] = more
        return replace(progress, changelogs=changelogs, tables=known)

    def adopt(self) -> None:
        """The batch is committed."""
        for table in self.tables:
            table.adopt(self._reports.get(table.spec.table, []), self._moments[table.spec.table])

    def looked_at(self) -> None:
        """The batch had no effect, and was not committed."""
        for table in self.tables:
            table.looked_at(self._reports.get(table.spec.table, []))

    def failed(self, problem: BaseException) -> None:
        """Learn from an attempt that has to be done in another way."""
        if isinstance(problem, NotColocatedError):
            self._apart = True
            log.info("%s; from now on in two stages", problem.what)
        elif isinstance(problem, NotCopartitionedError):
            self._by_source = False
            log.info("%s; from now on with a shuffle", problem.what)

    def settle(self) -> None:
        """Apply what the last batch left pending, when the stores are on this machine and the flow ends."""
        if not self._local:
            return
        for table in self.tables:
            spec = table.spec
            for partition, commit in table.last.items():
                folder = partition_folder(spec.state_dir, spec.flow_key, spec.table, partition)
                try:
                    settle(folder, spec.store, commit)
                except Exception as error:  # only a head start for readers and for the next run
                    log.warning("the local state of %s-%d was not settled: %s", spec.table, partition, error)

    # ---- inside --------------------------------------------------------------------------------------

    def _straight(self, df: DataFrame, table: TableState) -> bool:
        """Whether source partitions can be taken as they are, without a shuffle."""
        spec = table.spec
        if self._by_source is None:
            self._by_source = self._may_go_straight(df, spec)
        if not self._by_source:
            return False
        if self._due[spec.table]:
            # What is due in partitions without rows needs a task, too: only a shuffle has one for each.
            return set(self._due[spec.table]) <= {partition for _, partition in jvm.source_partitions(df)}
        return True

    def _may_go_straight(self, df: DataFrame, spec: ProcessSpec) -> bool:
        if list(self._source_partitions.values()) != [spec.topics.partitions] or "partition" not in df.columns:
            return False
        try:
            jvm.source_partitions(df)
        except OptionError:
            return False
        return True

    def _moved(self, df: DataFrame, spec: ProcessSpec, rows_most: int, by_source: bool) -> tuple[DataFrame, int]:
        """The rows where their partition of the table is, and the number of tasks."""
        wanted = max(1, min(self._cores, round(rows_most / _TASK_ROWS + 0.5)))
        if by_source:
            moved = df.coalesce(wanted)
            return moved, int(moved._jdf.queryExecution().toRdd().getNumPartitions())
        tasks = task_count(spec.topics.partitions, wanted)
        if tasks == 1 and rows_most:  # without rows there may be no task to coalesce to
            return df.coalesce(1), 1
        place = partition_of_key(df, spec.topics.partitions) % F.lit(tasks)
        return df.repartitionById(tasks, place.cast("int")), tasks

    def _write_apart(
        self,
        moved: DataFrame,
        order: StateOrder,
        tasks: int,
        shuffled: bool,
        write_order: Callable[[Routing], WriteOrder],
        targets: Mapping[str, Target],
    ) -> tuple[str, list[Part]]:
        """State tasks, a shuffle, and write tasks."""
        self._collected.value = []
        rows = moved.mapInArrow(
            RowsTask(replace(order, together=False), self._collected, streamed=False), OUTPUT_SPARK_SCHEMA
        )
        outputs = with_default_topic(rows, self._topic)
        prepared = prepare(
            outputs,
            check_columns(outputs.schema, topic=None, flow=order.write.flow),
            partitioner="key",
            topic=None,
            targets=targets,
            source=self._source_partitions,
            tasks_most=tasks,
            on_driver=False,
            keep_tasks=True,
        )
        write = replace(write_order(prepared.routing), topic=None, targets=targets)
        written = prepared.df.mapInArrow(WriteTask(write), reports.SPARK_SCHEMA).collect()
        found, states = _told(self._collected)
        self._reports[order.spec.table] = states
        return f"{tasks} + {prepared.routing.tasks} tasks", [
            Part(reports.from_rows(written), prepared.routing.tasks, True),
            Part(found, tasks, shuffled or prepared.shuffled),
        ]


def streamed_step(df: DataFrame, order: StateOrder, collected: Any, cores: int, *, clock: bool) -> DataFrame:
    """A process step as a part of the query: what it is to do in a batch, its tasks learn at run time.

    Args:
        clock: whether every task gets a row each second, data or not. Without rows Spark leaves the step out.
    """
    partitions = order.spec.topics.partitions
    tasks = _tasks_of(partitions, cores)
    place = (partition_of_key(df, partitions) % F.lit(tasks)).cast("int")
    if clock:
        every_task = F.explode(F.sequence(F.lit(0), F.lit(tasks - 1))).alias(TICK)
        nothing = [F.lit(None).cast(field.dataType).alias(field.name) for field in df.schema.fields]
        ticks = ticking(df.sparkSession, order.spec.flow).select(*nothing, every_task)
        df = df.withColumn(TICK, F.lit(None).cast("int")).unionByName(ticks)
        place = F.coalesce(F.col(TICK), place)
    task = RowsTask(replace(order, modulus=tasks, together=False), collected, streamed=True)
    return df.repartitionById(tasks, place).mapInArrow(task, OUTPUT_SPARK_SCHEMA)


def ticking(spark: SparkSession, flow: str) -> DataFrame:
    """A stream with a row each second (Spark's ``rate`` source), marked as the flow's own."""
    reader = spark.readStream.format("rate").option("rowsPerSecond", "1").option("numPartitions", "1")
    return reader.option(queries.MARK, flow).load()


def _without_ticks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        position = batch.schema.get_field_index(TICK)
        if position >= 0:
            ticks = batch.column(position)
            rows = batch.remove_column(position)
            batch = rows if ticks.null_count == len(ticks) else rows.filter(ticks.is_null())
        yield batch


def with_default_topic(df: DataFrame, topic: str | None) -> DataFrame:
    """Rows that name no topic go to the default one."""
    return df if topic is None else df.withColumn("topic", F.coalesce(F.col("topic"), F.lit(topic)))


def _tasks_of(partitions: int, cores: int) -> int:
    return task_count(partitions, min(cores, partitions))


def _told(collected: Any) -> tuple[list[reports.Report], list[StateReport]]:
    found: list[reports.Report] = []
    states: list[StateReport] = []
    for raw in collected.value:
        more, more_states = pickle.loads(raw)
        found += more
        states += more_states
    collected.value = []
    return found, states


def _as_written(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of ``OUTPUT_SCHEMA`` with the timestamp in milliseconds, as ``RowWriter`` takes them."""
    position = batch.schema.get_field_index("timestamp")
    return batch.set_column(position, "timestamp", batch.column(position).cast(pa.timestamp("ms")).cast(pa.int64()))
