"""One run of a flow's query: how it is put together, and what it holds until it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from onceflow.driver.batch.batches import Batches
from onceflow.driver.batch.driver_program import Functions
from onceflow.driver.batch.sink import BatchSink
from onceflow.driver.batch.watching import Watch
from onceflow.driver.kafka.commit import BatchCommit
from onceflow.driver.kafka.delivery import delivery
from onceflow.driver.kafka.output_writer import OutputWriter
from onceflow.driver.record import handover
from onceflow.driver.start.checkpoint_location import CheckpointLocation, kept_location
from onceflow.driver.start.report import StartReport, report
from onceflow.driver.start.startup import Startup
from onceflow.driver.start.streamed_query import StreamedQuery, divide
from onceflow.driver.step.joins import Joins
from onceflow.driver.step.row_calls import RowCalls
from onceflow.driver.step.state_step import StateStep
from onceflow.engine_query import DIRECT
from onceflow.errors import UnsupportedQueryError, located
from onceflow.planning import engine, process, step_query
from onceflow.planning.bounded import bounded
from onceflow.planning.direct_plan import DirectPlan
from onceflow.planning.engine import EngineChoice
from onceflow.planning.options import SinkOptions
from onceflow.planning.write_options import CheckedWrite, check_output
from onceflow.protocol.progress import Offsets, Progress
from onceflow.spark import logs, queries, query_listener, query_session, shipping
from onceflow.spark.imports import ImportCheck, sent_to_tasks
from onceflow.spark.master import current_cores, is_local
from onceflow.spark.query_facts import QueryFacts
from onceflow.spark.row_program import RowPrograms
from onceflow.spark.streaming_query import SparkQuery


@dataclass(frozen=True, kw_only=True)
class RunOfEngine:
    """One run of a query, by either engine. It ends with ``close``.

    Args:
        state: the process steps, if there are any.
        watch: logs what prevents the query from reading its sources.
        until: where its reads end; empty: it does not end by itself.
        report: what its start has found.
    """

    sink: Batches
    state: StateStep | None
    watch: Watch
    until: Offsets
    report: StartReport

    def close(self) -> None:
        """Release what the run holds, except the connections of its ``Startup``."""
        self.watch.stop()
        self.sink.ended()
        if self.state is not None:
            self.state.close()


@dataclass(frozen=True, kw_only=True)
class MicroBatchRun(RunOfEngine):
    """One run of a query with a checkpoint, by Spark's micro-batches.

    Args:
        writer: Spark's writer, ready to be started.
    """

    flow: str
    spark: SparkSession
    writer: DataStreamWriter

    def start(self) -> SparkQuery:
        """Start the query in Spark.

        Raises:
            UnsupportedQueryError: Spark refuses it.
        """
        try:
            with query_listener.by_flow(self.flow), query_session.without_adaptive_execution(self.spark):
                return SparkQuery(self.writer.start())
        except AnalysisException as error:
            raise UnsupportedQueryError(
                "Spark refuses the query",
                flow=self.flow,
                detail=str(error).splitlines()[0],
                next_step="see Spark's Structured Streaming guide for what output_mode the query's operators allow",
            ) from error


@dataclass(frozen=True)
class PreparedQuery:
    """A query that may be run, by the engine that was chosen for it.

    Args:
        progress: with which the run begins.
        location: of the checkpoint that is kept; None: there is none.
        written: topics that are written, as far as they are known.
        imports: checks whether tasks can import what they need.
        programs: of the direct engine.
    """

    spark: SparkSession
    startup: Startup
    write: CheckedWrite
    query: StreamedQuery
    choice: EngineChoice
    progress: Progress
    location: CheckpointLocation | None
    written: Sequence[str]
    imports: ImportCheck
    programs: RowPrograms


def prepare_query(spark: SparkSession, startup: Startup, write: CheckedWrite) -> PreparedQuery:
    """Check a query as a whole, fence, read progress, and choose an engine.

    Args:
        startup: of the flow. It is used for this run only.

    Raises:
        OnceflowError: see ``FlowWriter.start``. ``startup`` can be used again then.
    """
    logs.silence_py4j()  # the session may be one of the user's own
    flow = startup.flow
    options = bounded(write.sink, startup.takeover.sources, startup.takeover.until, flow)
    write = replace(write, sink=options)
    imports = _check_query(spark, startup, write)
    startup.takeover.await_turn()
    deadline = startup.takeover.deadline()
    with located(flow=flow):
        side_topics = process.all_side_topics(startup.steps, (order.dead_letter_topic for order in startup.calls))
        progress = replace(startup.prepare_run(deadline), side_topics=side_topics)
        location = _kept_location(spark, write, progress, flow)
        written = startup.prepare_outputs(options, deadline)
    programs = RowPrograms(spark)
    with contextlib.ExitStack() as unless_used:
        unless_used.callback(programs.close)
        query, choice = _divided(spark, startup, write, progress, programs)
        if choice.engine == DIRECT:
            unless_used.pop_all()
    return PreparedQuery(spark, startup, write, query, choice, progress, location, written, imports, programs)


def _divided(
    spark: SparkSession, startup: Startup, write: CheckedWrite, progress: Progress, programs: RowPrograms
) -> tuple[StreamedQuery, EngineChoice]:
    """The query, and the engine that runs it."""
    query = divide(
        write,
        startup.steps,
        progress,
        flow=startup.flow,
        source_partitions=startup.takeover.source_partitions,
        functions=functions_of_run(startup, programs if write.sink.checkpoint is None else None),
        output_partitions=startup.output_partitions,
    )
    plan, used = sources_used(query.plan, startup)
    handover.check_sources(progress, used, flow=startup.flow)
    choice = engine.choose(
        write.sink.engine,
        plan,
        "" if query.program is None else query.program.job,
        checkpoint=write.sink.checkpoint is not None,
        stateful=query.state is not None,
        local=is_local(spark),
        flow=startup.flow,
    )
    return query, choice


def functions_of_run(startup: Startup, programs: RowPrograms | None) -> Functions:
    """What a run has for the operators of its query.

    Args:
        programs: None: the driver runs no program.
    """
    maps = {name: each.apply for name, each in startup.maps.items()}
    return Functions(maps, startup.functions, None if programs is None else programs.evaluate)


def sources_used(plan: DirectPlan | str, startup: Startup) -> tuple[DirectPlan | str, Collection[str]]:
    """The plan, or why there is none; and the topics that the query uses. The flow may have read others, too."""
    if isinstance(plan, str):
        return plan, startup.takeover.sources
    used = set(plan.reads)
    old = sorted(used - startup.takeover.sources.keys())
    return (f"topic {old[0]} was read for an earlier run of the flow" if old else plan), used


def spark_run(prepared: PreparedQuery) -> MicroBatchRun:
    """Put a run of Spark's micro-batches together. After this only Spark can reject the query."""
    spark, startup = prepared.spark, prepared.startup
    query, location, flow = prepared.query, prepared.location, startup.flow
    if location is None:
        raise RuntimeError("the query has no checkpoint")
    prepared.imports.at_start()
    options = query.options
    commit = batch_commit(prepared, options, location)
    sink = BatchSink(commit, options, before_first=prepared.imports.finish)
    query_listener.watch(spark)  # a query without Flow.read has not done it yet
    start_report = report(
        startup, spark, options, outputs=prepared.written, checkpoint=location.address, choice=prepared.choice
    )
    startup.takeover.used()
    return MicroBatchRun(
        flow=flow,
        spark=spark,
        writer=_writer_of(spark, query.df, sink, location, options, flow),
        sink=sink,
        state=None,
        watch=watch_sources(startup, sink),
        until=startup.takeover.until,
        report=start_report,
    )


