"""Output topics as the driver sees them. All tasks of a batch share these partition counts and size limits."""

from __future__ import annotations

from collections.abc import Mapping

from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.deadline import Deadline
from onceflow.client.topics import find_topics, topic_limits
from onceflow.messages import Target


def load_targets(
    cluster: Cluster, topic: str | None, deadline: Deadline, *, more: Mapping[str, str] | None = None
) -> dict[str, Target]:
    """What must be known of each topic that may be written to.

    Args:
        topic: the output topic; None: rows name theirs, so all topics of the cluster count except internal ones.
        more: further topics that are written to, and what each is for.

    Raises:
        UnknownTopicError: a topic that was named does not exist.
    """
    named = {**(more or {}), **({} if topic is None else {topic: "output"})}
    found: dict[str, TopicInfo] = {} if topic is not None else cluster.topics(None, deadline)
    if named:
        found.update(find_topics(cluster, named, deadline))
    names = [name for name, info in found.items() if topic is not None or not (info.internal or name.startswith("__"))]
    if not names:
        return {}
    limits = topic_limits(cluster, names, deadline)
    return {name: Target(found[name].partitions, *limits[name]) for name in names}
