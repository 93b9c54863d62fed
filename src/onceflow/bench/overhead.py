"""What exactly-once costs: against the same sink at at-least-once, and its latency against Spark's own sink, too.

Everything runs in one SparkSession against one broker and contenders take turns. Throughput is taken where batches run
back to back, each of about the length of the trigger: in a service that has nothing to do most of the time no guarantee
costs any. After every run all outputs are counted; a figure of a wrong run says so.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from onceflow.bench import latency
from onceflow.bench.state import Bench

PARTITIONS = 4
VALUE_BYTES = latency.VALUE_BYTES
PARTS = ("throughput", "latency")
EXACTLY, AT_LEAST, SPARK = "exactly_once", "at_least_once", "spark"
GUARANTEES = (AT_LEAST, EXACTLY)
STEPS = ("plan", "begin", "write", "audit", "progress", "end")
LATENCY_TRIGGER = "100 milliseconds"
# A batch takes so many times the trigger: the trigger must never be what a batch waits for.
_FULL = 1.25
_MIN_FULL, _MAX_FULL = 1.1, 1.5
# Share of the time without a batch above which the first round does not count.
_MAX_IDLE = 0.02
_MAX_IDLE_ROUNDS = 2
_WARM_SECONDS = 1.0
# The JVMs, Spark's and the broker's, go on getting faster for long: many small batches are many turns of their code.
_WARM_TURNS = 4
_LATENCY_WARM_SECONDS = 4.0
_MAX_CALIBRATIONS = 5
_RUN_SECONDS = 120.0


@dataclass(frozen=True)
class Choices:
    """What to measure.

    Args:
        rounds: turns of each guarantee at each trigger. seconds: how long one of them is measured, about.
        records_per_second: of the producer in the latency part.
        latency_seconds: how long records count, for each contender.
        parts: of PARTS.
    """

    rounds: int
    seconds: float
    records_per_second: int
    latency_seconds: float = 21.0
    parts: tuple[str, ...] = PARTS
    cores: int = 2


@dataclass(frozen=True)
class Trigger:
    """How often a batch starts; ``name`` is part of the names of figures."""

    name: str
    text: str
    ms: float
    first_bound: int


TRIGGERS = (Trigger("100ms", "100 milliseconds", 100.0, 1_500), Trigger("1s", "1 second", 1000.0, 30_000))


class Commit(NamedTuple):
    """A batch in Spark's clock."""

    rows: int
    began_ms: float
    ended_ms: float


@dataclass(frozen=True)
class Measured:
    """One run of one guarantee, its warm batches only."""

    records_per_s: float
    batch_ms: list[float]
    idle: float
    path: str
    steps_ms: Mapping[str, list[float]]
    problem: str = ""


# ---- arithmetic ------------------------------------------------------------------------------------------


def turns(contenders: Sequence[str], rounds: int) -> list[tuple[str, ...]]:
    """Who runs after whom: A B, B A, A B ... so that a drift of the machine meets all alike."""
    return [tuple(contenders if turn % 2 == 0 else contenders[::-1]) for turn in range(rounds)]


def rotations(contenders: Sequence[str]) -> list[tuple[str, ...]]:
    """A turn for each contender in each place: the first of a turn may find the machine in another state."""
    return [tuple(contenders[place:]) + tuple(contenders[:place]) for place in range(len(contenders))]


def overhead_percent(pairs: Iterable[tuple[float, float]]) -> float:
    """How much less is done in the same time; of pairs of rates of one round: (exactly once, at least once)."""
    return (1 - statistics.median(exactly / at_least for exactly, at_least in pairs)) * 100


def commits_of(reports: Iterable[Mapping[str, Any]]) -> list[Commit]:
    """Batches that read something, of Spark's progress reports: the same clock and the same code for every sink."""
    found = []
    for report in reports:
        if report["numInputRows"] > 0:
            began = datetime.datetime.fromisoformat(report["timestamp"].replace("Z", "+00:00")).timestamp() * 1000
            ended = began + float(report["durationMs"]["triggerExecution"])
            found.append(Commit(int(report["numInputRows"]), began, ended))
    return found


def warm_span(commits: Sequence[Commit], warm_ms: float = _WARM_SECONDS * 1000) -> tuple[int, int]:
    """The batches that count: [first, end). Not the first one, not those of the first second, not a small rest."""
    if not commits:
        return 0, 0
    first = 1
    while first < len(commits) and commits[first].began_ms < commits[0].ended_ms + warm_ms:
        first += 1
    full = max(commit.rows for commit in commits) * 0.9
    end = len(commits)
    while end > first and commits[end - 1].rows < full:
        end -= 1
    return first, end


