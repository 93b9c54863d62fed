"""What is said of a topic that a user has named and that does not exist."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from onceflow.client.cluster import TopicInfo, unknown_topic
from onceflow.client.deadline import Deadline
from onceflow.client.topics import TopicLimits, find_topics, max_message_bytes, topic_limits
from onceflow.errors import BrokerUnreachableError, UnknownTopicError
from onceflow.protocol.timestamps import AcceptedTimes

THERE = ["Orders_eu", "orders-us", "orders.eu", "payments", "__orders-eu"]


class FakeCluster:
    """Has some topics; ``names`` None: they may not be listed."""

    def __init__(self, names: list[str] | None) -> None:
        self._names = names

    def topics(self, wanted: Any, deadline: Deadline) -> dict[str, TopicInfo]:
        if wanted is not None:
            raise unknown_topic(next(iter(wanted)))
        if self._names is None:
            raise BrokerUnreachableError("nobody answers")
        return {name: TopicInfo(name, "id", {0: 1}) for name in self._names}


def missing(name: str, role: str, there: list[str] | None) -> UnknownTopicError:
    cluster: Any = FakeCluster(there)
    with pytest.raises(UnknownTopicError) as caught:
        find_topics(cluster, {name: role}, Deadline(1, "test"))
    return caught.value


@pytest.mark.parametrize(
    "role, what", [("", "Topic"), ("source", "Source topic"), ("dead letter", "Dead letter topic")]
)
def test_it_says_what_the_topic_is_for(role: str, what: str) -> None:
    error = missing("clicks", role, THERE)
    assert (error.what, error.topic, error.detail) == (f"{what} 'clicks' does not exist", "clicks", "")
    assert error.next_step.startswith("create it: `onceflow topic create clicks --partitions N`; or check the name")


def test_similar_names_whatever_their_case_and_separators() -> None:
    error = missing("orders-eu", "output", THERE)
    assert error.detail == "topics of a similar name: Orders_eu, orders.eu, orders-us"
    assert error.next_step.startswith("did you mean Orders_eu? If not, create it: ")


def test_tables_are_no_outputs() -> None:
    there = ["orders-t", "orders-t-internal", "orders-a"]
    assert missing("orders", "output", there).detail == "topics of a similar name: orders-a"
    assert "orders-t" in missing("orders", "source", there).detail


def test_the_topics_of_a_table_are_made_by_its_flow() -> None:
    assert "topic create" not in missing("balances", "table", THERE).next_step


def test_without_a_list_of_topics() -> None:
    assert missing("orders", "", None).detail == ""


def test_a_name_that_cannot_be() -> None:
    error = unknown_topic("a b", "its name is not legal in Kafka")
    assert (error.what, error.next_step) == (
        "Topic 'a b' does not exist: its name is not legal in Kafka",
        "check the name",
    )


# ---- settings ----------------------------------------------------------------------------------------------


class Describing:
    """Answers DescribeConfigs for one topic, which it does not know at first."""

    def __init__(self, unknown: int) -> None:
        self.unknown = unknown
        self.asked = 0

    def connect(self, deadline: Deadline) -> None:
        pass

    def version(self, request: Any, *, min_version: int, max_version: int) -> int:
        return max_version

    def ask(self, request: Any, api: str, deadline: Deadline) -> Any:
        self.asked += 1
        known = self.asked > self.unknown
        configs = [SimpleNamespace(name="max.message.bytes", value="12345")] if known else []
        result = SimpleNamespace(resource_name="t", error_code=0 if known else 3, configs=configs)
        return SimpleNamespace(results=[result])


@pytest.mark.parametrize("unknown, limit", [(0, 12345), (2, 12345), (1000, 1_048_588)])
def test_a_broker_that_has_not_heard_of_a_new_topic_is_asked_again(unknown: int, limit: int) -> None:
    """Its settings would be taken for the defaults."""
    waited: list[float] = []
    cluster: Any = Describing(unknown)
    assert max_message_bytes(cluster, ["t"], Deadline(10, "test", sleep=waited.append)) == {"t": limit}
    assert cluster.asked == min(unknown, 4) + 1
    assert sum(waited) < 1


DEFAULT_TIMES = AcceptedTimes(after_ms=3_600_000)  # of Kafka


@pytest.mark.parametrize("values, limits", [
    ({}, TopicLimits(1_048_588, DEFAULT_TIMES)),
    ({"max.message.bytes": "5", "cleanup.policy": "compact,delete", "compression.type": "uncompressed"},
     TopicLimits(5, DEFAULT_TIMES, compacted=True, stored="uncompressed")),
    ({"cleanup.policy": "delete", "compression.type": "producer"}, TopicLimits(1_048_588, DEFAULT_TIMES)),
    ({"message.timestamp.before.max.ms": "5", "message.timestamp.after.max.ms": "7"},
     TopicLimits(1_048_588, AcceptedTimes(5, 7))),
])  # fmt: skip
def test_what_a_topic_takes(values: dict[str, str], limits: TopicLimits) -> None:
    """Kafka's defaults where this principal may not read the settings."""
    cluster: Any = Describing(0)
    configs = [SimpleNamespace(name=name, value=value) for name, value in values.items()]
    answer = SimpleNamespace(resource_name="t", error_code=0, configs=configs)
    cluster.ask = lambda *_: SimpleNamespace(results=[answer])
    assert topic_limits(cluster, ["t"], Deadline(10, "test")) == {"t": limits}
