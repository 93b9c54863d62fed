"""Dead letters, late records and rows that Spark drops are reported; and a start that changes nothing."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from pyspark.sql import functions as F

import onceflow
from onceflow import serdes
from onceflow.planning import placement
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration


class Even(onceflow.Processor):
    key = serdes.STRING
    value = serdes.JSON
    allowed_lateness = "1 minute"

    def event_time(self, record: onceflow.Record) -> int | None:
        return int(record.value["at"])

    def process(self, key: str, records: Any, state: Any) -> Iterator[onceflow.Record]:
        for record in records:
            if record.value["n"] % 2:
                raise ValueError(f"{record.value['n']} is odd")
            yield onceflow.Record(key, b"x")


@pytest.mark.long_but("driver")
@pytest.mark.parametrize(
    "write",
    [{}, {"engine": "tasks"}],
    ids=["driver", "tasks"],
)
def test_dead_letters_are_not_counted_as_outputs(
    make_pipe: Any,
    make_topic: Any,
    write: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(placement, "TASK_ROWS", 4)
    pipe = make_pipe(partitions=2)
    dead, late = make_topic("dead", 1), make_topic("late", 1)

    def send(values: list[tuple[int, int]]) -> None:
        records: Any = [(b"k%d" % n, json.dumps({"n": n, "at": at}).encode()) for n, at in values]
        independent.fill(pipe.bootstrap, pipe.source, records)

    def run(**options: Any) -> Any:
        flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap)
        with flow:
            out = flow.process(
                flow.read(pipe.source),
                Even(),
                table=f"{pipe.source}-table",
                on_error="dead-letter",
                dead_letter_topic=dead,
                late_topic=late,
                state_dir=pipe.tmp_path,
                idle_timeout="1 ms",
                **options,
            )
            query = flow.write(out, topic=pipe.target, once=True, **write).start()
            query.awaitTermination()
        return query

    send([(n, 10_000_000) for n in range(10)])
    run()
    assert "first dead letters of this run" in caplog.text
    assert "is odd" in caplog.text
    send([(20, 1), (22, 10_000_000), (23, 10_000_000), (24, 10_000_000)])
    query = run(max_dead_letters=1)
    (batch,) = query.batches
    assert (batch.records, batch.dead_letters, batch.late, batch.dropped) == (2, 1, 1, 0)
    send([(25, 10_000_000), (27, 10_000_000)])
    with pytest.raises(onceflow.DeadLetterLimitError, match=r"(?s)2 of 2 records .* is odd") as caught:
        run(max_dead_letters=1)
    assert caught.value.topic == dead
    counts = [len(independent.read_topic(pipe.bootstrap, topic, decided=True)) for topic in (pipe.target, dead, late)]
    assert counts == [5 + 2, 5 + 1, 1]  # of the last batch nothing is visible


def test_records_of_partitions_that_wait_for_their_turn_are_not_late(make_pipe: Any, make_topic: Any) -> None:
    """With a backlog, the driver reads one partition after the other. The others are not idle meanwhile."""
    pipe, late = make_pipe(partitions=2), make_topic("late", 1)
    producer = confluent_kafka.Producer({"bootstrap.servers": pipe.bootstrap})
    for partition, count in ((0, 300), (1, 20)):
        for n in range(count):
            value = json.dumps({"n": 0, "at": n * 60_000}).encode()
            producer.produce(pipe.source, value, b"k%d" % partition, partition=partition)
    assert producer.flush(30) == 0
    with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
        rows = flow.read(pipe.source, max_records_per_batch=10)
        kept = {"table": f"{pipe.source}-table", "state_dir": pipe.tmp_path, "late_topic": late}
        out = flow.process(rows, Even(), idle_timeout="1 ms", **kept)
        query = flow.write(out, topic=pipe.target, once=True, engine="driver").start()
        query.awaitTermination()
    assert len(query.batches) >= 30
    assert sum(batch.late for batch in query.batches) == 0
    assert len(independent.read_topic(pipe.bootstrap, pipe.target, decided=True)) == 320


class Alarm(Even):
    """An alarm at event time 500,000 for each key."""

    def process(self, key: str, records: Any, state: Any) -> Iterator[onceflow.Record]:
        state.timers.register("alarm", 500_000)
        return iter(())

    def on_timer(self, key: str, timer: Any, state: Any) -> Iterator[onceflow.Record]:
        yield onceflow.Record(key, b"late enough")


@pytest.mark.long
@pytest.mark.parametrize("engine", ["driver", pytest.param("tasks", marks=pytest.mark.long)])
def test_a_silent_partition_holds_event_time_back_only_for_a_while(
    make_pipe: Any, make_topic: Any, engine: str
) -> None:
    """Also if no record comes after that."""
    pipe, late = make_pipe(partitions=2), make_topic("late", 1)
    producer = confluent_kafka.Producer({"bootstrap.servers": pipe.bootstrap})

    def send(partition: int, at: int) -> None:
        producer.produce(pipe.source, json.dumps({"n": 0, "at": at}).encode(), b"k%d" % partition, partition=partition)
        assert producer.flush(30) == 0
        query.processAllAvailable()

    with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
        kept = {"table": f"{pipe.source}-table", "state_dir": pipe.tmp_path, "late_topic": late}
        out = flow.process(flow.read(pipe.source), Alarm(), idle_timeout="4 seconds", **kept)
        query = flow.write(out, topic=pipe.target, engine=engine).start()
        try:
            send(0, 100_000)
            sent_at = time.monotonic()
            wait_until(lambda: time.monotonic() - sent_at > 2, 30, "one partition is silent for longer than the other")
            send(1, 1_000_000)
            seen = lambda: independent.read_topic(pipe.bootstrap, pipe.target, decided=True)  # noqa: E731
            wait_until(lambda: len(seen()) == 2, 60, lambda: f"both alarms: {seen()}, {query.batches}")
        finally:
            query.stop()
    assert {each.key for each in seen()} == {b"k0", b"k1"}


def test_fields_of_the_state_that_were_changed_without_a_version(make_state_pipe: Any) -> None:
    pipe = make_state_pipe()

    def processor(**fields: str) -> onceflow.ColumnProcessor:
        made = type("Sums", (onceflow.ColumnProcessor,), {"state_fields": fields, "process": lambda *_: (None, None)})
        return made()  # type: ignore[no-any-return]

    pipe.run(process={"processor": processor(sum="int64", count="int64")})
    pipe.run(process={"processor": processor(sum="long", count="long")})
    with pytest.raises(onceflow.ProgressConflictError, match="raise the processor's `version`"):
        pipe.run(process={"processor": processor(count="int64", sum="int64")})


def test_rows_that_spark_drops_as_late(make_pipe: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Data that are sorted by something else than time, as a user had them: whole stations come after the watermark."""
    pipe = make_pipe(partitions=1)

    def send(hours: list[int]) -> None:
        records: Any = [(b"s", json.dumps({"hour": hour}).encode()) for hour in hours]
        independent.fill(pipe.bootstrap, pipe.source, records)

    def run(**options: Any) -> Any:
        with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
            hour = F.get_json_object(F.col("value").cast("string"), "$.hour").cast("long")
            counts = (
                flow.read(pipe.source)
                .select(F.timestamp_seconds(hour * 3600).alias("time"))
                .withWatermark("time", "2 hours")
                .groupBy("time")
                .count()
                .select(F.to_json(F.struct("time", "count")).alias("value"))
            )
            query = flow.write(
                counts,
                topic=pipe.target,
                checkpoint=tmp_path / "checkpoint",
                output_mode="update",
                once=True,
                **options,
            ).start()
            query.awaitTermination()
        return query

    send([100])
    run()
    send([97, 98, 99, 101])  # behind a partial aggregation every hour is one row
    query = run()
    assert sum(batch.dropped for batch in query.batches) == 2
    assert "Spark dropped at least 2 rows that were later than the watermark" in caplog.text
    send([1, 2, 102])
    seen = len(independent.read_topic(pipe.bootstrap, pipe.target, decided=True))
    with pytest.raises(onceflow.LateRowsError, match="dropped at least 2 rows"):
        run(late="fail")
    assert len(independent.read_topic(pipe.bootstrap, pipe.target, decided=True)) == seen
    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap)
    with flow, pytest.raises(onceflow.OptionError, match="late="):
        flow.write(flow.read(pipe.source), topic=pipe.target, late="fail", guarantee="at_least_once")


