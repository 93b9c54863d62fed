"""How a query with an external sink starts."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from uuid import uuid4

import pyarrow as pa
from pyspark.sql import SparkSession

from onceflow.arrow_types import nullable
from onceflow.client.brokers import warn_of_settings
from onceflow.client.deadline import Deadline
from onceflow.client.topics import find_topics, topic_limits
from onceflow.driver.batch.errors import in_short
from onceflow.driver.external.commit import ExternalCommit, Ownership, new_commit
from onceflow.driver.external.progress_commit import commit_progress
from onceflow.driver.external.refused_rows import LettersToWrite, RefusedRows, parsed
from onceflow.driver.external.waiting import at_start
from onceflow.driver.kafka.targets import check_side_topics_writable
from onceflow.driver.start.run import check_read_now, functions_of_run, sources_used
from onceflow.driver.start.source_offsets import ends_of_epochs
from onceflow.driver.start.startup import Startup
from onceflow.driver.start.streamed_query import StreamedQuery, whole
from onceflow.driver.start.takeover import Takeover
from onceflow.errors import OnceflowError, OptionError, ProgressConflictError, ProtocolError, located
from onceflow.messages import OutputTopic
from onceflow.planning import source_starts
from onceflow.planning.bounded import bounded
from onceflow.planning.engine import TASKS, EngineChoice, choose
from onceflow.planning.external_start import ExternalStart, of_row, plan_external
from onceflow.planning.external_write import ExternalWrite
from onceflow.planning.process import all_side_topics, check_side_topics
from onceflow.protocol.progress import Progress
from onceflow.spark import queries, shipping
from onceflow.spark.collect import arrow_schema
from onceflow.spark.imports import ImportCheck, sent_to_tasks
from onceflow.spark.master import current_cores, is_local
from onceflow.spark.row_program import RowPrograms
from onceflow.task.sink_form import TableForm

log = logging.getLogger("onceflow")


@dataclass(frozen=True)
class PreparedExternal:
    """A write to an external sink that may be run.

    Args:
        starts: where topics are read from. targets: topics of dead letters.
        followed: progress as the external system has it, if Kafka's was behind and has followed.
    """

    spark: SparkSession
    startup: Startup
    write: ExternalWrite
    query: StreamedQuery
    choice: EngineChoice
    owned: Ownership
    starts: Mapping[str, dict[int, int]]
    targets: Mapping[str, OutputTopic]
    imports: ImportCheck
    programs: RowPrograms
    followed: Progress | None

    def commit(self) -> ExternalCommit:
        """The steps of the batches of the run."""
        takeover, sink, letters = self.startup.takeover, self.write.sink, self.write.dead_letter_topic
        refused = RefusedRows(
            letters, self.write.max_dead_letters, self.targets, target=sink.target, flow=takeover.flow
        )
        return ExternalCommit(
            sink,
            self.owned,
            takeover.session,
            driver=takeover.driver,
            sources=takeover.sources_read,
            refused=refused,
            targets=self.targets,
            cores=current_cores(self.spark),
        )


def prepare_external(spark: SparkSession, startup: Startup, write: ExternalWrite) -> PreparedExternal:
    """Plan the query, and take the flow over in the external system, too.

    The progress row is read, and all that it decides is checked, before the flow is taken over there: a start that is
    refused, for example because it was given another database, must not fence a driver that works.

    Raises:
        OnceflowError: see ``FlowWriter.start``. ``startup`` can be used again then.
    """
    flow, sink, takeover = startup.flow, write.sink, startup.takeover
    options = bounded(write.options, takeover.sources, takeover.until, flow)
    # The sink is the user's, who may give it to another flow, too: with other columns, or without dead letters.
    sink = copy.copy(sink)
    write = replace(write, options=options, sink=sink)
    imports = _check_query(spark, startup, write)
    programs = RowPrograms(spark)
    with contextlib.ExitStack() as unless_used:
        unless_used.callback(programs.close)
        deadline = takeover.deadline()
        with located(flow=flow):
            kafka = startup.prepare_run(deadline)
            _check_not_promoted(kafka)
            schema = arrow_schema(write.df)
            form = TableForm(nullable(schema))
            query = whole(write.df, write.facts, options, form, functions_of_run(startup, programs), flow)
            plan, _ = sources_used(query.plan, startup)
            job = "" if query.program is None else query.program.job
            wanted, local = options.engine, is_local(spark)
            choice = choose(wanted, plan, job, checkpoint=None, stateful=False, local=local, flow=flow)
            if choice.place == TASKS:
                imports.at_start()
            at_start(lambda: sink.check(schema), deadline, sink.target, flow)
            takeover.commit()  # what the other system is told refers to it
            owned, starts, targets = _take_over(write, takeover, takeover.progress_now or kafka, deadline)
            takeover.session.transactions.renew(deadline)
        unless_used.pop_all()
    followed = owned.progress if owned.progress.batch_id > kafka.batch_id else None
    return PreparedExternal(spark, startup, write, query, choice, owned, starts, targets, imports, programs, followed)


def _check_query(spark: SparkSession, startup: Startup, write: ExternalWrite) -> ImportCheck:
    """Check what may have changed since the first check of the query, and what needs the complete query."""
    flow = startup.flow
    check_read_now(startup, write.facts)
    queries.check_session(spark, flow)
    if write.dead_letter_topic is not None:
        check_side_topics([write.dead_letter_topic], startup.own_topics, flow)
        write.sink.set_aside()
    if write.sink.local_only and not is_local(spark):
        raise OptionError(
            f"{write.sink.target} can be written by tasks on this machine only",
            flow=flow,
            next_step='use a session with master="local[*]"',
        )
    shipping.share_modules(spark)
    return ImportCheck(spark, sent_to_tasks(write.df, [], flow, startup.maps), flow=flow)


def _check_not_promoted(kafka: Progress) -> None:
    if kafka.handover is not None:
        raise ProgressConflictError(
            "The flow was promoted with state, and its program now writes to another system only",
            next_step="start the program that was promoted, with its process steps, until it has committed a batch",
        )


@dataclass(frozen=True)
class _Decided:
    """What follows from a progress row.

    Args:
        starts: where each topic is read from. letters: dead letters in the row. targets: all topics of dead letters.
    """

    start: ExternalStart
    starts: Mapping[str, dict[int, int]]
    letters: pa.Table | None
    targets: dict[str, OutputTopic]


def _take_over(
    write: ExternalWrite, takeover: Takeover, kafka: Progress, deadline: Deadline
) -> tuple[Ownership, Mapping[str, dict[int, int]], dict[str, OutputTopic]]:
    """Fence older drivers in the external system, and let Kafka's progress follow if the last one could not.

    Returns:
        What was found, where topics are read from, and the topics of dead letters.
    """
    flow, sink, session = takeover.flow, write.sink, takeover.session
    identity, owner = takeover.names.identity(session.cluster.cluster_id(deadline)), uuid4().hex
    seen = at_start(lambda: sink.progress_row(identity), deadline, sink.target, flow)
    before = None if seen is None else seen.progress
    decided = _decided(write, takeover, kafka, before, identity, deadline)
    opened = at_start(lambda: sink.open(identity, owner, None), deadline, sink.target, flow)
    if opened.progress != before:  # the last driver has committed a batch in between
        decided = _decided(write, takeover, kafka, opened.progress, identity, deadline)
    start = decided.start
    if start.warning:
        log.warning("flow %s: %s", flow, start.warning)
    # The first batch becomes visible there before Kafka's progress has it. Whoever looks for what flows have written (a
    # collection of a claim check) has to know of that from progress before.
    if start.follows or kafka.external != sink.target:
        left = None
        if start.owes_letters and decided.letters is not None:
            left = LettersToWrite(session, decided.letters, decided.targets, start.progress.batch_id)
        named = replace(start.progress, external=sink.target)
        if opened.progress is None:  # it tells a row that follows this progress from one that follows a later reset
            named = replace(named, external_commit=new_commit())
        commit_progress(session, named, takeover.sources, deadline, left)
        start = replace(start, progress=named)
    side_topics = all_side_topics({}, [write.dead_letter_topic])
    progress = replace(start.progress, side_topics=side_topics, external=sink.target)
    owned = Ownership(identity, owner, opened.generation, opened.progress, progress)
    return owned, decided.starts, decided.targets


def _decided(
    write: ExternalWrite, takeover: Takeover, kafka: Progress, text: str | None, identity: str, deadline: Deadline
) -> _Decided:
    """Decide where the flow is. Nothing is changed.

    Args:
        text: of the progress row; None: it has none.

    Raises:
        OnceflowError: the flow cannot continue there.
    """
    flow, target = takeover.flow, write.sink.target
    row, letters = (None, None) if text is None else _parsed(kafka.flow, text, target, identity)
    start = plan_external(kafka, row, takeover.sources, target=target, flow=flow, identity=identity)
    try:
        starts = _starts(takeover, start.progress, flow, deadline if start.follows else None)
    except OnceflowError as error:
        raise (of_row(error, target, identity) if start.follows else error) from None
    topics = {write.dead_letter_topic}
    if letters is not None and start.owes_letters:
        topics |= {*letters["topic"].to_pylist()}
    return _Decided(start, starts, letters, _targets(takeover, topics, kafka, deadline))


def _parsed(flow_key: str, text: str, target: str, identity: str) -> tuple[Progress, pa.Table]:
    try:
        return parsed(flow_key, text)
    except (OnceflowError, ValueError, TypeError, AttributeError) as error:
        raise ProtocolError(
            f"The progress row {identity!r} of {target} cannot be read",
            detail=in_short(error),
            next_step="use the version of onceflow that has written it, or restore it from a backup",
        ) from error


def _targets(
    takeover: Takeover, topics: Collection[str | None], kafka: Progress, deadline: Deadline
) -> dict[str, OutputTopic]:
    """Topics of dead letters. What the last batch has left undecided in them is decided.

    Raises:
        UnknownTopicError: one does not exist.
    """
    named = {topic: "dead letter" for topic in topics if topic is not None}
    if not named:
        return {}
    session = takeover.session
    cluster = session.cluster
    found = find_topics(cluster, named, deadline)
    limits = topic_limits(cluster, named, deadline)
    warn_of_settings(cluster, [*named], deadline, flow=takeover.flow)
    session.decide(named, kafka, deadline)
    targets = {name: OutputTopic(found[name].partitions, *limits[name]) for name in named}
    check_side_topics_writable(cluster, named, targets, deadline, flow=takeover.flow)
    return targets


def _starts(
    takeover: Takeover, progress: Progress, flow: str, deadline: Deadline | None = None
) -> Mapping[str, dict[int, int]]:
    """Where each topic is read from.

    Args:
        deadline: if this is not Kafka's progress: then leaders are asked for the epochs that it has.

    Raises:
        DataLossError, ProgressConflictError: it cannot be read from there.
    """
    sources = takeover.sources
    if deadline is not None:
        cluster = takeover.session.cluster
        ends = {name: ends_of_epochs(cluster, name, progress.epochs.get(name, {}), deadline) for name in sources}
        sources = {name: replace(topic, epoch_ends=ends[name]) for name, topic in sources.items()}
    return {
        name: source_starts.plan(
            topic, progress, starting_offsets="earliest", fail_on_data_loss=True, flow=flow
        ).offsets
        for name, topic in sources.items()
    }
