"""The sink end to end on a real broker and a real Spark: what comes out is what went in, once."""

from __future__ import annotations

import ast
import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

import onceflow
from onceflow import UnknownTopicError, interactive
from onceflow.driver.kafka import output_writer
from onceflow.driver.record.offset_log import SourceRange
from onceflow.protocol import progress as records
from onceflow.protocol.progress import PROGRESS_TOPIC
from onceflow.spark import jvm
from onceflow.spark.query_progress import ProgressReports
from onceflow.testing import independent
from onceflow.testing.waiting import WaitedInVainError, wait_until

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "partitioner",
    [pytest.param("key", marks=pytest.mark.long), pytest.param("source", marks=pytest.mark.short_form)],
)
@pytest.mark.parametrize("engine", ["tasks", "driver"])
def test_copies_exactly_once(make_pipe: Any, partitioner: str, engine: str) -> None:
    pipe = make_pipe()
    pipe.fill(2500)
    query = pipe.run(partitioner=partitioner, engine=engine)
    pipe.check()
    assert {batch.path for batch in query.batches} == {"driver" if engine == "driver" else "2 reading tasks"}
    assert sum(batch.records for batch in query.batches) == 2500


@pytest.mark.long
@pytest.mark.parametrize(
    "partitioner, path",
    [("key", "driver"), pytest.param("source", "4 tasks", marks=pytest.mark.long)],
)
def test_few_tasks_of_a_micro_batch_read_many_partitions(make_pipe: Any, partitioner: str, path: str) -> None:
    pipe = make_pipe(partitions=12)
    pipe.fill(2500)
    engine = "auto" if path == "driver" else "tasks"
    query = pipe.run(partitioner=partitioner, engine=engine, checkpoint=pipe.tmp_path / "checkpoint")
    pipe.check()  # with "source", every record is in the partition from which it came
    assert {batch.path for batch in query.batches} == {path}
    assert max(tasks_of_stages(pipe, query)) == 4, "two for each core"


@pytest.mark.long
def test_tasks_of_a_micro_batch_keep_source_partitions(make_pipe: Any) -> None:
    """So few that each has a task of its own."""
    pipe = make_pipe()
    pipe.fill(2500)
    query = pipe.run(partitioner="source", engine="tasks", checkpoint=pipe.tmp_path / "checkpoint")
    pipe.check()
    assert {batch.path for batch in query.batches} == {"4 tasks"}


@pytest.mark.long
def test_the_tasks_of_a_repartitioned_query_are_left_alone(make_pipe: Any) -> None:
    pipe = make_pipe(partitions=12)
    pipe.fill(500)
    flow = pipe.open()
    rows = flow.read(pipe.source).select("key", "value").repartition(9)
    query = flow.write(rows, topic=pipe.target, checkpoint=pipe.tmp_path / "checkpoint").start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    assert set(tasks_of_stages(pipe, query)) == {12, 9}
    assert sum(batch.records for batch in query.batches) == 500


def tasks_of_stages(pipe: Any, query: Any) -> list[int]:
    """How many tasks each stage of a query had."""
    tracker = pipe.spark.sparkContext.statusTracker()
    stages = [
        stage for job in tracker.getJobIdsForGroup(str(query.runId)) for stage in tracker.getJobInfo(job).stageIds
    ]
    return [tracker.getStageInfo(stage).numTasks for stage in stages]


@pytest.mark.long_but("driver")
@pytest.mark.parametrize("engine", ["tasks", "driver"])
def test_round_robin_uses_every_partition(make_pipe: Any, engine: str) -> None:
    pipe = make_pipe(partitions=3, target_partitions=5)
    pipe.fill(6000)
    pipe.run(partitioner="round_robin", engine=engine)
    seen = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    assert sorted(s.value for s in seen) == sorted(value for _, value in pipe.sent)
    assert {s.partition for s in seen} == set(range(5))


def test_restart_continues_where_progress_ends(make_pipe: Any) -> None:
    pipe = make_pipe()
    pipe.fill(1500)
    first = pipe.run()
    pipe.fill(1500)
    second = pipe.run()
    pipe.check()
    assert [b.batch for b in first.batches + second.batches] == list(
        range(1, 1 + len(first.batches) + len(second.batches))
    )


def test_progress_record_is_the_truth(make_pipe: Any) -> None:
    pipe = make_pipe()
    pipe.fill(1200)
    query = pipe.run()
    ours = [
        s for s in independent.read_topic(pipe.bootstrap, PROGRESS_TOPIC, decided=True) if s.key == pipe.flow.encode()
    ]
    assert ours[-1].value is not None
    last = records.decode(ours[-1].key, ours[-1].value)
    ends = independent.end_offsets(pipe.bootstrap, pipe.source)
    assert {(pipe.source, p): o for p, o in last.offsets[pipe.source].items()} == ends
    assert last.batch_id == query.batches[-1].batch