def check_read_now(startup: Startup, facts: QueryFacts) -> None:
    """Check that the query reads from where the flow is now, and up to where the run ends.

    Raises:
        UnsupportedQueryError: it was read before an earlier run, or with another ``until=`` than the last
            ``Flow.read`` of the topic.
    """
    if facts.topics and not startup.takeover.is_fenced:
        raise UnsupportedQueryError(
            "The DataFrame was read before an earlier run of this flow; its offsets are out of date",
            flow=startup.flow,
            next_step="call Flow.read again before starting the flow again",
        )
    for topic, ends in facts.ends_of_reads(startup.flow):
        until = startup.takeover.until.get(topic)
        if ends != (None if until is None else tuple(until.get(n, 0) for n in range(max(until) + 1))):
            raise UnsupportedQueryError(
                "The DataFrame was read with another until= than that of the last Flow.read of the topic",
                flow=startup.flow,
                topic=topic,
                next_step="write the DataFrame of the last Flow.read; a flow reads a topic in one way at a time",
            )


def watch_sources(startup: Startup, sink: Batches) -> Watch:
    """Log what prevents the query from reading its sources."""
    return Watch(
        startup.takeover.settings,
        startup.takeover.source_partitions,
        flow=startup.flow,
        over=lambda: sink.over or sink.failure is not None,
    )


