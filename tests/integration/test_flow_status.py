"""`onceflow status` on a real Kafka: a flow that runs, one that is behind, and one whose topics have changed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

import onceflow
from onceflow.admin.records import letter_replay
from onceflow.admin.records.letter_replay import Wanted
from onceflow.admin.status import flow_status_reader, table_counts
from onceflow.broker.folder import free_ports
from onceflow.cli.main import cli
from onceflow.client import first_connection
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import commit_offsets
from onceflow.client.settings import ClientSettings
from onceflow.clock import clock_ms
from onceflow.driver.record import committed_progress, progress_log
from onceflow.errors import BrokerUnreachableError, OptionError
from onceflow.protocol.names import INTERNAL_SUFFIX, Names
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress
from onceflow.testing import independent

pytestmark = pytest.mark.integration

Call = Callable[..., Result]


BAD = b"bad"


class Alarms(onceflow.Processor):
    """A value, entries and a timer for each key; keys that end with 3 lose all of it again."""

    def process(self, key: bytes, records: Any, state: Any) -> None:
        for record in records:
            if record.value == BAD:
                raise ValueError("a dead letter")
            state.map("seen").put(record.value, b"")
        state.put(b"%d" % len(records))
        state.timers.register("alarm", 4_000_000_000_000, "processing")
        if key.endswith(b"3"):
            state.delete()
            state.map("seen").clear()
            state.timers.cancel("alarm")

    def on_timer(self, key: bytes, timer: Any, state: Any) -> None: ...


@pytest.fixture
def call(onceflow_broker: str, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setenv("ONCEFLOW_BOOTSTRAP_SERVERS", onceflow_broker)
    return lambda *arguments: CliRunner().invoke(cli, ["status", *arguments], standalone_mode=False)


@pytest.fixture
def open_transaction(onceflow_broker: str) -> Iterator[Callable[[str, str, int], None]]:
    """Leaves a transaction of a transactional id open, with one record in a partition."""
    producers = []

    def begin(name: str, topic: str, partition: int) -> None:
        producer = Producer({"bootstrap.servers": onceflow_broker, "transactional.id": name})
        producers.append(producer)
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(topic, b"undecided", partition=partition)
        assert producer.flush(30) == 0

    yield begin
    for producer in producers:
        producer.abort_transaction(30)


def told(answer: Result) -> dict[str, Any]:
    (line,) = answer.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_flow_that_runs_and_then_is_behind(
    make_pipe: Callable[..., Any],
    call: Call,
    open_transaction: Callable[[str, str, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flow_status_reader, "HELD_AFTER_S", 0.0)
    pipe = make_pipe()
    pipe.fill(200)
    begun_ms = clock_ms()
    flow = pipe.open()
    with onceflow.serve_metrics(0) as endpoint:
        query = flow.write(flow.read(pipe.source).select("key", "value"), topic=pipe.target).start()
        query.processAllAvailable()
        url = endpoint.url
        running = told(call(pipe.flow, "--json", "--max-lag", "0", "--max-age", "1 hour", "--endpoint", url))
        driver = running["driver"]
        assert (driver["condition"], driver["host"], driver["pid"]) == ("running", socket.gethostname(), os.getpid())
        assert (driver["batch"], driver["producer_id"]) == (running["batch"], running["producer_id"])
        assert driver["producer_epoch"] == running["producer_epoch"]
        assert driver["counts"]["batches_committed"] == len(query.batches)
        assert driver["last_batch"]["records"] == query.batches[-1].records
        with monkeypatch.context() as context:  # no broker answers
            context.setattr(first_connection, "LOOK_REFUSED_S", 0.5)
            context.setenv("ONCEFLOW_BOOTSTRAP_SERVERS", f"127.0.0.1:{free_ports(1)[0]}")
            for names in ([pipe.flow], []):
                alone = call(*names, "--json", "--endpoint", url)
                (line,) = [each for each in map(json.loads, alone.stdout.splitlines()) if each["flow"] == pipe.flow]
                assert (alone.return_value, line["driver"], line["batch"]) == (1, driver, None)
                assert line["unseen"][0].startswith("Kafka: ")
            assert isinstance(call(pipe.flow).exception, BrokerUnreachableError)
        endpoint_text = call(pipe.flow, "--endpoint", url).stdout
        assert f"driver: running on host {socket.gethostname()}" in endpoint_text
        assert "the driver that committed last" not in endpoint_text, "its endpoint knows more"
        last = running["committed_by"]
        assert (last["host"], last["pid"]) == (socket.gethostname(), os.getpid())
        assert begun_ms <= last["since_ms"] <= driver["since_ms"]
        told_by_kafka = f"the driver that committed last: host {last['host']}, process {last['pid']}, since "
        assert told_by_kafka in call(pipe.flow).stdout
    gone = call(pipe.flow, "--endpoint", url)
    assert gone.return_value == 0
    assert gone.stdout.splitlines()[-1].startswith(f"warning: {url.removesuffix('/metrics')} does not answer")
    assert (running["lag"], running["lag_seconds"], running["warnings"]) == (0, 0.0, [])
    assert running["batch"] == query.batches[-1].batch
    assert running["transaction"]["transactional_id"] == f"onceflow.{pipe.flow}"
    assert running["transaction"]["producer_id"] == running["producer_id"] >= 0
    pipe.fill(100)
    query.processAllAvailable()  # it was not fenced
    flow.close()
    pipe.check()

    # Another transaction is open in the progress topic, and hides nothing.
    open_transaction(f"other-{pipe.flow}", PROGRESS_TOPIC, progress_log.partition_of(pipe.flow))
    hanging = f"hanging-{pipe.flow}"
    open_transaction(hanging, pipe.source, 0)
    pipe.fill(100)
    answer = call(pipe.flow, "--json", "--max-lag", "1")
    behind = told(answer)
    parts = behind["sources"][0]["partitions"]
    assert behind["batch"] > running["batch"]
    assert parts[0]["lag"] == 0
    assert parts[0]["held_back"] > 1
    assert behind["lag"] == sum(part["stable"] - part["offset"] for part in parts) > 0
    assert behind["lag_seconds"] == max(part["lag_seconds"] for part in parts) > 0
    (warning,) = behind["warnings"]
    assert f" of {pipe.source}-0 " in warning
    assert f"({parts[0]['held_back']} offsets behind it)" in warning
    assert repr(hanging) in warning
    assert answer.return_value == 1
    assert answer.stderr == f"onceflow: {pipe.flow}: a lag of {behind['lag']} exceeds --max-lag 1\n"

    columns, *rows = call().stdout.splitlines()
    assert columns.startswith("FLOW ")
    (row,) = [line.split() for line in rows if line.startswith(f"{pipe.flow} ")]
    assert (row[1], row[2], row[-1]) == (str(behind["batch"]), str(behind["lag"]), "1")

    unknown = call(pipe.flow.upper()[:1] + pipe.flow[1:]).exception
    assert isinstance(unknown, OptionError)
    assert pipe.flow in unknown.detail


def test_topics_that_have_changed(call: Call, onceflow_broker: str, make_topic: Callable[..., str]) -> None:
    source, other, table = make_topic("in", 3), make_topic("anew", 1), make_topic("sums", 1, cleanup_policy="compact")
    grown, empty = make_topic("grown", 4, cleanup_policy="compact"), make_topic("empty", 1, cleanup_policy="compact")
    flow = f"of-{source}"
    independent.fill(onceflow_broker, source, [(b"%d" % n, b"v") for n in range(60)])
    independent.fill(onceflow_broker, table, [(b"%d" % n, b"v") for n in range(5)])
    admin, place = AdminClient({"bootstrap.servers": onceflow_broker}), TopicPartition(source, 0, 3)
    admin.delete_records([place])[place].result(30)
    with closing(Cluster(ClientSettings(onceflow_broker))) as cluster:
        deadline = Deadline(60, "a test")
        progress_log.ensure_topic(cluster, deadline)
        ids = {source: cluster.topic(source, deadline).topic_id, other: "of the old topic", empty: "of the old table"}
        offsets = {source: {0: 1, 1: 2}, other: {0: 5}, f"{source}-gone": {0: 5}}
        commit_offsets(cluster, flow, {table: {0: 1}}, deadline, metadata="onceflow:0:1")  # of an earlier batch
        offsets[table] = {0: 1}
        tables = {table: {0: 5}, grown: {0: 0, 1: 0}, empty: {0: 5}}
        done = Progress(flow, 3, offsets, ids, 1_700_000_000_000, changelogs=tables)
        # The topic of a table that the flow joins with has more partitions than in its last batch; another one is gone.
        done = replace(done, joined={source: {0: 1}, f"{table}-joined": {0: 1}})
        progress_log.write_progress(cluster, None, Names(flow), done, {}, deadline)
    found = told(call(flow, "--json"))
    assert (found["batch"], found["lag"], found["transaction"]["state"]) == (3, None, "Dead")
    known = {"topic": table, "offsets": {"0": 5}, "records_at_most": 5, "watermark_ms": None}
    assert {**known, "contents": None} in found["tables"]
    by_table = {each["topic"]: each["contents"] for each in told(call(flow, "--json", "--tables"))["tables"]}
    counted = by_table[table]
    assert (counted["values"], counted["entries"], counted["timers"], counted["records"]) == (5, 0, 0, 5)
    assert f"{table} is not read any more; its offsets are kept" in found["notes"]
    by_topic = {each["topic"]: each["partitions"] for each in found["sources"]}
    assert (by_topic[other], by_topic[f"{source}-gone"]) == (None, None)
    first, second, new = by_topic[source]
    assert (first["first"], second["lag"], new["offset"]) == (3, second["stable"] - 2, None)
    assert new["lag"] == new["stable"] > 0
    says = "\n".join(found["warnings"])
    assert len(found["warnings"]) == 8
    assert f"joined table {source} has 3 partitions, and the last batch saw 1" in says
    assert f"joined table topic {table}-joined was deleted" in says
    assert f"table topic {empty} was deleted and created anew" in says
    assert f"{grown} has 4 partitions, and its rows are in the first 2" in says
    assert f"onceflow table repartition {flow} {grown} --partitions 4" in says
    assert f"source topic {other} was deleted and created anew" in says
    assert f"source topic {source}-gone was deleted" in says
    assert f"{source}-0 starts at offset 3, the flow is at 1: 2 offsets expired unread" in says
    assert f"does not know {source}-2 yet" in says
    assert f"{source}-1" in call(flow).stdout
    assert call(flow, "--max-lag", "1000000").return_value == 1  # not known


def test_tables_are_counted_when_asked_for(
    make_pipe: Callable[..., Any], make_topic: Callable[..., str], call: Call
) -> None:
    """After the flow has ended. Rows that were deleted do not count; timers are due, or are not yet. Letters count."""
    pipe, table = make_pipe(), make_topic("counted", 4, cleanup_policy="compact")
    letters = make_topic("letters", 2)
    with closing(pipe.open()) as flow:
        pipe.fill(200)
        independent.fill(pipe.bootstrap, pipe.source, [(b"x", BAD)] * 3)
        step = {"table": table, "state_dir": pipe.tmp_path / "state"}
        step |= {"on_error": "dead-letter", "dead_letter_topic": letters}
        rows = flow.process(flow.read(pipe.source), Alarms(), **step)
        query = flow.write(rows, topic=pipe.target, once=True).start()
        query.awaitTermination(60)
        (facts,) = query.tables
    seen = told(call(pipe.flow, "--json", "--tables"))
    (waiting,) = seen["letters"]
    assert (waiting["topic"], waiting["role"], waiting["waiting"]) == (letters, "dead letter", 3)
    (known, *_) = seen["tables"]
    found = known["contents"]
    assert {"value": found["values"], "entry": found["entries"], "timer": found["timers"]} == facts.rows
    assert found["values"] == found["timers"] == 45
    assert found["entries"] > found["values"]
    assert found["timers_due"] == 0
    assert found["next_timer_ms"] == {"event": None, "processing": 4_000_000_000_000}
    later = flow_contents(pipe, table, known, 4_000_000_000_001)
    assert later.timers_due == 45
    lines = call(pipe.flow, "--tables").stdout.splitlines()
    assert next(line.split()[-1] for line in lines if line.startswith(letters)) == "3"
    (unread,) = [line for line in call(pipe.flow).stdout.splitlines() if line.startswith(letters)]
    assert unread.split() == [letters, "dead", "letter", str(waiting["records_at_most"]), "?"]
    assert waiting["records_at_most"] >= 3
    heading = next(at for at, line in enumerate(lines) if line.startswith("IN KAFKA"))
    assert lines[heading + 1].split()[:2] == [table, "45"]
    assert "reads whole topics" in str(call("--tables", "--watch", "1").exception)
    letter_replay.replay(ClientSettings(pipe.bootstrap), letters, Wanted())
    assert told(call(pipe.flow, "--json", "--tables"))["letters"][0]["waiting"] == 0


def flow_contents(pipe: Any, table: str, known: Any, now_ms: int) -> table_counts.TableCounts:
    ends = {int(number): end for number, end in known["offsets"].items()}
    internal = {int(n): end for (_, n), end in independent.end_offsets(pipe.bootstrap, table + INTERNAL_SUFFIX).items()}
    with pytest.MonkeyPatch.context() as patch, closing(Cluster(ClientSettings(pipe.bootstrap))) as cluster:
        patch.setattr(table_counts, "clock_ms", lambda: now_ms)
        return table_counts.count_rows(cluster, table, ends, internal, None)


def test_a_cluster_without_flows(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed_progress, "PROGRESS_TOPIC", "__onceflow_progress_of_nobody")
    answer = call("--json")
    assert (answer.exit_code, answer.stdout) == (0, "")
    assert answer.stderr.startswith("No flow has committed anything at ")
    assert isinstance(call("anything").exception, OptionError)
