"""At least once with state: an older driver is fenced by the producer epoch, although it writes no transaction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.produce import Producer
from onceflow.client.settings import ClientSettings
from onceflow.driver.external.progress_commit import commit_progress
from onceflow.driver.kafka import delivery
from onceflow.driver.kafka.delivery import AtLeastOnceWithState
from onceflow.driver.record import progress_log
from onceflow.driver.record.session import DriverSession
from onceflow.errors import FencedError
from onceflow.protocol.batches import ProducerIdAndEpoch, encode_single
from onceflow.protocol.names import Names
from onceflow.protocol.progress import Progress
from onceflow.protocol.transaction import Event

pytestmark = [pytest.mark.integration]


class Driver:
    """One driver of the flow: its start, and its batches of one record."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.cluster = Cluster(ClientSettings(bootstrap, {}))
        self.session = DriverSession(self.cluster, Names(f"flow-{topic}"))
        self.topic = topic
        deadline = self.deadline()
        progress_log.ensure_topic(self.cluster, deadline)
        self.session.init(deadline)
        self.progress = self.session.progress({}, deadline) or Progress(f"flow-{topic}", 0, {}, {}, 0)
        commit_progress(self.session, self.progress, {}, deadline)  # as the first read of a topic does
        self.session.transactions.renew(deadline)
        self.delivery = AtLeastOnceWithState(self.session, self.progress)

    def deadline(self) -> Deadline:
        return Deadline(30, "test")

    def send(self, producer: ProducerIdAndEpoch, sequence: int) -> None:
        sender = Producer(self.cluster, transactional_id=None, deadline=self.deadline())
        record = encode_single(b"key", b"value", timestamp_ms=1, identity=producer, base_sequence=sequence)
        sender.send(self.topic, 0, record)
        sender.flush()

    def end_batch(self) -> None:
        self.delivery.written([])
        self.delivery.write_progress(self.progress, {}, self.deadline())
        self.delivery.end(self.deadline())
        self.delivery.machine.on(Event.SETTLE)


@pytest.fixture
def driver(onceflow_broker: str, make_topic: Callable[..., str]) -> Any:
    topic = make_topic("out", 1)
    made: list[Driver] = []

    def make() -> Driver:
        made.append(Driver(onceflow_broker, topic))
        return made[-1]

    yield make
    for each in made:
        each.cluster.close()


def test_an_older_driver_moves_neither_state_nor_progress(driver: Callable[[], Driver]) -> None:
    older = driver()
    before = older.delivery.begin(older.deadline())
    older.send(before, 0)
    older.end_batch()
    older.delivery.begin(older.deadline())
    newer = driver()
    newer_producer = newer.delivery.begin(newer.deadline())
    assert newer_producer.producer_id == before.producer_id
    older.delivery.written([])
    with pytest.raises(FencedError):  # from the newer one's first batch on
        older.delivery.write_progress(older.progress, {}, older.deadline())
    older.send(before, 1)  # a partition that the newer one has not written to yet: its rows are read by the newer one
    newer.send(newer_producer, 0)
    with pytest.raises(FencedError):
        older.send(before, 2)
    with pytest.raises(FencedError):
        older.delivery.abort(older.deadline())
    newer.end_batch()


def test_the_next_attempt_fences_the_tasks_of_a_failed_one(driver: Callable[[], Driver]) -> None:
    only = driver()
    first = only.delivery.begin(only.deadline())
    only.delivery.abort(only.deadline())
    second = only.delivery.begin(only.deadline())
    assert (second.producer_id, second.producer_epoch) > (first.producer_id, first.producer_epoch)
    only.send(second, 0)
    with pytest.raises(FencedError):
        only.send(first, 0)
    only.end_batch()


def test_a_driver_that_runs_for_long_keeps_its_transactional_id(
    driver: Callable[[], Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for an epoch from time to time, because Kafka forgets an id without transactions. Here for each batch."""
    monkeypatch.setattr(delivery, "_OWNED_S", 0.0)
    older = driver()
    epochs = []
    for _ in range(3):
        producer = older.delivery.begin(older.deadline())
        older.send(producer, 0)
        older.end_batch()
        epochs.append((producer.producer_id, producer.producer_epoch))
    assert epochs == [(epochs[0][0], epochs[0][1] + n) for n in range(3)]
    newer = driver()
    newer.delivery.begin(newer.deadline())
    with pytest.raises(FencedError):
        older.delivery.begin(older.deadline())
