"""What a start says: whom it has fenced, where it resumes, what may be restored, and how it writes."""

from __future__ import annotations

import json
import logging
import os
import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from sqlite_sink import SqliteSink

import onceflow
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.client.transactions import Transactions
from onceflow.logs.json_logs import JsonLogFormatter
from onceflow.testing import faults

pytestmark = pytest.mark.integration

Starts = Callable[[], tuple[list[str], dict[str, Any]]]


@pytest.fixture
def starts(caplog: pytest.LogCaptureFixture) -> Starts:
    """The lines of the last start, and the same as JSON."""
    caplog.set_level(logging.INFO, "onceflow")

    def last() -> tuple[list[str], dict[str, Any]]:
        (record,) = [record for record in caplog.records if hasattr(record, "start")]
        lines = record.getMessage().split("\n  ")
        found = json.loads(JsonLogFormatter().format(record))
        caplog.clear()
        assert lines[0].startswith(f"flow {(flow := lines[0].split()[1])} starts: ")
        assert any("Spark" in line for line in lines[-2:])
        assert flow.startswith(("flow-", "other-"))
        return lines, found["start"]

    return last


def open_transaction(pipe: Any) -> tuple[int, int]:
    """As of a driver that was killed while it wrote. Returns its producer id and epoch."""
    cluster = Cluster(ClientSettings(pipe.bootstrap, {}))
    try:
        deadline = Deadline(20, "the test")
        transactions = Transactions(cluster, f"onceflow.{pipe.flow}")
        transactions.init(deadline)
        producer = transactions.begin(deadline)
        transactions.add_partitions({pipe.target: [0]}, deadline)
        return producer.producer_id, producer.producer_epoch
    finally:
        cluster.close()


def test_a_first_start_one_after_a_stop_and_one_after_a_crash(make_pipe: Any, starts: Starts) -> None:
    pipe = make_pipe(partitions=2)
    pipe.fill(30)
    pipe.run()
    lines, facts = starts()
    assert lines[0].startswith(f"flow {pipe.flow} starts: exactly_once, onceflow.{pipe.flow}, producer id ")
    assert lines[1] == "first start: nothing is committed yet"
    assert lines[2] == f"reads {pipe.source}: from {{0: 0, 1: 0}}; 30 offsets waiting"
    assert lines[3].startswith(
        f"writes {pipe.target}: the driver reads and writes; with a large backlog and enough cores, tasks do; Spark "
    )
    assert lines[4] == "engine direct: its plan needs no Spark job"
    assert (facts["engine"], facts["engine_reason"]) == ("direct", "its plan needs no Spark job")
    assert facts["fenced"] is facts["committed_batch"] is facts["committed_by"] is None
    assert facts["outputs"] == [pipe.target]

    pipe.fill(5)
    first = pipe.run(engine="tasks")
    lines, facts = starts()
    ends = facts["sources"][pipe.source]["offsets"]
    assert sum(ends.values()) == 30
    assert facts["sources"][pipe.source]["waiting"] == 5
    assert lines[1].startswith("fenced: producer id ")
    assert lines[1].endswith("; it had no open transaction")
    assert lines[2].startswith("resumes after batch 1; its progress is ")
    assert "tasks read and write" in lines[-2]
    assert lines[-1] == (
        "engine direct: engine='tasks': each of its batches is a Spark job; one takes 0.1 seconds or more, however few "
        "records it has"
    )
    assert facts["committed_batch"] == 1
    assert lines[3].startswith(f"the driver that committed last: host {socket.gethostname()}, process {os.getpid()}, ")
    assert (facts["committed_by"]["host"], facts["committed_by"]["pid"]) == (socket.gethostname(), os.getpid())
    assert first.batches[0].batch == 2

    producer_id, epoch = open_transaction(pipe)
    pipe.run(engine="driver")
    lines, facts = starts()
    assert lines[1] == f"fenced: producer id {producer_id}, epoch {epoch}; its open transaction was aborted"
    assert facts["fenced"] == {"producer_id": producer_id, "producer_epoch": epoch, "aborted": True}
    assert facts["producer_epoch"] > epoch or facts["producer_id"] != producer_id
    assert lines[2].startswith("resumes after batch 2; its progress is ")
    assert lines[-2].startswith(f"writes {pipe.target}: the driver reads and writes; Spark ")
    pipe.check()


