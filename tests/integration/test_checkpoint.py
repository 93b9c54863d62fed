"""Checkpoint mode on a real broker and a real Spark: state survives restarts, and what does not belong is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import onceflow
from onceflow.admin.change.reset import reset
from onceflow.client.settings import ClientSettings
from onceflow.driver.start import checkpoint_location
from onceflow.protocol.names import Names
from onceflow.spark import versions
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

STATE_FORMAT = "spark.sql.streaming.stateStore.checkpointFormatVersion"
NO_DATA_BATCHES = "spark.sql.streaming.noDataMicroBatches.enabled"

#: Second of its event time, word, number.
Event = tuple[int, str, int]


@dataclass
class Service:
    """A flow with a kept checkpoint that is started again and again, and what came out of it so far."""

    bootstrap: str
    spark: Any
    sources: list[str]
    target: str
    folder: Path
    build: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        return f"flow-{self.target}"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def send(self, *events: Iterable[Event]) -> None:
        """Events for each source."""
        for source, more in zip(self.sources, events, strict=True):
            records: list[tuple[bytes | None, bytes | None]] = [
                (word.encode(), f"{second}:{number}".encode()) for second, word, number in more
            ]
            independent.fill(self.bootstrap, source, records)

    def start(self, *, read: dict[str, Any] | None = None, **write: Any) -> Any:
        flow = onceflow.Flow(self.name, self.spark, bootstrap_servers=self.bootstrap)
        try:
            topics = [parsed(flow.read(source, **(read or {}))) for source in self.sources]
            options = {"topic": self.target, "checkpoint": self.checkpoint, **self.options, **write}
            return flow.write(self.build(*topics), **options).start()
        except BaseException:
            flow.close()
            raise

    def run(self, **options: Any) -> Any:
        """A restart: a new flow in the old checkpoint that writes what there is, and ends."""
        query = self.start(once=True, **options)
        try:
            assert query.awaitTermination(60), "the query has not ended"
        finally:
            query.stop()
        return query

    def refused(self, *words: str, **options: Any) -> None:
        """The start is refused with all these words, and says which flow and what to do."""
        with pytest.raises(onceflow.ProgressConflictError) as caught:
            self.start(once=True, **options)
        assert caught.value.flow == self.name
        for word in (*words, "on_checkpoint_conflict", f"onceflow reset {self.name}"):
            assert word in str(caught.value)

    def new(self) -> list[str]:
        """What has come out since the last look, as ``word:value``, sorted."""
        records = independent.read_topic(self.bootstrap, self.target, decided=True)
        now = Counter(f"{(r.key or b'').decode()}:{(r.value or b'').decode()}" for r in records)
        assert not self.seen - now
        more, self.seen = now - self.seen, now
        return sorted(more.elements())

    def last_commit(self) -> int:
        return max(int(p.name) for p in (self.checkpoint / "commits").iterdir() if p.name.isdecimal())

    def forget_last_commit(self) -> str:
        """As a crash between Kafka's commit and Spark's leaves the checkpoint; what Spark's log has said."""
        last = self.last_commit()
        path = self.checkpoint / "commits" / str(last)
        text = path.read_text()
        path.unlink()
        (self.checkpoint / "commits" / f".{last}.crc").unlink(missing_ok=True)
        return text


@pytest.fixture
def make_service(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path
) -> Callable[..., Service]:
    def make(build: Callable[..., Any], topics: int = 1, **options: Any) -> Service:
        sources = [make_topic("in", 2) for _ in range(topics)]
        target = make_topic("out", 2)
        return Service(onceflow_broker, onceflow_spark, sources, target, tmp_path / target, build, options)

    return make


@pytest.fixture
def setting(onceflow_spark: Any) -> Iterator[Callable[[str, str], None]]:
    """A setting of the shared session, for one test."""
    names: list[str] = []

    def put(name: str, value: str) -> None:
        names.append(name)
        onceflow_spark.conf.set(name, value)

    yield put
    for name in names:
        onceflow_spark.conf.unset(name)