@pytest.mark.long
def test_a_start_that_changes_nothing(make_pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing to read: no batch. Starting offsets of a flow that has run: told."""
    pipe = make_pipe()
    assert pipe.run(once=True).batches == []
    pipe.fill(10)
    (batch,) = pipe.run(once=True).batches
    assert (batch.batch, batch.records) == (1, 10)
    assert pipe.run(once=True).batches == []
    pipe.target, target = "nowhere-at-all", pipe.target
    with pytest.raises(onceflow.UnknownTopicError):
        pipe.run()
    pipe.target = target
    assert "starting_offsets" not in caplog.text
    with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
        flow.read(pipe.source, starting_offsets="latest")
    (told,) = [r.getMessage() for r in caplog.records if "starting_offsets" in r.getMessage()]
    assert "onceflow reset" in told
    assert logging.WARNING in {r.levelno for r in caplog.records if "starting_offsets" in r.getMessage()}


class Sized(onceflow.Processor):
    """Writes and keeps what a record says, and rings at once."""

    value = serdes.JSON

    def process(self, key: bytes, records: Any, state: Any) -> Iterator[onceflow.Record]:
        for record in records:
            given = record.value
            state.put(b"s" * given.get("state", 1) if "noise" not in given else os.urandom(given["noise"]))
            if "ring" in given:
                state.timers.register("ring", 1, "processing")
            yield onceflow.Record(
                None if "keyless" in given else key, os.urandom(given.get("random", 1)), given.get("to")
            )
            yield onceflow.Record(key, b"v" * given.get("plain", 1))

    def on_timer(self, key: bytes, timer: Any, state: Any) -> None:
        raise LookupError("nobody is there")


@pytest.mark.long_but("driver")
@pytest.mark.parametrize("engine", ["driver", "tasks"])
def test_what_topics_do_not_take_becomes_letters(
    make_pipe: Any, make_topic: Any, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are those that the broker stores: 200 KB that are compressed to some hundred bytes fit into 20 KB."""
    monkeypatch.setattr(placement, "TASK_ROWS", 4)
    pipe = make_pipe(partitions=2)
    out, dead = (make_topic(name, 2, max_message_bytes=20_000) for name in ("out", "dead"))
    compacted = make_topic("compacted", 2, cleanup_policy="compact", max_message_bytes=20_000)
    good = [{"plain": 200_000}, {"random": 19_000}, {"state": 1_100_000}, {"to": compacted}, {"ring": 1}]
    bad = [
        {"random": 20_000},
        {"noise": 1_100_000},
        {"to": compacted, "keyless": 1},
        {"filler": "x" * 60_000, "random": 20_000},
    ]
    records: Any = [(b"k%d" % n, json.dumps(each).encode()) for n, each in enumerate([*good, *bad])]
    records.append((b"k9", os.urandom(60_000)))  # no JSON, and too large for the dead letters
    independent.fill(pipe.bootstrap, pipe.source, records)

    def run(letters: str) -> Any:
        with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
            rows = flow.process(
                flow.read(pipe.source),
                Sized(),
                table=f"{pipe.source}-table",
                on_error="dead-letter",
                dead_letter_topic=letters,
                state_dir=pipe.tmp_path,
            )
            query = flow.write(rows, topic=out, once=True, compression="zstd", engine=engine).start()
            query.awaitTermination()

    with pytest.raises(onceflow.OptionError, match="which is compacted"):
        run(compacted)
    with pytest.raises(onceflow.OptionError, match="takes at most 5000 bytes"):
        run(make_topic("small", 1, max_message_bytes=5_000))
    run(dead)
    independent.fill(pipe.bootstrap, pipe.source, [(b"k9", b"{}")])
    run(dead)  # the timer has not fired in the first batch
    written = independent.read_topic(pipe.bootstrap, out, decided=True)
    assert sorted(len(each.value or b"") for each in written) == [*[1] * 9, 19_000, 200_000]
    assert len(independent.read_topic(pipe.bootstrap, compacted, decided=True)) == 1
    table = independent.read_topic(pipe.bootstrap, f"{pipe.source}-table", decided=True)
    assert sorted(len(each.value or b"") for each in table) == [1, 1, 1, 1, 1, 1_100_000]
    letters = {each.key: each for each in independent.read_topic(pipe.bootstrap, dead, decided=True)}
    causes = {key: dict(each.headers)["onceflow.error.class"] for key, each in letters.items()}
    assert causes == {
        b"k4": b"LookupError", b"k5": b"BadRecordError", b"k6": b"BadRecordError", b"k7": b"BadRecordError",
        b"k8": b"BadRecordError", b"k9": b"JSONDecodeError",
    }  # fmt: skip
    assert json.loads(letters[b"k4"].value)["timer"] == "ring"
    assert letters[b"k8"].value == records[8][1], "compressed, it fits"
    assert json.loads(dict(letters[b"k9"].headers)["onceflow.shortened"]) == {"value": 60_000}
    assert letters[b"k9"].value == records[9][1][: len(letters[b"k9"].value)]
