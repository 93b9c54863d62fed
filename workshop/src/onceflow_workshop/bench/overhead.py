"""What exactly-once costs: against the same sink at at-least-once, and its latency against Spark's own sink, too.

Everything runs in one SparkSession against one broker and contenders take turns. Throughput is taken where batches run
back to back, each of about the length of the trigger: in a service that has nothing to do most of the time no guarantee
costs any. After every run all outputs are counted; a figure of a wrong run says so.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow_workshop.bench import latency
from onceflow_workshop.bench.environment import Bench, end_session
from onceflow_workshop.bench.overhead_figures import WARM_SECONDS, overhead_percent, rotations, turns
from onceflow_workshop.bench.overhead_runs import (
    AT_LEAST,
    EXACTLY,
    LATENCY_TRIGGER,
    SPARK,
    STEPS,
    Measured,
    Trigger,
    batch_of,
    calibrated,
    copy_once,
    measure_latency,
    records,
)

PARTS = ("throughput", "latency")
GUARANTEES = (AT_LEAST, EXACTLY)
TRIGGERS = (Trigger("100ms", "100 milliseconds", 100.0, 1_500), Trigger("1s", "1 second", 1000.0, 30_000))
# Share of the time without a batch above which the first round does not count.
_MAX_IDLE = 0.02
_MAX_IDLE_ROUNDS = 2
# The JVMs, Spark's and the broker's, go on getting faster for long: many small batches are many turns of their code.
_WARM_TURNS = 4
_LATENCY_WARM_SECONDS = 4.0


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
            end_session(spark)


def throughput(bench: Bench, choices: Choices, summary: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Both triggers; adds its figures to the summary."""
    for turn in range(_WARM_TURNS):
        for guarantee in GUARANTEES:
            for trigger in TRIGGERS[: 2 if turn == 0 else 1]:
                batch_of(bench, guarantee, trigger, trigger.first_bound)
    for trigger in TRIGGERS:
        bound, ms, size = calibrated(bench, trigger)
        batches = max(5, round((choices.seconds + WARM_SECONDS) * 1000 / max(ms, 1.0)) + 1)
        source = bench.topic("bench-in")
        count = bench.fill(source, records(size * batches))
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
            pair[guarantee] = measured = copy_once(bench, source, count, guarantee, trigger, bound)
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
        measure_latency(bench, contender, choices.records_per_second, _LATENCY_WARM_SECONDS * (3 if cold else 1))
    order = rotations(contenders)
    seconds = choices.latency_seconds / len(order)
    for turn, round_ in enumerate(order):
        for contender in round_:
            seen, batch_ms, problem = measure_latency(bench, contender, choices.records_per_second, seconds)
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
            "max_ms": round(max(seen), 1),
            **{
                f"batch_p{percent}_ms": round(latency.percentile(batches[contender], percent), 1)
                for percent in (50, 99)
            },
            "records": len(seen),
            "correct": "; ".join(dict.fromkeys(problems[contender])) or "yes",
        }
