"""``Flow.process`` on a real broker: outputs, table topic and local store agree with an independent fold."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions
from pyspark.sql import functions as F

import onceflow
from onceflow.driver.batch import range_rows
from onceflow.driver.kafka import output_writer
from onceflow.driver.step import state_step
from onceflow.planning import placement, step_tree
from onceflow.spark.query_facts import facts_of
from onceflow.testing import independent
from onceflow.testing.broker import create_topic
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def by_tasks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Small data is processed by as many tasks as large data would be."""
    monkeypatch.setattr(placement, "TASK_ROWS", 400)
    return {"engine": "tasks"}


def paths(query: Any) -> set[str]:
    return {commit.path for commit in query.batches}


@pytest.mark.long
def test_tasks_without_a_shuffle(make_state_pipe: Any, by_tasks: Any) -> None:
    """Keys are where Kafka's partitioner puts them, so source partitions are taken as they are."""
    pipe = make_state_pipe()
    pipe.fill(2500)
    query = pipe.run(**by_tasks)
    assert paths(query) == {"2 reading tasks"}
    assert {commit.attempts for commit in query.batches} == {1}
    pipe.check()


@pytest.mark.long
def test_tasks_with_a_shuffle(make_state_pipe: Any, by_tasks: Any) -> None:
    """The number of partitions of the table has no divisor in common with that of the source."""
    pipe = make_state_pipe(partitions=2, target_partitions=3)
    pipe.fill(2500)
    query = pipe.run(process={"partitions": 3}, **by_tasks)
    assert paths(query) == {"3 tasks"}
    pipe.check()


def test_source_that_is_partitioned_in_another_way(make_state_pipe: Any, by_tasks: Any) -> None:
    """As many partitions, but keys are elsewhere (librdkafka's own partitioner): found out, and shuffled."""
    pipe = make_state_pipe()
    pipe.sent = pipe.ledger.inputs(0, 1500)
    independent.fill(pipe.bootstrap, pipe.source, pipe.sent, options={"partitioner": "consistent_random"})
    query = pipe.run(**by_tasks)
    assert [commit.attempts for commit in query.batches][:2] == [2, 1]
    pipe.check()


@pytest.mark.long
def test_records_without_a_key_in_a_partition_that_was_added(
    make_state_pipe: Any, make_topic: Any, by_tasks: Any
) -> None:
    """The table has no partition of that number. They are dead letters, as those of other partitions are."""
    pipe = make_state_pipe()
    pipe.fill(1500)
    dead = make_topic("dead", 1)
    query = pipe.start(process={"on_error": "dead-letter", "dead_letter_topic": dead}, **by_tasks)
    try:
        query.processAllAvailable()
        admin = AdminClient({"bootstrap.servers": pipe.bootstrap})
        admin.create_partitions([NewPartitions(pipe.source, 6)])[pipe.source].result(30)
        producer = Producer({"bootstrap.servers": pipe.bootstrap})
        for n in range(60):
            producer.produce(pipe.source, b"%d" % n, None, partition=n % 6)
        assert producer.flush(30) == 0

        def letters() -> list[independent.Seen]:
            return independent.read_topic(pipe.bootstrap, dead, decided=True)

        wait_until(lambda: len(letters()) >= 60, 60, "60 dead letters", useless=lambda: query.failure, poll_s=0.1)
    finally:
        query.stop()
    assert sorted(int(letter.value or b"") for letter in letters()) == list(range(60))


def test_keys_that_are_made_are_shuffled_at_once(make_state_pipe: Any, by_tasks: Any) -> None:
    """They cannot be where the source has its records: nothing is tried first."""
    pipe = make_state_pipe()
    pipe.fill(2500)
    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap)
    source = flow.read(pipe.source, max_records_per_batch=1000).withColumn("key", F.expr("unhex(hex(key))"))
    output = flow.process(source, pipe.ledger.Ledger(), table=pipe.table, state_dir=pipe.state_dir)
    query = flow.write(output, topic=pipe.target, **by_tasks).start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    assert paths(query) == {"2 tasks"}
    pipe.check()


