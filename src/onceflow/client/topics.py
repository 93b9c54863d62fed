"""Topics: create the ones onceflow owns and let them grow, read the settings that bound what may be written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kafka.protocol.admin import CreatePartitionsRequest, CreateTopicsRequest, DescribeConfigsRequest

from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.deadline import Deadline
from onceflow.errors import UnknownTopicError
from onceflow.wire import codes

_TOPIC_RESOURCE = 2
_TOPIC_ALREADY_EXISTS = 36
DEFAULT_MAX_MESSAGE_BYTES = 1_048_588  # Kafka's default of max.message.bytes


def create_topic(
    cluster: Cluster,
    name: str,
    *,
    partitions: int,
    configs: Mapping[str, str],
    deadline: Deadline,
    replication: int = -1,
) -> bool:
    """Create a topic on the controller. Returns False when it existed already.

    Args:
        replication: -1 leaves it to the broker's ``default.replication.factor`` (KIP-464).

    Raises:
        PermissionDeniedError: this principal may not CREATE it.
    """
    cluster.connect(deadline)
    request = CreateTopicsRequest(
        version=cluster.version(CreateTopicsRequest, least=4, most=5),
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
    attempt = 0
    while True:
        # In KRaft any broker forwards the request to the active controller (KIP-590).
        response = cluster.ask(request, "CreateTopics", deadline)
        answer = response.topics[0]
        code = int(answer.error_code)
        if code in (0, _TOPIC_ALREADY_EXISTS):
            return code == 0
        row = codes.describe(code)
        if not row.verdict.retriable:
            raise codes.error_for(code, api="CreateTopics", topic=name, detail=answer.error_message or "")
        deadline.pause(attempt, f"CreateTopics {name}: {row.name}")
        attempt += 1


def create_partitions(cluster: Cluster, name: str, count: int, deadline: Deadline) -> None:
    """Let a topic grow to ``count`` partitions. Brokers learn of them a little later.

    Raises:
        PermissionDeniedError: this principal may not ALTER it.
        OptionError: it has that many, or more.
    """
    cluster.connect(deadline)
    request = CreatePartitionsRequest(
        version=cluster.version(CreatePartitionsRequest, least=1, most=3),
        topics=[CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=count, assignments=None)],
        timeout_ms=30_000,
        validate_only=False,
    )
    attempt = 0
    while True:
        answer = cluster.ask(request, "CreatePartitions", deadline).results[0]
        code = int(answer.error_code)
        if code == 0:
            return
        row = codes.describe(code)
        if not row.verdict.retriable:
            raise codes.error_for(code, api="CreatePartitions", topic=name, detail=answer.error_message or "")
        deadline.pause(attempt, f"CreatePartitions {name}: {row.name}")
        attempt += 1


def await_topic(cluster: Cluster, name: str, deadline: Deadline) -> TopicInfo:
    """Metadata of a topic that was just created: brokers learn of it a little later."""
    attempt = 0
    while True:
        try:
            return cluster.topics([name], deadline)[name]
        except UnknownTopicError as error:
            deadline.pause(attempt, error.what)
            attempt += 1


def max_message_bytes(cluster: Cluster, names: Iterable[str], deadline: Deadline) -> dict[str, int]:
    """``max.message.bytes`` of each topic; Kafka's default where this principal may not read it.

    DESCRIBE_CONFIGS is a privilege of its own, and no reason to stop: a batch above the true limit is
    refused by the broker (MESSAGE_TOO_LARGE), with a clear error.
    """
    key = "max.message.bytes"
    found = {name: values[key] for name, values in topic_configs(cluster, names, [key], deadline).items()}
    return {name: DEFAULT_MAX_MESSAGE_BYTES if value is None else int(value) for name, value in found.items()}


def topic_config(cluster: Cluster, name: str, key: str, deadline: Deadline) -> str | None:
    """One setting of a topic; None where this principal may not read it."""
    return topic_configs(cluster, [name], [key], deadline)[name][key]


def topic_configs(
    cluster: Cluster, names: Iterable[str], keys: Iterable[str], deadline: Deadline
) -> dict[str, dict[str, str | None]]:
    """Settings of topics, the brokers' defaults where a topic has none; None where this principal may not read it."""
    cluster.connect(deadline)
    wanted, settings = sorted(set(names)), sorted(set(keys))
    request = DescribeConfigsRequest(
        version=cluster.version(DescribeConfigsRequest, least=1, most=4),
        resources=[
            DescribeConfigsRequest.DescribeConfigsResource(
                resource_type=_TOPIC_RESOURCE, resource_name=name, configuration_keys=settings
            )
            for name in wanted
        ],
    )
    response = cluster.ask(request, "DescribeConfigs", deadline)
    values: dict[str, dict[str, str | None]] = {name: dict.fromkeys(settings) for name in wanted}
    for result in response.results:
        for config in result.configs or []:
            if result.error_code == 0 and config.name in settings:
                values[result.resource_name][config.name] = config.value
    return values
