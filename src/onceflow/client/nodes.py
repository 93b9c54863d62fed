"""Each broker of a cluster by itself: whether it answers at the address it advertises, its versions, its settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kafka.protocol.admin import DescribeClusterRequest, DescribeConfigsRequest
from kafka.protocol.broker_version_data import BrokerVersionData
from kafka.protocol.metadata import ApiVersionsRequest

from onceflow.client.addresses import Address, contact
from onceflow.client.cluster import Cluster, ConnectionFailedError
from onceflow.client.deadline import Deadline
from onceflow.errors import BrokerUnsupportedError, OnceflowError
from onceflow.protocol import codes

_BROKER_RESOURCE = 4
_ANSWER_S, _SOON_S = 5.0, 3.0


@dataclass(frozen=True)
class Node:
    """A broker.

    Args:
        address: of its listener for these connections, as it advertises it.
        problem: why it did not answer; empty if it did.
        version: its version is at least this one, by the requests that it knows. Kafka's protocol has no version of
            the broker.
        finalized: level of each finalized feature of the cluster, as this broker knows it.
        supported: highest level of each feature that the broker supports.
    """

    node: int
    address: str
    problem: str = ""
    version: str = ""
    finalized: Mapping[str, int] = field(default_factory=dict)
    supported: Mapping[str, int] = field(default_factory=dict)


def look_at_nodes(cluster: Cluster, deadline: Deadline) -> list[Node]:
    """All brokers that the cluster advertises, asked one by one, each for at most five seconds; and its fenced ones."""
    cluster.connect(deadline)
    found = [
        _look_at(cluster, int(broker.node_id), Address(str(broker.host), int(broker.port)))
        for broker in cluster.manager.cluster.brokers()
    ]
    known = {each.node for each in found}
    found += [each for each in _fenced(cluster, deadline) if each.node not in known]
    return sorted(found, key=lambda each: each.node)


def silent_nodes(cluster: Cluster, nodes: Iterable[int], deadline: Deadline) -> set[int]:
    """Those of these brokers that do not answer now. Each is asked once, for at most three seconds."""
    cluster.connect(deadline)
    version = cluster.version(ApiVersionsRequest, min_version=3, max_version=4)
    found = set()
    for node in sorted(nodes):
        request = ApiVersionsRequest(version=version, client_software_name="onceflow", client_software_version="0")
        patience_s = max(0.1, min(_SOON_S, deadline.remaining / 4))
        try:
            cluster.exchange(request, node, Deadline(patience_s, f"asking broker {node}"))
        except ConnectionFailedError:
            found.add(node)
    return found


def _fenced(cluster: Cluster, deadline: Deadline) -> list[Node]:
    """The brokers that are registered, but that the controller does not hear of (KIP-1073, since Kafka 4.0)."""
    try:
        version = cluster.version(DescribeClusterRequest, min_version=2, max_version=2)
    except BrokerUnsupportedError:
        return []
    request = DescribeClusterRequest(version=version, endpoint_type=1, include_fenced_brokers=True)
    response = cluster.ask(request, "DescribeCluster", deadline)
    return [
        Node(int(b.broker_id), str(Address(str(b.host), int(b.port))), "it is down, or the controller has fenced it")
        for b in response.brokers
        if b.is_fenced
    ]


def _look_at(cluster: Cluster, node: int, address: Address) -> Node:
    # Answers of version 3 leave out the features that a broker need not have, such as transaction.version.
    versions = range(cluster.version(ApiVersionsRequest, min_version=3, max_version=4), 2, -1)
    try:
        for version in versions:
            request = ApiVersionsRequest(version=version, client_software_name="onceflow", client_software_version="0")
            response = cluster.exchange(request, node, Deadline(_ANSWER_S, f"asking broker {node}"))
            if not response.error_code:  # else this broker is older than others
                break
    except (ConnectionFailedError, OnceflowError) as problem:
        return Node(node, str(address), contact(address).text or str(problem))
    known = BrokerVersionData(None, {key.api_key: (key.min_version, key.max_version) for key in response.api_keys})
    return Node(
        node,
        str(address),
        version=".".join(map(str, known.broker_version)),
        finalized={each.name: int(each.max_version_level) for each in response.finalized_features or []},
        supported={each.name: int(each.max_version) for each in response.supported_features or []},
    )


def node_settings(
    cluster: Cluster, nodes: Iterable[int], names: Iterable[str], deadline: Deadline
) -> dict[str, frozenset[str]]:
    """The values of settings of these brokers. Brokers that do not answer are left out.

    Raises:
        PermissionDeniedError: this principal lacks DESCRIBE_CONFIGS on the cluster.
    """
    cluster.connect(deadline)
    wanted = sorted(names)
    found: dict[str, set[str]] = {name: set() for name in wanted}
    for node in nodes:
        request = DescribeConfigsRequest(
            version=cluster.version(DescribeConfigsRequest, min_version=1, max_version=4),
            resources=[
                DescribeConfigsRequest.DescribeConfigsResource(
                    resource_type=_BROKER_RESOURCE, resource_name=str(node), configuration_keys=wanted
                )
            ],
        )
        try:
            response = cluster.exchange(request, node, Deadline(deadline.capped(_ANSWER_S), f"asking broker {node}"))
        except ConnectionFailedError:
            continue
        for result in response.results:
            if result.error_code:
                raise codes.error_for(int(result.error_code), api="DescribeConfigs", detail=f"broker {node}")
            for config in result.configs or []:
                if config.name in found and config.value is not None:
                    found[config.name].add(str(config.value))
    return {name: frozenset(values) for name, values in found.items()}
