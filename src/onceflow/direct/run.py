"""One run of the direct engine: how it is put together, and what it holds until it ends."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import SparkSession
from pyspark.sql import types as T

from onceflow.client.deadline import Deadline
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.client.settings import ClientSettings
from onceflow.direct.backlog import Backlog
from onceflow.direct.batches import DirectBatches
from onceflow.direct.loop import DirectLoop
from onceflow.direct.query import DirectQuery
from onceflow.direct.source_reader import SourceReader
from onceflow.driver.batch.driver_program import described
from onceflow.driver.batch.range_rows import RangeSource
from onceflow.driver.kafka.targets import load_targets
from onceflow.driver.record.offset_log import TopicOffsets
from onceflow.driver.start.external_run import PreparedExternal
from onceflow.driver.start.report import StartReport, report
from onceflow.driver.start.run import PreparedQuery, RunOfEngine, batch_commit, watch_sources
from onceflow.driver.start.startup import Startup
from onceflow.driver.start.streamed_query import StreamedQuery
from onceflow.driver.start.takeover import Takeover
from onceflow.errors import EnvironmentUnusableError, OptionError
from onceflow.planning.engine import TASKS, EngineChoice
from onceflow.planning.ownership import check_source_partitions
from onceflow.protocol.progress import Progress
from onceflow.spark.imports import ImportCheck
from onceflow.spark.jvm import SPARK_ERRORS
from onceflow.spark.master import current_cores, is_local
from onceflow.spark.pickling import pickled
from onceflow.spark.row_program import RowPrograms
from onceflow.state.table_facts import TableFacts

log = logging.getLogger("onceflow")

# On this machine, the driver and its tasks share the cores, often with the broker. With fewer cores tasks do not help.
_LOCAL_CORES_MIN, _CORES_MIN = 3, 2
_PATIENCE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class DirectRun(RunOfEngine):
    """One run of the direct engine."""

    loop: DirectLoop
    described: Callable[[bool], str]
    settings: ClientSettings
    programs: RowPrograms

    def start(self) -> DirectQuery:
        """Start the loop."""
        return DirectQuery(self.loop, self.sink, self.described, self.settings)

    def close(self) -> None:
        """See `RunOfEngine.close`."""
        self.loop.stop()
        try:
            super().close()
        finally:
            self.programs.close()


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """What is known of a run before its loop is made.

    Args:
        starts: where the topics that the query uses are read from.
        progress: where the flow is.
    """

    spark: SparkSession
    startup: Startup
    query: StreamedQuery
    choice: EngineChoice
    imports: ImportCheck
    programs: RowPrograms
    starts: TopicOffsets
    progress: Progress

    def run(self, batches: Callable[[], DirectBatches], started: Callable[[], StartReport]) -> DirectRun:
        """Make the loop.

        Args:
            batches: makes what runs the batches.
            started: returns what the start has found, when the sources can be read.
        """
        startup, query, starts = self.startup, self.query, self.starts
        plan, program = query.planned()
        deadline = startup.takeover.deadline()
        topic_ids = {topic: startup.takeover.sources[topic].topic_id for topic in starts}
        reader = SourceReader(
            startup.takeover.settings,
            plan.reads,
            starts,
            topic_ids=topic_ids,
            epochs=self.progress.epochs,
            flow=startup.flow,
            refused_s=startup.takeover.refused_s,
        )
        try:
            sink = batches()
            loop = DirectLoop(
                sink,
                reader,
                spark=self.spark,
                trigger_s=query.options.trigger_s,
                records_per_batch={t: s.max_records for t, s in plan.reads.items() if s.max_records is not None},
                until=_end_of_run(startup.takeover, starts, deadline) if query.options.once else None,
                backlog=backlog_of(self.spark, startup, query, self.choice, self.imports),
                tasks=range_source(self.spark, startup, query, self.choice, topic_ids, self.programs),
                programs=self.programs,
            )
            found = started()
            startup.takeover.used()
        except BaseException:
            reader.close()
            raise
        return DirectRun(
            loop=loop,
            described=lambda extended: described(plan, program, extended=extended),
            settings=startup.takeover.settings,
            programs=self.programs,
            sink=sink,
            state=query.state,
            watch=watch_sources(startup, sink),
            until=startup.takeover.until,
            report=found,
        )


def direct_run(prepared: PreparedQuery) -> DirectRun:
    """Put a run of the direct engine together.

    Raises:
        OnceflowError: see ``FlowWriter.start``. ``startup`` can be used again then.
    """
    startup, query, options = prepared.startup, prepared.query, prepared.query.options
    with closed_if_failed(prepared.programs):
        plan, _ = query.planned()
        if options.partitioner == "source":
            targets = load_targets(startup.takeover.session.cluster, options.topic, startup.takeover.deadline())
            check_source_partitions(options.topic, targets, startup.takeover.sources_read.partitions)
        parts = RunParts(
            spark=prepared.spark,
            startup=startup,
            query=query,
            choice=prepared.choice,
            imports=prepared.imports,
            programs=prepared.programs,
            # The flow may have read topics that this query does not use.
            starts={topic: dict(prepared.progress.offsets[topic]) for topic in plan.reads},
            progress=prepared.progress,
        )
        tables = list if query.state is None else query.state.facts
        return parts.run(
            lambda: DirectBatches(batch_commit(prepared, options, None), options, tables=tables),
            lambda: report(startup, prepared.spark, options, outputs=prepared.written, choice=prepared.choice),
        )


def external_run(prepared: PreparedExternal) -> DirectRun:
    """Put a run with an external sink together.

    Raises:
        OnceflowError: see ``FlowWriter.start``. ``startup`` can be used again then.
    """
    spark, startup, choice, options = prepared.spark, prepared.startup, prepared.choice, prepared.query.options
    with closed_if_failed(prepared.programs):
        plan, _ = prepared.query.planned()
        parts = RunParts(
            spark=spark,
            startup=startup,
            query=prepared.query,
            choice=choice,
            imports=prepared.imports,
            programs=prepared.programs,
            starts={topic: dict(prepared.starts[topic]) for topic in plan.reads},
            progress=prepared.owned.progress,
        )
        commit = prepared.commit()
        batches = DirectBatches(commit, options)
        commit.is_stopping = lambda: batches.stopping
        sink = prepared.write.sink
        return parts.run(
            lambda: batches,
            lambda: report(startup, spark, options, sink=sink, followed=prepared.followed, choice=choice),
        )


@contextlib.contextmanager
def closed_if_failed(programs: RowPrograms) -> Iterator[None]:
    """Close the programs of a run that cannot be put together."""
    try:
        yield
    except BaseException:
        programs.close()
        raise


def _end_of_run(takeover: Takeover, starts: TopicOffsets, deadline: Deadline) -> TopicOffsets:
    """Where the sources end now, or the reads of them."""
    bounds = takeover.until
    if bounds:  # then all reads have one; what was read before it was given may be behind it
        return {t: {n: max(start, bounds[t].get(n, 0)) for n, start in each.items()} for t, each in starts.items()}
    wanted = {topic: sorted(offsets) for topic, offsets in starts.items()}
    return list_offsets(takeover.session.cluster, wanted, LATEST, deadline)


def range_source(
    spark: SparkSession,
    startup: Startup,
    query: StreamedQuery,
    choice: EngineChoice,
    topic_ids: Mapping[str, str],
    programs: RowPrograms,
) -> RangeSource:
    """What tasks are told that read by themselves."""
    plan, program = query.planned()
    return RangeSource(
        flow=startup.flow,
        settings=startup.takeover.settings,
        topic_ids=topic_ids,
        plan=plan,
        program=program,
        schema=T.StructType([query.df.schema[name] for name in plan.columns if name in query.df.columns]),
        deadline_s=max(query.options.transaction_timeout_s, _PATIENCE_S),
        spark=spark,
        programs=programs,
        node=query.node,
        all_batches=choice.place == TASKS and not is_local(spark),
    )


def backlog_of(
    spark: SparkSession, startup: Startup, query: StreamedQuery, choice: EngineChoice, imports: ImportCheck
) -> Backlog:
    """Decides who reads, the driver or tasks.

    Raises:
        EnvironmentUnusableError: tasks are sure to read, and lack a module.
    """
    state = query.state
    local, cores = is_local(spark), current_cores(spark)
    if choice.place == TASKS:
        imports.at_start()
    processors = [step.spec.processor for step in startup.steps.values()]
    ready = _Ready(imports, processors, startup.flow)
    return Backlog(
        startup.flow,
        choice.place,
        may_help=lambda: (
            not (state is not None and stays_in_memory(state.facts()))
            and _known(cores) >= (_LOCAL_CORES_MIN if local else _CORES_MIN)
            and ready()
        ),
        batch_s=query.options.transaction_timeout_s / 4,
    )


def _known(cores: Callable[[], int]) -> int:
    """How many tasks Spark can run; 0: its JVM has ended. The driver does not need it to read."""
    with contextlib.suppress(*SPARK_ERRORS, AttributeError, OSError):
        return cores()
    return 0


class _Ready:
    """Whether tasks can get what the query needs, and import it. Whether they can import it is found out once, when
    there is a backlog for the first time."""

    def __init__(self, imports: ImportCheck, processors: Sequence[object], flow: str) -> None:
        self._imports = imports
        self._processors = processors
        self._flow = flow
        self._known: bool | None = None

    def __call__(self) -> bool:
        if self._known is not False:
            try:
                if self._known is None:
                    self._imports.finish()
                for processor in self._processors:  # the driver has called them, which may have changed their variables
                    pickled(processor, flow=self._flow)
                self._known = True
            except (EnvironmentUnusableError, OptionError) as error:
                log.warning("flow %s: the driver reads its backlog alone, because tasks cannot: %s", self._flow, error)
                self._known = False
        return self._known


def stays_in_memory(tables: Iterable[TableFacts]) -> bool:
    """Whether some state is in the memory of the driver: every batch of tasks would have to restore it. Copies on the
    disk of this machine are where tasks run already."""
    return any(table.nbytes is None for table in tables)
