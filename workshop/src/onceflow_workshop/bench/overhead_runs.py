"""Runs of ``onceflow bench overhead``: a topic is copied by one of the sinks, measured, and counted."""

from __future__ import annotations

import json
import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onceflow_workshop.bench import latency
from onceflow_workshop.bench.environment import Bench
from onceflow_workshop.bench.latency_records import VALUE_BYTES
from onceflow_workshop.bench.overhead_figures import Commit, chosen_bound, commits_of, next_bound, rate_of, warm_span

EXACTLY, AT_LEAST, SPARK = "exactly_once", "at_least_once", "spark"
STEPS = ("plan", "begin", "write", "audit", "progress", "end")
LATENCY_TRIGGER = "100 milliseconds"
_MAX_CALIBRATIONS = 5
_REACHED = 0.7  # a batch with less than this part of its bound is limited by something else
_RUN_SECONDS = 120.0


@dataclass(frozen=True)
class Trigger:
    """How often a batch starts; ``name`` is part of the names of figures."""

    name: str
    text: str
    ms: float
    first_bound: int


@dataclass(frozen=True)
class Measured:
    """One run of one guarantee, its warm batches only."""

    records_per_s: float
    batch_ms: list[float]
    idle: float
    path: str
    steps_ms: Mapping[str, list[float]]
    problem: str = ""


def records(count: int) -> Iterator[tuple[bytes, bytes]]:
    """Keys are numbers, values cannot be compressed."""
    pool = os.urandom(1 << 20)
    for number in range(count):
        start = (number * 7919) % ((1 << 20) - VALUE_BYTES)
        yield number.to_bytes(8, "big"), pool[start : start + VALUE_BYTES]


def _started(bench: Bench, source: str, target: str, contender: str, trigger: str, bound: int | None) -> Any:
    """A running query that copies a topic."""
    if contender == SPARK:
        return _spark_query(bench, source, target, trigger)
    from onceflow import Flow

    flow = Flow(target, bench.spark, bootstrap_servers=bench.servers)
    try:
        df = flow.read(source, max_records_per_batch=bound).select("key", "value")
        return flow.write(df, topic=target, trigger=trigger, guarantee=contender).start()
    except BaseException:
        flow.close()
        raise


def _spark_query(bench: Bench, source: str, target: str, trigger: str) -> Any:
    """Spark's own sink behind the reader settings of ``Flow.read``, with a checkpoint on the same fast file system."""
    from onceflow.client.settings import ClientSettings

    df = (
        bench.spark.readStream.format("kafka")
        .options(**ClientSettings(bench.servers).spark_reader())
        .option("subscribe", source)
        .option("startingOffsets", "earliest")
        .option("kafka.isolation.level", "read_committed")
        .load()
    )
    return (
        df.select("key", "value")
        .writeStream.format("kafka")
        .option("kafka.bootstrap.servers", bench.servers)
        .option("topic", target)
        .option("kafka.acks", "all")
        .option("checkpointLocation", (bench.folder / f"{target}-{uuid.uuid4().hex[:6]}").as_uri())
        .trigger(processingTime=trigger)
        .start()
    )


def copy_once(bench: Bench, source: str, count: int, guarantee: str, trigger: Trigger, bound: int) -> Measured:
    """Copy the whole topic, and count what came out."""
    target = bench.topic("bench-out")
    try:
        query, commits = _copied(bench, source, target, count, guarantee, trigger, bound)
        first, end = warm_span(commits)
        if end <= first:
            raise RuntimeError(f"a run of {len(commits)} batches is too short to be measured: raise --seconds")
        rate, idle = rate_of(commits, first, end)
        # The flow's own record of its batches has the last 200 of them. The direct engine makes them as large as fits
        # the trigger, whatever the bound. Small ones are left out.
        recent = query.batches[first - len(commits) :]
        usual = statistics.median(batch.max_rows for batch in recent)
        batches = [batch for batch in recent if batch.max_rows >= usual * 0.9]
        steps = {step: [batch.seconds.get(step, 0.0) * 1000 for batch in batches] for step in STEPS}
        path = "/".join(dict.fromkeys(batch.path for batch in batches))
        batch_ms = [commit.ended_ms - commit.began_ms for commit in commits[first:end]]
        return Measured(rate, batch_ms, idle, path, steps, problem_of(bench, target, count))
    finally:
        bench.delete(target)


def measure_latency(
    bench: Bench, contender: str, records_per_second: int, seconds: float
) -> tuple[list[float], list[float], str]:
    """Milliseconds of the records, those of the batches, and what is wrong with the output."""
    source, target = bench.topic("bench-live"), bench.topic("bench-out")
    try:
        query = _started(bench, source, target, contender, LATENCY_TRIGGER, None)
        try:
            plan = latency.Plan(bench.servers, source, target, records_per_second, 4.0, seconds)
            probed = latency.measure(plan, lambda: bool(query.isActive))
        finally:
            query.stop()
        commits = commits_of(query.recentProgress)
        warm_from_ms = commits[-1].ended_ms - seconds * 1000
        batch_ms = [commit.ended_ms - commit.began_ms for commit in commits if commit.ended_ms >= warm_from_ms]
        return probed.latencies_ms, batch_ms, problem_of(bench, target, probed.sent)
    finally:
        bench.delete(source, target)