@pytest.mark.long
def test_tables_and_weaker_guarantees(make_state_pipe: Any, starts: Starts) -> None:
    pipe = make_state_pipe(partitions=2)
    pipe.fill(40)
    pipe.run(process={"partitions": 3})
    lines, _ = starts()
    assert f"table {pipe.table}: 3 partitions, at most 0 records to restore" in lines
    pipe.run(guarantee="at_least_once")
    lines, facts = starts()
    (table,) = [line for line in lines if line.startswith("table ")]
    most = facts["tables"][pipe.table]["records_at_most"]
    assert table == f"table {pipe.table}: 3 partitions, at most {most:,} records to restore"
    assert most > 0
    assert facts["outputs"] == [pipe.target], "tables are no outputs"
    assert lines[0].startswith(f"flow {pipe.flow} starts: at_least_once, onceflow.{pipe.flow}, producer id ")
    assert lines[1].startswith("fenced: "), "with state, an older driver is fenced"


def test_without_a_transactional_id_nobody_is_fenced(make_pipe: Any, starts: Starts) -> None:
    pipe = make_pipe(partitions=1)
    pipe.fill(3)
    pipe.run()
    starts()
    pipe.run(guarantee="at_most_once")
    lines, facts = starts()
    assert lines[0] == f"flow {pipe.flow} starts: at_most_once, no transactional id, so it fences no other driver"
    assert not [line for line in lines if line.startswith("fenced")]
    assert facts["fenced"] is facts["transactional_id"] is None


@pytest.mark.long
def test_state_in_spark_and_another_system(make_pipe: Any, starts: Starts, tmp_path: Path) -> None:
    pipe = make_pipe(partitions=1)
    pipe.fill(3)
    folder = tmp_path / "checkpoint"
    with pipe.open() as flow:
        counts = flow.read(pipe.source).groupBy("key").count().selectExpr("key", "CAST(count AS STRING) AS value")
        flow.write(
            counts, topic=pipe.target, checkpoint=str(folder), output_mode="update", once=True
        ).start().awaitTermination()
    lines, facts = starts()
    assert f"state in Spark: checkpoint {facts['checkpoint']}" in lines
    assert facts["checkpoint"].endswith(str(folder))

    file = tmp_path / "rows.db"
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE rows (key TEXT PRIMARY KEY, value TEXT)")
    with onceflow.Flow(f"other-{pipe.source}", pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
        rows = flow.read(pipe.source).selectExpr("CAST(key AS STRING) AS key", "CAST(value AS STRING) AS value")
        sink = SqliteSink(file, "rows", mode="upsert", key="key")
        flow.write_external(rows, sink, once=True).start().awaitTermination()
    lines, facts = starts()
    assert lines[1] == "first start: nothing is committed yet"
    assert lines[-2].startswith(
        f"writes {sink.target}: the driver reads and writes; with a large backlog and enough cores, tasks do; "
    )
    assert lines[-1] == "engine direct: its plan needs no Spark job"
    assert facts["outputs"] == [sink.target]


def test_a_start_behind_another_system(make_pipe: Any, starts: Starts, inject: Any, tmp_path: Path) -> None:
    """The other system has committed a batch, and the driver was killed before Kafka's progress followed."""
    pipe = make_pipe(partitions=1)
    pipe.fill(30)
    file = tmp_path / "rows.db"
    with closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE rows (value TEXT)")

    def run() -> None:
        with onceflow.Flow(f"other-{pipe.source}", pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
            rows = flow.read(pipe.source, max_records_per_batch=10).selectExpr("CAST(value AS STRING) AS value")
            sink = SqliteSink(file, "rows")
            flow.write_external(rows, sink, once=True).start().awaitTermination()

    inject("commit", "raise", batch=2)
    with pytest.raises((StreamingQueryException, faults.InjectedFaultError), match="injected at"):
        run()
    starts()
    run()
    lines, facts = starts()
    assert any(line.startswith("resumes after batch 2;") for line in lines)
    assert facts["committed_batch"] == 2
    assert facts["sources"] == {pipe.source: {"offsets": {"0": 20}, "waiting": 10}}
