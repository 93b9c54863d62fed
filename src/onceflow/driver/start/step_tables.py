"""Table topics of process steps at a start: they are created where they are missing, and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.topics import find_topics
from onceflow.driver.record.committed_progress import CommittedProgress
from onceflow.errors import UnknownTopicError
from onceflow.planning import process, table_plan
from onceflow.planning.joins import check_co_partitioned
from onceflow.planning.process import StepOptions
from onceflow.protocol.progress import Progress, writer_of
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.changelog.topics import TableTopics, check_readable, committed_ends, ensure_topics
from onceflow.state.joins.spec import JoinSpec


def ensure_table(
    cluster: Cluster,
    options: StepOptions,
    processor: Processor | ColumnProcessor,
    joins: Sequence[JoinSpec],
    progress: Progress,
    sources: Mapping[str, int],
    deadline: Deadline,
    *,
    flow: str,
) -> tuple[TableTopics, Progress]:
    """The table's topics, and progress that knows them. Topics are created when nothing else is missing.

    Args:
        joins: tables that the processor looks up rows in.
        progress: the flow's, as committed.
        sources: partition count of every source topic.

    Returns:
        The topics, and what `table_plan.plan_table` returns.

    Raises:
        ProgressConflictError: the topics or their state are not what progress says.
        PermissionDeniedError: a topic is missing and may not be created, or may not be read.
        UnknownTopicError: there is no topic for dead letters or late records.
        OptionError: a table of ``joins`` has another number of partitions, although it is co-partitioned.
    """
    table_plan.check_not_replaced(options.table, progress)
    table_plan.check_kind(options, progress)
    known = progress.tables.get(options.table)
    if known is not None:
        table_plan.check_migration(processor, known.version, table=options.table, flow=flow)
    if side_topics := process.side_topics_of(options):
        find_topics(cluster, side_topics, deadline)
    partitions = options.partitions or max(sources.values())
    if not options.changelog:
        topics, planned = table_plan.plan_local_table(options, processor, partitions, progress)
        check_co_partitioned(joins, options.table, topics.partitions, flow)
        return topics, planned
    if any(spec.co_partitioned for spec in joins):
        with suppress(UnknownTopicError):
            partitions = cluster.topics([options.table], deadline, once=True)[options.table].partitions
        check_co_partitioned(joins, options.table, partitions, flow)
    topics = ensure_topics(cluster, options.table, partitions, deadline)
    ends = committed_ends(cluster, topics, deadline)
    check_readable(cluster, ends, deadline)
    if options.table not in progress.changelogs and any(end for each in ends.values() for end in each.values()):
        writer = writer_of(topics.table, topics.table_id, CommittedProgress().decoded(cluster, deadline))
        table_plan.check_not_written(options.table, writer, progress)
    return topics, table_plan.plan_table(options, processor, topics, ends, progress)