@pytest.mark.long
def test_reports_of_spark_look_like_those_of_other_engines(make_pipe: Any) -> None:
    pipe = make_pipe()
    pipe.fill(1200)
    query = pipe.run(checkpoint=pipe.tmp_path / "checkpoint")
    assert query.engine == "spark"
    pipe.flow = f"{pipe.flow}-direct"
    spark = query.recentProgress[1]  # the first one has no start
    start, end, latest = (
        {topic: {int(p): offset for p, offset in offsets.items()} for topic, offsets in report.items()}
        for report in (_parsed(spark["sources"][0][name]) for name in ("startOffset", "endOffset", "latestOffset"))
    )
    reports = ProgressReports(query.id, query.runId, query.name)
    rows = {pipe.source: spark["numInputRows"]}
    reports.committed(query.batches[1], SourceRange(start, end), latest, rows, started_ms=0, duration_s=0.1)
    assert _shape(reports.last) == _shape(spark)
    assert _parsed(reports.last["sources"][0]["endOffset"]) == _parsed(spark["sources"][0]["endOffset"])
    assert reports.last["sources"][0]["metrics"] == spark["sources"][0]["metrics"]
    pipe.fill(1200)
    other = pipe.run(engine="driver")
    assert other.engine == "direct"
    assert _shape(other.recentProgress[0]) == _shape(spark)
    assert sum(report["numInputRows"] for report in other.recentProgress) == 2400


def _parsed(offsets: Any) -> Any:
    # A text since Spark 4: JSON, but with PySpark 4.1 that of a Python dictionary. A literal of Python can be both.
    return ast.literal_eval(offsets) if isinstance(offsets, str) else offsets


def _shape(report: Any) -> Any:
    """The names of its fields and the types of their values."""
    if isinstance(report, dict):
        return type(report), {name: _shape(value) for name, value in report.items()}
    return [_shape(value) for value in report] if isinstance(report, list) else type(report)


@pytest.mark.long_but("tasks")
@pytest.mark.parametrize("engine", ["tasks", "driver"])
def test_many_topics_headers_and_timestamps_in_one_transaction(make_pipe: Any, make_topic: Any, engine: str) -> None:
    from pyspark.sql import functions as F

    pipe = make_pipe()
    odd, even = make_topic("odd", 2), make_topic("even", 3)
    pipe.fill(900)
    flow = pipe.open()
    df = flow.read(pipe.source)
    number = F.col("value").cast("string").cast("long")
    out = df.select(
        "key",
        "value",
        F.when(number % 2 == 0, even).otherwise(odd).alias("topic"),
        F.array(F.struct(F.lit("origin").alias("key"), F.col("topic").cast("binary").alias("value"))).alias("headers"),
        F.timestamp_millis(number + 1_000_000).alias("timestamp"),
    )
    query = flow.write(out, engine=engine).start()
    query.processAllAvailable()
    query.stop()
    for topic, rest in ((even, 0), (odd, 1)):
        seen = independent.read_topic(pipe.bootstrap, topic, decided=True)
        expected = [(k, v) for k, v in pipe.sent if int(v) % 2 == rest]
        assert sorted((s.key, s.value) for s in seen) == sorted(expected)
        assert all(s.headers == (("origin", pipe.source.encode()),) for s in seen)
        assert all(s.timestamp_ms == int(s.value or b"") + 1_000_000 for s in seen)


@pytest.mark.long_but("driver")
@pytest.mark.parametrize("engine", ["tasks", "driver"])
def test_explicit_partition_column_and_null_keys(make_pipe: Any, engine: str) -> None:
    from pyspark.sql import functions as F

    pipe = make_pipe(target_partitions=3)
    pipe.fill(600)
    flow = pipe.open()
    number = F.col("value").cast("string").cast("int")
    out = flow.read(pipe.source).select(
        F.when(number % 3 == 0, None).otherwise(F.col("key")).alias("key"),
        "value",
        F.when(number % 2 == 0, number % 3).cast("int").alias("partition"),
    )
    query = flow.write(out, topic=pipe.target, engine=engine).start()
    query.processAllAvailable()
    query.stop()
    seen = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    assert sorted(int(s.value or b"") for s in seen) == list(range(600))
    for record in seen:
        value = int(record.value or b"")
        assert (record.key is None) == (value % 3 == 0)
        if value % 2 == 0:
            assert record.partition == value % 3


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_batches_are_read_by_librdkafka(make_pipe: Any, compression: str) -> None:
    pipe = make_pipe()
    pipe.fill(700)
    pipe.run(compression=compression)
    pipe.check()


