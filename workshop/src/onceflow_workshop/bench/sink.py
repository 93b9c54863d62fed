"""Throughput of the sink against Spark's own, cost of a small batch, time to the first commit.

Everything runs in one SparkSession against one broker, contenders take turns, and every figure comes from
Spark's own progress reports, the same for both. Claims are ratios within a run: this machine is not yours.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onceflow.broker.local import LocalBroker
from onceflow.client.settings import ClientSettings
from onceflow.testing.broker import create_topic
from onceflow.testing.independent import fill
from onceflow_workshop.bench.environment import end_session, stop_query

PARTITIONS = 4
VALUE_BYTES = 1024
SMALL_ROWS = 400
SPARK = "spark"
# Spark's own sink behind the consumer settings that Flow.read uses: what of the difference is theirs?
SPARK_TUNED = "spark, our reader settings"
CONTENDERS = (SPARK, SPARK_TUNED, "source", "round_robin", "key")
LARGE_VALUE_BYTES = 500_000


@dataclass(frozen=True)
class Choices:
    """What to measure.

    Args:
        records: in the source topic, 1 KiB each.
        records_per_batch: bound of a batch, for every contender.
        rounds: how often each contender runs; medians are reported.
        small_batches: batches of ``SMALL_ROWS`` records in the latency part.
    """

    records: int
    records_per_batch: int
    rounds: int
    small_batches: int
    cores: int = 2


@dataclass
class Measured:
    """One run of one contender."""

    contender: str
    rows_per_s: float
    batch_ms: list[float]
    steps_ms: dict[str, float] = field(default_factory=dict)
    max_worker_mib: float = 0.0


def run(choices: Choices, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Run all parts; yields one result (a JSON object) after the other."""
    from onceflow.session import session

    with tempfile.TemporaryDirectory(prefix="onceflow-") as folder, LocalBroker(Path(folder) / "broker") as broker:
        servers = broker.bootstrap_servers
        say(f"broker at {servers}; producing {choices.records:,} records of {VALUE_BYTES} bytes")
        source = _filled(servers, "bench-in", choices.records)
        small = _filled(servers, "bench-small", SMALL_ROWS * choices.small_batches)
        spark = session(app_name="onceflow-bench", master=f"local[{choices.cores}]")
        try:
            yield from _throughput(spark, servers, source, choices, say)
            yield from _small_batches(spark, servers, small, say)
            yield from _memory(spark, servers, source, choices, say)
        finally:
            end_session(spark)
        say("time to the first commit, in a process of its own")
        yield _first_commit(servers, source)


def _filled(servers: str, prefix: str, records: int) -> str:
    topic = f"{prefix}-{uuid.uuid4().hex[:6]}"
    create_topic(servers, topic, PARTITIONS)
    pool = os.urandom(1 << 20)

    def rows() -> Iterator[tuple[bytes, bytes]]:
        for n in range(records):
            start = (n * 7919) % ((1 << 20) - VALUE_BYTES)
            yield n.to_bytes(8, "big"), pool[start : start + VALUE_BYTES]

    fill(servers, topic, rows())
    return topic


# ---- parts ---------------------------------------------------------------------------------------------


