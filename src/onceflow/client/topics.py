"""Topics: finds the topics that users name, creates and deletes topics, adds partitions, reads settings."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kafka.protocol.admin import (
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
)
from kafka.protocol.metadata import MetadataRequest

from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.deadline import Deadline
from onceflow.errors import OnceflowError, PermissionDeniedError, UnknownTopicError, counted
from onceflow.protocol import acls, codes
from onceflow.protocol.codes import Code
from onceflow.protocol.compression import PRODUCER
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.protocol.timestamps import ACCEPTED_TIMES_SETTINGS, ANY_TIME, AcceptedTimes

log = logging.getLogger("onceflow")

_TOPIC_RESOURCE = 2
_UNKNOWN_ATTEMPTS = 4
_SET_ON_TOPIC = 1  # where a setting comes from: DYNAMIC_TOPIC_CONFIG
_MAX_COPIES = 3
_READ_ROLES = ("", "source", "table")
_MAX_ALIKE, _ALIKE_SHARE = 3, 0.7
DEFAULT_MAX_MESSAGE_BYTES = 1_048_588  # Kafka's default of max.message.bytes


@dataclass(frozen=True)
class Copies:
    """The brokers of a partition, as node ids.

    Args:
        leader: -1 while there is none.
        replicas: all brokers with a replica.
        in_sync: the brokers with an in-sync replica.
    """

    leader: int
    replicas: Sequence[int]
    in_sync: Sequence[int]


def find_topics(
    cluster: Cluster, roles: Mapping[str, str], deadline: Deadline, *, needs: str = ""
) -> dict[str, TopicInfo]:
    """Metadata of topics that a user has named.

    Args:
        roles: topic name -> what the topic is for: ``source``, ``output``, ``dead letter``, ..., or '' for no role.
        needs: the permission that the caller needs on them. '': READ for a source or table, and without a role; else
            WRITE.

    Raises:
        UnknownTopicError: a topic does not exist; see `missing`.
        PermissionDeniedError: this principal may not even see a topic. The error names what it needs.
    """
    try:
        return cluster.topics(roles, deadline)
    except UnknownTopicError as error:
        raise missing(cluster, error, roles, deadline, gone=needs == "DELETE") from None
    except PermissionDeniedError as error:
        if error.topic is None or error.topic not in roles:
            raise
        raise _denied(error, needs or ("READ" if roles[error.topic] in _READ_ROLES else "WRITE")) from None


def find_topic(cluster: Cluster, name: str, needs: str, deadline: Deadline) -> TopicInfo | None:
    """A topic that need not exist. One broker is asked once; None: it knows no such topic.

    Args:
        needs: the permission that the caller needs on it.

    Raises:
        PermissionDeniedError: this principal may not see it. A broker does not tell then whether it exists.
    """
    try:
        return cluster.topics([name], deadline, once=True)[name]
    except UnknownTopicError:
        return None
    except PermissionDeniedError as error:
        raise _denied(error, needs) from None


def _denied(error: PermissionDeniedError, needs: str) -> PermissionDeniedError:
    step = acls.grant(needs, acls.TOPIC, error.topic or "NAME")
    return PermissionDeniedError(error.what, **{**error.fields(), "next_step": step})


def missing(
    cluster: Cluster, error: UnknownTopicError, roles: Mapping[str, str], deadline: Deadline, *, gone: bool = False
) -> UnknownTopicError:
    """The same error, with two additions: the role of the topic, and the topics with a similar name.

    Args:
        gone: the topic was to be deleted, so nobody wants to create it.
    """
    name = error.topic
    if name is None or name not in roles:
        return error
    role = roles[name]
    fields = error.fields()
    if role == "table":
        fields["next_step"] = (
            "check the name: a flow makes the topics of its table when it first starts with it. A table with "
            "changelog=False has no topics; Table.of_flow reads its rows on the flow's machine"
        )
    if gone:
        fields["next_step"] = "check the name: `onceflow topic list` shows the topics"
    alike = _alike(cluster, name, deadline, tables=role in ("source", "table"))
    if alike:
        fields["detail"] = f"topics of a similar name: {', '.join(alike)}"
        fields["next_step"] = f"did you mean {alike[0]}? If not, {fields['next_step']}"
    return UnknownTopicError(
        f"{role.capitalize()} topic{error.what.removeprefix('Topic')}" if role else error.what, **fields
    )


def _alike(cluster: Cluster, name: str, deadline: Deadline, *, tables: bool) -> list[str]:
    """Topics with a similar name, the most similar first.

    Args:
        tables: also those that hold state. They are known by their companion topics.
    """
    try:
        there = cluster.topics(None, deadline)
    except OnceflowError:
        return []  # the error about the missing topic is more important
    named = [other for other in sorted(there) if other != name and not other.startswith("__")]
    if not tables:
        named = [each for each in named if each + INTERNAL_SUFFIX not in there and not each.endswith(INTERNAL_SUFFIX)]
    # The commonest mistakes are wrong case and wrong separators.
    plain = {other: _plain(other) for other in named}
    close = difflib.get_close_matches(_plain(name), set(plain.values()), _MAX_ALIKE, _ALIKE_SHARE)
    return [other for each in close for other in plain if plain[other] == each][:_MAX_ALIKE]


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def create_topic(
    cluster: Cluster,
    name: str,
    *,
    partitions: int,
    configs: Mapping[str, str],
    deadline: Deadline,
    replication: int = -1,
) -> bool:
    """Create a topic. Returns False if it already exists.

    Args:
        replication: the replication factor. -1: ``default.replication.factor`` of the brokers (KIP-464).

    Raises:
        PermissionDeniedError: this principal lacks CREATE.
    """
    cluster.connect(deadline)
    request = CreateTopicsRequest(
        version=cluster.version(CreateTopicsRequest, min_version=4, max_version=5),
        topics=[
            CreateTopicsRequest.CreatableTopic(
                name=name,
                num_partitions=partitions,
                replication_factor=replication,
                assignments=[],
                configs=[
                    CreateTopicsRequest.CreatableTopic.CreatableTopicConfig(name=key, value=value)
                    for key, value in sorted(configs.items())
                ],
            )
        ],
        timeout_ms=30_000,
        validate_only=False,
    )
    return _change(cluster, request, "CreateTopics", "topics", name, deadline, fine=(0, Code.TOPIC_ALREADY_EXISTS)) == 0


def create_own_topic(
    cluster: Cluster,
    name: str,
    what: str,
    *,
    partitions: int,
    configs: Mapping[str, str],
    deadline: Deadline,
    policy: str = "compact",
) -> TopicInfo:
    """Create a topic for data of a flow's own. If it already exists, it is left as it is.

    The broker's default is often one replica. This topic has up to three, as many as there are brokers.
    ``min.insync.replicas`` is one less, but at least 1.

    Args:
        what: the kind of topic, for the log and for errors: ``progress topic``.
        configs: topic settings besides ``cleanup.policy``; they may replace ``min.insync.replicas``.
        policy: its ``cleanup.policy``.

    Raises:
        PermissionDeniedError: this principal lacks CREATE.
    """
    copies = min(_MAX_COPIES, cluster.broker_count())
    configs = {"min.insync.replicas": str(max(1, copies - 1)), **configs, "cleanup.policy": policy}
    try:
        if create_topic(cluster, name, partitions=partitions, configs=configs, deadline=deadline, replication=copies):
            log.info("created %s %s with %d partitions", what, name, partitions)
    except PermissionDeniedError as error:
        raise PermissionDeniedError(
            f"{what.capitalize()} {name} does not exist, and this principal may not create it",
            topic=name,
            detail=error.detail,
            next_step=f"create it once: {counted(partitions, 'partition')}, cleanup.policy={policy}; or "
            + acls.grant("CREATE", acls.TOPIC, name),
        ) from error
    return await_topic(cluster, name, deadline)


def delete_topic(cluster: Cluster, name: str, deadline: Deadline) -> None:
    """Delete a topic with all its records. Brokers remove it from their metadata a little later.

    Raises:
        UnknownTopicError: it does not exist.
        PermissionDeniedError: this principal lacks DELETE.
    """
    cluster.connect(deadline)
    request = DeleteTopicsRequest(
        version=cluster.version(DeleteTopicsRequest, min_version=1, max_version=5),
        topic_names=[name],
        timeout_ms=30_000,
    )
    # No retry for a topic that does not exist: it will not appear later.
    _change(cluster, request, "DeleteTopics", "responses", name, deadline, final=UnknownTopicError)


def copies(cluster: Cluster, name: str, deadline: Deadline) -> dict[int, Copies]:
    """The brokers of each partition of a topic. The topic must exist."""
    cluster.connect(deadline)
    listed = [MetadataRequest.MetadataRequestTopic(name=name)]
    response = cluster.ask(MetadataRequest(topics=listed, allow_auto_topic_creation=False), "Metadata", deadline)
    return {
        int(part.partition_index): Copies(
            int(part.leader_id), [int(n) for n in part.replica_nodes], [int(n) for n in part.isr_nodes]
        )
        for topic in response.topics
        for part in sorted(topic.partitions, key=lambda each: int(each.partition_index))
    }


def create_partitions(cluster: Cluster, name: str, count: int, deadline: Deadline) -> None:
    """Increase the number of partitions of a topic to ``count``. Brokers learn of the new ones a little later.

    Raises:
        PermissionDeniedError: this principal lacks ALTER.
        OptionError: the topic already has that many partitions, or more.
    """
    cluster.connect(deadline)
    request = CreatePartitionsRequest(
        version=cluster.version(CreatePartitionsRequest, min_version=1, max_version=3),
        topics=[CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=count, assignments=None)],
        timeout_ms=30_000,
        validate_only=False,
    )
    _change(cluster, request, "CreatePartitions", "results", name, deadline)


def _change(
    cluster: Cluster,
    request: Any,
    api: str,
    field: str,
    name: str,
    deadline: Deadline,
    *,
    fine: Container[int] = (0,),
    final: type[OnceflowError] | None = None,
) -> int:
    """Request a change of one topic. Retriable errors are retried. Returns the error code of the response.

    In KRaft any broker forwards the request to the active controller (KIP-590).

    Args:
        field: the field of the response that has the results by topic.
        fine: error codes that count as success.
        final: an error that is raised at once, although it is retriable in other requests.
    """
    attempt = 0
    while True:
        answer = getattr(cluster.ask(request, api, deadline), field)[0]
        code = int(answer.error_code)
        if code in fine:
            return code
        row = codes.describe(code)
        if not row.verdict.retriable or (final is not None and row.error is final):
            raise codes.error_for(code, api=api, topic=name, detail=answer.error_message or "")
        deadline.pause(attempt, f"{api} {name}: {row.name}")
        attempt += 1


def await_topic(cluster: Cluster, name: str, deadline: Deadline) -> TopicInfo:
    """Metadata of a topic that was just created. Waits until the brokers know it."""
    attempt = 0
    while True:
        try:
            return cluster.topics([name], deadline)[name]
        except UnknownTopicError as error:
            deadline.pause(attempt, error.what)
            attempt += 1


class TopicLimits(NamedTuple):
    """What a topic takes.

    Args:
        max_message_bytes: the size of a record batch, as it is stored.
        times: the timestamps of records.
        compacted: whether records need a key.
        stored: how brokers compress what they store: ``producer`` (as it comes), ``uncompressed``, or a codec.
    """

    max_message_bytes: int
    times: AcceptedTimes = ANY_TIME
    compacted: bool = False
    stored: str = PRODUCER


def topic_limits(cluster: Cluster, names: Iterable[str], deadline: Deadline) -> dict[str, TopicLimits]:
    """What topics take. Kafka's defaults, if this principal may not read their settings."""
    size, policy, stored = "max.message.bytes", "cleanup.policy", "compression.type"
    found = topic_configs(cluster, names, [size, policy, stored, *ACCEPTED_TIMES_SETTINGS], deadline)
    return {
        name: TopicLimits(
            _size(values[size]),
            AcceptedTimes.of(values),
            "compact" in (values[policy] or ""),
            values[stored] or PRODUCER,
        )
        for name, values in found.items()
    }


