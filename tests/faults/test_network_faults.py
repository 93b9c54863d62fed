"""A client behind a network that errs, and a real broker: every committed transaction whole and once, no other."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from kafka.protocol.producer import (
    AddPartitionsToTxnResponse,
    EndTxnResponse,
    InitProducerIdResponse,
    ProduceResponse,
    TxnOffsetCommitResponse,
)

from onceflow import DeadlineExceededError, FencedError, OnceflowError
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import fetch_committed
from onceflow.client.produce import Producer
from onceflow.client.settings import ClientSettings
from onceflow.client.transaction_requests import describe_transaction
from onceflow.client.transactions import Outcome, Transactions
from onceflow.protocol.batches import encode_single
from onceflow.testing import independent
from onceflow.testing.broker import create_topic
from onceflow_workshop.testing.links import Copy
from onceflow_workshop.testing.network import ANSWER, Network, Rule
from onceflow_workshop.testing.proxy import Proxy, proxied_broker

pytestmark = [pytest.mark.integration, pytest.mark.faults]

APIS = ("Produce", "EndTxn", "InitProducerId", "AddPartitionsToTxn", "TxnOffsetCommit", "FindCoordinator")
TRANSACTIONS = 20
STEPS = ("AddPartitionsToTxn", "Produce", "TxnOffsetCommit", "EndTxn")  # of a transaction, in order
#: What a broker answers to a copy while the next transaction is open: INVALID_PRODUCER_EPOCH or PRODUCER_FENCED.
LATE = {"AddPartitionsToTxn": 90, "Produce": 47, "TxnOffsetCommit": 47, "EndTxn": 90}
RECORDS = 3  # of a transaction in each partition
PARTITIONS = (0, 1)
MAX_DRIVERS = 60
_numbers = itertools.count(1)


class Impatient(Deadline):
    """Waits for one answer only a little: most are dropped here, not late."""

    def capped(self, seconds: float) -> float:
        return super().capped(min(seconds, 0.5))


def soon(seconds: float = 60.0) -> Deadline:
    return Impatient(seconds, "a test")


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Proxy]]:
    with proxied_broker(tmp_path_factory.mktemp("proxied")) as found:
        yield found


@pytest.fixture
def topic(proxied: tuple[str, str, Proxy]) -> Iterator[str]:
    direct, _, proxy = proxied
    name = f"network-{next(_numbers)}"
    create_topic(direct, name, len(PARTITIONS))
    yield name
    proxy.faults(None)
    proxy.resume()


# ---- a driver in small -------------------------------------------------------------------------------


def write(cluster: Cluster, transactions: Transactions, topic: str, text: str) -> None:
    """Batches of one record each, several of a partition under way together."""
    producer = Producer(cluster, transactional_id=transactions.transactional_id, deadline=soon())
    for number, partition in itertools.product(range(RECORDS), PARTITIONS):
        value = f"{text}: {partition}/{number}".encode()
        identity = transactions.identity
        # Of today: retention deletes what looks old, whenever it happens to run.
        now_ms = int(time.time() * 1000)
        batch = encode_single(b"k", value, timestamp_ms=now_ms, identity=identity, base_sequence=number)
        producer.send(topic, partition, batch)
    producer.flush()


def drive(cluster: Cluster, topic: str) -> int:
    """Take over, go on from committed progress, and write a few transactions; how many there are now.

    Every fourth is aborted first, and written again.
    """
    transactions = Transactions(cluster, f"onceflow.{topic}")
    transactions.init(soon())
    known = fetch_committed(cluster, topic, {topic: [0]}, soon())
    done = known[topic][0][0] if known else 0
    for number in range(done, min(done + 4, TRANSACTIONS)):
        for what in ("aborted", "committed") if number % 4 == 3 else ("committed",):
            transactions.begin(soon())
            transactions.add_partitions({topic: PARTITIONS}, soon())
            write(cluster, transactions, topic, f"{what} {number}")
            transactions.commit_offsets(topic, {topic: {0: number + 1}}, soon())
            if what == "aborted":
                transactions.abort(soon())
            elif transactions.end(soon(), commit=True) is not Outcome.COMMITTED:
                return number  # taken over by a copy of our own InitProducerId, perhaps: progress decides
    return min(done + 4, TRANSACTIONS)


def transfer(through: str, topic: str) -> list[OnceflowError]:
    """Driver after driver, as after crashes, until all transactions are committed; what drivers ended with."""
    problems: list[OnceflowError] = []
    for _ in range(MAX_DRIVERS):
        cluster = Cluster(ClientSettings(through))
        try:
            if drive(cluster, topic) == TRANSACTIONS:
                return problems
        except OnceflowError as error:
            problems.append(error)
        finally:
            cluster.close()
    raise AssertionError(f"{MAX_DRIVERS} drivers have not done it: {problems}")


def check(direct: str, topic: str) -> None:
    """By another client, around the proxy."""
    expected = {
        (partition, f"committed {n}: {partition}/{number}".encode())
        for n, partition, number in itertools.product(range(TRANSACTIONS), PARTITIONS, range(RECORDS))
    }
    seen = Counter((s.partition, s.value) for s in independent.read_topic(direct, topic, decided=True))
    assert seen == Counter(expected)
    assert independent.committed_offsets(direct, topic) == {(topic, 0): TRANSACTIONS}


# ---- every action ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        Rule("delay", APIS, count=3, seconds=0.1),
        Rule("delay", APIS, ANSWER, count=3, seconds=0.1),
        Rule("delay", APIS, first=2, count=1, seconds=1.0),  # later than the client waits
        Rule("duplicate", APIS, first=2, count=3),
        Rule("duplicate", APIS, first=2, count=3, seconds=0.05),
        Rule("reorder", APIS, first=2, count=3, seconds=0.05),
        Rule("drop", APIS, count=2),
        Rule("drop", APIS, ANSWER, count=2),
        Rule("cut", APIS, count=3),
        Rule("cut", APIS, ANSWER, count=3),
    ],
    ids=lambda rule: f"{rule.action}-{rule.direction}-{rule.seconds or 0}",
)
@pytest.mark.long
def test_one_action(proxied: tuple[str, str, Proxy], topic: str, rule: Rule) -> None:
    direct, through, proxy = proxied
    network = Network(1, [rule])
    copies = len(proxy.copies.done)
    proxy.faults(network)
    transfer(through, topic)
    assert {fault.api for fault in network.log} == set(APIS)  # every one was hit
    if rule.action == "duplicate":
        proxy.copies.wait(copies + len(network.log) * (1 if rule.seconds is None else 2))
    check(direct, topic)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_all_actions(proxied: tuple[str, str, Proxy], topic: str, seed: int) -> None:
    direct, through, proxy = proxied
    rules = [
        Rule("cut", APIS, probability=0.03),
        Rule("cut", APIS, ANSWER, probability=0.03),
        Rule("drop", APIS, probability=0.02),
        Rule("drop", APIS, ANSWER, probability=0.02),
        Rule("duplicate", APIS, probability=0.1, seconds=0.05),
        Rule("reorder", APIS, probability=0.1, seconds=0.02),
        Rule("delay", APIS, probability=0.1, seconds=0.02),
        Rule("delay", APIS, ANSWER, probability=0.1, seconds=0.02),
    ]
    network = Network(seed, rules)
    copies = len(proxy.copies.done)
    proxy.faults(network)
    transfer(through, topic)
    assert set(network.counts) == {"cut", "drop", "duplicate", "reorder", "delay"}, network.to_json()
    sent = len(proxy.copies.wait_for_all()) - copies
    assert network.counts["duplicate"] < sent <= 2 * network.counts["duplicate"]
    check(direct, topic)


def test_a_pause_and_cut_connections(proxied: tuple[str, str, Proxy], topic: str) -> None:
    """A partition of the network while a transaction is open: the client gives up, and a later one goes on."""
    direct, through, proxy = proxied
    cluster = Cluster(ClientSettings(through))
    transactions = Transactions(cluster, f"onceflow.{topic}")
    transactions.init(soon())
    transactions.begin(soon())
    write(cluster, transactions, topic, "lost 0")
    proxy.pause()
    with pytest.raises(OnceflowError, match="EndTxn"):
        transactions.end(soon(1), commit=False)
    cluster.close()
    proxy.cut_all()
    proxy.resume()
    transfer(through, topic)
    check(direct, topic)


# ---- what a copy does --------------------------------------------------------------------------------


def code_of(copy: Copy) -> int:
    """The error code that the broker answered a copy with."""
    assert copy.answer is not None
    answers: dict[str, Any] = {
        "Produce": ProduceResponse,
        "AddPartitionsToTxn": AddPartitionsToTxnResponse,
        "TxnOffsetCommit": TxnOffsetCommitResponse,
        "EndTxn": EndTxnResponse,
        "InitProducerId": InitProducerIdResponse,
    }
    response = answers[copy.api].decode(copy.answer, version=copy.version, header=True)
    if copy.api == "Produce":
        return int(response.responses[0].partition_responses[0].error_code)
    if copy.api == "AddPartitionsToTxn":
        return int(response.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code)
    if copy.api == "TxnOffsetCommit":
        return int(response.topics[0].partitions[0].error_code)
    return int(response.error_code)


def do(step: str, cluster: Cluster, transactions: Transactions, topic: str, number: int) -> None:
    """One request (or several, of Produce) of a transaction, by the name of its API."""
    if step == "AddPartitionsToTxn":
        transactions.add_partitions({topic: PARTITIONS}, soon())
    elif step == "Produce":
        write(cluster, transactions, topic, str(number))
    elif step == "TxnOffsetCommit":
        transactions.commit_offsets(topic, {topic: {0: number}}, soon())
    else:
        assert transactions.end(soon(), commit=True) is Outcome.COMMITTED


@pytest.mark.parametrize("api", STEPS)
def test_a_late_copy_is_refused(proxied: tuple[str, str, Proxy], topic: str, api: str) -> None:
    """Within its transaction a copy is recognised; while the next one is open, it neither enters nor ends it."""
    direct, through, proxy = proxied
    copies = len(proxy.copies.done)
    cluster, around = Cluster(ClientSettings(through)), Cluster(ClientSettings(direct))
    around.connect(soon())
    transactions = Transactions(cluster, f"onceflow.{topic}")
    transactions.init(soon())
    transactions.begin(soon())
    proxy.faults(Network(1, [Rule("duplicate", (api,), count=1, seconds=1.0)]))
    before, after = STEPS[: STEPS.index(api) + 1], STEPS[STEPS.index(api) + 1 :]
    for step in before:
        do(step, cluster, transactions, topic, 1)
    at_once = proxy.copies.wait(copies + 1)[copies]
    # 51: the markers of this commit are being written. Asked again, it would be no error.
    assert code_of(at_once) in ((0, 51) if api == "EndTxn" else (0,))
    proxy.pause()  # the second copy waits; from here on the driver goes around
    owner = Transactions(around, transactions.transactional_id, identity=transactions.identity)
    for step in after:
        do(step, around, owner, topic, 1)
    owner.begin(soon())
    for step in STEPS[:-1]:
        do(step, around, owner, topic, 2)
    proxy.resume()
    late = proxy.copies.wait(copies + 2)[copies + 1]
    assert code_of(late) == LATE[api]
    described = describe_transaction(around, owner.transactional_id, soon())
    assert (described["state"], described["producer_epoch"]) == ("Ongoing", owner.identity.producer_epoch)
    first = Counter(f"1: {partition}/{number}".encode() for partition in PARTITIONS for number in range(RECORDS))
    assert Counter(s.value for s in independent.read_topic(direct, topic)) == first
    do("EndTxn", around, owner, topic, 2)
    second = Counter(f"2: {partition}/{number}".encode() for partition in PARTITIONS for number in range(RECORDS))
    assert Counter(s.value for s in independent.read_topic(direct, topic, decided=True)) == first + second
    assert independent.committed_offsets(direct, topic) == {(topic, 0): 2}
    cluster.close()
    around.close()


def test_a_copy_of_an_initialisation_fences(proxied: tuple[str, str, Proxy], topic: str) -> None:
    """To the broker it is another initialisation: the owner is out, and nothing of it becomes visible."""
    direct, through, proxy = proxied
    copies = len(proxy.copies.done)
    cluster, around = Cluster(ClientSettings(through)), Cluster(ClientSettings(direct))
    around.connect(soon())
    proxy.faults(Network(1, [Rule("duplicate", ("InitProducerId",), count=1, seconds=1.0)]))
    first = Transactions(cluster, f"onceflow.{topic}")
    first.init(soon())
    assert code_of(proxy.copies.wait(copies + 1)[copies]) == 0
    proxy.pause()  # the second copy waits
    lost = Transactions(around, first.transactional_id, identity=first.identity)
    lost.begin(soon())
    with pytest.raises(FencedError):
        write(around, lost, topic, "lost")
    owner = Transactions(around, first.transactional_id)
    owner.init(soon())
    owner.begin(soon())
    write(around, owner, topic, "lost, too")
    owner.commit_offsets(topic, {topic: {0: 1}}, soon())
    proxy.resume()
    # 51: it aborts what is open, as InitProducerId does, and asks for patience.
    assert code_of(proxy.copies.wait(copies + 2)[copies + 1]) == 51
    # An EndTxn of the epoch before reads as one sent again, and the transaction as one that was aborted.
    assert owner.end(soon(), commit=True) in (Outcome.ABORTED, Outcome.FENCED)
    assert independent.read_topic(direct, topic, decided=True) == []
    assert independent.committed_offsets(direct, topic) == {}
    cluster.close()
    around.close()


def test_a_silent_broker_does_not_hold_up_a_deadline(proxied: tuple[str, str, Proxy], topic: str) -> None:
    """I8. Neither the answer comes, nor the list of brokers that is asked for then."""
    _, servers, proxy = proxied
    cluster = Cluster(ClientSettings(servers))
    transactions = Transactions(cluster, f"onceflow.{topic}")
    transactions.init(soon())
    transactions.begin(soon())
    write(cluster, transactions, topic, "never decided")
    proxy.pause()
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        transactions.end(Deadline(2, "a test"), commit=False)
    assert time.monotonic() - started < 6
    cluster.close()
    proxy.cut_all()
