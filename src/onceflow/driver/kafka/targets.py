"""Output topics as the driver sees them. All tasks of a batch share these partition counts and size limits."""

from __future__ import annotations

from collections.abc import Mapping

from onceflow.client import allowed
from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.deadline import Deadline
from onceflow.client.topics import find_topics, topic_limits
from onceflow.errors import OptionError, PermissionDeniedError
from onceflow.messages import OutputTopic
from onceflow.protocol import acls
from onceflow.state.engine.dead_letters import LETTER_BYTES_MIN


def load_targets(
    cluster: Cluster, topic: str | None, deadline: Deadline, *, more: Mapping[str, str] | None = None
) -> dict[str, OutputTopic]:
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
    return {name: OutputTopic(found[name].partitions, *limits[name]) for name in names}


def check_side_topics_writable(
    cluster: Cluster, roles: Mapping[str, str], targets: Mapping[str, OutputTopic], deadline: Deadline, *, flow: str
) -> None:
    """Refuse topics that cannot take dead letters, late records or duplicates: found out at the first one, they would
    stop the flow.

    Args:
        roles: what each of the topics is for.

    Raises:
        OptionError: a topic is compacted, or takes only very small records.
        PermissionDeniedError: this principal may not write to it, as far as brokers say so.
    """
    roles = {topic: role for topic, role in roles.items() if topic in targets}
    for topic, role in roles.items():
        target = targets[topic]
        if target.compacted:
            raise OptionError(
                f"Records cannot go to the {role} topic {topic}, which is compacted",
                flow=flow,
                topic=topic,
                detail="compaction would delete all but the last one of each key, and brokers refuse those without key",
                next_step="name another topic, or set it: kafka-configs.sh --bootstrap-server HOST:PORT --alter "
                f"--topic {topic} --add-config cleanup.policy=delete",
            )
        if target.max_message_bytes < LETTER_BYTES_MIN:
            raise OptionError(
                f"Records cannot go to the {role} topic {topic}, which takes at most {target.max_message_bytes} bytes",
                flow=flow,
                topic=topic,
                detail=f"headers with the cause need up to {LETTER_BYTES_MIN:,} bytes",
                next_step=f"raise max.message.bytes of {topic}, best to that of the source and 10,000 more",
            )
    described = allowed.describe_topics(cluster, roles, deadline) if roles else []
    for answer in described:
        found = allowed.operations(answer.authorized_operations)
        if found is not None and "WRITE" not in found and answer.name in roles:
            raise PermissionDeniedError(
                f"This principal may not write to the {roles[answer.name]} topic {answer.name}",
                flow=flow,
                topic=answer.name,
                next_step=acls.grant("WRITE", acls.TOPIC, answer.name),
            )