def _check_query(spark: SparkSession, startup: Startup, write: CheckedWrite) -> ImportCheck:
    """Check what may have changed since the first check of the query, and what needs the complete query."""
    flow = startup.flow
    check_read_now(startup, write.facts)
    queries.check_session(spark, flow)
    step_query.check_goes_with(write.facts, startup.steps, write.sink.guarantee, write.sink.checkpoint, flow=flow)
    check_output(write.sink.topic, startup.own_topics, flow)  # sources may have been read since Flow.write
    process.check_side_topics(process.side_topics(startup.steps), startup.own_topics, flow)
    shipping.share_modules(spark)  # also modules that were imported since
    specs = [step.spec for step in startup.steps.values()]
    return ImportCheck(spark, sent_to_tasks(write.df, specs, flow, startup.maps), flow=flow)


def _kept_location(
    spark: SparkSession, write: CheckedWrite, progress: Progress, flow: str
) -> CheckpointLocation | None:
    folder, others = write.sink.checkpoint, write.facts.others
    if folder is None:
        return None
    return kept_location(spark, folder, progress, on_conflict=write.sink.on_conflict, other_sources=others, flow=flow)


def batch_commit(prepared: PreparedQuery, options: SinkOptions, location: CheckpointLocation | None) -> BatchCommit:
    """The steps of the batches of a run.

    Args:
        location: of the checkpoint from which ranges are read; None: the engine knows them itself.
    """
    startup, query, progress = prepared.startup, prepared.query, prepared.progress
    takeover, state = startup.takeover, query.state
    session, sources = takeover.session, takeover.sources_read
    with_state = None if state is None else state.opened(progress)
    delivered = delivery(options.guarantee, session, prepared.written, with_state=with_state)
    numbering = None if location is None else location.numbering
    writer = OutputWriter(
        startup.flow,
        cluster=session.cluster,
        delivery=delivered,
        options=options,
        columns=prepared.write.columns,
        cores=current_cores(prepared.spark),
        source_partitions=sources.partitions,
        state=state,
        numbering=numbering,
    )
    return BatchCommit(
        session,
        takeover.driver,
        progress,
        options,
        sources=sources,
        writer=writer,
        delivery=delivered,
        numbering=numbering,
        state=state,
        joins=Joins(startup.joins, session.cluster, progress, flow=startup.flow),
        calls=RowCalls(startup.calls, options.transaction_timeout_s),
    )


def _writer_of(
    spark: SparkSession, df: DataFrame, sink: BatchSink, location: CheckpointLocation, options: SinkOptions, flow: str
) -> DataStreamWriter:
    """Spark's writer, which calls the sink for each batch."""
    writer = df.writeStream.foreachBatch(sink).option("checkpointLocation", location.address)
    if all(query.name != flow for query in spark.streams.active):
        writer = writer.queryName(flow)  # else an older driver of this flow is in this session
    writer = writer.outputMode(options.output_mode)
    if options.once:
        return writer.trigger(availableNow=True)
    if options.trigger_s:
        # Spark understands fewer units than onceflow.
        return writer.trigger(processingTime=f"{round(options.trigger_s * 1000)} milliseconds")
    return writer
