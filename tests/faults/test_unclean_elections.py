"""A source loses records that were read, in a real unclean leader election, and gets others at the same offsets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import KafkaException, NewTopic

import onceflow
from onceflow.broker.local import LocalBroker
from onceflow.cli.main import cli
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.leader_epochs import epoch_ends, look_at_leaders
from onceflow.client.long_poll import LongPoll
from onceflow.client.settings import ClientSettings
from onceflow.testing import independent
from onceflow.testing.broker import create_topic, three_nodes
from onceflow.testing.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.faults]

SOURCE = "in"


def soon() -> Deadline:
    return Deadline(90, "a test")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    with three_nodes(tmp_path_factory.mktemp("unclean")) as broker:
        yield broker


class Source:
    """A topic with one partition, on nodes 1 and 2, that may elect an unclean leader."""

    def __init__(self, broker: LocalBroker) -> None:
        self._broker = broker
        self._admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
        config = {"min.insync.replicas": "1", "unclean.leader.election.enable": "true"}
        made = NewTopic(SOURCE, 1, replica_assignment=[[1, 2]], config=config)
        self._admin.create_topics([made])[SOURCE].result(30)

    def fill(self, name: str, count: int) -> None:
        records = [(b"k", b"%s-%d" % (name.encode(), n)) for n in range(count)]
        # A producer of its own: the leader of after the election does not know the sequences of one of before.
        independent.fill(self._broker.bootstrap_servers, SOURCE, records, options={"client.id": name})

    def _is(self, leader: int, in_sync: set[int] | None) -> bool:
        with contextlib.suppress(KafkaException):
            found = self._admin.list_topics(SOURCE, timeout=10).topics[SOURCE].partitions[0]
            return found.leader == leader and in_sync in (None, {*found.isrs})
        return False

    def lose(self, name: str, count: int) -> None:
        """These records are on node 1 alone, which is killed when the caller has read them."""
        self._broker.kill(2)
        wait_until(lambda: self._is(1, {1}), 60, "node 2 is not in sync", poll_s=0.2)
        self.fill(name, count)

    def elect(self) -> None:
        """Node 2 becomes the leader, without what it has never had."""
        self._broker.kill(1)
        self._broker.start_node(2)
        wait_until(lambda: self._is(2, None), 90, "an unclean leader", poll_s=0.2)


def outputs(broker: LocalBroker, topic: str) -> list[str]:
    return [
        (each.value or b"").decode() for each in independent.read_topic(broker.bootstrap_servers, topic, decided=True)
    ]


@pytest.mark.long
def test_records_in_place_of_others_are_noticed(broker: LocalBroker, onceflow_spark: Any) -> None:
    servers = broker.bootstrap_servers
    source = Source(broker)
    engines = ("driver", "tasks")
    for engine in engines:
        create_topic(servers, f"out-{engine}", 1)

    def run(engine: str, **read: Any) -> None:
        flow = onceflow.Flow(f"copy-{engine}", onceflow_spark, bootstrap_servers=servers)
        with contextlib.closing(flow):
            rows = flow.read(SOURCE, **read).select("key", "value")
            query = flow.write(rows, topic=f"out-{engine}", engine=engine, once=True).start()
            query.awaitTermination(90)
            query.stop()

    source.fill("first", 10)
    source.lose("lost", 10)
    for engine in engines:
        run(engine)
        assert len(outputs(broker, f"out-{engine}")) == 20
    cluster = Cluster(ClientSettings(servers))
    cluster.connect(soon())
    before = look_at_leaders(cluster, [(SOURCE, 0)], soon()).epochs
    poll = LongPoll(cluster, [cluster.topic(SOURCE, soon())], {(SOURCE, 0): 10})
    wait_until(lambda: [*poll.poll(0.5)], 30, "records")
    source.elect()
    source.fill("new", 30)

    assert epoch_ends(cluster, before, soon()) == {(SOURCE, 0): 10}
    with pytest.raises(onceflow.DataLossError, match="truncated at offset 10"):
        wait_until(lambda: [*poll.poll(0.5)], 30, "an answer of the new leader")
    cluster.close()
    for engine in engines:
        for read in ({}, {"fail_on_data_loss": False}):
            with pytest.raises(onceflow.DataLossError, match="truncated at offset 10") as caught:
                run(engine, **read)
            assert (caught.value.flow, caught.value.topic) == (f"copy-{engine}", f"{SOURCE}-0")
        words = ["reset", f"copy-{engine}", "--to", f"offsets={SOURCE}:0=10", "--bootstrap-servers", servers, "--yes"]
        answer = CliRunner().invoke(cli, words)
        assert answer.exit_code == 0, answer.output
        run(engine)
        found = outputs(broker, f"out-{engine}")
        assert sorted(found) == sorted(
            f"{name}-{n}" for name, count in (("first", 10), ("lost", 10), ("new", 30)) for n in range(count)
        )
