"""With a backlog, tasks read by themselves: whatever the rows are like, and whoever reads the next batch."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import functions as F

from onceflow import Flow, Processor, ProcessorError, Record, Table, serdes
from onceflow.direct import backlog
from onceflow.direct import run as direct_run
from onceflow.planning import placement
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until
from onceflow_workshop.testing.backlogs import tasks_above

pytestmark = pytest.mark.integration

MakeTopic = Callable[..., str]
BY_TASKS: dict[str, Any] = {"engine": "tasks"}
_names = itertools.count()


@pytest.fixture
def make_flow(onceflow_broker: str, onceflow_spark: Any) -> Iterator[Callable[..., Flow]]:
    flows = []

    def make(name: str = "") -> Flow:
        flows.append(Flow(name or f"range-tasks-{next(_names)}", onceflow_spark, bootstrap_servers=onceflow_broker))
        return flows[-1]

    yield make
    for flow in flows:
        flow.close()


def finished(query: Any) -> Any:
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    return query


def fed(query: Any, bootstrap: str, topic: str, *parts: list[tuple[bytes | None, bytes | None]]) -> Any:
    """The query, stopped, when it has written one part of the records after the other."""
    try:
        for part in parts:
            independent.fill(bootstrap, topic, part)
            query.processAllAvailable()
    finally:
        query.stop()
    return query


def numbered(count: int, *, start: int = 0, keys: int = 40) -> list[tuple[bytes | None, bytes | None]]:
    return [(b"key-%d" % (n % keys), b"%d" % n) for n in range(start, start + count)]


def counted(bootstrap: str, topic: str) -> Counter[Any]:
    return Counter((each.key, each.value) for each in independent.read_topic(bootstrap, topic, decided=True))


def test_tasks_take_over_and_give_back(make_pipe: Any) -> None:
    """In one run: the driver reads what is little, tasks what is more than the bound."""
    pipe = make_pipe(partitions=4, target_partitions=4)
    flow = pipe.open()
    source = flow.read(pipe.source, max_records_per_batch=2000).select("key", "value")
    with tasks_above(500):
        query = flow.write(source, topic=pipe.target).start()
        try:
            for records in (100, 5000, 100, 100, 3000):
                pipe.fill(records)
                query.processAllAvailable()
        finally:
            query.stop()
    pipe.check()
    ways = [way for way, _ in itertools.groupby(batch.path for batch in query.batches)]
    assert ways[0] == "driver"
    assert ways.count("2 reading tasks") >= 2, ways
    assert "driver" in ways[2:], ways
    assert query.engine == "direct"
    jobs = pipe.spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    told = {
        str(jobs.apply(n).description().get()) for n in range(jobs.size()) if jobs.apply(n).description().isDefined()
    }
    assert told >= {f"flow {pipe.flow}, batch {batch.batch}" for batch in query.batches if batch.path != "driver"}
    for batch, report in zip(query.batches, query.recentProgress, strict=True):
        assert report["numInputRows"] == batch.records, "records that tasks have read are counted, too"
        assert max(batch.read.values()) <= 2000


@pytest.mark.long
def test_sql_goes_to_tasks_and_back_under_load(make_pipe: Any) -> None:
    """More records come all the time."""
    pipe = make_pipe(partitions=4, target_partitions=4)
    flow = pipe.open()
    source = flow.read(pipe.source, max_records_per_batch=2000).selectExpr("key", "unhex(hex(value)) AS value")
    writer = flow.write(source.where("length(key) > 2"), topic=pipe.target)
    seen: dict[int, bool] = {}  # a query remembers the last 200 batches only

    def by_tasks() -> list[bool]:
        seen.update({batch.batch: "task" in batch.path for batch in query.batches})
        return [by for by, _ in itertools.groupby(by for _, by in sorted(seen.items()))]

    def more(records: int, turns: int) -> bool:
        pipe.fill(records)
        return len(by_tasks()) >= turns

    with tasks_above(500):
        query = writer.start()
        try:
            for turn in range(1, 6):
                wait_until(lambda turn=turn: more(20 if turn % 2 else 2000, turn), 120, f"turn {turn}")  # type: ignore[misc]
            query.processAllAvailable()
        finally:
            query.stop()
    assert by_tasks()[:5] == [False, True, False, True, False]
    pipe.check()


@pytest.mark.long
def test_tasks_take_over_by_what_batches_cost(make_pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has said when. (The bounds are smaller than they are in production.)"""
    monkeypatch.setattr(direct_run, "_LOCAL_CORES_MIN", 1)
    monkeypatch.setattr(backlog, "BEHIND_S", 0.02)
    monkeypatch.setattr(backlog, "CAUGHT_UP_S", 0.001)
    pipe = make_pipe(partitions=4, target_partitions=4)
    pipe.fill(6000)
    flow = pipe.open()
    source = flow.read(pipe.source, max_records_per_batch=150).select("key", "value")
    query = flow.write(source, topic=pipe.target).start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    pipe.check()
    ways = [way for way, _ in itertools.groupby(batch.path for batch in query.batches)]
    assert ways[:2] == ["driver", "2 reading tasks"], ways