def rate_of(commits: Sequence[Commit], first: int, end: int) -> tuple[float, float]:
    """Records per second from the commit before ``first`` to the last one, and the share of it without a batch."""
    span_ms = commits[end - 1].ended_ms - commits[first - 1].ended_ms
    # Spark's clock has milliseconds: a gap of one is none.
    gaps = [after.began_ms - before.ended_ms for before, after in itertools.pairwise(commits[first - 1 : end])]
    return sum(c.rows for c in commits[first:end]) / span_ms * 1000, sum(gap for gap in gaps if gap > 1.5) / span_ms


def next_bound(tried: Mapping[int, float], trigger_ms: float) -> int | None:
    """The bound to try next, from milliseconds of a batch at the bounds tried so far; None: one of them will do."""
    if any(trigger_ms * _MIN_FULL <= ms <= trigger_ms * _MAX_FULL for ms in tried.values()):
        return None
    want = trigger_ms * _FULL
    under = max((bound for bound, ms in tried.items() if ms < want), default=None)
    over = min((bound for bound, ms in tried.items() if ms >= want), default=None)
    if under is None or over is None or over <= under:
        bound, ms = list(tried.items())[-1]
        guess = bound * min(4.0, max(0.25, want / ms))
    else:
        share = (want - tried[under]) / (tried[over] - tried[under])
        guess = under + (over - under) * min(0.9, max(0.1, share))
    rounded = max(100, round(guess / 100) * 100)
    return None if rounded in tried else rounded


def chosen_bound(tried: Mapping[int, float], trigger_ms: float) -> int:
    """The least bound whose batches fill the trigger, else the largest one tried."""
    full = [bound for bound, ms in tried.items() if ms >= trigger_ms * _MIN_FULL]
    return min(full, default=max(tried))


# ---- parts -----------------------------------------------------------------------------------------------