def _throughput(
    spark: Any, servers: str, source: str, choices: Choices, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    say("warming up")
    for contender in CONTENDERS:
        _run_once(spark, servers, source, contender, choices.records_per_batch, max_batches=2)
    found: dict[str, list[Measured]] = {contender: [] for contender in CONTENDERS}
    for turn in range(choices.rounds):
        order = CONTENDERS if turn % 2 == 0 else tuple(reversed(CONTENDERS))
        for contender in order:
            measured = _run_once(spark, servers, source, contender, choices.records_per_batch)
            found[contender].append(measured)
            say(f"round {turn + 1} of {choices.rounds}: {contender:7} {measured.rows_per_s:10,.0f} rows/s")
    base = statistics.median(m.rows_per_s for m in found[SPARK])
    for contender, runs in found.items():
        rates = sorted(m.rows_per_s for m in runs)
        yield {
            "bench": "throughput",
            "contender": contender,
            "guarantee": "at_least_once" if contender in (SPARK, SPARK_TUNED) else "exactly_once",
            "rows_per_s": round(statistics.median(rates)),
            "min_rows_per_s": round(rates[0]),
            "max_rows_per_s": round(rates[-1]),
            "ratio_to_spark": round(statistics.median(rates) / base, 2),
            "max_worker_mib": round(max(m.max_worker_mib for m in runs), 1),
            "records": choices.records,
            "records_per_batch": choices.records_per_batch,
        }


def _small_batches(spark: Any, servers: str, source: str, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    say(f"batches of {SMALL_ROWS} rows")
    base = 0.0
    for contender in (SPARK, SPARK_TUNED, "key"):
        measured = _run_once(spark, servers, source, contender, SMALL_ROWS)
        warm = measured.batch_ms[len(measured.batch_ms) // 3 :]
        median = statistics.median(warm)
        base = base or median
        yield {
            "bench": "small_batch",
            "contender": contender,
            "rows": SMALL_ROWS,
            "trigger_ms_median": round(median, 1),
            "trigger_ms_p90": round(sorted(warm)[int(len(warm) * 0.9)], 1),
            "ratio_to_spark": round(median / base, 2),
            "steps_ms_median": {name: round(ms, 1) for name, ms in measured.steps_ms.items()},
        }


def _memory(
    spark: Any, servers: str, source: str, choices: Choices, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Peak memory of a Python worker when everything is one batch, of small and of large values."""
    say("memory of a worker")
    large = f"bench-large-{uuid.uuid4().hex[:6]}"
    create_topic(servers, large, PARTITIONS)
    value = os.urandom(LARGE_VALUE_BYTES)
    fill(servers, large, ((n.to_bytes(8, "big"), value) for n in range(1000)))
    for topic, value_bytes, records in ((source, VALUE_BYTES, choices.records), (large, LARGE_VALUE_BYTES, 1000)):
        for partitioner in ("round_robin", "key"):
            memory = _peak_mib(spark, servers, topic, partitioner)
            yield {
                "bench": "memory",
                "contender": partitioner,
                "records_in_one_batch": records,
                "value_bytes": value_bytes,
                "max_worker_mib": memory,
            }


def _peak_mib(spark: Any, servers: str, source: str, partitioner: str) -> float:
    from onceflow import Flow

    target = f"bench-out-{uuid.uuid4().hex[:6]}"
    create_topic(servers, target, PARTITIONS)
    flow = Flow(target, spark, bootstrap_servers=servers)
    df = flow.read(source, max_records_per_batch=None).select("key", "value")
    query = flow.write(df, topic=target, partitioner=partitioner, engine="tasks", once=True).start()
    _wait(query, None)
    most = max(batch.max_rss_kib for batch in query.batches) / 1024
    flow.close()
    _delete(servers, target)
    return round(most, 1)


def _first_commit(servers: str, source: str) -> dict[str, Any]:
    """A driver as a user would start it, from process start to the first committed record."""
    code = "from onceflow_workshop.bench.sink import first_commit; first_commit()"
    answer = subprocess.run(
        [sys.executable, "-c", code, servers, source],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=180,
        check=True,
    )
    result: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return result


def first_commit() -> None:
    """Child process of the last part: prints one JSON line."""
    from onceflow import Flow
    from onceflow.session import session

    servers, source = sys.argv[1:3]
    target = f"bench-first-{uuid.uuid4().hex[:6]}"
    create_topic(servers, target, PARTITIONS)
    began = time.monotonic()
    spark = session(app_name="onceflow-first", master="local[2]")
    have_session = time.monotonic()
    flow = Flow(target, spark, bootstrap_servers=servers)
    df = flow.read(source).select("key", "value")
    have_read = time.monotonic()
    query = flow.write(df, topic=target).start()
    while query.isActive and not query.batches:
        time.sleep(0.01)
    committed = time.monotonic()
    first = query.batches[0]
    query.stop()
    print(
        json.dumps(
            {
                "bench": "first_commit",
                "session_s": round(have_session - began, 2),
                "read_s": round(have_read - have_session, 2),
                "start_to_first_commit_s": round(committed - have_read, 2),
                "first_batch_records": first.records,
                "first_batch_steps_s": {name: round(s, 3) for name, s in first.seconds.items()},
            }
        ),
        flush=True,
    )


# ---- one run -------------------------------------------------------------------------------------------


def _run_once(
    spark: Any, servers: str, source: str, contender: str, records_per_batch: int, *, max_batches: int | None = None
) -> Measured:
    """Copy the topic once, from its start to its end; the first batch of a run is not counted."""
    target = f"bench-out-{uuid.uuid4().hex[:6]}"
    create_topic(servers, target, PARTITIONS)
    try:
        if contender in (SPARK, SPARK_TUNED):
            return _run_spark(spark, servers, source, target, contender, records_per_batch, max_batches)
        return _run_onceflow(spark, servers, source, target, contender, records_per_batch, max_batches)
    finally:
        _delete(servers, target)


def _run_spark(
    spark: Any,
    servers: str,
    source: str,
    target: str,
    contender: str,
    records_per_batch: int,
    max_batches: int | None,
) -> Measured:
    settings = ClientSettings(servers).spark_reader() if contender == SPARK_TUNED else {}
    df = (
        spark.readStream.format("kafka")
        .options(**settings)
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", source)
        .option("startingOffsets", "earliest")
        .option("kafka.isolation.level", "read_committed")
        .option("maxOffsetsPerTrigger", records_per_batch)
        .load()
    )
    with tempfile.TemporaryDirectory(prefix="onceflow-bench-checkpoint-") as checkpoint:
        query = (
            df.select("key", "value")
            .writeStream.format("kafka")
            .option("kafka.bootstrap.servers", servers)
            .option("topic", target)
            .option("kafka.acks", "all")
            .option("checkpointLocation", Path(checkpoint).as_uri())
            .trigger(availableNow=True)
            .start()
        )
        _wait(query, max_batches)
        rows_per_s, batch_ms = _rates(query)
    return Measured(contender, rows_per_s, batch_ms)


def _run_onceflow(
    spark: Any,
    servers: str,
    source: str,
    target: str,
    partitioner: str,
    records_per_batch: int,
    max_batches: int | None,
) -> Measured:
    from onceflow import Flow

    flow = Flow(target, spark, bootstrap_servers=servers)
    df = flow.read(source, max_records_per_batch=records_per_batch).select("key", "value")
    query = flow.write(df, topic=target, partitioner=partitioner, once=True).start()
    _wait(query, max_batches)
    rows_per_s, batch_ms = _rates(query)
    batches = query.batches[len(query.batches) // 3 :]
    steps = {name: statistics.median(b.seconds[name] * 1000 for b in batches) for name in batches[0].seconds}
    memory = max((b.max_rss_kib for b in batches if b.path != "driver"), default=0) / 1024
    flow.close()
    return Measured(partitioner, rows_per_s, batch_ms, steps, memory)


def _wait(query: Any, max_batches: int | None) -> None:
    end = time.monotonic() + 600
    try:
        while query.isActive and (max_batches is None or len(query.recentProgress) < max_batches):
            if time.monotonic() > end:
                raise TimeoutError("a benchmark run took more than 600 s")
            query.awaitTermination(0.05)
    finally:
        stop_query(query)


def _rates(query: Any) -> tuple[float, list[float]]:
    """Rows per second and milliseconds per batch, from Spark's progress reports, without the first batch."""
    reports = [p for p in query.recentProgress if p["numInputRows"] > 0][1:]
    if not reports:
        return 0.0, []
    batch_ms = [float(p["durationMs"]["triggerExecution"]) for p in reports]
    rows = sum(int(p["numInputRows"]) for p in reports)
    return rows / (sum(batch_ms) / 1000), batch_ms


def _delete(servers: str, topic: str) -> None:
    from onceflow_workshop.testing.librdkafka import admin_client

    with admin_client(servers, {}) as admin:
        admin.delete_topics([topic])[topic].result(30)
