"""One run of a query with an external sink: how it starts, and how it is put together."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pyspark.sql import SparkSession

from onceflow.client.deadline import Deadline
from onceflow.driver.batch_sink import BatchSink
from onceflow.driver.checkpoint_location import CheckpointLocation, scratch_folder
from onceflow.driver.external_commit import ExternalCommit, Ownership
from onceflow.driver.external_waiting import at_start
from onceflow.driver.run import Run, check_read_now, watch_sources, writer_of
from onceflow.driver.startup import Startup, commit_progress
from onceflow.errors import OptionError, located
from onceflow.external.sink import ExternalSink
from onceflow.planning import source_starts
from onceflow.planning.external_start import plan_external
from onceflow.planning.external_write import ExternalWrite
from onceflow.protocol.progress import Progress, decode
from onceflow.spark import queries, query_listener, shipping
from onceflow.spark.checkpoint_files import LocalFolder
from onceflow.spark.collect import arrow_schema
from onceflow.spark.imports import ImportCheck, sent_to_tasks
from onceflow.spark.kafka_source import put_starting_offsets
from onceflow.spark.master import is_local

log = logging.getLogger("onceflow")


def prepare_external_run(spark: SparkSession, startup: Startup, write: ExternalWrite) -> Run:
    """Take the flow over in the external system, too, and put the query together.

    Raises:
        OnceflowError: see ``FlowWriter.start``. ``startup`` can be used again then.
    """
    flow, sink = startup.flow, write.sink
    check_read_now(startup, write.run.facts)
    queries.check_session(spark, flow)
    if sink.local_only and not is_local(spark):
        raise OptionError(
            f"{sink.target} can be written by tasks on this machine only",
            flow=flow,
            next_step='use a session with master="local[*]"',
        )
    shipping.share_modules(spark)
    imports = ImportCheck(spark, sent_to_tasks(write.df, [], flow), flow=flow)
    imports.at_start()
    deadline = startup.deadline()
    with located(flow=flow):
        kafka = startup.prepare_run(deadline)
        at_start(lambda: sink.check(arrow_schema(write.df)), deadline, sink.target, flow)
        owned = _take_over(sink, startup, kafka, deadline)
        startup.session.transactions.renew(deadline)
    checkpoint = scratch_folder(flow)
    location = CheckpointLocation(LocalFolder(checkpoint), checkpoint.as_uri(), None)
    starts = _starts(startup, owned.progress, flow)
    if starts != _starts(startup, kafka, flow):
        put_starting_offsets(write.df, checkpoint, starts)
    commit = ExternalCommit(
        sink,
        owned,
        startup.session,
        sources=startup.sources,
        options=write.options,
        checkpoint=location.folder,
    )
    batches = BatchSink(commit, write.options, before_first=imports.finish)
    commit.is_stopping = lambda: batches.stopping
    writer = writer_of(spark, write.df, batches, location, write.run, flow)
    query_listener.watch(spark)
    startup.used()
    return Run(flow, spark, writer, batches, None, location, watch_sources(startup, batches))


def _take_over(sink: ExternalSink, startup: Startup, kafka: Progress, deadline: Deadline) -> Ownership:
    """Fence older drivers in the external system, and let Kafka's progress follow if the last one could not."""
    flow = startup.flow
    opened = at_start(lambda: sink.open(flow, None), deadline, sink.target, flow)
    row = None if opened.progress is None else decode(kafka.flow.encode(), opened.progress.encode())
    start = plan_external(kafka, row, startup.sources, target=sink.target, flow=flow)
    if start.warning:
        log.warning("flow %s: %s", flow, start.warning)
    if start.follows:
        commit_progress(startup.session, start.progress, startup.sources, deadline)
    return Ownership(opened.generation, opened.progress, start.progress)


def _starts(startup: Startup, progress: Progress, flow: str) -> Mapping[str, dict[int, int]]:
    """Where each topic is read from.

    Raises:
        DataLossError, ProgressConflictError: it cannot be read from there.
    """
    return {
        name: source_starts.plan(
            topic, progress, starting_offsets="earliest", fail_on_data_loss=True, flow=flow
        ).offsets
        for name, topic in startup.sources.items()
    }