def test_a_function_of_a_script_is_sent_as_it_was(
    make_flow: Callable[..., Flow], make_topic: MakeTopic, onceflow_broker: str
) -> None:
    """The driver calls it first. Then it has a connection in a variable, which could not be sent."""
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(  # noqa: S102
        "import threading\nopened = None\n"
        "def keep(batch):\n    global opened\n    opened = opened or threading.Lock()\n    return batch",
        script,
    )
    source, target = make_topic("in", 2), make_topic("out", 2)
    flow, sent = make_flow(), numbered(2100)
    rows = flow.map(flow.read(source, max_records_per_batch=1000).select("key", "value"), script["keep"])
    writer = flow.write(rows, topic=target)
    with tasks_above(500):
        query = fed(writer.start(), onceflow_broker, source, sent[:100], sent[100:])
    assert script["opened"] is None, "the function that runs is the one that was given"
    assert {batch.path for batch in query.batches} >= {"driver", "2 reading tasks"}
    assert counted(onceflow_broker, target) == Counter(sent)


@pytest.mark.parametrize("engine", ["tasks", "driver"])
def test_a_function_with_a_broadcast_variable(
    make_flow: Callable[..., Flow],
    make_topic: MakeTopic,
    onceflow_broker: str,
    onceflow_spark: Any,
    engine: str,
) -> None:
    """Spark sends those that are pickled by the thread that starts a job."""
    source, target = make_topic("in", 2), make_topic("out", 2)
    flow, sent = make_flow(), numbered(200)
    names = onceflow_spark.sparkContext.broadcast({b"%d" % n: b"number %d" % n for n in range(400)})

    def named(batch: pa.RecordBatch) -> pa.RecordBatch:
        found = [names.value[value] for value in batch.column("value").to_pylist()]
        return pa.RecordBatch.from_pydict({"key": batch.column("key"), "value": pa.array(found, pa.binary())})

    rows = flow.map(flow.read(source).select("key", "value"), named, schema="key binary, value binary")
    query = fed(flow.write(rows, topic=target, engine=engine).start(), onceflow_broker, source, sent[:100], sent[100:])
    assert {"task" in batch.path for batch in query.batches} == {engine == "tasks"}
    assert counted(onceflow_broker, target) == Counter((key, b"number " + (value or b"")) for key, value in sent)


@pytest.mark.long
def test_tasks_keep_to_the_trigger(make_pipe: Any) -> None:
    """When nothing is left to read, the next batch waits for it."""
    pipe = make_pipe(partitions=2, target_partitions=2)
    flow = pipe.open()
    rows = flow.read(pipe.source).select("key", "value")
    query = flow.write(rows, topic=pipe.target, trigger="700 milliseconds", **BY_TASKS).start()

    def are_there() -> bool:
        pipe.fill(5)
        return len(query.batches) >= 3

    try:
        wait_until(are_there, 60, lambda: repr(query))
        query.processAllAvailable()
    finally:
        query.stop()
    pipe.check()
    began = [datetime.fromisoformat(report["timestamp"].rstrip("Z")) for report in query.recentProgress]
    for n, at in enumerate(began):
        assert at - began[0] >= n * timedelta(milliseconds=700) - timedelta(milliseconds=10), began