def max_message_bytes(cluster: Cluster, names: Iterable[str], deadline: Deadline) -> dict[str, int]:
    """``max.message.bytes`` of each topic; Kafka's default if this principal may not read it.

    A flow runs without DESCRIBE_CONFIGS, too: if a batch is above the true limit, the broker refuses it with a clear
    error (MESSAGE_TOO_LARGE).
    """
    key = "max.message.bytes"
    return {name: _size(values[key]) for name, values in topic_configs(cluster, names, [key], deadline).items()}


def _size(setting: str | None) -> int:
    return DEFAULT_MAX_MESSAGE_BYTES if setting is None else int(setting)


def topic_config(cluster: Cluster, name: str, key: str, deadline: Deadline) -> str | None:
    """One setting of a topic; None if this principal may not read it."""
    return topic_configs(cluster, [name], [key], deadline)[name][key]


def topic_configs(
    cluster: Cluster, names: Iterable[str], keys: Iterable[str], deadline: Deadline
) -> dict[str, dict[str, str | None]]:
    """Settings of topics, or the brokers' defaults if a topic has none. None: this principal may not read them."""
    wanted, settings = sorted(set(names)), sorted(set(keys))
    values: dict[str, dict[str, str | None]] = {name: dict.fromkeys(settings) for name in wanted}
    for result in _described(cluster, wanted, settings, deadline):
        for config in result.configs or []:
            if result.error_code == 0 and config.name in settings:
                values[result.resource_name][config.name] = config.value
    return values