def calibrated(bench: Bench, trigger: Trigger) -> tuple[int, float, int]:
    """How many records fill the trigger, at at-least-once; the milliseconds of such a batch, and its records. The same
    bound is used for both guarantees.

    The direct engine limits its batches by itself: then a higher bound changes nothing any more.
    """
    tried: dict[int, float] = {}
    bound: int | None = trigger.first_bound
    for _ in range(_MAX_CALIBRATIONS):
        if bound is None:
            break
        ms, rows = batch_of(bench, AT_LEAST, trigger, bound)
        bench.say(f"{trigger.text}: a batch of {rows:,} records takes {ms:,.0f} ms, of at most {bound:,}")
        if rows < _REACHED * bound:
            return bound, ms, rows
        tried[bound] = ms
        bound = next_bound(tried, trigger.ms)
    bound = chosen_bound(tried, trigger.ms)
    return bound, tried[bound], bound


def batch_of(bench: Bench, guarantee: str, trigger: Trigger, bound: int) -> tuple[float, int]:
    """Median milliseconds and records of a batch; the first third does not count."""
    source = bench.topic("bench-warm")
    count = bench.fill(source, records(bound * (24 if trigger.ms < 1000 else 4)))
    target = bench.topic("bench-out")
    try:
        _, commits = _copied(bench, source, target, count, guarantee, trigger, bound)
        first, end = len(commits) // 3, len(commits) - 1  # the last one may be a rest
        usual = commits[first:end] or commits
        ms = statistics.median(commit.ended_ms - commit.began_ms for commit in usual)
        return ms, round(statistics.median(commit.rows for commit in usual))
    finally:
        bench.delete(source, target)


def _copied(
    bench: Bench, source: str, target: str, count: int, guarantee: str, trigger: Trigger, bound: int
) -> tuple[Any, list[Commit]]:
    """The query that has copied a topic, and its batches."""
    query = _started(bench, source, target, guarantee, trigger.text, bound)
    try:
        _wait(query, lambda: _read(query) >= count)
    finally:
        query.stop()
    return query, commits_of(query.recentProgress)


def _wait(query: Any, done: Callable[[], bool]) -> None:
    end = time.monotonic() + _RUN_SECONDS
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"a benchmark run took more than {_RUN_SECONDS:g} s")
        if query.awaitTermination(0.1):  # raises what it failed with
            raise RuntimeError("the query ended by itself")


def _read(query: Any) -> int:
    """Records that are committed; the sources begin at offset 0 and hold no markers."""
    report = query.lastProgress
    if report is None:
        return 0
    ends: list[Mapping[str, Mapping[str, int]]] = [_offsets(source["endOffset"]) for source in report["sources"]]
    return sum(offset for end in ends for partitions in end.values() for offset in partitions.values())


def _offsets(text: Any) -> Mapping[str, Mapping[str, int]]:
    return (json.loads(text) if isinstance(text, str) else text) or {}


def problem_of(bench: Bench, topic: str, count: int) -> str:
    """What is wrong with an output topic that shall hold the keys 0 to ``count``, each once."""
    seen = bytearray(count)
    total = 0
    for key in _keys(bench.servers, topic):
        number = int.from_bytes(key or b"", "big")
        if key is None or number >= count:
            return f"an unknown key {key!r}"
        seen[number] = 1
        total += 1
    distinct = sum(seen)
    if total == distinct == count:
        return ""
    return f"{total:,} records with {distinct:,} keys came out of {count:,}"


def _keys(servers: str, topic: str) -> Iterator[bytes | None]:
    """Of all committed records, by an independent consumer; open transactions are waited for."""
    from confluent_kafka import Consumer, TopicPartition

    from onceflow.testing.independent import end_offsets

    ends = end_offsets(servers, topic, isolation="read_uncommitted")
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "onceflow-bench-check",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, partition, 0) for _, partition in ends])
        waiting = {partition for (_, partition), end in ends.items() if end > 0}
        deadline = time.monotonic() + _RUN_SECONDS
        while waiting:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{topic}: partitions {sorted(waiting)} were not read to their end")
            for message in consumer.consume(10_000, 0.05):
                if message.error() is not None:
                    raise RuntimeError(f"{topic}: {message.error()}")
                yield message.key()
            for place in consumer.position([TopicPartition(topic, partition) for partition in waiting]):
                if place.offset >= ends[topic, place.partition]:
                    waiting.discard(place.partition)
    finally:
        consumer.close()