@pytest.fixture
def state_format(request: pytest.FixtureRequest, setting: Callable[[str, str], None]) -> int:
    setting(STATE_FORMAT, str(request.param))
    return int(request.param)


# ---- queries -------------------------------------------------------------------------------------------


def parsed(df: Any) -> Any:
    """Columns ``time``, ``word`` and ``number`` of records made by ``Service.send``."""
    from pyspark.sql import functions as F

    parts = F.split(F.col("value").cast("string"), ":")
    return df.select(
        F.timestamp_seconds(parts[0].cast("long")).alias("time"),
        F.col("key").cast("string").alias("word"),
        parts[1].cast("long").alias("number"),
    )


def output(df: Any, *columns: str) -> Any:
    """The word as key, the other columns as ``1:2:3``."""
    from pyspark.sql import functions as F

    texts = [F.coalesce(F.col(name).cast("string"), F.lit("none")) for name in columns]
    return df.select(F.col("word").alias("key"), F.concat_ws(":", *texts).alias("value"))


def copies(events: Any) -> Any:
    return output(events, "number")


def totals(*events: Any) -> Any:
    """Count and sum per word, over everything."""
    from pyspark.sql import functions as F

    union = events[0]
    for more in events[1:]:
        union = union.unionByName(more)
    return output(union.groupBy("word").agg(F.count("*").alias("count"), F.sum("number").alias("sum")), "count", "sum")


def windows(events: Any) -> Any:
    """Count and sum per word and window of 10 seconds, up to 5 seconds late."""
    from pyspark.sql import functions as F

    grouped = events.withWatermark("time", "5 seconds").groupBy(F.window("time", "10 seconds"), "word")
    sums = grouped.agg(F.count("*").alias("count"), F.sum("number").alias("sum"))
    return output(sums.withColumn("start", F.unix_seconds("window.start")), "start", "count", "sum")


def join(kind: str) -> Callable[..., Any]:
    """What of the right came within 10 seconds after the left, by word."""

    def build(left: Any, right: Any) -> Any:
        from pyspark.sql import functions as F

        later = right.select(F.col("time").alias("then"), F.col("word").alias("same"), F.col("number").alias("other"))
        joined = left.withWatermark("time", "2 seconds").join(
            later.withWatermark("then", "2 seconds"),
            F.expr("word = same AND then >= time AND then <= time + INTERVAL 10 SECONDS"),
            kind,
        )
        return output(joined, "number", "other")

    return build


def without_duplicates(events: Any) -> Any:
    return output(
        events.withWatermark("time", "10 seconds").dropDuplicatesWithinWatermark(["word", "number"]), "number"
    )


def transformed(events: Any) -> Any:
    """A word's sum, ten seconds after its first event: a timer writes it and forgets the word."""
    return output(
        events.withWatermark("time", "1 second")
        .groupBy("word")
        .transformWithState(summing_processor(), "word string, count long, sum long", "append", "EventTime"),
        "count",
        "sum",
    )