@pytest.mark.long
@pytest.mark.parametrize(
    "guarantee",
    [
        "exactly_once",
        pytest.param("at_least_once", marks=pytest.mark.long),
        pytest.param("at_most_once", marks=pytest.mark.long),
    ],
)
def test_keys_that_are_elsewhere_are_moved(
    make_flow: Callable[..., Flow],
    make_topic: MakeTopic,
    onceflow_broker: str,
    guarantee: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another producer has placed the records. With a transaction it is tried first; otherwise the attempt would lose
    records, or double them."""
    source, target = make_topic("in", 4), make_topic("out", 4)
    sent = numbered(4000)
    independent.fill(onceflow_broker, source, sent, options={"partitioner": "consistent"})
    flow = make_flow()
    rows = flow.read(source, max_records_per_batch=1500).select("key", "value")
    query = finished(flow.write(rows, topic=target, guarantee=guarantee, **BY_TASKS).start())
    assert counted(onceflow_broker, target) == Counter(sent)
    first, *others = [batch.attempts for batch in query.batches]
    assert (first, {*others}) == (2 if guarantee == "exactly_once" else 1, {1})
    assert len(others) >= 2
    assert all(batch.max_rows <= 1500 for batch in query.batches)
    assert sum(report["numInputRows"] for report in query.recentProgress) == 4000
    assert not any("reading" in batch.path for batch in query.batches)
    seen = independent.read_topic(onceflow_broker, target)
    assert len({each.partition for each in seen}) == 4
    if guarantee == "exactly_once":  # the next start knows it, for a day; then it tries again
        for is_believed, attempts in ((True, 1), (False, 2), (True, 1)):
            monkeypatch.setattr(placement, "_BELIEVED_MS", 86_400_000 if is_believed else 0)
            independent.fill(onceflow_broker, source, sent, options={"partitioner": "consistent"})
            rows = flow.read(source).select("key", "value")
            query = finished(flow.write(rows, topic=target, **BY_TASKS).start())
            assert query.batches[0].attempts == attempts


@pytest.mark.long
def test_rows_that_name_topics_of_different_sizes(
    make_flow: Callable[..., Flow], make_topic: MakeTopic, onceflow_broker: str
) -> None:
    """Two topics fit the tasks, one does not; and some rows have no key, and some their own partition."""
    source = make_topic("in", 4)
    targets = [make_topic("out", partitions) for partitions in (8, 2, 3)]
    sent = [*numbered(900), *[(None, b"%d" % n) for n in range(900, 1000)]]
    independent.fill(onceflow_broker, source, sent)
    flow = make_flow()

    def deal(batch: pa.RecordBatch, topics: list[str]) -> pa.RecordBatch:
        numbers = [int(value) for value in batch.column("value").to_pylist()]
        names = pa.array([topics[number % len(topics)] for number in numbers])
        return batch.append_column("topic", names)

    def written(topics: list[str]) -> Any:
        rows = flow.map(
            flow.read(source).select("key", "value"),
            lambda batch: deal(batch, topics),
            schema="key binary, value binary, topic string",
        )
        return finished(flow.write(rows, **BY_TASKS).start())

    fitting = written(targets[:2])
    assert {batch.path for batch in fitting.batches} == {"2 reading tasks"}
    assert sum((counted(onceflow_broker, each) for each in targets[:2]), Counter()) == Counter(sent)
    more = numbered(1000, start=1000)
    independent.fill(onceflow_broker, source, more)
    mixed = written(targets)
    assert mixed.batches[0].attempts == 2
    assert sum((counted(onceflow_broker, each) for each in targets), Counter()) == Counter([*sent, *more])


def test_a_partition_column(make_flow: Callable[..., Flow], make_topic: MakeTopic, onceflow_broker: str) -> None:
    source, target = make_topic("in", 3), make_topic("out", 5)
    sent = numbered(700)
    independent.fill(onceflow_broker, source, sent)
    flow = make_flow()
    rows = flow.read(source).select("key", "value", "timestamp", F.lit(4).alias("partition"))
    finished(flow.write(rows, topic=target, **BY_TASKS).start())
    assert counted(onceflow_broker, target) == Counter(sent)
    assert {each.partition for each in independent.read_topic(onceflow_broker, target)} == {4}


def test_topics_with_and_without_a_function_go_through_one_shuffle(
    make_flow: Callable[..., Flow], make_topic: MakeTopic, onceflow_broker: str, onceflow_spark: Any
) -> None:
    """A task that reads both has times in the time zone of the session, and in UTC: Arrow has two types for that."""
    names, sent = [make_topic("in", partitions) for partitions in (4, 3)], numbered(200)
    for name in names:
        independent.fill(onceflow_broker, name, sent)
    target = make_topic("out", 2)
    zone = onceflow_spark.conf.get("spark.sql.session.timeZone")
    onceflow_spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        flow = make_flow()
        one, other = (flow.read(name).select("value", "key", "timestamp") for name in names)
        rows = flow.map(one, lambda batch: batch).union(other)
        query = finished(flow.write(rows, topic=target, **BY_TASKS).start())
    finally:
        onceflow_spark.conf.set("spark.sql.session.timeZone", zone)
    assert not any("reading" in batch.path for batch in query.batches), "nothing divides both 4 and 3"
    assert counted(onceflow_broker, target) == Counter(sent * 2)


@pytest.mark.parametrize("partitioner", ["key", "source", "round_robin"])
def test_one_partition(
    make_flow: Callable[..., Flow], make_topic: MakeTopic, onceflow_broker: str, partitioner: str
) -> None:
    """One task reads it. Unless rows stay where they were, others write them."""
    source, target = make_topic("in", 1), make_topic("out", 1)
    sent = numbered(50)
    independent.fill(onceflow_broker, source, sent)
    flow = make_flow()
    rows = flow.read(source).select("key", "value")
    query = finished(flow.write(rows, topic=target, partitioner=partitioner, **BY_TASKS).start())
    assert [(each.key, each.value) for each in independent.read_topic(onceflow_broker, target, decided=True)] == sent
    assert (query.batches[-1].path == "1 reading task") == (partitioner == "source")


def test_a_function_that_fails_in_a_task(
    make_flow: Callable[..., Flow], make_topic: MakeTopic, onceflow_broker: str
) -> None:
    source, target = make_topic("in", 4), make_topic("out", 4)
    independent.fill(onceflow_broker, source, numbered(500))
    flow = make_flow()

    def fail(batch: pa.RecordBatch) -> pa.RecordBatch:
        if pc.any(pc.equal(batch.column("value"), b"77")).as_py():
            raise ValueError("no such number")
        return batch

    query = flow.write(flow.map(flow.read(source).select("key", "value"), fail), topic=target, **BY_TASKS).start()
    with pytest.raises(ProcessorError, match=rf"(?s)fail failed.*no such number.*flow={flow.name}"):
        query.awaitTermination(60)
    assert not independent.read_topic(onceflow_broker, target)


class Forwarding(Processor):
    """Sends each record on under another key, and keeps how many there were of each."""

    state = serdes.JSON

    def process(self, key: bytes, records: Any, state: Any) -> Iterator[Record]:
        for record in records:
            state.put((state.get() or 0) + 1)
            yield Record(value=record.value, key=b"to-" + record.value)


@pytest.mark.long
@pytest.mark.parametrize(
    "partitions", [(4, 4), pytest.param((4, 3), marks=pytest.mark.long), pytest.param((3, 5), marks=pytest.mark.long)]
)
def test_a_step_whose_outputs_go_elsewhere(
    make_flow: Callable[..., Flow],
    make_topic: MakeTopic,
    onceflow_broker: str,
    tmp_path: Path,
    partitions: tuple[int, int],
) -> None:
    """Other keys, other partition counts, and a record without a key, which becomes a dead letter."""
    source, target = make_topic("in", partitions[0]), make_topic("out", 4)
    letters = make_topic("letters", 2)
    table = make_topic("table", partitions[1], cleanup_policy="compact")
    sent = numbered(900)
    flow = make_flow()
    for part in (sent[:600], sent[600:]):
        independent.fill(onceflow_broker, source, [*part, (None, b"bad")])
        rows = flow.process(
            flow.read(source),
            Forwarding(),
            table=table,
            state_dir=tmp_path,
            on_error="dead-letter",
            dead_letter_topic=letters,
        )
        finished(flow.write(rows, topic=target, **BY_TASKS).start())
    assert counted(onceflow_broker, target) == Counter((b"to-" + (value or b""), value) for _, value in sent)
    assert len(independent.read_topic(onceflow_broker, letters, decided=True)) == 2
    wanted = Counter(key for key, _ in sent)
    rows_of = {key: json.loads(value) for key, value in Table.of_flow(tmp_path / flow.name / table).range()}
    assert rows_of == wanted
