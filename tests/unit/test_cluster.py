"""What the client makes of answers that a healthy cluster gives now and then. No sockets: tests make the answers."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest, OffsetCommitRequest
from kafka.protocol.metadata import FindCoordinatorRequest
from kafka.protocol.producer import (
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
    TxnOffsetCommitRequest,
)

from onceflow.client import cluster as clusters
from onceflow.client.cluster import UNKNOWN_TOPIC_S, Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.library_log import muted
from onceflow.client.log_reader import LogRecord, read_log
from onceflow.client.offsets import offset_topics
from onceflow.client.settings import ClientSettings
from onceflow.errors import BrokerUnsupportedError, DeadlineExceededError, ProtocolError, UnknownTopicError
from onceflow.protocol.batches import ProducerIdAndEpoch, encode_single


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def deadline(self, seconds: float = 60.0) -> Deadline:
        return Deadline(seconds, "a test", clock=lambda: self.now, sleep=self.sleep, rng=random.Random(1))

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(clusters, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(ClientSettings("127.0.0.1:1"))
    yield made
    made.close()


# ---- topics that a broker does not know (yet) --------------------------------------------------------------


def metadata(name: str, code: int) -> Any:
    partition = SimpleNamespace(partition_index=0, leader_id=1)
    topic = SimpleNamespace(name=name, error_code=code, topic_id="id", partitions=[partition], is_internal=False)
    return SimpleNamespace(topics=[topic])


@pytest.fixture
def unknown_for(cluster: Cluster, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """From now on brokers do not know the topic, for some seconds."""

    def script(seconds: float) -> None:
        until = clock.now + seconds
        monkeypatch.setattr(cluster, "ask", lambda request, api, deadline: metadata("t", 3 if clock.now < until else 0))

    return script


def test_a_topic_that_was_never_there_is_told_at_once(
    cluster: Cluster, clock: Clock, unknown_for: Callable[[float], None]
) -> None:
    unknown_for(1000)
    with pytest.raises(UnknownTopicError, match="'t' does not exist"):
        cluster.topics(["t"], clock.deadline())
    assert clock.now < 101


@pytest.mark.parametrize("how", ["seen before", "patient", "leader"])
@pytest.mark.parametrize("seconds", [UNKNOWN_TOPIC_S / 2, 1000])
def test_a_topic_that_should_be_there_is_waited_for(
    cluster: Cluster, clock: Clock, unknown_for: Callable[[float], None], how: str, seconds: float
) -> None:
    if how == "seen before":
        unknown_for(0)
        cluster.topics(["t"], clock.deadline())
    unknown_for(seconds)
    before = clock.now

    def ask() -> None:
        if how == "leader":
            assert cluster.leader("t", 0, clock.deadline(), fresh=True) == 1
        else:
            assert cluster.topics(["t"], clock.deadline(), patient=how == "patient")["t"].partitions == 1

    if seconds < UNKNOWN_TOPIC_S:
        ask()
        assert clock.now - before < seconds + 1
    else:
        with pytest.raises(UnknownTopicError, match="'t' does not exist"):
            ask()
        assert UNKNOWN_TOPIC_S <= clock.now - before < UNKNOWN_TOPIC_S + 1


def grown(at: float, clock: Clock) -> Any:
    """Metadata of a topic that one broker knows two partitions of, and others one, until some time."""
    answer = metadata("t", 0)
    if clock.now >= at:
        answer.topics[0].partitions.append(SimpleNamespace(partition_index=1, leader_id=2))
    return answer


def test_a_partition_that_a_broker_does_not_know_yet(
    cluster: Cluster, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = clock.now + UNKNOWN_TOPIC_S / 2
    monkeypatch.setattr(cluster, "ask", lambda *_: grown(at, clock))
    assert cluster.leader("t", 1, clock.deadline()) == 2
    with pytest.raises(UnknownTopicError, match="has no partition 2"):
        cluster.leader("t", 2, clock.deadline())
    assert clock.now < at + UNKNOWN_TOPIC_S + 1


def test_a_topic_that_is_gone_is_not_waited_for_again(
    cluster: Cluster, clock: Clock, unknown_for: Callable[[float], None]
) -> None:
    unknown_for(0)
    cluster.topics(["t"], clock.deadline())
    unknown_for(1000)
    with pytest.raises(UnknownTopicError):
        cluster.topics(["t"], clock.deadline())
    before = clock.now
    with pytest.raises(UnknownTopicError):
        cluster.topics(["t"], clock.deadline())
    assert clock.now - before < 1


def test_a_topic_is_unknown_also_if_no_broker_answers_just_before_a_short_deadline(
    cluster: Cluster, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(request: Any, api: str, deadline: Deadline) -> Any:
        if deadline.expired:
            raise deadline.error("no answer")
        return metadata("t", 3)

    monkeypatch.setattr(cluster, "ask", ask)
    with pytest.raises(UnknownTopicError, match="'t' does not exist"):
        cluster.topics(["t"], clock.deadline(3), patient=True)
    assert 102 < clock.now <= 103


# ---- brokers of different versions -------------------------------------------------------------------------


def broker(**versions: tuple[int, int]) -> Any:
    """A connection to a broker that offers these versions, by API key."""
    offered = {int(key.removeprefix("api")): span for key, span in versions.items()}
    return SimpleNamespace(node_id=2, broker_version_data=SimpleNamespace(api_versions=offered))


def offering(cluster: Cluster, transaction_version: int, *requests: Any) -> None:
    """As if a broker had been asked that offers everything."""
    cluster._features = {"transaction.version": transaction_version}
    cluster._api_versions = {request.API_KEY: (0, 99) for request in requests}


_TXN = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
_PLAIN = OffsetCommitRequest.OffsetCommitRequestTopic
_PLACE = ListOffsetsRequest.ListOffsetsTopic.ListOffsetsPartition
REQUESTS: dict[str, tuple[Any, int, int, dict[str, Any]]] = {
    "FindCoordinator": (FindCoordinatorRequest, 1, 4, {"key_type": 1, "key": "k", "coordinator_keys": ["k"]}),
    "InitProducerId": (
        InitProducerIdRequest, 3, 5,
        {"transactional_id": "t", "transaction_timeout_ms": 1, "producer_id": 1, "producer_epoch": 2},
    ),
    "EndTxn": (
        EndTxnRequest, 0, 4, {"transactional_id": "t", "producer_id": 1, "producer_epoch": 2, "committed": True}
    ),
    "AddPartitionsToTxn": (
        AddPartitionsToTxnRequest, 0, 3,
        {
            "v3_and_below_transactional_id": "t",
            "v3_and_below_producer_id": 1,
            "v3_and_below_producer_epoch": 2,
            "v3_and_below_topics": [AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name="o", partitions=[0])],
        },
    ),
    "TxnOffsetCommit": (
        TxnOffsetCommitRequest, 3, 4,
        {
            "transactional_id": "t", "group_id": "g", "producer_id": 1, "producer_epoch": 2, "generation_id": -1,
            "member_id": "", "group_instance_id": None,
            "topics": offset_topics(_TXN, _TXN.TxnOffsetCommitRequestPartition, {"o": {0: 1}}, "m"),
        },
    ),
    "OffsetCommit": (
        OffsetCommitRequest, 6, 7,
        {
            "group_id": "g", "generation_id_or_member_epoch": -1, "member_id": "",
            "topics": offset_topics(_PLAIN, _PLAIN.OffsetCommitRequestPartition, {"o": {0: 1}}, "m"),
        },
    ),
    "ListOffsets": (
        ListOffsetsRequest, 2, 6,
        {
            "replica_id": -1, "isolation_level": 1,
            "topics": [
                ListOffsetsRequest.ListOffsetsTopic(
                    name="o", partitions=[_PLACE(partition_index=0, current_leader_epoch=-1, timestamp=-1)]
                )
            ],
        },
    ),
    "CreateTopics": (
        CreateTopicsRequest, 4, 5,
        {
            "timeout_ms": 1, "validate_only": False,
            "topics": [
                CreateTopicsRequest.CreatableTopic(
                    name="o", num_partitions=1, replication_factor=-1, assignments=[], configs=[]
                )
            ],
        },
    ),
    "DescribeConfigs": (
        DescribeConfigsRequest, 1, 4,
        {
            "resources": [
                DescribeConfigsRequest.DescribeConfigsResource(
                    resource_type=2, resource_name="o", configuration_keys=["c"]
                )
            ]
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_fits_the_broker_that_it_goes_to(cluster: Cluster, name: str) -> None:
    """ApiVersions is asked of one broker; in a rolling upgrade the next one may be older."""
    kind, least, most, fields = REQUESTS[name]
    for theirs in range(least, most + 1):
        offering(cluster, 1, kind)
        request = kind(version=cluster.version(kind, min_version=least, max_version=most), **fields)
        cluster._fit(request, broker(**{f"api{kind.API_KEY}": (0, theirs)}))
        assert theirs == request.API_VERSION
        assert request.encode() == kind(version=theirs, **fields).encode()
        # From now on it is asked for what all understand.
        assert cluster.version(kind, min_version=least, max_version=most) == theirs


def test_a_broker_that_is_too_old_is_an_error(cluster: Cluster) -> None:
    offering(cluster, 1, InitProducerIdRequest)
    request = InitProducerIdRequest(version=cluster.version(InitProducerIdRequest, min_version=3, max_version=5))
    with pytest.raises(BrokerUnsupportedError, match=r"Broker 2 .*up to version 1 only"):
        cluster._fit(request, broker(api22=(0, 1)))


@pytest.mark.parametrize("kind", [EndTxnRequest, TxnOffsetCommitRequest, ProduceRequest])
def test_the_two_ways_to_end_a_transaction_are_never_mixed(cluster: Cluster, kind: Any) -> None:
    offering(cluster, 2, kind)
    version = cluster.version(kind, min_version=0, max_version=5)
    with pytest.raises(BrokerUnsupportedError, match="Broker 2"):
        cluster.fits(kind.API_KEY, version, broker(**{f"api{kind.API_KEY}": (0, version - 1)}))


def test_newer_brokers_change_nothing(cluster: Cluster) -> None:
    offering(cluster, 2, EndTxnRequest)
    assert cluster.fits(EndTxnRequest.API_KEY, 5, broker(api26=(0, 7))) == 5
    assert cluster.fits(EndTxnRequest.API_KEY, 5, SimpleNamespace(node_id=1, broker_version_data=None)) == 5


# ---- Fetch without a partition -----------------------------------------------------------------------------


class Fetches:
    """A cluster that answers Fetch requests in turn."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def leader(self, topic: str, partition: int, deadline: Deadline, *, fresh: bool = False) -> int:
        return 1

    def version(self, request: Any, *, min_version: int, max_version: int) -> int:
        assert request is FetchRequest
        return max_version

    def exchange(self, request: Any, node: int, deadline: Deadline) -> Any:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def fetched(*records: bytes, code: int = 0) -> Any:
    raw = b"".join(records)
    part = SimpleNamespace(error_code=code, records=raw, log_start_offset=0, last_stable_offset=1, high_watermark=1)
    return SimpleNamespace(error_code=0, responses=[SimpleNamespace(partitions=[part])])


