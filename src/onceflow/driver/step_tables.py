"""Table topics of process steps at a start: they are created where they are missing, and checked."""

from __future__ import annotations

from collections.abc import Mapping

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.planning import process
from onceflow.planning.process import StepOptions
from onceflow.protocol.progress import Progress
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.topics import TableTopics, check_readable, committed_ends, ensure_topics


def ensure_table(
    cluster: Cluster,
    options: StepOptions,
    processor: Processor | ColumnProcessor,
    progress: Progress,
    sources: Mapping[str, int],
    deadline: Deadline,
    *,
    flow: str,
) -> tuple[TableTopics, Progress]:
    """The table's topics, and progress that knows them.

    Args:
        progress: the flow's, as committed.
        sources: partition count of every source topic.

    Returns:
        The topics, and what `process.plan_table` returns.

    Raises:
        ProgressConflictError: the topics or their state are not what progress says.
        PermissionDeniedError: a topic is missing and may not be created, or may not be read.
    """
    known = progress.tables.get(options.table)
    if known is not None:
        process.check_migration(processor, known.version, table=options.table, flow=flow)
    topics = ensure_topics(cluster, options.table, options.partitions or max(sources.values()), deadline)
    ends = committed_ends(cluster, topics, deadline)
    check_readable(cluster, ends, deadline)
    return topics, process.plan_table(options, processor, topics, ends, progress)