def summing_processor() -> Any:
    # Made here: a class of this module would be pickled by its name, which Spark's workers cannot import.
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class Summing(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle
            self.kept = handle.getValueState("kept", "count long, sum long")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            rows = list(rows)
            if any(row.number < 0 for row in rows):
                raise ValueError(f"{key[0]} goes below zero")
            if self.kept.exists():
                count, total = self.kept.get()
            else:
                count = total = 0
                first = min(int(row.time.timestamp()) for row in rows)
                self.handle.registerTimer((first + 10) * 1000)
            self.kept.update((count + len(rows), total + sum(row.number for row in rows)))
            return iter(())

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
            count, total = self.kept.get()
            self.kept.clear()
            yield Row(word=key[0], count=count, sum=total)

        def close(self) -> None: ...

    return Summing()


def remembered(events: Any) -> Any:
    """For each word a text that was made up at its first event, and how many events there were."""
    grouped = events.select("word").groupBy("word")
    kept = grouped.transformWithState(
        remembering_processor(), "word string, made_up string, count long", "update", "None"
    )
    return output(kept, "made_up", "count")


def remembering_processor() -> Any:
    import uuid

    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class Remembering(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.kept = handle.getValueState("kept", "made_up string, count long")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            made_up, count = self.kept.get() if self.kept.exists() else (uuid.uuid4().hex, 0)
            count += sum(1 for _ in rows)
            self.kept.update((made_up, count))
            yield Row(word=key[0], made_up=made_up, count=count)

        def close(self) -> None: ...

    return Remembering()


# ---- what must come out, in plain Python ---------------------------------------------------------------


def sums(events: Iterable[Event], *, of: Iterable[str] | None = None) -> list[str]:
    """As ``totals``, of all words or of some."""
    grouped: dict[str, list[int]] = {}
    for _, word, number in events:
        grouped.setdefault(word, []).append(number)
    return sorted(f"{w}:{len(ns)}:{sum(ns)}" for w, ns in grouped.items() if of is None or w in of)


def window_sums(events: Iterable[Event], starts: Iterable[int]) -> list[str]:
    """As ``windows``, of these windows."""
    grouped: dict[tuple[int, str], list[int]] = {}
    for second, word, number in events:
        grouped.setdefault((second // 10 * 10, word), []).append(number)
    return sorted(f"{w}:{start}:{len(ns)}:{sum(ns)}" for (start, w), ns in grouped.items() if start in set(starts))


def every_second(first: int, last: int) -> list[Event]:
    return [(second, "abc"[second % 3], second) for second in range(first, last)]


# ---- a query goes on where it was, with its state ------------------------------------------------------


@pytest.mark.long
def test_windows_are_closed_by_later_records(make_service: Any) -> None:
    """Also by those after a restart; and what was late before it is late after it."""
    service = make_service(windows)
    first, more = every_second(0, 30), every_second(22, 40)
    service.send(first)
    service.run()
    assert service.new() == window_sums(first, [0, 10])
    late, closing = [(3, "a", 1000), (12, "b", 1000)], [(100, "z", 1)]
    service.send([*late, *more, *closing])
    service.run()
    assert service.new() == window_sums(first + more, [20, 30])


def test_the_session_keeps_state_in_rocksdb_with_changelogs(onceflow_spark: Any) -> None:
    settings = onceflow_spark.conf
    assert settings.get("spark.sql.streaming.stateStore.providerClass").endswith(".RocksDBStateStoreProvider")
    assert settings.get("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled") == "true"


@pytest.mark.long
@pytest.mark.short_form
@pytest.mark.parametrize("output_mode", ["complete", pytest.param("update", marks=pytest.mark.long)])
def test_totals(make_service: Any, output_mode: str) -> None:
    service = make_service(totals, output_mode=output_mode)
    first, more = every_second(0, 30), [(30, "a", 7), (31, "d", 8)]
    service.send(first)
    service.run()
    assert service.new() == sums(first)
    service.send(more)
    service.run()
    assert service.new() == sums(first + more, of="ad" if output_mode == "update" else None)


@pytest.mark.parametrize("kind", ["left_outer", pytest.param("inner", marks=pytest.mark.long)])
def test_join_of_two_topics(make_service: Any, setting: Any, kind: str) -> None:
    """Pairs are found across a restart; the left without a partner comes out when none can come any more."""
    setting(STATE_FORMAT, "2" if kind == "inner" else "1")
    service = make_service(join(kind), topics=2)
    service.send([(10, "a", 1), (11, "b", 2), (12, "c", 3)], [(12, "a", 10), (9, "b", 20), (13, "x", 30)])
    service.run()
    assert service.new() == ["a:1:10"]
    service.send([(60, "z", 4)], [(20, "b", 40), (60, "y", 50)])
    service.run()
    assert service.new() == (["b:2:40"] if kind == "inner" else ["b:2:40", "c:3:none"])


@pytest.mark.long
def test_duplicates_are_known_for_as_long_as_the_watermark_says(make_service: Any) -> None:
    service = make_service(without_duplicates)
    service.send([(10, "a", 1), (12, "a", 1), (11, "b", 2)])
    service.run()
    assert service.new() == ["a:1", "b:2"]
    service.send([(13, "a", 1), (13, "b", 3), (40, "c", 4)])
    service.run()
    assert service.new() == ["b:3", "c:4"]
    service.send([(41, "a", 1), (41, "c", 4)])  # a's is forgotten: 20 is past; c's is not
    service.run()
    assert service.new() == ["a:1"]


@pytest.mark.long
@pytest.mark.spark_since(4, 1)
def test_transform_with_state(make_service: Any, setting: Any) -> None:
    """Python's ``transformWithState``: values and timers survive restarts, timers fire once."""
    setting(STATE_FORMAT, "2")
    service = make_service(transformed)
    service.send([(1, "a", 1), (4, "a", 2), (5, "b", 5)])
    service.run()
    assert service.new() == []
    # The watermark of 20 fires a's timer, of 11, and b's, of 15, but not c's, of 22.
    service.send([(6, "a", 4), (12, "c", 9), (21, "c", 1)])
    service.run()
    assert service.new() == ["a:3:7", "b:1:5"]


@pytest.mark.spark_since(4, 1)
@pytest.mark.long
def test_a_state_function_that_raises(make_service: Any) -> None:
    """The error says what it has raised, and where."""
    service = make_service(transformed)
    service.send([(1, "a", -1)])
    with pytest.raises(onceflow.BatchAbortedError) as caught:
        service.run()
    place = r"\(raised in handleInputRows, test_checkpoint\.py:\d+\)"
    assert re.fullmatch(rf"ValueError: a goes below zero {place}", caught.value.detail)


@pytest.mark.long
def test_two_topics_and_files_in_one_query(make_service: Any, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    spark: Any = None

    def build(*topics: Any) -> Any:
        schema = "time timestamp, word string, number long"
        return totals(*topics, spark.readStream.schema(schema).json(str(files)))

    service = make_service(build, topics=2, output_mode="update")
    spark = service.spark
    write_events(files / "1.json", [(0, "a", 100), (0, "f", 200)])
    service.send([(0, "a", 1), (0, "b", 2)], [(0, "a", 10), (0, "c", 30)])
    service.run()
    assert service.new() == ["a:3:111", "b:1:2", "c:1:30", "f:1:200"]
    write_events(files / "2.json", [(0, "f", 300)])
    service.send([], [(0, "b", 20)])
    service.run()
    assert service.new() == ["b:2:22", "f:2:500"]
    service.run()
    assert service.new() == []
    ends = {place: end for topic in service.sources for place, end in end_offsets(service, topic).items()}
    assert independent.committed_offsets(service.bootstrap, service.name) == ends


def write_events(path: Path, events: list[Event]) -> None:
    lines = [json.dumps({"time": "1970-01-01T00:00:00Z", "word": w, "number": n}) for _, w, n in events]
    path.write_text("\n".join(lines))


def end_offsets(service: Service, topic: str) -> dict[tuple[str, int], int]:
    return independent.end_offsets(service.bootstrap, topic)


@pytest.mark.long
@pytest.mark.parametrize("topics", [1, 0])
def test_files_and_a_rate_source(make_service: Any, tmp_path: Path, topics: int) -> None:
    """Their position is in the checkpoint only: each of their rows comes out once, whatever the runs."""
    files = tmp_path / "files"
    files.mkdir()
    spark: Any = None

    def build(*events: Any) -> Any:
        text = spark.readStream.text(str(files)).selectExpr("'file' AS key", "value")
        rate = spark.readStream.format("rate").option("rowsPerSecond", 20).load()
        union = text.unionByName(rate.selectExpr("'rate' AS key", "CAST(value AS STRING) AS value"))
        for more in events:
            union = union.unionByName(output(more, "number"))
        return union

    service = make_service(build, topics=topics)
    spark = service.spark
    expected: list[str] = []
    rates: list[int] = []

    def read_rates() -> int:
        rates.extend(int(text.removeprefix("rate:")) for text in service.new() if text.startswith("rate:"))
        return len(rates)

    for run in range(2):
        (files / f"{run}.txt").write_text(f"line-{run}")
        expected.append(f"file:line-{run}")
        if topics:
            service.send([(0, "topic", run)])
            expected.append(f"topic:{run}")
        query = service.start(trigger="100 milliseconds")
        try:
            wait_until(
                lambda wanted=20 * run + 20: read_rates() >= wanted and len(service.seen) >= len(expected) + len(rates),
                60,
                lambda run=run: f"all of run {run}, not only {service.seen}",
                useless=lambda query=query: not query.isActive and "the query has ended",
            )
        finally:
            query.stop()
        read_rates()
    assert sorted(rates) == list(range(len(rates)))
    assert sorted(text for text in service.seen.elements() if not text.startswith("rate:")) == sorted(expected)


# ---- a batch that Kafka has committed and Spark has not ------------------------------------------------


def check_state_files(checkpoint: Path, state_format: int) -> None:
    """RocksDB with a changelog; the commit log names state files with format 2 only."""
    changelogs = list((checkpoint / "state").rglob("*.changelog"))
    assert changelogs, "the state is not kept as a changelog"
    # Version and, with format 2, an id that is the attempt's own.
    assert all(file.stem.isdecimal() == (state_format == 1) for file in changelogs), changelogs[:3]
    settings = json.loads((checkpoint / "offsets" / "0").read_text().splitlines()[1])["conf"]
    assert settings["spark.sql.streaming.stateStore.providerClass"].endswith(".RocksDBStateStoreProvider")


@pytest.fixture
def draining(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is not known what Spark's commit log has to say: the batch is run again."""
    monkeypatch.setattr(checkpoint_location, "COMPLETE_COMMIT_LOG", False)


@pytest.mark.parametrize(
    "state_format, completes",
    [
        # Each format and each way is left for `make test-long`.
        pytest.param(2, False, marks=pytest.mark.spark_since(4, 0)),
        pytest.param(1, True, marks=pytest.mark.long),
        pytest.param(1, False, marks=pytest.mark.long),
        pytest.param(2, True, marks=[pytest.mark.long, pytest.mark.spark_since(4, 0)]),
    ],
    indirect=["state_format"],
)
def test_a_batch_that_spark_does_not_know_to_be_committed(
    make_service: Any, setting: Any, state_format: int, completes: bool, request: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of it is written twice, and the next batch has its state and its watermark."""
    if not completes:
        request.getfixturevalue("draining")
    service = make_service(windows)
    setting(NO_DATA_BATCHES, "false")
    first, second, more = every_second(0, 16), every_second(16, 30), every_second(25, 35)
    service.send(first)
    service.run()
    service.send(second)
    query = service.run()
    assert service.new() == window_sums(first, [0])  # at a watermark of 10; that of 24 is the next batch's
    number = query.batches[-1].batch
    forgotten = service.forget_last_commit()
    setting(NO_DATA_BATCHES, "true")
    service.send([(5, "a", 1000), *more, (100, "z", 1)])
    query = service.run()
    if completes:
        assert query._sink.drained == []
        assert "Spark's commit log is completed" in caplog.text
        assert (service.checkpoint / "commits" / "1").read_text() == forgotten
    else:
        assert query._sink.drained == [number]
        assert "run again for its state only" in caplog.text
    # Without the watermark of 24 the next batch would close nothing, and take the late event in.
    assert [batch.records for batch in query.batches] == [3, 6]
    assert service.new() == window_sums(first + second + more, [10, 20, 30])
    check_state_files(service.checkpoint, state_format)


@pytest.mark.parametrize("guarantee", ["exactly_once", pytest.param("at_most_once", marks=pytest.mark.long)])
def test_the_very_first_batch_is_run_again_for_its_state_only(
    make_service: Any, draining: None, guarantee: str
) -> None:
    """With each guarantee: without failures they give the same."""
    service = make_service(totals, output_mode="update", guarantee=guarantee)
    first, more = every_second(0, 9), every_second(9, 12)
    service.send(first)
    service.run()
    assert service.new() == sums(first)
    service.forget_last_commit()
    service.send(more)
    query = service.run()
    assert query._sink.drained == [1]
    assert [batch.batch for batch in query.batches] == [2]
    assert service.new() == sums(first + more)


@pytest.mark.long
@pytest.mark.spark_since(4, 1)
@pytest.mark.parametrize("state_format", [2, 1], indirect=True)
def test_a_failed_attempt_leaves_nothing_in_the_state(
    make_service: Any, state_format: int, inject: Callable[..., None], tmp_path: Path
) -> None:
    """What follows goes on from the state of the attempt that was committed, not from that of the first one.

    The two differ: the query remembers for each word a text that the attempt has made up.
    """
    service = make_service(remembered, output_mode="update", engine="tasks")
    fired = tmp_path / "fired"
    inject("write", "raise", where="task", batch=1, once_file=str(fired))
    service.send([(0, "a", 1), (0, "b", 2), (0, "c", 3)])
    again = state_format == 1 or versions.has("clean lineage")
    if not again:
        with pytest.raises(onceflow.BatchAbortedError, match=r"Spark before 4\.2 [\s\S]*: injected at write"):
            service.run()
        assert fired.exists()
    query = service.start()
    try:
        query.processAllAvailable()
        service.send([(0, "a", 4)])
        query.processAllAvailable()
    finally:
        query.stop()
    assert fired.exists()
    assert [batch.attempts for batch in query.batches] == [2 if again else 1, 1]
    service.send([(0, "a", 5), (0, "b", 6)])
    service.run()
    records = [text.split(":") for text in service.new()]
    assert len({(word, made_up) for word, made_up, _ in records}) == 3, "state of another attempt"
    counts = sorted((word, int(count)) for word, _, count in records)
    assert counts == [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2), ("c", 1)]


# ---- sources that change while the flow stands still ---------------------------------------------------


@pytest.mark.long
def test_new_partitions(make_service: Any) -> None:
    """Progress moves when they are found, also by a start that writes nothing; Spark's log does not."""
    from confluent_kafka.admin import AdminClient, NewPartitions

    service = make_service(totals, output_mode="update")
    first, more = every_second(0, 9), every_second(9, 30)
    service.send(first)
    service.run()
    admin = AdminClient({"bootstrap.servers": service.bootstrap})
    for future in admin.create_partitions([NewPartitions(service.sources[0], 4)]).values():
        future.result(30)
    service.send([(second, f"{word}{second}", 1) for second, word, _ in more])
    with pytest.raises(onceflow.UnknownTopicError):
        service.start(topic="never-made")
    query = service.run()
    assert query._sink.drained == []
    assert service.new() == sorted(sums(first) + [f"{word}{second}:1:1" for second, word, _ in more])
    assert independent.committed_offsets(service.bootstrap, service.name) == end_offsets(service, service.sources[0])


@pytest.mark.long
def test_expired_records_are_skipped_when_allowed(make_service: Any) -> None:
    """Also when a start before has moved progress over them, and then wrote nothing."""
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    service = make_service(totals, output_mode="update")
    service.send([(0, "a", 1), (0, "a", 2)])
    service.run()
    service.send([(0, "a", 10), (0, "a", 20), (0, "a", 30)])
    ends = end_offsets(service, service.sources[0])
    admin = AdminClient({"bootstrap.servers": service.bootstrap})
    partition = max(ends, key=lambda place: ends[place])[1]
    cut = TopicPartition(service.sources[0], partition, ends[service.sources[0], partition] - 1)
    for future in admin.delete_records([cut]).values():
        future.result(30)
    skipping = {"read": {"fail_on_data_loss": False}}
    with pytest.raises(onceflow.UnknownTopicError):
        service.start(topic="never-made", **skipping)
    service.run(**skipping)
    assert service.new() == ["a:2:3", "a:3:33"]


# ---- lost rows -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_batch_that_at_most_once_loses_is_in_the_state(make_service: Any, tmp_path: Path) -> None:
    """Its rows are lost, its source records are not read again: so the state has to know of them."""
    fired = str(tmp_path / "fired")

    def build(events: Any) -> Any:
        from pyspark.sql import functions as F

        def fails_once(word):  # type: ignore[no-untyped-def]  # Spark takes hints for those of a pandas function
            try:
                Path(fired).open("x").close()
            except FileExistsError:
                return word
            raise ValueError("for once")

        return totals(events.withColumn("word", F.udf(fails_once, "string")("word")))

    service = make_service(build, output_mode="update", guarantee="at_most_once")
    first, more = every_second(0, 9), every_second(9, 12)
    service.send(first)
    query = service.run()
    assert [batch.lost for batch in query.batches] == [True]
    assert service.new() == []
    service.send(more)
    query = service.run()
    assert [(batch.batch, batch.lost) for batch in query.batches] == [(2, False)]
    assert service.new() == sums(first + more)


# ---- checkpoints that do not belong --------------------------------------------------------------------


def test_checkpoints_that_do_not_belong(make_service: Any) -> None:
    """Each of them is refused and said what it is; nothing is written, and the right one still goes on."""
    service, other = make_service(copies), make_service(copies)
    kept, older = service.folder / "kept", service.folder / "older"
    for one in (service, other):
        one.send(every_second(0, 3))
        one.run()
    shutil.copytree(service.checkpoint, older)
    service.send(every_second(3, 6))
    service.run()
    shutil.copytree(service.checkpoint, kept)
    service.new()

    shutil.rmtree(service.checkpoint)
    service.refused("The checkpoint is empty", "has committed 2 batches", str(service.checkpoint))
    shutil.copytree(older, service.checkpoint)
    service.refused("older than the flow's progress", "restored from a backup?")
    service.refused("belongs to another query", "has finished batch 0", checkpoint=other.checkpoint)
    shutil.copytree(kept, service.checkpoint, dirs_exist_ok=True)
    log = service.checkpoint / "offsets" / str(service.last_commit())
    right = log.read_text()
    lines = right.splitlines()
    lines[-1] = json.dumps({service.sources[0]: {"0": 0, "1": 0}})
    log.write_text("\n".join(lines))
    service.refused("and the flow's progress have diverged")
    log.write_text(right)
    assert service.new() == []

    service.send(every_second(6, 9))
    service.run()
    assert service.new() == sorted(f"{word}:{number}" for _, word, number in every_second(6, 9))

    reset(ClientSettings(service.bootstrap, {}), Names(service.name, "", ""), service.sources)
    service.refused("belongs to another query", "has never committed a batch, or was reset")


@pytest.mark.long
def test_an_empty_checkpoint_goes_on_at_committed_offsets_when_asked_to(
    make_service: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is read twice, and nothing is known of what was read before."""
    service = make_service(totals, output_mode="update")
    first, more = every_second(0, 9), every_second(9, 12)
    service.send(first)
    service.run()
    assert service.new() == sums(first)
    fresh = service.folder / "fresh"
    service.refused("The checkpoint is empty", str(fresh), checkpoint=fresh)
    service.send(more)
    query = service.run(checkpoint=fresh, on_checkpoint_conflict="resume")
    assert [batch.batch for batch in query.batches] == [2]
    assert "continues at its committed offsets with empty Spark state" in caplog.text
    assert service.new() == sums(more)
    # From now on this is the flow's checkpoint, and the old one is another query's.
    service.refused("belongs to another query", on_checkpoint_conflict="resume")
    service.send(more)
    service.run(checkpoint=fresh)
    assert service.new() == sums(more + more)


@pytest.mark.long
def test_a_flow_begins_to_keep_a_checkpoint_and_gives_it_up(make_service: Any) -> None:
    """Both are changes of mind that have to be said."""
    service = make_service(copies)
    service.send(every_second(0, 3))
    service.run(checkpoint=None)
    service.refused("The checkpoint is empty", "has committed 1 batch without a checkpoint")
    service.send(every_second(3, 6))
    service.run(on_checkpoint_conflict="resume")
    service.send(every_second(6, 9))
    service.run(checkpoint=None)
    assert service.new() == sorted(f"{word}:{number}" for _, word, number in every_second(0, 9))
    service.refused("belongs to another query", "without a checkpoint since")


@pytest.mark.long
def test_an_empty_checkpoint_of_other_sources_cannot_be_resumed(make_service: Any, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "1.txt").write_text("line-1")
    spark: Any = None

    def build(events: Any) -> Any:
        text = spark.readStream.text(str(files)).selectExpr("'file' AS key", "value")
        return text.unionByName(output(events, "number"))

    service = make_service(build)
    spark = service.spark
    service.send([(0, "a", 1)])
    service.run()
    with pytest.raises(onceflow.ProgressConflictError, match="position was in the old one") as caught:
        service.start(once=True, checkpoint=service.folder / "fresh", on_checkpoint_conflict="resume")
    assert f"onceflow reset {service.name}" in caught.value.next_step


# ---- queries that are refused --------------------------------------------------------------------------


def test_output_modes_that_are_refused(make_service: Any) -> None:
    service = make_service(totals)
    service.send(every_second(0, 3))
    for mode in ("update", "complete"):
        with pytest.raises(
            onceflow.UnsupportedQueryError, match=r"state in Spark \(an aggregation\), which needs a check"
        ):
            service.start(checkpoint=None, output_mode=mode)
    with pytest.raises(onceflow.UnsupportedQueryError, match=r"(?s)Spark refuses the query.*[Ww]atermark"):
        service.start()
    service.build = copies
    for mode in ("update", "complete"):
        with pytest.raises(onceflow.OptionError, match=f"'{mode}' needs a checkpoint"):
            service.start(checkpoint=None, output_mode=mode)
    with pytest.raises(onceflow.UnsupportedQueryError, match=r"(?s)Spark refuses the query.*output_mode"):
        service.start(output_mode="complete")
    assert service.new() == []


@pytest.mark.parametrize(
    "write, words", [({"checkpoint": "somewhere"}, "checkpoint="), ({"guarantee": "at_most_once"}, "guarantee=")]
)
def test_processors_keep_their_state_elsewhere(make_state_pipe: Any, write: dict[str, str], words: str) -> None:
    pipe = make_state_pipe(partitions=1)
    with pytest.raises(onceflow.UnsupportedQueryError, match=f"Flow.process cannot be combined with {words}") as caught:
        pipe.start(**write)
    assert caught.value.flow == pipe.flow
    assert caught.value.next_step


class Silent(onceflow.Processor):
    """Sends nothing."""

    def process(self, key: bytes, records: Any, state: Any) -> Iterator[onceflow.Record]:
        yield from ()


def test_a_processor_takes_no_state_in_spark(make_service: Any) -> None:
    service = make_service(totals)
    with closing(onceflow.Flow(service.name, service.spark, bootstrap_servers=service.bootstrap)) as flow:
        sums = totals(parsed(flow.read(service.sources[0])))
        with pytest.raises(onceflow.UnsupportedQueryError, match=r"Flow.process cannot take .*an aggregation"):
            flow.process(sums, Silent(), table="sums")
