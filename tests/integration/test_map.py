"""``Flow.map`` in real flows: rows that are changed, left out and added, and what is said when it goes wrong."""

from __future__ import annotations

import functools
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import confluent_kafka
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import functions as F
from pyspark.sql import types as T

import onceflow
from onceflow.driver.step import state_step
from onceflow.errors import (
    EnvironmentUnusableError,
    OptionError,
    ProcessorError,
    SchemaError,
    UnsupportedQueryError,
)
from onceflow.planning.ownership import HEADERS
from onceflow.testing import independent

pytestmark = pytest.mark.integration


def even(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Only values that are even numbers."""
    numbers = batch.column("value").cast(pa.string()).cast(pa.int64())
    return batch.filter(pc.equal(pc.bit_wise_and(numbers, 1), 0))


def route(batch: pa.RecordBatch, *, to: dict[bool, str]) -> pa.RecordBatch:
    """A topic for each row, and where it was read as a header."""
    values = batch.column("value").to_pylist()
    places = zip(batch.column("topic").to_pylist(), batch.column("partition").to_pylist(), strict=True)
    return pa.RecordBatch.from_pydict(
        {
            "topic": [to[int(value) % 4 == 0] for value in values],
            "value": [b"<%s>" % value for value in values],
            "key": batch.column("key"),
            "headers": [[{"key": "from", "value": f"{topic}-{partition}"}] for topic, partition in places],
        }
    )


@pytest.mark.long_but("tasks", "driver")
@pytest.mark.short_form
@pytest.mark.parametrize("engine", ["tasks", "driver", "checkpoint"])
def test_rows_are_changed_left_out_and_routed(make_pipe: Any, make_topic: Any, engine: str) -> None:
    pipe = make_pipe()
    pipe.fill(900)
    topics = {True: make_topic("fours"), False: make_topic("twos")}
    flow = pipe.open()
    kept = flow.map(flow.read(pipe.source), even)
    assert kept.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    rows = flow.map(
        kept, functools.partial(route, to=topics), schema=f"key binary, value binary, topic string, headers {HEADERS}"
    )
    options: dict[str, Any] = {"engine": engine}
    if engine == "checkpoint":
        options = {"checkpoint": pipe.tmp_path / "checkpoint"}
    query = flow.write(rows, **options).start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    assert query.engine == ("spark" if engine == "checkpoint" else "direct")
    assert query.batches
    assert all(("driver" in batch.path) == (engine == "driver") for batch in query.batches)
    for is_four, topic in topics.items():
        seen = independent.read_topic(pipe.bootstrap, topic, decided=True)
        expected = [(k, b"<%s>" % v) for k, v in pipe.sent if int(v) % 2 == 0 and (int(v) % 4 == 0) == is_four]
        assert sorted((s.key, s.value) for s in seen) == sorted(expected)
        assert {s.headers[0][0] for s in seen} == {"from"}
        assert all((s.headers[0][1] or b"").decode().rpartition("-")[0] == pipe.source for s in seen)


class Last(onceflow.Processor):
    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        for record in records:
            state.put(record.value)
        yield onceflow.Record(key, records[-1].value)


@pytest.mark.long_but("driver, also behind")
@pytest.mark.parametrize(
    "engine, behind",
    [("tasks", True), pytest.param("tasks", False, marks=pytest.mark.long), ("driver", True), ("driver", False)],
    ids=["tasks, also behind", "tasks", "driver, also behind", "driver"],
)
def test_maps_around_a_union_and_around_a_process_step(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path, engine: str, behind: bool
) -> None:
    one, other, target = make_topic(partitions=2), make_topic(partitions=1), make_topic(partitions=2)
    independent.fill(onceflow_broker, one, [(b"k%d" % n, b"one") for n in range(5)])
    independent.fill(onceflow_broker, other, [(b"k%d" % n, b"two") for n in range(5, 9)])
    # A function and a lambda function of a script that is started, which no task can import.
    script: dict[str, Any] = {"__name__": "__main__", "pa": pa, "pc": pc}
    exec(  # noqa: S102
        "def doubled(batch):\n    return pa.Table.from_batches([batch, batch])\n"
        "shout = lambda batch: batch.set_column(1, 'value', pc.utf8_upper(batch.column('value').cast(pa.string())))",
        script,
    )
    with onceflow.Flow(f"maps-{one}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        first = flow.map(flow.read(one).select("key", "value"), script["doubled"])
        both = first.unionByName(flow.read(other).select("value", "key"))
        text = T.StructType(
            [T.StructField("key", T.BinaryType(), False), T.StructField("value", T.StringType(), False)]
        )
        rows = flow.map(both, script["shout"], schema=text)
        assert rows.schema.fields[1].nullable, "the function is free to leave values out"
        written = flow.process(rows, Last(), table=f"{one}-last", state_dir=tmp_path)
        if behind:
            written = flow.map(
                written.select("key", "value"),
                lambda b: b.set_column(1, "value", pc.binary_join_element_wise(b.column(1), b"!", b"")),
            )
        query = flow.write(written, topic=target, once=True, engine=engine).start()
        query.awaitTermination(60)
        assert all(("task" in batch.path) == (engine == "tasks") for batch in query.batches)
    outputs = independent.read_topic(onceflow_broker, target, decided=True)
    seen = {(record.key, record.value) for record in outputs}
    end = b"!" if behind else b""
    assert seen == {(b"k%d" % n, (b"ONE" if n < 5 else b"TWO") + end) for n in range(9)}


@pytest.mark.parametrize("engine", ["driver", pytest.param("tasks", marks=pytest.mark.long)])
def test_a_function_keeps_the_variables_that_it_had(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], engine: str
) -> None:
    """A loop makes a function for each topic. It uses a variable of the loop, which then has its last value."""
    source, flows, queries = make_topic(partitions=1), [], []
    targets = {word: make_topic(partitions=1) for word in ("even", "odd")}
    independent.fill(onceflow_broker, source, [(b"k", b"%d" % n) for n in range(20)])
    for rest, target in enumerate(targets.values()):

        def wanted(batch: pa.RecordBatch) -> pa.RecordBatch:
            numbers = [int(value) % 2 == rest for value in batch.column("value").to_pylist()]  # noqa: B023
            return batch.filter(pa.array(numbers))

        flows.append(onceflow.Flow(f"kept-{target}", onceflow_spark, bootstrap_servers=onceflow_broker))
        rows = flows[-1].map(flows[-1].read(source).select("key", "value"), wanted)
        queries.append(flows[-1].write(rows, topic=target, once=True, engine=engine))
    for flow, query in zip(flows, queries, strict=True):
        query.start().awaitTermination(60)
        flow.close()
    for rest, target in enumerate(targets.values()):
        seen = independent.read_topic(onceflow_broker, target, decided=True)
        assert [int(record.value or b"") for record in seen] == list(range(rest, 20, 2))


def refuse(batch: pa.RecordBatch) -> pa.RecordBatch:
    raise ValueError("I do not like it")


REFUSED = ProcessorError, "Flow.map: refuse failed for a batch of 3 rows: ValueError: I do not like it"


@pytest.mark.parametrize(
    "where, function, kind, words",
    [
        ("tasks", refuse, *REFUSED),
        ("driver", refuse, *REFUSED),
        ("before a step", refuse, *REFUSED),
        ("after a step", refuse, *REFUSED),
        (
            "driver",
            lambda batch: batch.drop_columns(["key"]),
            SchemaError,
            "Flow.map: <lambda> returned a batch without",
        ),
        (
            "tasks",
            lambda batch: batch.drop_columns(["key"]),
            SchemaError,
            "Flow.map: <lambda> returned a batch without",
        ),
    ],
)
def test_a_wrong_result_stops_the_flow(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path,
    where: str, function: Any, kind: type[onceflow.OnceflowError], words: str,
) -> None:  # fmt: skip
    source, target = make_topic(partitions=1), make_topic(partitions=1)
    independent.fill(onceflow_broker, source, [(b"k%d" % n, b"v") for n in range(3)])
    with onceflow.Flow(f"wrong-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        rows = flow.read(source)
        if where == "after a step":
            rows = flow.process(rows, Last(), table=f"{source}-last", state_dir=tmp_path).select("key", "value")
        rows = flow.map(rows, function)
        if where == "before a step":
            rows = flow.process(rows, Last(), table=f"{source}-last", state_dir=tmp_path)
        query = flow.write(rows, topic=target, engine="tasks" if where == "tasks" else "driver").start()
        with pytest.raises(kind, match=words) as caught:
            query.processAllAvailable()
    error = caught.value
    assert (error.flow, error.batch) == (f"wrong-{source}", 1)
    if where != "after a step":
        assert error.topic == source
        assert error.detail.startswith("rows of partition 0, offsets 0 to 2")
    assert error.next_step
    assert independent.read_topic(onceflow_broker, target, decided=True) == []


def test_arguments_that_are_refused_at_once(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str]
) -> None:
    source = make_topic(partitions=1)
    with onceflow.Flow(f"refused-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        with pytest.raises(OptionError, match="Nothing was read yet"):
            flow.map(onceflow_spark.range(1), even)
        rows = flow.read(source)
        with pytest.raises(UnsupportedQueryError, match="not a stream"):
            flow.map(onceflow_spark.range(1), even)
        unable: Any
        for unable, words in (
            (json, "Flow.map takes a function, not <module"),
            ("even", "Flow.map takes a function, not 'even'"),
            (_yields, "_yields yields"),
            (_waits, "_waits is asynchronous"),
        ):
            with pytest.raises(OptionError, match=words):
                flow.map(rows, unable)
        lock = threading.Lock()

        def waits(batch: pa.RecordBatch) -> pa.RecordBatch:
            with lock:
                return batch

        with pytest.raises(OptionError, match=r"lock \(lock\), which waits uses, cannot be sent to tasks") as caught:
            flow.map(rows, waits)
        assert "inside of it" in caught.value.next_step
        for schema, error, words in (
            ("value binry", OptionError, "The schema of Flow.map is not understood: 'value binry'"),
            (["value"], OptionError, "schema= of Flow.map is list"),
            (T.StructType(), SchemaError, "no columns"),
            ("value binary, value string", SchemaError, "two columns 'value'"),
            ("value binary, every interval year", SchemaError, "every is interval year, which Python code in tasks"),
        ):
            with pytest.raises(error, match=words):
                flow.map(rows, even, schema=schema)  # type: ignore[arg-type]
        with pytest.raises(SchemaError, match="column 'value' is bigint"):
            flow.write(flow.map(rows, even, schema="value bigint"), topic="any")


def _yields(batch: pa.RecordBatch) -> Any:
    yield batch


async def _waits(batch: pa.RecordBatch) -> Any:
    return batch


def test_a_module_that_only_the_driver_has_is_told_at_the_start(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("onceflow_test_only_here")
    exec("def clean(batch):\n    return batch", module.__dict__)  # noqa: S102
    monkeypatch.setitem(sys.modules, module.__name__, module)
    source, target = make_topic(partitions=1), make_topic(partitions=1)
    with onceflow.Flow(f"only-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        rows = flow.map(flow.read(source), module.clean)
        with pytest.raises(EnvironmentUnusableError, match="'onceflow_test_only_here', which the function clean needs"):
            flow.write(rows, topic=target, engine="tasks").start()
        # No task imports it if the driver reads all batches.
        flow.write(rows, topic=target, once=True, engine="driver").start().awaitTermination(60)


def test_tasks_prepare_copies_of_a_processor_that_they_cannot_import(
    make_state_pipe: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver runs it: tasks only read the table."""
    caplog.set_level(logging.INFO, "onceflow.state")
    monkeypatch.setattr(state_step, "_MIN_BYTES", 1)
    module = ModuleType("onceflow_test_processors_here")
    code = "import onceflow\nclass Keep(onceflow.Processor):\n    def process(self, key, records, state):\n"
    exec(f"{code}        state.put(records[-1].value)\n        return iter(())", module.__dict__)  # noqa: S102
    monkeypatch.setitem(sys.modules, module.__name__, module)
    pipe = make_state_pipe()
    for _ in range(2):
        pipe.fill(100)
        with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
            kept = {"table": pipe.table, "state_dir": pipe.state_dir}
            query = flow.write(
                flow.process(flow.read(pipe.source), module.Keep(), **kept), topic=pipe.target, once=True
            )
            assert query.start().awaitTermination(60)
    assert "local copies are prepared" in caplog.text


@pytest.mark.parametrize("engine", [pytest.param("tasks", marks=pytest.mark.long), "driver"])
def test_a_time_zone_of_the_session_does_not_move_times(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], engine: str
) -> None:
    source, target = make_topic(partitions=1), make_topic(partitions=1)
    independent.fill(onceflow_broker, source, [(b"k", b"v")])
    before = onceflow_spark.conf.get("spark.sql.session.timeZone")
    onceflow_spark.conf.set("spark.sql.session.timeZone", "America/Lima")
    try:
        with onceflow.Flow(f"zone-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
            rows = flow.map(flow.read(source).select("value", "timestamp"), _later)
            if engine == "tasks":
                rows = rows.where(F.col("value") == b"2021-01-01 00:00:01+00:00")
            flow.write(rows, topic=target, once=True, engine=engine).start().awaitTermination(60)
    finally:
        onceflow_spark.conf.set("spark.sql.session.timeZone", before)
    (seen,) = independent.read_topic(onceflow_broker, target, decided=True)
    assert seen.value == b"2021-01-01 00:00:01+00:00"
    assert seen.timestamp_ms == 1_609_459_201_000


@pytest.mark.parametrize("zone", ["Europe/Berlin", "GMT+02:00"], ids=["an hour that is there twice", "not in Arrow"])
@pytest.mark.parametrize("process", [False, True], ids=["sink", "process"])
def test_times_that_arrow_cannot_have_in_the_time_zone_of_the_session(
    onceflow_broker: str,
    onceflow_spark: Any,
    make_topic: Callable[..., str],
    tmp_path: Path,
    zone: str,
    process: bool,
) -> None:
    source, target = (make_topic(partitions=1, retention_ms=-1) for _ in range(2))
    times = [1_761_438_600_123, 1_761_442_200_456]  # 2025-10-26 at 00:30 and 01:30 UTC
    producer = confluent_kafka.Producer({"bootstrap.servers": onceflow_broker})
    for number, time_ms in enumerate(times):
        producer.produce(source, b"%d" % number, b"k%d" % number, timestamp=time_ms)
    assert producer.flush(30) == 0
    before = onceflow_spark.conf.get("spark.sql.session.timeZone")
    onceflow_spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        with onceflow.Flow(f"hour-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
            rows = flow.map(flow.read(source), lambda batch: batch)
            if process:
                rows = flow.process(rows, Last(), table=f"{source}-last", state_dir=tmp_path)
            flow.write(rows, topic=target, once=True, engine="driver").start().awaitTermination(60)
    finally:
        onceflow_spark.conf.set("spark.sql.session.timeZone", before)
    seen = independent.read_topic(onceflow_broker, target, decided=True)
    assert {each.value for each in seen} == {b"0", b"1"}
    assert process or sorted(each.timestamp_ms for each in seen) == times
    assert len(seen) == 2


def _later(batch: pa.RecordBatch) -> pa.RecordBatch:
    import datetime

    zone = batch.schema.field("timestamp").type.tz
    time = datetime.datetime(2021, 1, 1, 0, 0, 1, tzinfo=datetime.timezone.utc)
    return pa.RecordBatch.from_arrays(
        [pa.array([str(time)] if zone == "UTC" else [zone]), pa.array([time], pa.timestamp("s", "UTC"))],
        names=["value", "timestamp"],
    )


#: What is special in Spark's SQL, in Arrow, or for the steps.
ODD_NAMES = [
    "",
    "a.b",
    "`",
    "a`.`b",
    "a b",
    "ä",
    "\U0001f600",
    "select",
    "key.",
    "keys",
    "c0",
    "'",
    '"',
    "\\",
    "*",
    "value[0]",
]


@pytest.mark.parametrize("engine", ["driver", pytest.param("tasks", marks=pytest.mark.long)])
def test_columns_may_have_any_names(make_pipe: Any, make_topic: Any, engine: str) -> None:
    """Whatever their names are, values stay in their columns, through functions and as the id of a de-duplication."""

    def added(batch: pa.RecordBatch) -> pa.RecordBatch:
        assert batch.schema.names == ["key", "value"]
        texts = [
            pa.array([f"{number}-{value}" for value in batch.column(1).to_pylist()]) for number in range(len(ODD_NAMES))
        ]
        return pa.RecordBatch.from_arrays([*batch.columns, *texts], names=["key", "value", *ODD_NAMES])

    def joined(batch: pa.RecordBatch) -> pa.RecordBatch:
        assert batch.schema.names == ["key", "value", *ODD_NAMES]
        rows = zip(*(batch.column(at).to_pylist() for at in range(2, batch.num_columns)), strict=True)
        return pa.RecordBatch.from_pydict({"key": batch.column(0), "value": ["|".join(row).encode() for row in rows]})

    pipe = make_pipe(partitions=1)
    independent.fill(pipe.bootstrap, pipe.source, [(b"k%d" % (n % 2), b"%d" % n) for n in range(4)])
    flow = pipe.open()
    fields = [T.StructField(name, T.BinaryType()) for name in ("key", "value")]
    fields += [T.StructField(name, T.StringType()) for name in ODD_NAMES]
    rows = flow.map(flow.read(pipe.source).select("key", "value"), added, schema=T.StructType(fields))
    flow.write(
        flow.map(rows, joined, schema="key binary, value binary"), topic=pipe.target, once=True, engine=engine
    ).start().awaitTermination()
    flow.close()
    expected = ["|".join(f"{number}-b'{n}'" for number in range(len(ODD_NAMES))).encode() for n in range(4)]
    written = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    assert sorted(each.value for each in written) == sorted(expected)
    if engine == "driver":
        return
    for name in ("a`.`b", ""):
        flow = onceflow.Flow(f"{pipe.flow}-{len(name)}", pipe.spark, bootstrap_servers=pipe.bootstrap)
        source = flow.read(pipe.source)
        ids = source.select("key", "value", "timestamp", F.col("key").alias(name), F.lit("x").alias("a.b"))
        once = flow.deduplicate(ids, id=name, records=100, state_dir=pipe.tmp_path)
        target = make_topic("once", 1)
        flow.write(once, topic=target, once=True).start().awaitTermination()
        flow.close()
        assert sorted(each.value for each in independent.read_topic(pipe.bootstrap, target, decided=True)) == [
            b"0",
            b"1",
        ]
