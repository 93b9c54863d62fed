"""What Kafka does to a transaction that ends while one of its partitions has no leader: it leaves the marker out.

TransactionMarkerChannelManager takes a partition without a leader for a deleted one. The transaction is complete then,
its records stay undecided in that partition, and the producer's next transaction there decides them, too. This pins
Kafka's behaviour, which docs/guarantees.md tells of; when it fails, Kafka has been mended.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from onceflow.broker.local import LocalBroker
from onceflow.client.cluster import TRANSACTION, Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.produce import Producer
from onceflow.client.settings import ClientSettings
from onceflow.client.transactions import Transactions, describe_transaction
from onceflow.testing import independent
from onceflow.wire.batches import encode_single

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.long]


def soon() -> Deadline:
    return Deadline(60, "a test")


def write(cluster: Cluster, transactions: Transactions, text: str) -> None:
    producer = Producer(cluster, transactional_id=transactions.transactional_id, deadline=soon())
    now_ms = int(time.time() * 1000)
    identity = transactions.identity
    producer.send("out", 0, encode_single(b"k", text.encode(), timestamp_ms=now_ms, identity=identity, base_sequence=0))
    producer.flush()


def test_aborted_records_become_visible(tmp_path: Path) -> None:
    with LocalBroker(tmp_path, nodes=3, heap="300m") as broker:
        cluster = Cluster(ClientSettings(broker.bootstrap_servers))
        transactions = Transactions(cluster, "onceflow.markers")
        transactions.init(soon())
        coordinator = cluster.coordinator(TRANSACTION, "onceflow.markers", soon())
        node = next(node for node in (1, 2, 3) if node != coordinator)
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
        alone = NewTopic("out", 1, replica_assignment=[[node]], config={"min.insync.replicas": "1"})
        admin.create_topics([alone])["out"].result(30)
        transactions.begin(soon())
        write(cluster, transactions, "aborted")
        broker.kill(node)
        deadline = soon()
        while admin.list_topics("out", timeout=10).topics["out"].partitions[0].leader >= 0:
            deadline.pause(3, "the partition has a leader")
        transactions.end(soon(), commit=False)
        transactions.renew(soon())  # answered when the transaction is complete
        assert describe_transaction(cluster, "onceflow.markers", soon())["state"] in ("CompleteAbort", "Empty")
        broker.start_node(node)
        transactions.begin(soon())
        write(cluster, transactions, "committed")
        transactions.end(soon(), commit=True)
        seen = [record.value for record in independent.read_topic(broker.bootstrap_servers, "out", decided=True)]
        assert seen == [b"aborted", b"committed"]
        cluster.close()