def own_settings(cluster: Cluster, name: str, deadline: Deadline) -> dict[str, str | None] | None:
    """The settings that were set on the topic itself, by name; None if this principal may not read them."""
    (result,) = _described(cluster, [name], None, deadline)
    if result.error_code:
        return None
    return {c.name: c.value for c in sorted(result.configs, key=lambda c: c.name) if c.config_source == _SET_ON_TOPIC}


def _described(cluster: Cluster, names: Sequence[str], keys: Sequence[str] | None, deadline: Deadline) -> list[Any]:
    """Results of DescribeConfigs; all settings if ``keys`` is None.

    A broker that does not know a new topic yet responds that it does not exist, so the request is repeated a few times.
    """
    cluster.connect(deadline)
    request = DescribeConfigsRequest(
        version=cluster.version(DescribeConfigsRequest, min_version=1, max_version=4),
        resources=[
            DescribeConfigsRequest.DescribeConfigsResource(
                resource_type=_TOPIC_RESOURCE, resource_name=name, configuration_keys=keys
            )
            for name in names
        ],
    )
    attempt = 0
    while True:
        results: list[Any] = cluster.ask(request, "DescribeConfigs", deadline).results
        unknown = [
            str(result.resource_name) for result in results if result.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
        ]
        if not unknown or attempt == _UNKNOWN_ATTEMPTS:
            return results
        deadline.pause(attempt + 3, f"{', '.join(unknown)} is unknown")
        attempt += 1
