"""`onceflow doctor` on a real Kafka: a healthy cluster, a flow with bad topics, and a flow that runs meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer

from onceflow.admin.status import flow_status_reader
from onceflow.broker.folder import free_ports
from onceflow.cli.main import cli
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.client.transaction_requests import describe_transaction
from onceflow.clock import clock_ms
from onceflow.driver.record import progress_log
from onceflow.protocol.names import Names
from onceflow.protocol.progress import Progress
from onceflow.testing import independent

pytestmark = pytest.mark.integration

Doctor = Callable[..., list[dict[str, str]]]


@pytest.fixture
def doctor(onceflow_broker: str, tmp_path: Path) -> Doctor:
    """Runs the command, and returns what it has found about Kafka."""

    def run(*arguments: str, servers: str = onceflow_broker, code: int = 0) -> list[dict[str, str]]:
        common = ["--bootstrap-servers", servers, "--state-dir", str(tmp_path), "--json", "--no-session"]
        answer = CliRunner().invoke(cli, ["doctor", *arguments, *common], standalone_mode=False)
        assert answer.exception is None, answer.exception
        found = [json.loads(line) for line in answer.stdout.splitlines()]
        assert answer.return_value == code, [each for each in found if each["level"] in ("warning", "error")]
        here = next(n for n, each in enumerate(found) if each["check"] == "connection")
        return found[here:]

    return run


def of(found: list[dict[str, str]], check: str, level: str) -> list[dict[str, str]]:
    return [each for each in found if (each["check"], each["level"]) == (check, level)]


@pytest.fixture
def connected(onceflow_broker: str) -> Any:
    cluster = Cluster(ClientSettings(onceflow_broker))
    yield cluster
    cluster.close()


def commit(cluster: Cluster, flow: str, source: str, at: dict[int, int], **fields: Any) -> None:
    """Progress of a flow, as if it had run."""
    deadline = Deadline(30, "a test")
    progress_log.ensure_topic(cluster, deadline)
    ids = {source: cluster.topic(source, deadline).topic_id}
    progress = Progress(flow, 3, {source: at}, ids, clock_ms(), **fields)
    progress_log.write_progress(cluster, None, Names(flow), progress, progress.offsets, deadline)


def test_a_healthy_flow_in_the_middle_of_a_transaction(
    doctor: Doctor,
    connected: Cluster,
    make_topic: Callable[..., str],
    onceflow_broker: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = make_topic("in", 2), make_topic("out", 1)
    flow, deadline = f"flow-{source}", Deadline(30, "a test")
    driver = Producer({"bootstrap.servers": onceflow_broker, "transactional.id": f"onceflow.{flow}"})
    driver.init_transactions(30)
    driver.begin_transaction()
    driver.produce(target, b"1")
    driver.flush(30)
    commit(connected, flow, source, {0: 0, 1: 0}, outputs=(target,))
    before = describe_transaction(connected, f"onceflow.{flow}", deadline)

    found = doctor(flow, "--topic", target)
    assert [each for each in found if each["level"] == "error"] == []
    assert of(found, "connection", "ok")
    assert of(found, "brokers", "ok")
    assert "Apache Kafka 4.3 or later" in of(found, "versions", "ok")[0]["found"]
    assert "transaction.version=2" in of(found, "versions", "ok")[1]["found"]
    assert of(found, "progress-topic", "ok")
    assert "batch 3 is committed" in of(found, "progress", "ok")[0]["found"]
    assert of(found, "lag", "ok")[0]["found"].startswith("lag 0 offsets; retention.ms=")
    assert of(found, "held-back", "ok")[0]["found"] == "no open transaction holds records back"
    assert {each["subject"] for each in of(found, "permissions", "ok")} >= {
        f"source {source}",
        f"output {target}",
        f"group {flow}",
        f"transactional id onceflow.{flow}",
    }
    assert {each["found"] for each in of(found, "broker-settings", "ok")} >= {"900000 ms"}
    after = describe_transaction(connected, f"onceflow.{flow}", deadline)
    assert after == before
    assert before["state"] == "Ongoing"
    driver.produce(target, b"2")
    driver.commit_transaction(30)  # it was not fenced
    assert [record.value for record in independent.read_topic(onceflow_broker, target, decided=True)] == [b"1", b"2"]

    monkeypatch.setattr(flow_status_reader, "HELD_AFTER_S", 0.0)
    other = Producer({"bootstrap.servers": onceflow_broker, "transactional.id": f"other-{flow}"})
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(source, b"undecided", partition=1)
    assert other.flush(30) == 0
    (held,) = of(doctor(flow), "held-back", "warning")
    assert held["subject"] == f"source {source}"
    assert f" of {source}-1 on could be read" in held["found"]
    assert f"'other-{flow}'" in held["found"]
    other.abort_transaction(30)


def test_a_flow_with_bad_topics(
    doctor: Doctor, connected: Cluster, make_topic: Callable[..., str], onceflow_broker: str
) -> None:
    source = make_topic("in", 1, retention_ms=60_000, message_timestamp_type="CreateTime", max_message_bytes=3_000_000)
    risky = make_topic("out", 1, unclean_leader_election_enable="true")
    table = make_topic("table", 1)  # it is not compacted
    stamped = make_topic("stamped", 1, message_timestamp_type="LogAppendTime")
    producer = Producer({"bootstrap.servers": onceflow_broker})
    for _ in range(5):
        producer.produce(source, b"v", timestamp=clock_ms() - 45_000)
        producer.produce(stamped, b"v")
    assert producer.flush(30) == 0
    flow = f"misspelt-{uuid4().hex}"  # unlike the names of other tests, which the next step would list as well
    letters = {f"{risky}-gone": "dead letter"}
    commit(connected, flow, source, {0: 1}, outputs=(risky,), side_topics=letters, changelogs={table: {0: 0}})

    found = doctor(flow, "--topic", stamped, code=1)
    (safety,) = of(found, "safety", "warning")
    assert (safety["subject"], safety["fix"]) == (risky, "set it to false")
    (gone,) = of(found, "topics", "error")
    assert f"{risky}-gone' does not exist" in gone["found"]
    assert f"did you mean {risky}?" in gone["fix"]
    (policy,) = of(found, "cleanup-policy", "error")
    assert f"Topic {table} is not compacted" in policy["found"]
    (lag,) = of(found, "lag", "warning")
    assert lag["found"].startswith("lag 4 offsets; retention.ms=60000; the oldest unread records of partitions 0 are")
    assert {each["subject"] for each in of(found, "message-size", "warning")} == {f"output {risky}", f"table {table}"}
    (clock,) = of(found, "clock", "skipped")
    assert "2 times of others compared" in clock["found"]  # of the LogAppendTime topic, and of the progress

    (wrong,) = of(doctor(flow[:-1] + "x", code=0), "progress", "warning")
    assert f"did you mean {flow}" in wrong["fix"]
    doctor(flow[:-1] + "x", "--strict", code=1)


def test_an_address_that_is_no_broker_any_more(doctor: Doctor, onceflow_broker: str) -> None:
    ended = f"127.0.0.1:{free_ports(1)[0]}"
    (found,) = of(doctor(servers=f"{ended},{onceflow_broker}"), "connection", "warning")
    assert (found["subject"], "refused" in found["found"]) == (ended, True)