@pytest.mark.long
def test_outputs_that_belong_to_other_tasks(make_state_pipe: Any, by_tasks: Any) -> None:
    """The output has other partitions: the driver writes few rows, two stages write many."""
    pipe = make_state_pipe(target_partitions=3)
    pipe.fill(2500)
    pipe.run(**by_tasks)
    pipe.check()


@pytest.mark.long
def test_many_outputs_that_belong_to_other_tasks(
    make_state_pipe: Any, by_tasks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Many(range_rows.RangeTask):
        def __call__(self, numbers: Any) -> Any:
            from onceflow.task import step_outputs

            step_outputs.RETURNED_ROWS_MAX = 10
            return super().__call__(numbers)

    monkeypatch.setattr(range_rows, "RangeTask", Many)
    pipe = make_state_pipe(target_partitions=3)
    pipe.fill(2500)
    query = pipe.run(**by_tasks)
    assert [commit.attempts for commit in query.batches] == [2, 1, 1]
    assert query.batches[-1].path == "2 + 1 tasks"
    pipe.check()


@pytest.mark.long
@pytest.mark.parametrize("engine", ["tasks", "driver"])
def test_inside_a_query(make_state_pipe: Any, engine: str) -> None:
    """Any PySpark may follow a process step."""
    pipe = make_state_pipe()
    pipe.fill(2500)
    pipe.run(inside=True, engine=engine)
    pipe.check()


@pytest.mark.long
@pytest.mark.parametrize(
    "engine, path", [("auto", "driver"), pytest.param("tasks", "2 reading tasks", marks=pytest.mark.long)]
)
def test_operators_that_change_nothing(make_state_pipe: Any, by_tasks: Any, engine: str, path: str) -> None:
    """Behind a step they choose no other way to run it. Those that may change something in some batch do."""
    pipe = make_state_pipe()
    pipe.fill(2500)
    with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
        source = flow.read(pipe.source, max_records_per_batch=1000)
        output = flow.process(source, pipe.ledger.Ledger(), table=pipe.table, state_dir=pipe.state_dir)

        def is_whole(df: Any) -> bool:
            tree, _ = step_tree.tree_of(facts_of(df), [pipe.table], flow.name) or pytest.fail("it has a step")
            return step_tree.stripped(tree).step is not None

        output.createOrReplaceTempView("outputs")
        nothing = {
            "itself": output,
            "condition": output.where(F.lit(True)).where("1 = 1"),
            "columns": output.select("*").select("timestamp", "headers", F.col("value").alias("value"), "key", "topic"),
            "names": output.alias("outputs").withColumnRenamed("key", "k").withColumnRenamed("k", "key"),
            "no topic": output.drop("topic"),
            "view": pipe.spark.table("outputs"),
        }
        assert {name: is_whole(df) for name, df in nothing.items()} == dict.fromkeys(nothing, True)
        something = {
            "time": output.where(F.current_timestamp() < F.timestamp_seconds(F.lit(4_000_000_000))),
            "chance": output.where(F.rand() < 2),
            "columns": output.select("key", "value"),
            "value": output.withColumn("value", F.upper("value")),
            "topic": output.withColumn("topic", F.lit(pipe.target)),
            "partition": output.withColumn("partition", F.lit(0)),
            "failure": output.where("1 / 0 = 1"),
        }
        assert {name: is_whole(df) for name, df in something.items()} == dict.fromkeys(something, False)
        every = output.where(F.lit(True)).select("*").alias("outputs").select(*reversed(output.columns))
        query = flow.write(every, topic=pipe.target, engine=engine, once=True).start()
        query.awaitTermination()
    assert paths(query) == {path}
    assert {commit.attempts for commit in query.batches} == {1}
    pipe.check()


@pytest.mark.long
def test_a_step_inside_a_query_that_yields_nothing(make_state_pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write tasks that get no row report, too, when there are several of them."""
    monkeypatch.setattr(output_writer, "_TASK_BYTES", 10_000)

    class Silent(onceflow.Processor):
        def process(self, key: bytes, records: Any, state: Any) -> None:
            state.put(b"seen")

    pipe = make_state_pipe()
    pipe.fill(300)
    query = pipe.run(process={"processor": Silent()}, inside=True, engine="tasks")
    assert [(done.path, done.attempts) for done in query.batches] == [("1 + 2 tasks", 1)]
    rows = independent.read_topic(pipe.bootstrap, pipe.table, decided=True)
    assert {row.key for row in rows} == {key for key, _ in pipe.sent}


@pytest.mark.short_form
def test_restarts_go_on_with_the_state(make_state_pipe: Any, by_tasks: Any) -> None:
    pipe = make_state_pipe()
    for turn in range(3):
        pipe.fill(1200)
        pipe.run(inside=turn == 1, **(by_tasks if turn else {}))
        pipe.check()


@pytest.mark.long
def test_lost_local_state(make_state_pipe: Any) -> None:
    pipe = make_state_pipe()
    pipe.fill(1500)
    pipe.run()
    shutil.rmtree(pipe.state_dir)
    pipe.fill(500)
    pipe.run()
    pipe.check()


@pytest.mark.long
@pytest.mark.parametrize("store", ["lmdb", "rocksdb"])
def test_large_copies_are_prepared_before_the_batch_writes(
    make_state_pipe: Any,
    by_tasks: Any,
    store: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "onceflow.state")
    monkeypatch.setattr(state_step, "_MIN_RECORDS", 100)
    monkeypatch.setattr(state_step, "_MIN_BYTES", 1)
    pipe = make_state_pipe()
    pipe.fill(2000)
    pipe.run(process={"store": store})
    assert "local copies are prepared" not in caplog.text
    for told in ("up to 0 records to read", "0 MiB to verify"):  # a copy of the run before; none
        caplog.clear()
        pipe.fill(300)
        query = pipe.run(process={"store": store}, **by_tasks)
        assert {commit.attempts for commit in query.batches} == {1}
        assert told in caplog.text
        shutil.rmtree(pipe.state_dir)
    assert caplog.text.count(": restored, ") == 4
    pipe.check(local=False)


@pytest.mark.parametrize("store", [pytest.param("memory", marks=pytest.mark.long), "rocksdb"])
def test_other_stores(make_state_pipe: Any, by_tasks: Any, store: str) -> None:
    pipe = make_state_pipe()
    for options in ({}, by_tasks):
        pipe.fill(1200)
        pipe.run(process={"store": store}, **options)
        pipe.check(local=False)


@pytest.mark.long
def test_a_processor_that_raises(make_state_pipe: Any, by_tasks: Any) -> None:
    """The batch aborts; the error names the record. Dead-lettered, the rest of the batch counts."""
    pipe = make_state_pipe()
    pipe.fill(600)
    boom = (b"key-001", json.dumps({"n": -1, "op": "boom"}).encode())
    garbage = (b"key-002", b"{not json")
    independent.fill(pipe.bootstrap, pipe.source, [boom, garbage])
    with pytest.raises(onceflow.ProcessorError, match=r"boom at -1|not json|JSON") as caught:
        pipe.run(**by_tasks)
    text = str(caught.value)
    assert pipe.source in text
    assert "offset" in text
    assert "key-00" in text
    assert independent.read_topic(pipe.bootstrap, pipe.target) == []
    letters = pipe.source.replace("in-", "dead-", 1)
    create_topic(pipe.bootstrap, letters, 1)
    pipe.run(process={"on_error": "dead-letter", "dead_letter_topic": letters}, **by_tasks)
    pipe.check()
    seen = {(r.key, r.value): dict(r.headers) for r in independent.read_topic(pipe.bootstrap, letters, decided=True)}
    assert set(seen) == {boom, garbage}
    assert seen[boom]["onceflow.error.class"] == b"ValueError"
    assert seen[boom]["onceflow.error.message"] == b"boom at -1"
    assert seen[boom]["onceflow.error.topic"] == pipe.source.encode()


def test_table_topic_settings(make_state_pipe: Any) -> None:
    pipe = make_state_pipe(partitions=3)
    pipe.fill(10)
    pipe.run()
    admin = AdminClient({"bootstrap.servers": pipe.bootstrap})
    for topic in (pipe.table, f"{pipe.table}-internal"):
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        config = admin.describe_configs([resource])[resource].result(30)
        assert config["cleanup.policy"].value == "compact"
        assert len(admin.list_topics(topic, timeout=30).topics[topic].partitions) == 3


def test_another_partition_count_is_refused(make_state_pipe: Any) -> None:
    pipe = make_state_pipe(partitions=2)
    pipe.fill(100)
    pipe.run()
    admin = AdminClient({"bootstrap.servers": pipe.bootstrap})
    for future in admin.create_partitions(
        [NewPartitions(pipe.table, 4), NewPartitions(f"{pipe.table}-internal", 4)]
    ).values():
        future.result(30)
    with pytest.raises(onceflow.ProgressConflictError, match=r"(?s)4 partitions.*placed for 2.*table repartition"):
        pipe.run()


def test_a_topic_that_is_no_table(make_state_pipe: Any) -> None:
    pipe = make_state_pipe()
    create_topic(pipe.bootstrap, pipe.table, 4)
    with pytest.raises(onceflow.ProgressConflictError, match=r"cleanup\.policy=delete"):
        pipe.run()


def test_foreign_rows_are_not_taken_for_state(make_state_pipe: Any) -> None:
    pipe = make_state_pipe()
    create_topic(pipe.bootstrap, pipe.table, 4, {"cleanup.policy": "compact"})
    independent.fill(pipe.bootstrap, pipe.table, [(b"key-001", b'{"sum": 1000000, "count": 5}')])
    pipe.fill(50)
    with pytest.raises(onceflow.ProgressConflictError, match="holds records already"):
        pipe.run()
    pipe.run(process={"adopt_existing": True})
    rows = pipe.table_rows()
    assert rows[b"key-001"]["sum"] > 1_000_000
    other = replace(pipe, flow=f"other-{pipe.flow}", tmp_path=pipe.tmp_path / "other")
    for adopted in (False, True):
        with pytest.raises(
            onceflow.ProgressConflictError, match=f"{pipe.table} belongs to flow {pipe.flow}"
        ) as refused:
            other.run(process={"adopt_existing": adopted})
        assert f"onceflow reset {pipe.flow}" in refused.value.next_step


@pytest.mark.long
def test_a_table_that_was_made_again(make_state_pipe: Any) -> None:
    pipe = make_state_pipe()
    pipe.fill(50)
    pipe.run()
    admin = AdminClient({"bootstrap.servers": pipe.bootstrap})
    for future in admin.delete_topics([pipe.table]).values():
        future.result(30)
    with pytest.raises(onceflow.ProgressConflictError, match="deleted and created again"):
        pipe.run()


@pytest.mark.long
def test_versions(make_state_pipe: Any) -> None:
    pipe = make_state_pipe()
    pipe.fill(100)
    pipe.run()
    newer = type("Newer", (pipe.ledger.Ledger,), {"version": 2})
    with pytest.raises(onceflow.ProgressConflictError, match=r"no migrate\(\)"):
        pipe.run(process={"processor": newer()})

    class Migrating(pipe.ledger.Ledger):  # type: ignore[misc,name-defined]
        version = 2

        def migrate(self, value: bytes, from_version: int) -> Any:
            return json.loads(value)

    pipe.fill(100)
    pipe.run(process={"processor": Migrating()})
    pipe.check()
    with pytest.raises(onceflow.ProgressConflictError, match="this is version 0"):
        pipe.run()


@pytest.mark.parametrize(
    "options,message",
    [
        ({"processor": "x"}, "takes a Processor"),
        ({"table": "__x"}, "cannot be a table topic"),
        ({"on_error": "skip"}, "is unknown"),
        ({"on_error": "dead-letter"}, "go together"),
        ({"late_topic": "x"}, "go together"),
        ({"partitions": 0}, "not a whole number of at least 1"),
        ({"store": "x"}, "is unknown"),
        ({"retention": "soon"}, "is not a duration"),
        ({"retention": "0 s"}, "must be positive"),
        ({"idle_timeout": "x"}, "is not a duration"),
        ({"idle_timeout": None}, "cannot be left out"),
        ({"max_timers_per_batch": 0}, "not a whole number of at least 1"),
    ],
)
def test_wrong_options(make_state_pipe: Any, options: dict[str, Any], message: str) -> None:
    pipe = make_state_pipe()
    with pytest.raises(onceflow.OptionError, match=message):
        pipe.run(process=options)


@pytest.mark.parametrize(
    "column, made, message",
    [
        ("timestamp", "CAST(timestamp AS LONG)", "'timestamp' as timestamp; it is bigint"),
        ("timestamp", "CAST(timestamp AS TIMESTAMP_NTZ)", "'timestamp' as timestamp; it is timestamp_ntz"),
        ("offset", "CAST(offset AS INT)", "'offset' as long; it is int"),
        ("headers", "array('a')", "'headers' as array<struct"),
        ("key", "1", "'key' as string or binary; it is int"),
    ],
)
def test_columns_of_other_types_are_refused(make_pipe: Any, column: str, made: str, message: str) -> None:
    """Event time, offsets or headers would be missing without a word."""
    pipe = make_pipe()
    with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
        df = flow.read(pipe.source).withColumn(column, F.expr(made))
        with pytest.raises(onceflow.SchemaError, match=message):
            flow.process(df, pipe_processor(), table=f"{pipe.source}-table")


def test_what_loses_the_order_of_keys_is_told_or_refused(make_pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    pipe = make_pipe()
    with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
        df = flow.read(pipe.source, options={"minPartitions": "8"})
        with pytest.raises(onceflow.OptionError, match="minPartitions divides the partitions"):
            flow.process(df, pipe_processor(), table=f"{pipe.source}-table")
        with pytest.raises(onceflow.OptionError, match=r'partitioner="key" needs'):
            flow.write(df, topic=pipe.target)
        flow.write(df.drop("partition"), topic=pipe.target, partitioner="round_robin")
        df = flow.read(pipe.source)
        flow.write(df.repartition(3, "key").coalesce(2), topic=pipe.target)
        assert not caplog.records
        flow.write(df.repartition(3), topic=pipe.target)
        assert "loses the order of a key's records" in caplog.text


def test_a_with_clause_is_refused(make_state_pipe: Any, onceflow_spark: Any) -> None:
    pipe = make_state_pipe()
    with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
        rows = flow.process(flow.read(pipe.source), pipe_processor(), table=pipe.table, state_dir=pipe.state_dir)
        rows.createOrReplaceTempView("rows_of_a_step")
        query = onceflow_spark.sql("WITH some AS (SELECT key, value FROM rows_of_a_step) SELECT * FROM some")
        with pytest.raises(onceflow.UnsupportedQueryError, match="WITH clause"):
            flow.write(query, topic=pipe.target).start()


def pipe_processor() -> onceflow.Processor:
    class Nothing(onceflow.Processor):
        def process(self, key: bytes, records: Any, state: Any) -> Any:
            return ()

    return Nothing()


def test_a_step_that_is_refused_creates_no_topics(make_state_pipe: Any, make_topic: Any) -> None:
    pipe = make_state_pipe()
    pipe.fill(10)
    admin = AdminClient({"bootstrap.servers": pipe.bootstrap})
    joined = make_topic("joined", 7, cleanup_policy="compact")
    tables = {"joined": onceflow.JoinTable(joined, co_partitioned=True)}
    for process, error, what in [
        ({"on_error": "dead-letter", "dead_letter_topic": "nowhere-at-all"}, onceflow.UnknownTopicError, "nowhere"),
        ({"tables": tables}, onceflow.OptionError, f"{joined} has 7 partitions and table {pipe.table} has "),
    ]:
        with pytest.raises(error, match=what):
            pipe.run(process=process)
        assert not {pipe.table, f"{pipe.table}-internal"} & admin.list_topics(timeout=30).topics.keys()
    create_topic(pipe.bootstrap, pipe.table, 7, {"cleanup.policy": "compact"})
    pipe.run(process={"tables": tables})


def test_output_to_the_table_is_refused(make_state_pipe: Any) -> None:
    pipe = make_state_pipe()
    pipe.target = pipe.table
    with pytest.raises(onceflow.OptionError, match="belongs to a table"):
        pipe.run()


@pytest.mark.long
def test_a_shuffled_batch_is_one_job(make_state_pipe: Any, by_tasks: Any) -> None:
    """Its rows are read and shuffled once, whatever is asked of its plan before it runs. (Nothing divides 2 and 3.)"""
    pipe = make_state_pipe(partitions=2, target_partitions=3)
    pipe.fill(2500)
    store = pipe.spark.sparkContext._jsc.sc().statusStore()
    for inside in (False, True):
        query = pipe.start(process={"partitions": 3}, inside=inside, **by_tasks)
        try:
            query.processAllAvailable()
            pipe.spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(20_000)
            jobs = store.jobsList(None)
            own = [jobs.apply(i) for i in range(jobs.size())]
            batch_jobs = {f"flow {pipe.flow}, batch {batch.batch}" for batch in query.batches}
            own = [job for job in own if job.description().isDefined() and job.description().get() in batch_jobs]
            stages = [job.stageIds().apply(i) for job in own for i in range(job.stageIds().size())]
            read = sum(store.lastStageAttempt(stage).shuffleReadRecords() for stage in stages)
        finally:
            query.stop()
        batches, records = len(query.batches), sum(commit.max_rows for commit in query.batches)
        assert batches >= 1
        assert len(own) == batches
        assert read == (2 * records if inside else records), "to the step, and to the output"
        pipe.fill(1000)
    pipe.run(process={"partitions": 3})
    pipe.check()


@pytest.mark.parametrize(
    "named, inside",
    [
        ("__onceflow_progress", False),
        ("source", True),
        pytest.param("table-internal", True, marks=pytest.mark.long),
        pytest.param("__onceflow_progress", True, marks=pytest.mark.long),
        pytest.param("__consumer_offsets", False, marks=pytest.mark.long),
        pytest.param("source", False, marks=pytest.mark.long),
        pytest.param("table", False, marks=pytest.mark.long),
        pytest.param("table-internal", False, marks=pytest.mark.long),
    ],
)
def test_topics_that_a_record_must_not_name(make_state_pipe: Any, named: str, inside: bool) -> None:
    pipe = make_state_pipe(partitions=2)
    pipe.fill(20)
    topic = named.replace("source", pipe.source).replace("table", pipe.table)

    class Named(pipe.ledger.Ledger):  # type: ignore[misc,name-defined]
        def process(self, key: bytes, records: Any, state: Any) -> Any:
            for record in super().process(key, records, state):
                yield onceflow.Record(key, record.value, topic=topic if record.value["n"] == 7 else None)

    with pytest.raises(onceflow.BadRecordError, match=rf"(?s){topic}.*key-") as caught:
        pipe.run(process={"processor": Named()}, inside=inside)
    assert pipe.source in str(caught.value)
    assert independent.read_topic(pipe.bootstrap, pipe.target) == []


@pytest.mark.long
def test_topics_that_a_column_must_not_name(make_pipe: Any) -> None:
    pipe = make_pipe(partitions=2)
    pipe.fill(20)
    for topic in ("__onceflow_progress", pipe.source):
        with pipe.open() as flow:
            named = F.when(F.expr("CAST(CAST(value AS STRING) AS INT) = 7"), F.lit(topic)).otherwise(F.lit(pipe.target))
            query = flow.write(flow.read(pipe.source).select("key", "value", named.alias("topic"))).start()
            with pytest.raises(onceflow.BadRecordError, match=rf"(?s){topic}.*key-7"):
                query.processAllAvailable()
    assert independent.read_topic(pipe.bootstrap, pipe.target) == []


def test_side_outputs_must_not_go_to(make_state_pipe: Any) -> None:
    pipe = make_state_pipe()
    for topic in ("__onceflow_progress", pipe.source, pipe.table, f"{pipe.table}-internal"):
        with pytest.raises(onceflow.OptionError, match=f"cannot go to '{topic}'"):
            pipe.run(process={"on_error": "dead-letter", "dead_letter_topic": topic})


def test_outputs_are_placed_by_key(make_state_pipe: Any) -> None:
    pipe = make_state_pipe()
    with pytest.raises(onceflow.OptionError, match="cannot be used for the outputs"):
        pipe.run(partitioner="round_robin")


@pytest.mark.long_but("driver")
@pytest.mark.parametrize(
    "write",
    [{}, {"engine": "tasks"}],
    ids=["driver", "tasks"],
)
def test_column_processor(make_state_pipe: Any, by_tasks: Any, write: dict[str, Any]) -> None:
    """Sums a column at a time; every tenth record is late and goes to its topic in the same transaction."""
    import pyarrow as pa
    import pyarrow.compute as pc

    class Sums(onceflow.ColumnProcessor):
        state_fields = {"sum": "int64"}  # noqa: RUF012
        allowed_lateness = "0 seconds"

        def event_time(self, records: pa.Table) -> Any:
            return pc.cast(pc.cast(records["value"], pa.string()), pa.int64())

        def process(self, records: pa.Table, states: pa.Table, context: Any) -> Any:
            numbers = pc.cast(pc.cast(records["value"], pa.string()), pa.int64())
            added = pa.table({"state": records["state"], "n": numbers}).group_by("state").aggregate([("n", "sum")])
            added = added.sort_by("state")
            sums = pc.add(added["n_sum"], pc.fill_null(states["sum"], 0))
            return pa.table({"key": records["key"], "value": records["value"]}), pa.table(
                {"key": states["key"], "sum": sums}
            )

    pipe = make_state_pipe()
    late_topic = pipe.source.replace("in-", "late-", 1)
    create_topic(pipe.bootstrap, late_topic, 1)
    sent = [(f"key-{n % 40}".encode(), str(1000 + n).encode()) for n in range(1600)]
    options = {"process": {"processor": Sums(), "late_topic": late_topic}, **write}
    independent.fill(pipe.bootstrap, pipe.source, sent)
    pipe.run(**options)
    late = [(key, b"7") for key, _ in sent[:40]]
    independent.fill(pipe.bootstrap, pipe.source, late)
    pipe.run(**options)
    out = [(r.key, r.value) for r in independent.read_topic(pipe.bootstrap, pipe.target, decided=True)]
    assert sorted(out) == sorted(sent)
    seen = [(r.key, r.value) for r in independent.read_topic(pipe.bootstrap, late_topic, decided=True)]
    assert sorted(seen) == sorted(late)
    wanted: dict[bytes, int] = {}
    for key, value in sent:
        wanted[key] = wanted.get(key, 0) + int(value)
    rows = {key: int.from_bytes(value[-8:], "little") for key, value in onceflow.Table.of_flow(pipe.folder).range()}
    assert rows == wanted
