"""``Flow.process``: what is checked and made before a step with state can run."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.errors import OptionError, ProgressConflictError, UnsupportedQueryError
from onceflow.sink import jvm, queries
from onceflow.sink.delivery import EXACTLY_ONCE
from onceflow.sink.options import SinkOptions
from onceflow.sink.ownership import Columns, check_columns
from onceflow.sink.state_step import Collected, StateStep, ticking, with_default_topic
from onceflow.sink.state_tasks import StateOrder
from onceflow.sink.tasks import Routing, Target, WriteOrder
from onceflow.state.base import TIMERS_PER_BATCH
from onceflow.state.durations import duration_ms
from onceflow.state.local import Commit, default_state_dir
from onceflow.state.processor import ColumnProcessor, Processor
from onceflow.state.spec import Moment, ProcessSpec
from onceflow.state.store import Store
from onceflow.state.table_state import TableState
from onceflow.state.topics import TableTopics, check_known, check_readable, committed_ends, ensure_topics
from onceflow.wire.batches import BatchHeader
from onceflow.wire.progress import Progress, TableProgress

log = logging.getLogger("onceflow.state")

ON_ERROR = ("fail", "dead-letter")
STORES = ("lmdb", "memory", "rocksdb")


@dataclass(frozen=True)
class Step:
    """One ``Flow.process`` of a flow.

    Args:
        input: the rows it takes, columns selected. output: the DataFrame the user was given.
        collected: accumulator of the reports of its tasks, when it runs inside the query.
    """

    spec: ProcessSpec
    input: DataFrame
    output: DataFrame
    collected: Any
    lateness_ms: int | None
    idle_s: float


def needs_clock(spec: ProcessSpec) -> bool:
    """Whether a step must be woken up when there are no data: timers fire and rows expire."""
    processor = spec.processor
    has_timers = isinstance(processor, Processor) and type(processor).on_timer is not Processor.on_timer
    return has_timers or spec.default_ttl_ms is not None


@dataclass(frozen=True)
class StepOptions:
    """Arguments of ``Flow.process``, as given."""

    table: str
    partitions: int | None
    on_error: str
    dead_letter_topic: str | None
    late_topic: str | None
    retention: str | None
    single_key: bool
    store: str | type[Store]
    state_dir: str | Path | None
    adopt_existing: bool
    idle_timeout: str
    max_timers_per_batch: int | None = TIMERS_PER_BATCH


def check_options(
    options: StepOptions, processor: object, *, flow: str, sources: Iterable[str], tables: Iterable[str]
) -> Processor | ColumnProcessor:
    """What can be told without asking Kafka.

    Raises:
        OptionError: see its text.
    """
    if not isinstance(processor, Processor | ColumnProcessor):
        raise OptionError(
            f"Flow.process takes a Processor, not {processor!r}",
            flow=flow,
            next_step="give an instance of your subclass: Balance(), not Balance",
        )
    table = options.table
    if not table or table in sources or table.startswith("__"):
        what = "is read by this flow" if table in sources else "cannot be a table topic"
        raise OptionError(f"table={table!r} {what}", flow=flow, next_step="give the table a topic name of its own")
    if table in tables:
        raise OptionError(
            f"table={table!r} has a step already", flow=flow, next_step="one step of one flow owns a table"
        )
    if options.on_error not in ON_ERROR:
        raise OptionError(
            f"on_error={options.on_error!r} is unknown", flow=flow, next_step=f"use one of {', '.join(ON_ERROR)}"
        )
    if (options.on_error == "dead-letter") != (options.dead_letter_topic is not None):
        raise OptionError(
            'on_error="dead-letter" and dead_letter_topic= go together',
            flow=flow,
            next_step="give both, or neither: then a record that cannot be processed stops the flow",
        )
    if (processor.allowed_lateness is not None) != (options.late_topic is not None):
        raise OptionError(
            "allowed_lateness of the processor and late_topic= go together",
            flow=flow,
            next_step="give both (late records go to the topic, they never vanish), or neither (none is late)",
        )
    if options.partitions is not None and options.partitions < 1:
        raise OptionError(f"partitions={options.partitions} is too few", flow=flow, next_step="give at least 1")
    if options.max_timers_per_batch is not None and options.max_timers_per_batch < 1:
        raise OptionError(
            f"max_timers_per_batch={options.max_timers_per_batch} is too few",
            flow=flow,
            next_step="give at least 1, or None to fire all that are due in one batch",
        )
    for name, duration in (
        ("retention", options.retention),
        ("idle_timeout", options.idle_timeout),
        ("ttl", processor.ttl),
        ("allowed_lateness", processor.allowed_lateness),
    ):
        try:
            if duration is not None and duration_ms(duration) <= 0 and name != "allowed_lateness":
                raise ValueError("it must be positive")
        except ValueError as error:
            raise OptionError(f"{name}={duration!r}: {error}", flow=flow, next_step='for example "5 minutes"') from None
    if isinstance(options.store, str) and options.store not in STORES:
        raise OptionError(f"store={options.store!r} is unknown", flow=flow, next_step=f"use one of {STORES}")
    return processor


def store_class(store: str | type[Store]) -> type[Store]:
    """The local store by its name; classes pass."""
    if not isinstance(store, str):
        return store
    if store == "memory":
        from onceflow.state.memory_store import MemoryStore

        return MemoryStore
    if store == "rocksdb":
        from onceflow.state.rocksdb_store import RocksdbStore

        return RocksdbStore
    from onceflow.state.lmdb_store import LmdbStore

    return LmdbStore


def ensure_table(
    cluster: Cluster,
    options: StepOptions,
    progress: Progress,
    sources: Mapping[str, int],
    version: int,
    deadline: Deadline,
) -> tuple[TableTopics, Progress]:
    """The table's topics, and progress that knows them.

    Args:
        sources: partition count of every source topic.
        version: of the processor's state.

    Returns:
        The topics, and progress: the same object when it knew them already, else one to be committed first.
    """
    table = options.table
    topics = ensure_topics(cluster, table, options.partitions or max(sources.values()), deadline)
    ends = committed_ends(cluster, topics, deadline)
    check_readable(cluster, ends, deadline)
    if table in progress.changelogs:
        check_known(topics, progress.changelogs, progress.topic_ids)
        _check_version(table, progress.tables.get(table, TableProgress()).version, version)
        return topics, progress
    if options.partitions is not None and topics.partitions != options.partitions:
        raise ProgressConflictError(
            f"Table topic {table} has {topics.partitions} partitions, partitions={options.partitions} was asked for",
            topic=table,
            next_step="leave partitions= out, or give the table another name",
        )
    if any(end for by_partition in ends.values() for end in by_partition.values()) and not options.adopt_existing:
        raise ProgressConflictError(
            f"Table topic {table} holds records already, and the flow has no progress of them",
            topic=table,
            detail="they may be the state of another flow, or of this one before it was reset",
            next_step="delete the topics "
            f"{topics.table} and {topics.internal} to start empty, or give adopt_existing=True to take the rows over",
        )
    return topics, replace(
        progress,
        changelogs={**progress.changelogs, **ends},
        topic_ids={**progress.topic_ids, **topics.ids},
        tables={**progress.tables, table: TableProgress(version)},
    )


def runs_here(spark: SparkSession) -> bool:
    """Whether tasks run on this machine."""
    return re.match(r"local(\[|$)", str(spark.sparkContext.master)) is not None


def check_migration(processor: Processor | ColumnProcessor, known: int, *, table: str, flow: str) -> None:
    """Whether the processor can read what another version of it has written.

    Raises:
        ProgressConflictError: it cannot.
    """
    if processor.version > known and not callable(getattr(processor, "migrate", None)):
        raise ProgressConflictError(
            f"The state of table {table} has version {known}, the processor {processor.version} and no migrate()",
            flow=flow,
            topic=table,
            next_step="add `def migrate(self, value, from_version)` to the processor, or keep its version",
        )


def _check_version(table: str, known: int, version: int) -> None:
    if version < known:
        raise ProgressConflictError(
            f"The state of table {table} was written by version {known} of the processor, this is version {version}",
            topic=table,
            next_step="run the newer processor; state is not migrated backwards",
        )


def make_spec(
    options: StepOptions,
    processor: Processor | ColumnProcessor,
    topics: TableTopics,
    *,
    flow: str,
    flow_key: str,
    source_topic: str | None,
    local: bool,
) -> ProcessSpec:
    """What the step's tasks are told.

    Args:
        local: whether they run on this machine. Then driver and workers share the stores, and one of them decides where
            these are; elsewhere every host goes by its own environment.
    """
    state_dir = default_state_dir() if local else None
    ttl = options.retention if options.retention is not None else processor.ttl
    return ProcessSpec(
        flow=flow,
        flow_key=flow_key,
        processor=processor,
        topics=topics,
        store=store_class(options.store),
        state_dir=state_dir if options.state_dir is None else Path(options.state_dir),
        on_error=options.on_error,
        dead_letter_topic=options.dead_letter_topic,
        late_topic=options.late_topic,
        default_ttl_ms=None if ttl is None else duration_ms(ttl),
        single_key=options.single_key,
        source_topic=source_topic,
        max_timers_per_batch=options.max_timers_per_batch,
    )


def streamed_order(
    spec: ProcessSpec, settings: ClientSettings, transactional_id: str, transaction_version: int
) -> StateOrder:
    """What the tasks of a step inside a query know before it runs; the rest they are told batch by batch."""
    write = WriteOrder(
        flow=spec.flow,
        batch=-1,
        settings=settings,
        transactional_id=transactional_id,
        identity=BatchHeader(-1, -1),
        compression="none",
        topic=None,
        targets={name: Target(spec.topics.partitions, spec.topics.max_message_bytes) for name in spec.topics.ids},
        routing=Routing("key", 1, False),
        transaction_version=transaction_version,
        deadline_s=60.0,
    )
    moment = Moment(-1, Commit(-1, -1, -1), 0, None, {}, {}, {})
    return StateOrder(spec, moment, write, together=False, topic=None, modulus=1)


def letter_topics(steps: Mapping[str, Step]) -> set[str]:
    """Topics of late and dead letters: that one is missing is better told at the start."""
    specs = [step.spec for step in steps.values()]
    return {name for spec in specs for name in (spec.late_topic, spec.dead_letter_topic) if name is not None}


@dataclass(frozen=True)
class Query:
    """A query as the sink runs it."""

    df: DataFrame
    options: SinkOptions
    columns: Columns
    state: StateStep | None


def wire(
    df: DataFrame,
    options: SinkOptions,
    columns: Columns,
    steps: Mapping[str, Step],
    progress: Progress,
    *,
    flow: str,
    source_partitions: Mapping[str, list[int]],
    clock: bool,
) -> Query:
    """Decide where each process step of a query runs.

    The step whose output is written as it is takes the query's place: its input is streamed, and the sink runs it in
    every batch, with as many tasks as the batch is worth. Others stay inside the query.

    Args:
        clock: whether a flow with timers is woken up when there are no data (steps inside the query see to it
            themselves).
    """
    found = steps_in(df, steps, flow)
    if not found:
        return Query(df, options, columns, None)
    whole = next((step for step in found if step.output is df), None)
    source_keys = False
    inside = [step for step in found if step is not whole]
    if whole is not None:
        if options.partitioner != "key":
            raise OptionError(
                f"partitioner={options.partitioner!r} does not go with the outputs of Flow.process",
                flow=flow,
                next_step='leave it out: outputs are placed by their keys, partitioner="key"',
            )
        df = whole.input
        source_keys = queries.has_source_keys(df)
    elif options.topic is not None and columns.has_topic:
        # Dead letters, late records and records that name their topic keep it.
        df, options = with_default_topic(df, options.topic), replace(options, topic=None)
        columns = check_columns(df.schema, topic=None, flow=flow)
    if clock and whole is not None and needs_clock(whole.spec):
        df = with_clock(df, flow)
    places = [(name, partition) for name, partitions in source_partitions.items() for partition in partitions]

    def table(step: Step) -> TableState:
        return TableState(
            step.spec, progress, source_partitions=places, lateness_ms=step.lateness_ms, idle_s=step.idle_s
        )

    context = df.sparkSession.sparkContext
    state = StateStep(
        together=None if whole is None else table(whole),
        streamed=[(table(step), step.collected) for step in inside],
        topic=options.topic,
        cores=context.defaultParallelism,
        local=runs_here(df.sparkSession),
        small_batch_rows=options.small_batch_rows,
        source_partitions={name: len(partitions) for name, partitions in source_partitions.items()},
        source_keys=source_keys,
        collected=context.accumulator([], Collected()),
    )
    return Query(df, options, columns, state)


def check_goes_with(
    df: DataFrame, steps: Mapping[str, Step], guarantee: str, checkpoint: str | None, *, flow: str
) -> None:
    """Refuse process steps where they could not keep what they promise.

    Raises:
        UnsupportedQueryError: with a weaker guarantee, or beside Spark's own state.
    """
    if not steps or not steps_in(df, steps, flow):
        return
    if guarantee != EXACTLY_ONCE:
        raise UnsupportedQueryError(
            f"Flow.process does not go with guarantee={guarantee!r}",
            flow=flow,
            detail="its state and its outputs are committed together, or not at all",
            next_step="leave guarantee out; only queries without Flow.process have a choice",
        )
    if checkpoint is not None:
        raise UnsupportedQueryError(
            "Flow.process does not go with checkpoint=: its state is in Kafka, Spark's in the checkpoint",
            flow=flow,
            next_step="divide the query into two flows: one writes a topic that the other one reads",
        )


def steps_in(df: DataFrame, steps: Mapping[str, Step], flow: str) -> list[Step]:
    """The process steps that are part of a query's plan."""
    found = []
    for node in jvm.nodes(df._jdf.queryExecution().analyzed()):
        if node.getClass().getSimpleName() != "MapInArrow":
            continue
        name = str(node.functionExpr().name())
        if not name.startswith(queries.STEP_NAME):
            continue
        step = steps.get(name.removeprefix(queries.STEP_NAME))
        if step is None or step in found:
            raise UnsupportedQueryError(
                f"The query has the process step of table {name.removeprefix(queries.STEP_NAME)!r} "
                + ("of another run or flow" if step is None else "twice: its state would be written twice"),
                flow=flow,
                next_step="call Flow.read and Flow.process again for this run, and use every step once",
            )
        found.append(step)
    return found


def with_clock(df: DataFrame, flow: str) -> DataFrame:
    """The same rows, woken up every second without data, too: timers must fire.

    The source has news every second; the filter keeps its rows out, and the optimizer the rest.
    """
    nothing = (
        ticking(df.sparkSession, flow)
        .where(F.lit(False))
        .select(*[F.lit(None).cast(field.dataType).alias(field.name) for field in df.schema.fields])
    )
    return df.unionByName(nothing)