THROTTLED = SimpleNamespace(error_code=0, responses=[])


def encoded(value: bytes) -> bytes:
    batch = encode_single(b"k", value, timestamp_ms=1, identity=ProducerIdAndEpoch(-1, -1, False), base_sequence=-1)
    return batch.head + bytes(batch.body)


def read(clock: Clock, *answers: Any, seconds: float = 10.0) -> list[bytes | None]:
    fetches: Any = Fetches(*answers)
    found = read_log(fetches, "t", 0, 0, 1, clock.deadline(seconds))
    return [item.value for item in found if isinstance(item, LogRecord)]


def test_a_throttled_fetch_is_repeated(clock: Clock) -> None:
    """Above its quota, a client is answered without any partition."""
    assert read(clock, THROTTLED, THROTTLED, fetched(encoded(b"v"))) == [b"v"]
    with pytest.raises(DeadlineExceededError) as caught:
        read(clock, THROTTLED)
    assert "throttles" in caught.value.detail


def test_an_error_of_the_whole_fetch(clock: Clock) -> None:
    refused = SimpleNamespace(error_code=6, responses=[])
    assert read(clock, refused, fetched(encoded(b"v"))) == [b"v"]
    with pytest.raises(ProtocolError, match="failed unexpectedly"):
        read(clock, SimpleNamespace(error_code=-1, responses=[]))


