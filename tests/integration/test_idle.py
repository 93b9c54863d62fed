"""A flow that was idle for longer than Kafka remembers its transactional id (``transactional.id.expiration.ms``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from kafka.protocol.admin import DescribeProducersRequest

from onceflow import FencedError
from onceflow.broker.local import LocalBroker
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.leaders import ask_leaders
from onceflow.client.settings import ClientSettings
from onceflow.client.transaction_requests import describe_transaction
from onceflow.client.transactions import Outcome
from onceflow.driver.kafka.delivery import ExactlyOnce
from onceflow.driver.record.progress_log import ensure_topic
from onceflow.driver.record.session import DriverSession
from onceflow.errors import BatchAbortedError
from onceflow.protocol.names import Names
from onceflow.protocol.progress import Progress
from onceflow.testing import independent
from onceflow.testing.broker import create_topic
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

FORGETS_AFTER_S = 2
PROPERTIES = {
    "transactional.id.expiration.ms": str(1000 * FORGETS_AFTER_S),
    "transaction.remove.expired.transaction.cleanup.interval.ms": "200",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    # What partitions know of a producer; by default they remember it for a day.
    "producer.id.expiration.ms": str(1000 * FORGETS_AFTER_S),
    "producer.id.expiration.check.interval.ms": "200",
}


def soon(seconds: float = 30.0) -> Deadline:
    return Deadline(seconds, "a test")


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.long), 2])
def forgetful(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Bootstrap servers of a broker that soon forgets who is idle, at transaction version 1 or 2."""
    folder = tmp_path_factory.mktemp("forgetful")
    with LocalBroker(folder, properties=PROPERTIES, features={"transaction.version": request.param}) as broker:
        yield broker.bootstrap_servers


@pytest.fixture
def connect(forgetful: str) -> Iterator[Callable[[], Cluster]]:
    clusters: list[Cluster] = []

    def connect() -> Cluster:
        clusters.append(Cluster(ClientSettings(forgetful)))
        clusters[-1].connect(soon())
        return clusters[-1]

    yield connect
    for cluster in clusters:
        cluster.close()


def wait_until_forgotten(cluster: Cluster, names: Names) -> None:
    def is_dead() -> bool:
        return describe_transaction(cluster, names.transactional_id, soon())["state"] == "Dead"

    wait_until(is_dead, 30, "the broker forgets the transactional id")


def producers_of(cluster: Cluster, topic: str) -> int:
    """How many producers the leaders of a topic with four partitions remember."""

    def request(wanted: Any) -> Any:
        kind = DescribeProducersRequest.TopicRequest
        topics = [kind(name=name, partition_indexes=list(numbers)) for name, numbers in wanted.items()]
        return DescribeProducersRequest(version=0, topics=topics)

    places = [(topic, partition) for partition in range(4)]
    answers = ask_leaders(
        cluster, places, soon(), api="DescribeProducers", request=request, read=lambda a: len(a.active_producers or [])
    )
    return sum(answers.values())


# ---- flows -------------------------------------------------------------------------------------------------


@pytest.fixture
def pipe(forgetful: str, make_pipe: Callable[..., Any]) -> Any:
    pipe = replace(make_pipe(), bootstrap=forgetful)
    for topic in (pipe.source, pipe.target):
        create_topic(forgetful, topic, 4)
    pipe.fill(100)
    return pipe


@pytest.mark.long
@pytest.mark.parametrize(
    "guarantee, engine", [("exactly_once", "tasks"), ("exactly_once", "driver"), ("at_least_once", "driver")]
)
def test_the_next_batch_commits(pipe: Any, connect: Callable[[], Cluster], guarantee: str, engine: str) -> None:
    cluster = connect()
    flow = pipe.open()
    rows = flow.read(pipe.source).select("key", "value")
    wait_until_forgotten(cluster, Names(pipe.flow))
    writer = flow.write(rows, topic=pipe.target, engine=engine, guarantee=guarantee)
    query = writer.start()
    try:
        query.processAllAvailable()
        for _ in range(2):
            wait_until_forgotten(cluster, Names(pipe.flow))
            wait_until(lambda: not producers_of(cluster, pipe.target), 30, "the partitions forget the producer")
            pipe.fill(100)
            query.processAllAvailable()
        assert query.isActive
        assert max(batch.attempts for batch in query.batches) <= 2
    finally:
        query.stop()
    pipe.check()


