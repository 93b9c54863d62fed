"""Reads and changes the metadata of a running cluster: leaders, in-sync replicas and feature levels."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from onceflow.broker.config import Cluster
from onceflow.broker.metadata import MetadataReader, Partition, metadata_reader
from onceflow.broker.process import POLL_S, running
from onceflow.errors import BrokerUnreachableError, BrokerUnsupportedError, DeadlineExceededError, OnceflowError

if TYPE_CHECKING:
    from onceflow.client.cluster import Cluster as Client
    from onceflow.client.deadline import Deadline

TRANSACTION_VERSION = "transaction.version"
# Timeout of one request. A paused node accepts a request but does not respond; then another node is asked.
_ANSWER_S = 3.0
_SHOWN = 5
_UPGRADE, _SAFE_DOWNGRADE = 1, 2  # update types of UpdateFeatures (KIP-778)
_PREFERRED = 0
_ELECTION_NOT_NEEDED = 84


def wait_in_sync(cluster: Cluster, client_options: Mapping[str, Any], timeout_s: float) -> None:
    """Wait until all nodes run and are in the cluster, and all replicas of every partition are in sync.

    Raises:
        DeadlineExceededError: not in time. The detail names the partitions that are not in sync.
    """
    wanted = {node.node_id for node in cluster.nodes}

    def lagging(reader: MetadataReader) -> str:
        # Until its session expires, the other nodes consider a killed node as in the cluster and in sync.
        if down := [str(node.node_id) for node in cluster.nodes if not running(node)]:
            return f"not running: node {', '.join(down)}"
        found = reader.read(_ANSWER_S)
        if absent := wanted - found.nodes:
            return f"not in the cluster: node {', '.join(map(str, sorted(absent)))}"
        late = [p for p in found.partitions if p.leader < 0 or p.in_sync != set(p.replicas)]
        shown = [f"{p} has {sorted(p.in_sync)} of {sorted(p.replicas)} in sync" for p in late[:_SHOWN]]
        more = len(late) - len(shown)
        return "; ".join([*shown, f"{more} more"] if more else shown)

    with metadata_reader(cluster.bootstrap_servers, client_options) as reader:
        _poll(lambda: lagging(reader), timeout_s, "all replicas to be in sync")


def leader_of(cluster: Cluster, client_options: Mapping[str, Any], topic: str, partition: int, timeout_s: float) -> int:
    """Node id of a partition's leader. Waits until there is one.

    Raises:
        DeadlineExceededError: no leader in time, or no such partition.
    """
    seen: dict[tuple[str, int], int] = {}

    def missing(reader: MetadataReader) -> str:
        seen.update({(p.topic, p.number): p.leader for p in reader.read(_ANSWER_S).partitions})
        leader = seen.get((topic, partition))
        return "" if leader is not None and leader >= 0 else "no leader" if leader == -1 else "no such partition"

    with metadata_reader(cluster.bootstrap_servers, client_options) as reader:
        _poll(lambda: missing(reader), timeout_s, f"a leader of {topic}-{partition}")
    return seen[topic, partition]


def move_leaders(
    cluster: Cluster, client_options: Mapping[str, Any], topics: Collection[str] | None, timeout_s: float
) -> int:
    """Elect another in-sync replica as leader of every partition that has one. Returns how many leaders have changed.

    The order of the replicas is changed, which makes another one the preferred leader. Then that one is elected. No
    data is copied.

    Raises:
        BrokerUnreachableError: the controllers refused the request.
        DeadlineExceededError: the metadata still has an old leader, although the controllers elected a new one.
    """
    with metadata_reader(cluster.bootstrap_servers, client_options) as reader:
        before: dict[tuple[str, int], Partition] = {}

        def no_answer() -> str:
            before.update({(p.topic, p.number): p for p in reader.read(_ANSWER_S).partitions})
            return ""

        started = time.monotonic()
        _poll(no_answer, timeout_s, "the leaders of all partitions")
        asked = {key: p for key, p in before.items() if topics is None or p.topic in topics}
        orders = {key: order for key, p in asked.items() if (order := p.next_order())}
        if not orders:
            return 0
        with _client(cluster, client_options, timeout_s, "other leaders") as (client, deadline):
            _reassign(client, orders, deadline)
            elected = _elect(client, list(orders), deadline)

        def stayed() -> str:
            now = {(p.topic, p.number): p.leader for p in reader.read(_ANSWER_S).partitions}
            same = [str(before[key]) for key in elected if now.get(key) == before[key].leader]
            return f"{', '.join(same[:_SHOWN])} did not move" if same else ""

        _poll(stayed, timeout_s - (time.monotonic() - started), "the new leaders")
        return len(elected)


def feature_levels(cluster: Cluster, client_options: Mapping[str, Any], name: str, timeout_s: float) -> dict[int, int]:
    """Node id -> finalized level of a feature as this node knows it, or 0. Only for nodes in the cluster."""
    with _client(cluster, client_options, timeout_s, f"the level of {name}") as (client, deadline):
        return _levels(client, name, deadline)


def set_feature(cluster: Cluster, client_options: Mapping[str, Any], name: str, level: int, timeout_s: float) -> None:
    """Finalize another level of a feature while the cluster runs, and wait until every node knows it.

    Raises:
        BrokerUnsupportedError: the controllers refuse this level; the detail has their reason.
        DeadlineExceededError: some nodes did not know it in time.
    """
    from kafka.protocol.admin import UpdateFeaturesRequest

    with _client(cluster, client_options, timeout_s, f"{name} {level}") as (client, deadline):
        now = max(_levels(client, name, deadline).values())
        if now != level:
            update = UpdateFeaturesRequest.FeatureUpdateKey(
                feature=name, max_version_level=level, upgrade_type=_UPGRADE if level > now else _SAFE_DOWNGRADE
            )
            version = client.version(UpdateFeaturesRequest, min_version=1, max_version=2)
            timeout_ms = int(deadline.remaining * 1000)
            request = UpdateFeaturesRequest(version=version, timeout_ms=timeout_ms, feature_updates=[update])
            answer = client.ask(request, "UpdateFeatures", deadline)
            for result in [answer, *(answer.results if version < 2 else [])]:
                if result.error_code:
                    raise BrokerUnsupportedError(
                        f"The cluster does not accept {name} {level}.",
                        detail=result.error_message or f"error code {result.error_code}",
                        next_step="See the detail; with `features` you can create a new cluster with another level.",
                    )
        attempt = 0
        while (levels := _levels(client, name, deadline)) != dict.fromkeys(levels, level):
            deadline.pause(attempt, f"node -> level: {levels}")
            attempt += 1


def _levels(client: Client, name: str, deadline: Deadline) -> dict[int, int]:
    from kafka.protocol.metadata import ApiVersionsRequest

    from onceflow.client.cluster import ConnectionFailedError

    request = ApiVersionsRequest(version=3, client_software_name="onceflow", client_software_version="0")
    attempt = 0
    while True:
        try:
            nodes = [broker.node_id for broker in client.manager.cluster.brokers()]
            answers = {node_id: client.exchange(request, node_id, deadline) for node_id in nodes}
            break
        except ConnectionFailedError as problem:
            deadline.pause(attempt, str(problem))
            client.refresh_brokers(deadline)
            attempt += 1
    return {
        node_id: next((f.max_version_level for f in answer.finalized_features or [] if f.name == name), 0)
        for node_id, answer in answers.items()
    }


def _reassign(client: Client, orders: Mapping[tuple[str, int], tuple[int, ...]], deadline: Deadline) -> None:
    from kafka.protocol.admin import AlterPartitionReassignmentsRequest as Request

    topics = [
        Request.ReassignableTopic(
            name=topic,
            partitions=[
                Request.ReassignableTopic.ReassignablePartition(partition_index=number, replicas=list(order))
                for (name, number), order in orders.items()
                if name == topic
            ],
        )
        for topic in sorted({topic for topic, _ in orders})
    ]
    request = Request(version=0, timeout_ms=int(deadline.remaining * 1000), topics=topics)
    answer = client.ask(request, "AlterPartitionReassignments", deadline)
    _refuse([answer, *(partition for topic in answer.responses for partition in topic.partitions)])


def _elect(client: Client, keys: Collection[tuple[str, int]], deadline: Deadline) -> list[tuple[str, int]]:
    """Elect the preferred leaders. Returns the partitions where that has succeeded. It fails if the preferred replica
    is no longer in sync."""
    from kafka.protocol.admin import ElectLeadersRequest as Request

    topics = [
        Request.TopicPartitions(topic=topic, partitions=[number for name, number in keys if name == topic])
        for topic in sorted({topic for topic, _ in keys})
    ]
    timeout_ms = int(deadline.remaining * 1000)
    request = Request(version=1, election_type=_PREFERRED, topic_partitions=topics, timeout_ms=timeout_ms)
    answer = client.ask(request, "ElectLeaders", deadline)
    _refuse([answer])
    return [
        (result.topic, partition.partition_id)
        for result in answer.replica_election_results
        for partition in result.partition_result
        if partition.error_code in (0, _ELECTION_NOT_NEEDED)
    ]


def _refuse(rows: list[Any]) -> None:
    refused = [getattr(row, "error_message", "") or f"error code {row.error_code}" for row in rows if row.error_code]
    if refused:
        raise BrokerUnreachableError(
            f"The controllers did not move leaders ({len(refused)} refusals).",
            detail="; ".join(sorted(set(refused))[:_SHOWN]),
            next_step="Check that a majority of the nodes runs, and try again.",
        )


@contextlib.contextmanager
def _client(
    cluster: Cluster, client_options: Mapping[str, Any], timeout_s: float, what: str
) -> Iterator[tuple[Client, Deadline]]:
    # Imported here, because most commands need no client, and its codec is slow to import.
    from onceflow.client.cluster import Cluster as Client
    from onceflow.client.deadline import Deadline
    from onceflow.client.settings import ClientSettings

    deadline = Deadline(timeout_s, what)
    client = Client(ClientSettings(cluster.bootstrap_servers, client_options))
    try:
        client.connect(deadline)
        yield client, deadline
    finally:
        client.close()


def _poll(problem: Callable[[], str], timeout_s: float, what: str) -> None:
    """Call ``problem`` repeatedly until it returns ''."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            last = problem()
        except OnceflowError as error:
            last = f"{error.what}: {error.detail}"
        if not last:
            return
        if time.monotonic() > deadline:
            raise DeadlineExceededError(
                f"Waited {timeout_s:.1f} s for {what}.",
                detail=last,
                next_step="See which nodes run: `onceflow broker status`, and their logs.",
            )
        time.sleep(POLL_S)