def run(choices: Choices, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Run the parts; yields one result (a JSON object) after the other, the summary last.

    ``correct`` is what a check of the outputs found.
    """
    from onceflow.broker.local import LocalBroker
    from onceflow.session import session

    summary: dict[str, Any] = {"bench": "overhead", **{f"overhead_percent_{t.name}": None for t in TRIGGERS}}
    names = {EXACTLY: "", AT_LEAST: f"{AT_LEAST}_", SPARK: f"{SPARK}_"}
    summary.update({f"{prefix}p{percent}_ms": None for prefix in names.values() for percent in (50, 99)})
    summary["rounds"] = choices.rounds
    with tempfile.TemporaryDirectory(prefix="onceflow-") as folder, LocalBroker(Path(folder) / "broker") as broker:
        # Spark warns of every batch that takes longer than its trigger. Here all of them shall.
        config = {"spark.sql.streaming.numRecentProgressUpdates": "5000", "spark.log.level": "ERROR"}
        spark = session(app_name="onceflow-bench", master=f"local[{choices.cores}]", config=config)
        try:
            bench = Bench(spark, broker.bootstrap_servers, broker.status().pids, Path(folder) / "state", say)
            say(f"broker at {bench.servers}; warming up")
            results = []
            if "throughput" in choices.parts:
                for result in throughput(bench, choices, summary):
                    results.append(result)
                    yield result
            if "latency" in choices.parts:
                for result in latencies(bench, choices):
                    results.append(result)
                    yield result
                    prefix = names[result["contender"]]
                    summary.update({f"{prefix}{name}": result[name] for name in ("p50_ms", "p99_ms")})
            wrong = [str(result["correct"]) for result in results if result.get("correct", "yes") != "yes"]
            yield {**summary, "correct": "; ".join(dict.fromkeys(wrong)) or "yes"}
        finally:
            spark.stop()


def records(count: int) -> Iterator[tuple[bytes, bytes]]:
    """Keys are numbers, values cannot be compressed."""
    pool = os.urandom(1 << 20)
    for number in range(count):
        start = (number * 7919) % ((1 << 20) - VALUE_BYTES)
        yield number.to_bytes(8, "big"), pool[start : start + VALUE_BYTES]


def throughput(bench: Bench, choices: Choices, summary: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Both triggers; adds its figures to the summary."""
    for turn in range(_WARM_TURNS):
        for guarantee in GUARANTEES:
            for trigger in TRIGGERS[: 2 if turn == 0 else 1]:
                _batch_ms(bench, guarantee, trigger, trigger.first_bound)
    for trigger in TRIGGERS:
        bound = _calibrated(bench, trigger)
        batches = max(5, round((choices.seconds + _WARM_SECONDS) * 1000 / (trigger.ms * _FULL)) + 1)
        source = bench.topic("bench-in")
        count = bench.fill(source, records(bound * batches))
        found, bound = _rounds(bench, source, count, trigger, bound, choices.rounds)
        bench.delete(source)
        overheads = [overhead_percent([pair]) for pair in zip(*_rates(found), strict=True)]
        summary[f"overhead_percent_{trigger.name}"] = round(statistics.median(overheads), 2)
        summary[f"min_overhead_percent_{trigger.name}"] = round(min(overheads), 2)
        summary[f"max_overhead_percent_{trigger.name}"] = round(max(overheads), 2)
        # Of the medians of all batches: less true to a service, as hiccups do not count, and steadier.
        medians = [(1 / _batch_median(found[EXACTLY]), 1 / _batch_median(found[AT_LEAST]))]
        summary[f"overhead_percent_{trigger.name}_of_median_batch"] = round(overhead_percent(medians), 2)
        summary[f"records_per_batch_{trigger.name}"] = bound
        for guarantee in (EXACTLY, AT_LEAST):
            line = _line(found[guarantee], trigger, guarantee, bound, count)
            summary[f"records_per_s_{guarantee}_{trigger.name}"] = line["records_per_s"]
            yield line
        for guarantee in (EXACTLY, AT_LEAST):
            yield _steps(found[guarantee], trigger, guarantee)


def _batch_median(runs: Sequence[Measured]) -> float:
    return statistics.median(ms for measured in runs for ms in measured.batch_ms)


def _rates(found: Mapping[str, Sequence[Measured]]) -> tuple[list[float], list[float]]:
    exactly, at_least = ([measured.records_per_s for measured in found[name]] for name in (EXACTLY, AT_LEAST))
    return exactly, at_least


def _rounds(
    bench: Bench, source: str, count: int, trigger: Trigger, bound: int, rounds: int
) -> tuple[dict[str, list[Measured]], int]:
    """All rounds of a trigger. A first round in which the trigger idled does not count: the bound is raised."""
    found: dict[str, list[Measured]] = {guarantee: [] for guarantee in GUARANTEES}
    idled = 0
    while len(found[EXACTLY]) < rounds:
        turn = len(found[EXACTLY])
        pair = {}
        for guarantee in turns(GUARANTEES, rounds)[turn]:
            pair[guarantee] = measured = _run_once(bench, source, count, guarantee, trigger, bound)
            bench.say(
                f"{trigger.text}, round {turn + 1} of {rounds}: {guarantee:13} {measured.records_per_s:10,.0f} "
                f"records/s in batches of {statistics.median(measured.batch_ms):,.0f} ms {measured.problem}"
            )
        # Before the first round only: figures of different bounds are not mixed.
        if turn == 0 and idled < _MAX_IDLE_ROUNDS and max(measured.idle for measured in pair.values()) > _MAX_IDLE:
            idled += 1
            bound = round(bound * 1.15 / 100) * 100
            bench.say(f"{trigger.text}: batches waited for the trigger; again, with {bound:,} records")
            continue
        for guarantee, measured in pair.items():
            found[guarantee].append(measured)
    return found, bound


def _line(runs: Sequence[Measured], trigger: Trigger, guarantee: str, bound: int, count: int) -> dict[str, Any]:
    rates = sorted(measured.records_per_s for measured in runs)
    return {
        "bench": "overhead_throughput",
        "trigger": trigger.text,
        "guarantee": guarantee,
        "records_per_s": round(statistics.median(rates)),
        "min_records_per_s": round(rates[0]),
        "max_records_per_s": round(rates[-1]),
        "idle_percent": round(max(measured.idle for measured in runs) * 100, 1),
        "path": "/".join(dict.fromkeys(measured.path for measured in runs)),
        "records_per_batch": bound,
        "records": count,
        "correct": "; ".join(dict.fromkeys(measured.problem for measured in runs if measured.problem)) or "yes",
    }


def _steps(runs: Sequence[Measured], trigger: Trigger, guarantee: str) -> dict[str, Any]:
    """Median milliseconds of a batch and of its steps; the rest of a batch is Spark's."""
    pooled = {step: [ms for measured in runs for ms in measured.steps_ms[step]] for step in STEPS}
    return {
        "bench": "overhead_steps",
        "trigger": trigger.text,
        "guarantee": guarantee,
        "batch_ms": round(_batch_median(runs), 1),
        **{f"{step}_ms": round(statistics.median(ms), 2) for step, ms in pooled.items()},
    }


def latencies(bench: Bench, choices: Choices) -> Iterator[dict[str, Any]]:
    """A steady, moderate rate through each sink in turn."""
    contenders = (EXACTLY, AT_LEAST, SPARK)
    found: dict[str, list[float]] = {contender: [] for contender in contenders}
    batches: dict[str, list[float]] = {contender: [] for contender in contenders}
    problems: dict[str, list[str]] = {contender: [] for contender in contenders}
    cold = "throughput" not in choices.parts
    for contender in contenders:
        bench.say(f"latency: warming up {contender}")
        _latency_once(bench, contender, choices.records_per_second, _LATENCY_WARM_SECONDS * (3 if cold else 1))
    order = rotations(contenders)
    seconds = choices.latency_seconds / len(order)
    for turn, round_ in enumerate(order):
        for contender in round_:
            seen, batch_ms, problem = _latency_once(bench, contender, choices.records_per_second, seconds)
            found[contender] += seen
            batches[contender] += batch_ms
            problems[contender] += [problem] if problem else []
            p50, p99 = (latency.percentile(seen, percent) for percent in (50, 99))
            figures = f"p50 {p50:.0f} ms, p99 {p99:.0f} ms, a batch {statistics.median(batch_ms):.0f} ms"
            bench.say(f"latency, round {turn + 1} of {len(order)}: {contender:13} {figures} {problem}")
    for contender, seen in found.items():
        yield {
            "bench": "overhead_latency",
            "contender": contender,
            "trigger": LATENCY_TRIGGER,
            "records_per_second": choices.records_per_second,
            **{f"p{percent}_ms": round(latency.percentile(seen, percent), 1) for percent in (50, 90, 99)},
            "most_ms": round(max(seen), 1),
            **{
                f"batch_p{percent}_ms": round(latency.percentile(batches[contender], percent), 1)
                for percent in (50, 99)
            },
            "records": len(seen),
            "correct": "; ".join(dict.fromkeys(problems[contender])) or "yes",
        }


# ---- one run ---------------------------------------------------------------------------------------------


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


def _run_once(bench: Bench, source: str, count: int, guarantee: str, trigger: Trigger, bound: int) -> Measured:
    """Copy the whole topic, and count what came out."""
    target = bench.topic("bench-out")
    try:
        query, commits = _copied(bench, source, target, count, guarantee, trigger, bound)
        first, end = warm_span(commits)
        if end <= first:
            raise RuntimeError(f"a run of {len(commits)} batches is too short to be measured: raise --seconds")
        rate, idle = rate_of(commits, first, end)
        # The flow's own record of its batches has the last 200 of them.
        batches = [batch for batch in query.batches[first - len(commits) :] if batch.max_rows >= bound * 0.9]
        steps = {step: [batch.seconds.get(step, 0.0) * 1000 for batch in batches] for step in STEPS}
        path = "/".join(dict.fromkeys(batch.path for batch in batches))
        batch_ms = [commit.ended_ms - commit.began_ms for commit in commits[first:end]]
        return Measured(rate, batch_ms, idle, path, steps, problem_of(bench, target, count))
    finally:
        bench.delete(target)


def _latency_once(
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


def _calibrated(bench: Bench, trigger: Trigger) -> int:
    """How many records fill the trigger, at at-least-once; the same bound is used for both."""
    tried: dict[int, float] = {}
    bound: int | None = trigger.first_bound
    for _ in range(_MAX_CALIBRATIONS):
        if bound is None:
            break
        tried[bound] = _batch_ms(bench, AT_LEAST, trigger, bound)
        bench.say(f"{trigger.text}: a batch of {bound:,} records takes {tried[bound]:,.0f} ms")
        bound = next_bound(tried, trigger.ms)
    return chosen_bound(tried, trigger.ms)


def _batch_ms(bench: Bench, guarantee: str, trigger: Trigger, bound: int) -> float:
    """Median milliseconds of a batch; the first third does not count."""
    source = bench.topic("bench-warm")
    count = bench.fill(source, records(bound * (24 if trigger.ms < 1000 else 4)))
    target = bench.topic("bench-out")
    try:
        _, commits = _copied(bench, source, target, count, guarantee, trigger, bound)
        first, end = len(commits) // 3, len(commits) - 1  # the last one may be a rest
        return statistics.median(commit.ended_ms - commit.began_ms for commit in commits[first:end] or commits)
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