@pytest.mark.long
def test_a_start_may_take_its_time(pipe: Any, connect: Callable[[], Cluster], forgetful: str) -> None:
    """What its second call of Flow.read decides is committed, too."""
    other = f"{pipe.source}-other"
    create_topic(forgetful, other, 1)
    flow = pipe.open()
    first = flow.read(pipe.source).select("key", "value")
    wait_until_forgotten(connect(), Names(pipe.flow))
    query = flow.write(first.union(flow.read(other).select("key", "value")), topic=pipe.target).start()
    query.processAllAvailable()
    query.stop()
    seen = independent.read_topic(forgetful, pipe.target, decided=True)
    assert sorted((record.key, record.value) for record in seen) == sorted(pipe.sent)


# ---- who goes on -------------------------------------------------------------------------------------------


class Driver:
    """What a driver does of a batch, without Spark."""

    def __init__(self, cluster: Cluster, names: Names) -> None:
        self.session = DriverSession(cluster, names)
        ensure_topic(cluster, soon())
        self.session.init(soon())
        empty = Progress(names.progress_key, 0, {}, {}, 0, transactional_id=names.transactional_id)
        self.progress = self.session.progress({}, soon()) or empty
        self.delivery = ExactlyOnce(self.session, [])

    def batch(self) -> Outcome:
        """One attempt of the next batch."""
        identity = self.delivery.begin(soon())
        after = replace(
            self.progress,
            batch_id=self.progress.batch_id + 1,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
        )
        self.delivery.written([])
        self.delivery.write_progress(after, {}, soon())
        outcome = self.delivery.end(soon())
        if outcome is Outcome.COMMITTED:
            self.progress = after
        return outcome

    def commit(self) -> None:
        """The next batch, run again as the sink does."""
        try:
            assert self.batch() is Outcome.COMMITTED
        except BatchAbortedError:
            self.delivery.abort(soon())
            assert self.batch() is Outcome.COMMITTED


@pytest.fixture
def names(request: pytest.FixtureRequest) -> Names:
    return Names(f"idle-{abs(hash(request.node.name))}")


@pytest.mark.long
def test_who_is_alone_goes_on(names: Names, connect: Callable[[], Cluster]) -> None:
    driver = Driver(connect(), names)
    for batch in range(1, 4):
        driver.commit()
        assert driver.progress.batch_id == batch
        wait_until_forgotten(connect(), names)
    assert Driver(connect(), names).progress == driver.progress


def test_who_slept_through_the_batches_of_a_newer_driver_is_fenced(
    names: Names, connect: Callable[[], Cluster]
) -> None:
    """The coordinator has forgotten both of them: only progress tells that the older one has been replaced."""
    older = Driver(connect(), names)
    older.commit()
    newer = Driver(connect(), names)
    newer.commit()
    wait_until_forgotten(connect(), names)
    with pytest.raises(FencedError, match="progress"):
        older.commit()  # it ends with this
    if older.session.transactions.version_2:  # at version 1 the older one has taken the transactional id before it knew
        newer.commit()
    assert Driver(connect(), names).progress == newer.progress


def test_of_two_that_were_forgotten_one_goes_on(names: Names, connect: Callable[[], Cluster]) -> None:
    """The newer one has committed nothing yet. Whoever is first goes on, and the other one is fenced."""
    older = Driver(connect(), names)
    older.commit()
    newer = Driver(connect(), names)
    wait_until_forgotten(connect(), names)
    older.commit()
    with pytest.raises(FencedError):
        newer.commit()
    assert Driver(connect(), names).progress == older.progress


def test_who_was_replaced_after_it_was_forgotten_is_fenced(names: Names, connect: Callable[[], Cluster]) -> None:
    older = Driver(connect(), names)
    older.commit()
    wait_until_forgotten(connect(), names)
    newer = Driver(connect(), names)
    with pytest.raises(FencedError):
        older.commit()
    newer.commit()


@pytest.mark.long
def test_a_reset_meanwhile_is_noticed(names: Names, connect: Callable[[], Cluster], forgetful: str) -> None:
    from onceflow.admin.change.reset import reset

    driver = Driver(connect(), names)
    driver.commit()
    assert reset(ClientSettings(forgetful), names, []) == driver.progress
    wait_until_forgotten(connect(), names)
    with pytest.raises(FencedError):
        driver.commit()
