"""What flows with windows write is what Spark's batch computes over the same topic, without the late records."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from pyspark.sql import functions as F

import onceflow
from onceflow import serdes, windows
from onceflow.errors import ProgressConflictError
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

RECORDS, STEP_MS, DISORDER_MS = 1200, 200, 20_000
START_MS = 1_700_000_000_000  # a time before 1970 is none
LAST_MS = START_MS + RECORDS * STEP_MS + 10 * DISORDER_MS + 5_500


class Summed(windows.WindowProcessor):
    key = serdes.STRING
    value = serdes.JSON
    allowed_lateness = DISORDER_MS / 1000
    aggregates = {  # noqa: RUF012
        "count": windows.Count(),
        "of_n": windows.Count("n"),
        "sum": windows.Sum("n"),
        "min": windows.Min("n"),
        "max": windows.Max("n"),
        "mean": windows.Mean("n"),
    }

    def __init__(self, window: Any) -> None:
        self.window = window

    def event_time(self, record: onceflow.Record) -> int:
        return int(record.value["at"])


KINDS = {
    "tumbling": (
        windows.Tumbling("1 minute", start_time="17 seconds"),
        lambda at: F.window(at, "1 minute", startTime="17 seconds"),
    ),
    "hopping": (
        windows.Hopping("25 seconds", every="10 seconds", start_time="3 seconds"),
        lambda at: F.window(at, "25 seconds", "10 seconds", "3 seconds"),
    ),
    "session": (windows.Session("4 seconds"), lambda at: F.session_window(at, "4 seconds")),
}


def inputs(seed: int) -> list[tuple[bytes, bytes]]:
    """Records of some keys, out of order, but never by more than the lateness. Some are a gap apart."""
    rng = random.Random(seed)
    found = []
    for n in range(RECORDS):
        at = START_MS + n * STEP_MS - rng.choice([0, rng.randrange(DISORDER_MS), 4_000, rng.randrange(20) * 1_000])
        value = {"id": n, "at": at, "n": rng.choice([None, rng.randrange(-1000, 1000)])}
        found.append((f"key-{rng.randrange(6)}".encode(), json.dumps(value).encode()))
    return found


def fillers(at: int, first: int) -> list[tuple[bytes, bytes]]:
    """A record in every partition that moves event time."""
    return [(f"filler-{n}".encode(), json.dumps({"id": first + n, "at": at, "n": None}).encode()) for n in range(20)]


def computed(spark: Any, bootstrap: str, topic: str, kind: str, late: set[int]) -> Counter[Any]:
    """By Spark's batch, of the records that did not go to the late topic."""
    read = spark.read.format("kafka").option("kafka.bootstrap.servers", bootstrap).option("subscribe", topic).load()
    value = F.from_json(F.col("value").cast("string"), "id INT, at LONG, n LONG")
    rows = read.select(F.col("key").cast("string"), value.alias("v")).select(
        "key", "v.id", "v.n", F.timestamp_millis("v.at").alias("at")
    )
    rows = rows.where(~F.col("key").startswith("filler")).where(~F.col("id").isin(sorted(late)))
    window, n = KINDS[kind][1]("at"), F.col("n")
    sums = rows.groupBy("key", window.alias("w")).agg(F.count("*"), F.count(n), F.sum(n), F.min(n), F.max(n), F.avg(n))
    found = sums.withColumns({"start": F.unix_millis("w.start"), "end": F.unix_millis("w.end")}).drop("w").collect()
    return Counter((row[0], row["start"], row["end"], *row[1:7]) for row in found)


def start(pipe: Any, window: Any, late: str, **write: Any) -> Any:
    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap)
    try:
        rows = flow.process(
            flow.read(pipe.source, max_records_per_batch=400),
            Summed(window),
            table=f"{pipe.source}-windows",
            late_topic=late,
            state_dir=pipe.tmp_path,
        )
        return flow.write(rows, topic=pipe.target, **write).start()
    except BaseException:
        flow.close()
        raise


@pytest.mark.parametrize(
    "kind, write",
    [
        pytest.param("tumbling", {}, marks=pytest.mark.long),
        ("hopping", {}),
        pytest.param("session", {}, marks=pytest.mark.long),
        pytest.param("session", {"engine": "tasks"}, marks=pytest.mark.long),
    ],
    ids=["tumbling", "hopping", "session", "session by reading tasks"],
)
def test_results_are_those_of_sparks_batch(make_pipe: Any, make_topic: Any, kind: str, write: dict[str, Any]) -> None:
    """In many batches; then come records of which some are too late."""
    pipe, late_topic, window = make_pipe(partitions=3), make_topic("late", 1), KINDS[kind][0]
    times = {10_000 + n: LAST_MS - 90_000 + n * 1_700 for n in range(60)}
    stale = [
        (b"key-%d" % (number % 6), json.dumps({"id": number, "at": at, "n": 1}).encode())
        for number, at in times.items()
    ]

    def results() -> Counter[Any]:
        return Counter(
            (record.key.decode(), *json.loads(record.value or b"").values())
            for record in independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
            if record.key is not None and not record.key.startswith(b"filler")
        )

    independent.fill(pipe.bootstrap, pipe.source, [*inputs(7), *fillers(LAST_MS, 20_000)])
    query = start(pipe, window, late_topic, **write)
    try:
        query.processAllAvailable()
        # They meet the watermark that the records before have left.
        independent.fill(pipe.bootstrap, pipe.source, [*stale, *fillers(2 * LAST_MS - START_MS, 30_000)])
        query.processAllAvailable()
        late = Counter(
            json.loads(record.value or b"")["id"]
            for record in independent.read_topic(pipe.bootstrap, late_topic, decided=True)
        )
        expected = computed(pipe.spark, pipe.bootstrap, pipe.source, kind, set(late))
        # The last timers fire when the clock wakes the flow up.
        wait_until(lambda: len(results()) >= len(expected), 60, "all windows close", useless=lambda: query.failure)
    finally:
        query.stop()
    assert results() == expected
    assert len(expected) > 30
    older = {number for number, at in times.items() if at < LAST_MS - DISORDER_MS}
    assert set(late.values()) == {1}
    # Windows that are open take records that are older than the watermark. Sessions do not.
    assert set(late) == older if kind == "session" else set(late) < older


def test_another_window_needs_another_table(make_pipe: Any, make_topic: Any) -> None:
    pipe, late = make_pipe(partitions=1), make_topic("late", 1)
    for same in (windows.Tumbling("1 minute"), windows.Tumbling(60)):
        start(pipe, same, late).stop()
    with pytest.raises(ProgressConflictError, match=r"Hopping\(60000 ms, .* declares .*Session\(1000 ms\)"):
        start(pipe, windows.Session("1 second"), late)