@pytest.mark.long
def test_large_batches_are_split_below_the_topic_limit(make_pipe: Any, make_topic: Any) -> None:
    pipe = make_pipe()
    pipe.target = make_topic("narrow", 4, max_message_bytes=20_000)
    pipe.fill(3000)
    pipe.run(engine="tasks")
    pipe.check()


def test_new_source_partitions_are_read_from_their_start(make_pipe: Any) -> None:
    from confluent_kafka.admin import AdminClient, NewPartitions

    pipe = make_pipe(partitions=2)
    pipe.fill(300)
    pipe.run(partitioner="key")
    admin = AdminClient({"bootstrap.servers": pipe.bootstrap})
    for future in admin.create_partitions([NewPartitions(pipe.source, 4)]).values():
        future.result(30)
    # Keys move with the partition count, so only the set of records is compared.
    extra = [(None, f"extra-{n}".encode()) for n in range(200)]
    independent.fill(pipe.bootstrap, pipe.source, extra)
    pipe.sent += extra
    pipe.run(partitioner="key")
    seen = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    assert sorted(s.value or b"" for s in seen) == sorted(v or b"" for _, v in pipe.sent)


def test_latest_is_pinned_at_the_first_start(make_pipe: Any) -> None:
    pipe = make_pipe()
    pipe.fill(100)
    flow = pipe.open()
    rows = flow.read(pipe.source, starting_offsets="latest")
    flow.write(rows, topic=pipe.target).start().stop()  # pins, then "crashes" before it wrote anything
    before = list(pipe.sent)
    pipe.fill(100)
    pipe.run(read={"starting_offsets": "latest"})
    seen = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    assert sorted(s.value or b"" for s in seen) == sorted(v or b"" for _, v in pipe.sent[len(before) :])


def test_aborted_and_undecided_source_records_are_not_read(make_pipe: Any) -> None:
    from confluent_kafka import Producer

    pipe = make_pipe()
    producer = Producer({"bootstrap.servers": pipe.bootstrap, "transactional.id": f"t-{pipe.source}"})
    producer.init_transactions(30)
    producer.begin_transaction()
    for n in range(50):
        producer.produce(pipe.source, f"aborted-{n}", f"k{n}")
    producer.abort_transaction(30)
    producer.begin_transaction()
    for n in range(50):
        producer.produce(pipe.source, f"good-{n}", f"k{n}")
    producer.commit_transaction(30)
    pipe.run()
    seen = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    assert {s.value for s in seen} == {f"good-{n}".encode() for n in range(50)}
    assert len(seen) == 50


@pytest.mark.long
def test_chain_of_flows(make_pipe: Any, make_topic: Any) -> None:
    first = make_pipe()
    first.fill(1000)
    first.run()
    second = make_pipe()
    second.source, second.sent, second.flow = first.target, first.sent, first.flow + "-second"
    second.run()
    seen = independent.read_topic(second.bootstrap, second.target, decided=True)
    assert sorted((s.key or b"", s.value or b"") for s in seen) == sorted((k or b"", v or b"") for k, v in first.sent)


def test_an_output_topic_that_was_created_again_is_written_on(make_pipe: Any) -> None:
    from confluent_kafka.admin import AdminClient

    from onceflow.testing.broker import create_topic

    pipe = make_pipe()
    pipe.fill(200)
    pipe.run()
    admin = AdminClient({"bootstrap.servers": pipe.bootstrap})
    for future in admin.delete_topics([pipe.target]).values():
        future.result(30)
    create_topic(pipe.bootstrap, pipe.target, 6)
    before = list(pipe.sent)
    pipe.fill(200)
    pipe.run()
    seen = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    assert sorted(s.value or b"" for s in seen) == sorted(v or b"" for _, v in pipe.sent[len(before) :])


def test_user_code_that_may_make_any_number_of_rows_runs_in_tasks(make_pipe: Any) -> None:
    """However few records a micro-batch has: the driver must not collect what they become."""
    pipe = make_pipe(partitions=1, target_partitions=1)
    pipe.fill(1)

    def many(batches: Any) -> Any:
        for batch in batches:
            for _ in range(500):
                yield batch

    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap)
    rows = flow.read(pipe.source).select("key", "value")
    options: dict[str, Any] = {"once": True, "checkpoint": pipe.tmp_path / "checkpoint"}
    query = flow.write(rows.mapInArrow(many, rows.schema), topic=pipe.target, **options).start()
    query.awaitTermination()
    assert [(batch.records, batch.path) for batch in query.batches] == [(500, "1 task")]
    assert len(independent.read_topic(pipe.bootstrap, pipe.target, decided=True)) == 500


# ---- ends of a run -----------------------------------------------------------------------------------------


