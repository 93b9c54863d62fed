"""Leaders are asked at once, each for what it leads, and one that does not answer holds up nobody for long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.errors import NodeNotReadyError
from kafka.future import Future
from kafka.protocol.consumer import OffsetForLeaderEpochRequest
from kafka.protocol.metadata import MetadataRequest

from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.connections import ConnectionFailedError
from onceflow.client.deadline import Deadline
from onceflow.client.leader_epochs import epoch_ends, look_at_leaders
from onceflow.client.settings import ClientSettings
from onceflow.errors import DeadlineExceededError, UnknownTopicError
from onceflow.protocol.names import TopicPartition


class Leaders:
    """A cluster. ``led``: the broker that leads each partition, -1: none; ``silent`` brokers do not answer."""

    def __init__(self, led: Mapping[TopicPartition, int], silent: Iterable[int] = ()) -> None:
        self.led, self.silent = dict(led), {*silent}
        self.known: dict[str, TopicInfo] = {}
        self.gone: set[str] = set()
        self.asked: list[dict[int, list[str]]] = []
        self.now = 0.0

    def deadline(self, seconds: float) -> Deadline:
        return Deadline(seconds, "a test", clock=lambda: self.now, sleep=self.later)

    def later(self, seconds: float) -> None:
        self.now += seconds

    def known_topic(self, name: str) -> TopicInfo | None:
        return self.known.get(name)

    def topics(
        self, names: Iterable[str], deadline: Deadline, *, patient: bool = False, leaderless: bool = False
    ) -> None:
        assert leaderless or not patient, "a partition without a leader must not be waited for here"
        if self.gone and deadline.expired:
            raise deadline.error("no answer in a very short time")
        for name in names:
            leaders = {partition: node for (topic, partition), node in self.led.items() if topic == name}
            self.known[name] = TopicInfo(name, f"id of {name}", leaders)

    def exchange_all(self, requests: Mapping[int, Any], deadline: Deadline) -> dict[int, Any]:
        self.asked.append(
            {
                node: [topic.name for topic in request.topics if isinstance(request, MetadataRequest)]
                for node, request in requests.items()
            }
        )
        return {
            node: ConnectionFailedError("no answer") if node in self.silent else self._answer(request)
            for node, request in requests.items()
        }

    def connect(self, deadline: Deadline) -> None:
        pass

    def version(self, request: Any, *, min_version: int, max_version: int) -> int:
        return max_version

    def leader(self, topic: str, partition: int, deadline: Deadline) -> int:
        if topic not in self.known:
            self.topics([topic], deadline, patient=True, leaderless=True)
        while (node := self.known[topic].leaders[partition]) < 0:
            deadline.pause(5, "no leader")
        return node

    def _answer(self, request: Any) -> Any:
        if isinstance(request, OffsetForLeaderEpochRequest):
            return SimpleNamespace(
                topics=[
                    SimpleNamespace(
                        topic=topic.topic,
                        partitions=[
                            SimpleNamespace(partition=each.partition, error_code=0, end_offset=10 * each.leader_epoch)
                            for each in topic.partitions
                        ],
                    )
                    for topic in request.topics
                ]
            )
        return SimpleNamespace(topics=[self._of(topic.name) for topic in request.topics])

    def _of(self, name: str) -> Any:
        parts = [
            SimpleNamespace(partition_index=partition, leader_id=node, leader_epoch=7)
            for (topic, partition), node in self.led.items()
            if topic == name and name not in self.gone
        ]
        return SimpleNamespace(
            name=name, error_code=3 if name in self.gone else 0, topic_id=f"id of {name}", partitions=parts
        )


def test_each_leader_is_asked_for_the_topics_of_its_partitions_only() -> None:
    cluster: Any = Leaders({("a", 0): 1, ("a", 1): 2, ("b", 0): 2, ("c", 0): 3})
    view = look_at_leaders(cluster, [("a", 0), ("a", 1), ("b", 0)], cluster.deadline(3))
    assert view.epochs == {("a", 0): 7, ("a", 1): 7, ("b", 0): 7}
    assert view.topic_ids == {"a": "id of a", "b": "id of b"}
    assert cluster.asked[-1] == {1: ["a"], 2: ["a", "b"]}


@pytest.mark.parametrize("led, silent", [({("b", 0): -1}, ()), ({("b", 0): 2}, (2,))], ids=["no leader", "no answer"])
def test_a_partition_whose_leader_does_not_answer_is_left_out(
    led: dict[TopicPartition, int], silent: tuple[int, ...]
) -> None:
    cluster: Any = Leaders({("a", 0): 1, ("a", 1): 1, **led}, silent)
    view = look_at_leaders(cluster, [("a", 0), ("a", 1), ("b", 0)], cluster.deadline(3))
    assert view.epochs == {("a", 0): 7, ("a", 1): 7}
    assert 3 <= cluster.now < 3.5


def test_a_new_leader_is_found_before_the_deadline() -> None:
    cluster: Any = Leaders({("a", 0): 1, ("b", 0): -1})
    later = cluster.later

    def elected(seconds: float) -> None:
        later(seconds)
        if cluster.now > 0.5:
            cluster.led["b", 0] = 4

    cluster.later = elected
    view = look_at_leaders(cluster, [("a", 0), ("b", 0)], cluster.deadline(3))
    assert view.epochs == {("a", 0): 7, ("b", 0): 7}
    assert cluster.now < 2


def test_a_topic_that_its_leader_does_not_know_any_more_does_not_exist() -> None:
    """Another broker still mentions it. It is not a leader that does not answer."""
    cluster: Any = Leaders({("a", 0): 1, ("b", 0): 1})
    cluster.gone.add("b")
    with pytest.raises(UnknownTopicError, match="'b' does not exist"):
        look_at_leaders(cluster, [("a", 0), ("b", 0)], cluster.deadline(3))
    assert 3 <= cluster.now < 3.5


@pytest.mark.parametrize("node, silent", [(-1, ()), (2, (2,))], ids=["no leader", "no answer"])
def test_ends_of_epochs_are_those_that_leaders_have_told(node: int, silent: tuple[int, ...]) -> None:
    """One leader that does not answer does not hide what the others have told."""
    places = {("a", 0): 3, ("b", 0): 4, ("b", 1): 5}
    cluster: Any = Leaders({("a", 0): 1, ("b", 0): node, ("b", 1): 1}, silent)
    assert epoch_ends(cluster, places, cluster.deadline(3), partial=True) == {("a", 0): 30, ("b", 1): 50}
    assert 3 <= cluster.now < 3.5
    with pytest.raises(DeadlineExceededError):
        epoch_ends(cluster, places, cluster.deadline(3))


@pytest.fixture
def cluster() -> Any:
    made = Cluster(ClientSettings("127.0.0.1:1"))
    yield made
    made.close()


def test_requests_to_several_brokers_are_under_way_at_once(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first broker answers only when the last one was asked."""
    last_asked = Future()

    async def sent(request: Any, node: int, deadline: Deadline) -> Any:
        if node == 3:
            last_asked.success(None)
            raise NodeNotReadyError("made up")
        await last_asked
        return request

    monkeypatch.setattr(cluster, "_sent", sent)
    cluster.net.call_later(10, lambda: last_asked.is_done or last_asked.failure(NodeNotReadyError("in turn")))
    found = cluster.exchange_all({1: "x", 2: "y", 3: "z"}, Deadline(20, "a test"))
    lost = found.pop(3)
    assert found == {1: "x", 2: "y"}
    assert isinstance(lost, ConnectionFailedError)
    assert "broker 3: NodeNotReadyError" in str(lost)


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_cluster_that_is_closed_has_lost_its_connections(nodes: int) -> None:
    closed = Cluster(ClientSettings("127.0.0.1:1"))
    closed.close()
    found = closed.exchange_all(dict.fromkeys(range(nodes), "x"), Deadline(20, "a test"))
    assert [*found] == [*range(nodes)]
    for node, lost in found.items():
        assert isinstance(lost, ConnectionFailedError)
        assert f"broker {node}: " in str(lost)


def test_a_request_has_some_time_even_if_its_deadline_has_passed(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """kafka-python closes a connection whose broker has not answered in time: 1 ms would close one that is healthy."""
    given: list[int] = []

    def connection(node: int, timeout_ms: int) -> Any:
        given.append(timeout_ms)
        raise NodeNotReadyError("made up")

    monkeypatch.setattr(cluster.manager, "get_connection", connection)
    for seconds in (0.0, 0.0005, 20.0, 100.0):
        with pytest.raises(ConnectionFailedError):
            cluster.exchange("x", 1, Deadline(seconds, "a test"))
    assert given[0] == given[1] == 100
    assert 10_000 < given[2] <= 20_000
    assert given[3] == 30_000
