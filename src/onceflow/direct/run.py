"""One run of the direct engine: how it is put together, and what it holds until it ends."""

from __future__ import annotations

from dataclasses import dataclass

from onceflow.client.deadline import Deadline
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.client.settings import ClientSettings
from onceflow.direct.batches import DirectBatches
from onceflow.direct.by_tasks import backlog_of, range_source
from onceflow.direct.loop import DirectLoop
from onceflow.direct.query import DirectQuery
from onceflow.direct.source_reader import SourceReader
from onceflow.driver.offset_log import TopicOffsets
from onceflow.driver.run import PreparedQuery, RunOfEngine, batch_commit, watch_sources
from onceflow.driver.start_report import report
from onceflow.driver.streamed_query import StreamedQuery
from onceflow.driver.targets import load_targets
from onceflow.planning.ownership import check_source_partitions
from onceflow.spark.row_program import RowPrograms
from onceflow.task.direct_plan import DirectPlan, SinkForm
from onceflow.task.source_rows import QueryRows


@dataclass(frozen=True, kw_only=True)
class DirectRun(RunOfEngine):
    """One run of the direct engine."""

    loop: DirectLoop
    plan: DirectPlan
    settings: ClientSettings
    programs: RowPrograms

    def start(self) -> DirectQuery:
        """Start the loop."""
        return DirectQuery(self.loop, self.sink, self.plan, self.settings)

    def close(self) -> None:
        """See `RunOfEngine.close`."""
        self.loop.stop()
        try:
            super().close()
        finally:
            self.programs.close()


def direct_run(prepared: PreparedQuery) -> DirectRun:
    """Put a run of the direct engine together.

    Raises:
        OnceflowError: see ``FlowWriter.start``. ``startup`` can be used again then.
    """
    try:
        return _put_together(prepared)
    except BaseException:
        prepared.programs.close()
        raise


def _put_together(prepared: PreparedQuery) -> DirectRun:
    startup, query, options = prepared.startup, prepared.query, prepared.query.options
    plan, flow = prepared.choice.plan, startup.flow
    if plan is None:
        raise RuntimeError("the query has no plan for the direct engine")
    deadline = startup.deadline()
    by_source = options.partitioner == "source"
    if by_source:
        targets = load_targets(startup.session.cluster, options.topic, deadline)
        check_source_partitions(options.topic, targets, startup.sources_read.partitions)
    # The flow may have read topics that this query does not use.
    starts = {topic: dict(prepared.progress.offsets[topic]) for topic in plan.reads}
    read = _rows_of(query, plan, by_source=by_source)
    topic_ids = {topic: startup.sources[topic].topic_id for topic in starts}
    epochs = prepared.progress.epochs
    reader = SourceReader(startup.settings, read, starts, topic_ids=topic_ids, epochs=epochs, flow=flow)
    try:
        until = _end_of_run(prepared, starts, deadline)
        tables = list if query.state is None else query.state.facts
        batches = DirectBatches(batch_commit(prepared, options, None), options, tables=tables)
        loop = DirectLoop(
            batches,
            reader,
            spark=prepared.spark,
            trigger_s=options.trigger_s,
            records_per_batch={t: s.max_records for t, s in plan.reads.items() if s.max_records is not None},
            until=until,
            backlog=backlog_of(prepared),
            tasks=range_source(prepared, read, topic_ids),
            programs=prepared.programs,
        )
        given = prepared.write.sink  # with Flow.map, the query's own options make tasks of Spark write every batch
        told = report(startup, prepared.spark, given, outputs=prepared.written, choice=prepared.choice)
        startup.used()
    except BaseException:
        reader.close()
        raise
    return DirectRun(
        loop=loop,
        plan=plan,
        settings=startup.settings,
        programs=prepared.programs,
        sink=batches,
        state=query.state,
        watch=watch_sources(startup, batches),
        until=startup.until,
        report=told,
    )


def _rows_of(query: StreamedQuery, plan: DirectPlan, *, by_source: bool) -> QueryRows:
    """What the sink, or the process step, takes."""
    if query.state is not None and query.state.written_as_is:
        return QueryRows(plan)
    taken = query.columns.taken
    return QueryRows(plan.only(taken), SinkForm(taken, query.columns.cast, by_source))


def _end_of_run(prepared: PreparedQuery, starts: TopicOffsets, deadline: Deadline) -> TopicOffsets | None:
    """With ``once=True``, where the sources end now, or the reads of them; None: the run does not end by itself."""
    if not prepared.write.run.once:
        return None
    bounds = prepared.startup.until
    if bounds:  # then all reads have one; what was read before it was given may be behind it
        return {t: {n: max(start, bounds[t].get(n, 0)) for n, start in each.items()} for t, each in starts.items()}
    wanted = {topic: sorted(offsets) for topic, offsets in starts.items()}
    return list_offsets(prepared.startup.session.cluster, wanted, LATEST, deadline)