# ---- kafka-python's log ------------------------------------------------------------------------------------


def test_the_log_of_kafka_python_is_the_users(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(ClientSettings("127.0.0.1:1"))
    theirs = logging.getLogger("kafka.net.manager")
    try:
        assert logging.getLogger("kafka").level == logging.NOTSET
        with caplog.at_level(logging.INFO, "kafka"):
            theirs.error("of the user's own consumer")
            with muted():
                with muted():
                    theirs.error("of ours")
                theirs.warning("of ours")
            theirs.info("of the user again")
        assert [record.getMessage() for record in caplog.records] == ["of the user's own consumer", "of the user again"]
    finally:
        cluster.close()


def test_a_refused_connection_is_not_logged_by_kafka_python(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(ClientSettings("127.0.0.1:1"))
    with caplog.at_level(logging.INFO), pytest.raises(Exception, match="No broker answered"):
        cluster.connect(Deadline(0.3, "a test"))
    cluster.close()
    assert [record for record in caplog.records if record.name.startswith("kafka")] == []
    with caplog.at_level(logging.DEBUG, "onceflow.client"), pytest.raises(Exception, match="No broker answered"):
        Cluster(ClientSettings("127.0.0.1:1")).connect(Deadline(0.3, "a test"))
    assert [record for record in caplog.records if record.name.startswith("kafka")]