def test_the_query_of_an_older_run_leaves_the_newer_one_alone(make_pipe: Any) -> None:
    pipe = make_pipe()
    pipe.fill(200)
    with pipe.open() as flow:
        rows = flow.read(pipe.source).select("key", "value")
        older = flow.write(rows, topic=pipe.target, checkpoint=pipe.tmp_path / "checkpoint").start()
        older.processAllAvailable()
        pipe.spark.streams.get(older.id).stop()  # by Spark: nobody has told the flow
        newer = flow.write(flow.read(pipe.source).select("key", "value"), topic=pipe.target).start()
        for _ in range(2):
            older.stop()
            pipe.fill(200)
            newer.processAllAvailable()
        assert newer.isActive
        assert newer.failure is None
    pipe.check()


def slow(batches: Any) -> Any:
    for batch in batches:
        time.sleep(60)
        yield batch


def test_a_query_that_spark_stops_is_not_run_again(make_pipe: Any) -> None:
    pipe = make_pipe()
    pipe.fill(10)
    flow = pipe.open()
    rows = flow.read(pipe.source).select("key", "value")
    kept = pipe.tmp_path / "checkpoint"
    query = flow.write(rows.mapInPandas(slow, rows.schema), topic=pipe.target, checkpoint=kept).start()
    tracker = pipe.spark.sparkContext.statusTracker()
    wait_until(lambda: bool(tracker.getJobIdsForGroup(str(query.runId))), 60, "the batch runs")
    pipe.spark.streams.get(query.id).stop()
    wait_until(lambda: query.failure is not None, 60, "the batch has failed")
    query.stop()
    assert "the query is being stopped" in str(query.failure)
    pipe.run()
    pipe.check()


def refuses_once(fired: str) -> Any:
    """A function for mapInPandas that fails the first time, with words that Spark uses, too."""

    def work(batches: Any) -> Any:
        for batch in batches:
            if not Path(fired).exists():
                Path(fired).touch()
                raise RuntimeError("order 17 was cancelled: InterruptedException")
            yield batch

    return work


@pytest.mark.long
def test_an_error_of_user_code_that_speaks_of_cancelling_is_run_again(make_pipe: Any) -> None:
    pipe = make_pipe()
    pipe.fill(100)
    flow = pipe.open()
    rows = flow.read(pipe.source).select("key", "value")
    work = refuses_once(str(pipe.tmp_path / "fired"))
    query = flow.write(rows.mapInPandas(work, rows.schema), topic=pipe.target, engine="tasks").start()
    query.processAllAvailable()
    query.stop()
    assert [batch.attempts for batch in query.batches] == [2]
    pipe.check()


@pytest.mark.long
def test_a_large_batch_that_is_filtered_to_nothing(make_pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write task reports, also when the shuffle in front of it has no rows."""
    monkeypatch.setattr(output_writer, "_TASK_BYTES", 1000)
    pipe = make_pipe()
    pipe.fill(400)
    with pipe.open() as flow:
        nothing = flow.read(pipe.source).where("length(value) < 0").select("key", "value")
        query = flow.write(nothing, topic=pipe.target, engine="tasks").start()
        query.processAllAvailable()
        assert [(batch.attempts, batch.path) for batch in query.batches] == [(1, "2 tasks")]
        query.stop()
    assert independent.read_topic(pipe.bootstrap, pipe.target) == []
    assert independent.committed_offsets(pipe.bootstrap, pipe.flow) == independent.end_offsets(
        pipe.bootstrap, pipe.source
    )


def test_a_batch_learns_that_its_query_is_being_stopped(onceflow_spark: Any) -> None:
    """By Spark's own handle, of which the flow knows nothing. Batches run in a session that knows no queries."""
    begun, known = threading.Event(), []

    def batch(df: DataFrame, _: int) -> None:
        known.append(jvm.is_being_stopped(df.sparkSession))
        begun.set()
        with contextlib.suppress(WaitedInVainError):
            wait_until(lambda: jvm.is_being_stopped(df.sparkSession), 30, "the batch learns of the stop")
        known.append(jvm.is_being_stopped(df.sparkSession))

    query = onceflow_spark.readStream.format("rate").load().writeStream.foreachBatch(batch).start()
    try:
        assert begun.wait(30)
    finally:
        query.stop()
    assert known == [False, True]


def test_a_cell_that_runs_again(make_pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a prompt it stops the query that it has started before, unless it has a typo."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(interactive, "_queries", {})
    pipe = make_pipe()
    flow = pipe.open()
    query = flow.write(flow.read(pipe.source).select("key", "value"), topic=pipe.target).start()
    try:
        with pytest.raises(UnknownTopicError) as told:
            flow.read(f"{pipe.source}-")
        assert query.isActive
        assert told.value.__cause__ is None, "one traceback"
        pipe.fill(100)
        again = flow.write(flow.read(pipe.source).select("key", "value"), topic=pipe.target).start()
        assert not query.isActive
        query = again
        query.processAllAvailable()
    finally:
        query.stop()
    pipe.check()
