"""Times of records that are unknown, far ahead, or in other units: no flow and no command stops because of them. And
event time goes on although a partition is empty, also in runs that end soon."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import confluent_kafka
import pyarrow as pa
import pytest
from click.testing import CliRunner

import onceflow
from onceflow import serdes
from onceflow.cli.main import cli
from onceflow.clock import clock_ms
from onceflow.protocol.partitioners import key_partitions
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress, decode
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

HOUR = 3_600_000
ANY_TIME = {"message_timestamp_after_max_ms": 2**63 - 1}


def produce(bootstrap: str, topic: str, records: Iterable[tuple[str, int]], partition: int = 0) -> None:
    """Records of these keys, at these times."""
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    for key, at in records:
        producer.produce(topic, b"v", key.encode(), timestamp=at, partition=partition)
    assert producer.flush(30) == 0


class Odd(onceflow.Processor):
    """Copies records with their times. Those whose key begins with "bad" cannot be processed."""

    key = value = output = serdes.STRING

    def process(self, key: str, records: Any, state: Any) -> Iterator[onceflow.Record]:
        for record in records:
            if key.startswith("bad"):
                raise ValueError("bad")
            yield onceflow.Record(key, str(record.timestamp_ms), timestamp_ms=record.timestamp_ms)


@pytest.mark.parametrize("step", ["copy", "process"])
@pytest.mark.parametrize("engine", ["driver", "tasks"])
def test_no_time_stops_a_flow(make_pipe: Any, make_topic: Any, engine: str, step: str) -> None:
    """Neither -1, nor a time that the output or the topic of dead letters refuses."""
    pipe, source, failed = make_pipe(partitions=1), make_topic("in", 1, **ANY_TIME), make_topic("failed", 1)
    now = clock_ms()
    times = {"now": now, "none": -1, "ahead": now + 2 * HOUR, "2099": 4_070_908_800_000, "micros": now * 1000}
    sent = {**times, "bad none": -1, "bad ahead": now + 2 * HOUR, "bad micros": now * 1000}
    sent |= {"nanos": now * 1_000_000, "bad nanos": now * 1_000_000}  # Spark's source cannot express it
    if step == "copy":
        sent = {key: at for key, at in sent.items() if not key.startswith("bad")}
    produce(pipe.bootstrap, source, sent.items())
    with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
        rows = flow.read(source)
        if step == "copy":
            rows = rows.drop("topic", "partition", "offset", "timestampType")
        else:
            letters = {"on_error": "dead-letter", "dead_letter_topic": failed}
            rows = flow.process(rows, Odd(), table=f"{source}-table", state_dir=pipe.tmp_path, **letters)
        flow.write(rows, topic=pipe.target, once=True, engine=engine).start().awaitTermination()
    found = {
        seen.key.decode(): seen
        for topic in (pipe.target, failed)
        for seen in independent.read_topic(pipe.bootstrap, topic, decided=True)
        if seen.key is not None
    }
    assert found.keys() == sent.keys()
    for key, at in sent.items():
        own = dict(found[key].headers).get("onceflow.timestamp")
        if key == "now":
            assert (found[key].timestamp_ms, own) == (now, None)
            continue
        assert now <= found[key].timestamp_ms <= clock_ms(), "the time of writing"
        known = None if at < 0 else b"%d" % min(at, (2**63 - 1) // 1000)
        assert own == known
        if step == "process" and not key.startswith("bad"):
            assert found[key].value == (known or b"None")


class Alarms(onceflow.Processor):
    """A timer for each record, at its time."""

    key = value = output = serdes.STRING
    allowed_lateness = 0

    def process(self, key: str, records: Any, state: Any) -> None:
        for record in records:
            state.timers.register(str(record.timestamp_ms), record.timestamp_ms)

    def on_timer(self, key: str, timer: Any, state: Any) -> Iterator[onceflow.Record]:
        yield onceflow.Record(key, timer.name)


def progress_of(bootstrap: str, flow: str) -> Progress:
    records = independent.read_topic(bootstrap, PROGRESS_TOPIC, decided=True)
    last = [record for record in records if record.key == flow.encode()][-1]
    return decode(last.key, last.value or b"")


@pytest.mark.long
@pytest.mark.parametrize("engine", ["driver", pytest.param("tasks", marks=pytest.mark.long)])
def test_runs_that_end_soon_do_not_wait_for_an_empty_partition(make_pipe: Any, make_topic: Any, engine: str) -> None:
    """As jobs of cron: the second partition never has records. Also not for one that has had its last one long ago."""
    pipe, late, idle_s = make_pipe(partitions=2), make_topic("late", 1), 1.0
    began = clock_ms() - 10 * HOUR

    def run(hour: int) -> list[int]:
        """Event time as the run has left it, and what has fired so far."""
        with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
            rows = flow.process(
                flow.read(pipe.source),
                Alarms(),
                table=f"{pipe.source}-table",
                late_topic=late,
                idle_timeout=f"{idle_s} seconds",
                state_dir=pipe.tmp_path,
            )
            flow.write(rows, topic=pipe.target, once=True, engine=engine).start().awaitTermination()
        fired = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
        return sorted((int(record.value or b"") - began) // HOUR for record in fired)

    def until_idle() -> None:
        (table,) = progress_of(pipe.bootstrap, pipe.flow).tables.values()
        newest = max(each.since_ms for each in table.event_times.values())
        assert len(table.event_times) == 2
        wait_until(lambda: clock_ms() - newest > idle_s * 1000, 10, "both partitions are idle")

    produce(pipe.bootstrap, pipe.source, [("a", began)])
    assert run(0) == []
    until_idle()
    produce(pipe.bootstrap, pipe.source, [("a", began + HOUR)])
    assert run(1) == [0], "the other partition may have had an earlier record only in the first run"
    until_idle()
    produce(pipe.bootstrap, pipe.source, [("b", began + 2 * HOUR)], partition=1)
    assert run(2) == [0, 1]
    until_idle()
    assert run(3) == [0, 1, 2], "nothing new has come, and all are idle"


@pytest.mark.long
def test_a_step_behind_another_one_goes_on_with_its_watermark(make_pipe: Any, make_topic: Any) -> None:
    """In runs that end soon. One partition of the step before is an hour ahead of the other one."""
    pipe, late = make_pipe(partitions=2), make_topic("late", 1)
    began = clock_ms() - 10 * HOUR

    def run(key: str, at: int) -> tuple[list[int], int | None]:
        """What has fired so far, and the watermark behind the run."""
        produce(pipe.bootstrap, pipe.source, [(key, at)])
        with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
            rows = flow.process(flow.read(pipe.source), Odd(), table=f"{pipe.source}-first", state_dir=pipe.tmp_path)
            rows = flow.process(
                rows,
                Alarms(),
                table=f"{pipe.source}-table",
                late_topic=late,
                idle_timeout="10 minutes",
                state_dir=pipe.tmp_path,
            )
            flow.write(rows, topic=pipe.target, once=True).start().awaitTermination()
        fired = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
        table = progress_of(pipe.bootstrap, pipe.flow).tables[f"{pipe.source}-table"]
        return sorted((int(record.value or b"") - began) // HOUR for record in fired), table.watermark_ms

    names = [f"k{n}" for n in range(20)]
    homes = key_partitions(pa.array([name.encode() for name in names]), 2).tolist()
    a, b = (names[homes.index(partition)] for partition in (0, 1))
    assert run(a, began) == ([], began)
    assert run(b, began + 2 * HOUR) == ([0], began)
    assert run(b, began + 4 * HOUR) == ([0], began), "the other partition may still bring earlier records"
    assert run(a, began + HOUR) == ([0], began + HOUR)
    assert run(a, began + 3 * HOUR) == ([0, 1], began + 3 * HOUR)
    assert not independent.read_topic(pipe.bootstrap, late, decided=True)


def test_commands_while_a_transaction_has_records_of_the_far_future(
    make_pipe: Any, make_topic: Any, onceflow_broker: str
) -> None:
    source = make_topic("in", 1, **ANY_TIME)
    now, name = clock_ms(), f"held-{uuid.uuid4().hex[:8]}"
    produce(onceflow_broker, source, [("a", now * 1000), ("b", now * 1_000_000), ("c", -1)])
    holder = confluent_kafka.Producer({"bootstrap.servers": onceflow_broker, "transactional.id": name})
    holder.init_transactions(30)
    holder.begin_transaction()
    holder.produce(source, b"open", b"d", timestamp=now * 1_000_000, partition=0)
    assert holder.flush(30) == 0

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(cli, [*arguments, "--bootstrap-servers", onceflow_broker], standalone_mode=False)
        assert done.exception is None, done.output + repr(done.exception)
        return done.stdout

    pipe = make_pipe(partitions=1)
    with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
        query = flow.write(flow.read(source).select("key", "value"), topic=pipe.target).start()
        wait_until(lambda: query.batches, 30, "a batch is committed")
        query.stop()
        found = onceflow.peek(pipe.spark, source, bootstrap_servers=pipe.bootstrap)
        assert [row.timestamp for row in found.collect()] == [None, None, None]
    for command in (["list"], ["describe", name]):
        assert name in run("transactions", *command, "--topic", source)
        assert "+" in run("transactions", *command, "--topic", source, "--json")
    assert pipe.flow in run("status", pipe.flow)
    assert json.loads(run("status", pipe.flow, "--json"))["flow"] == pipe.flow
    assert "null" in run("peek", source, "--json")
    assert [json.loads(line)["timestamp_ms"] for line in run("consume", source, "--json").splitlines()] == [
        now * 1000,
        now * 1_000_000,
        None,
    ]
    holder.abort_transaction(30)
