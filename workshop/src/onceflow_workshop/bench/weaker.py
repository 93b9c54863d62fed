"""What the weaker choices of state gain: the balance service with each of them, beside exactly-once.

``onceflow bench state --only weaker``. All of them process the same topic in batches of the same size, in turns, in one
session. The sizes are those for which exactly-once needs about a second, or about 100 ms. After every run, outputs and
rows are compared with a fold: without faults, all choices give the same. Latency is measured at a steady rate.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from onceflow.state.api.processor import Processor
from onceflow.state.api.record import Record
from onceflow.state.api.serdes import LONG
from onceflow_workshop.bench import latency
from onceflow_workshop.bench.balance_runs import batches_of, local_rows, rate_of, start_flow, table_rows, table_topics
from onceflow_workshop.bench.balances import Balance, ColumnBalance, Expected, expected, payments, problem_of
from onceflow_workshop.bench.environment import Bench, wait

EXACTLY = "exactly once"
#: Arguments of Flow.process and of Flow.write.
CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    EXACTLY: ({}, {}),
    "without a changelog": ({"changelog": False}, {}),
    "at least once": ({}, {"guarantee": "at_least_once"}),
    "both": ({"changelog": False}, {"guarantee": "at_least_once"}),
}
PROCESSORS = {"Processor": Balance, "ColumnProcessor": ColumnBalance}
COMMIT_MS = (1000, 100)
_LATENCY_RATE, _LATENCY_SECONDS, _WARM_SECONDS = 1_000, 6.0, 4.0
_LATENCY_TRIGGER = "100 milliseconds"


class Counted(Processor):
    """Passes records on, and counts those of each key."""

    state = LONG

    def process(self, key: bytes, records: Sequence[Record], state: Any) -> Iterator[Record]:
        state.put(state.get(0) + len(records))
        for record in records:
            yield Record(key, record.value)


def weaker(bench: Bench, records: int, accounts: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Throughput at both commit intervals, then latency."""
    sent = list(payments(records, accounts))
    want = expected(sent)
    source = bench.topic("bench-in")
    bench.say(f"broker at {bench.servers}; {bench.fill(source, sent):,} records; warming up")
    for name, kind in PROCESSORS.items():
        for commit_ms in COMMIT_MS:
            yield from _throughput(bench, source, name, kind, commit_ms, records, rounds, want)
    bench.delete(source)
    yield from _latency(bench, rounds)


def _throughput(
    bench: Bench, source: str, name: str, kind: Any, commit_ms: int, records: int, rounds: int, want: Expected
) -> Iterator[dict[str, Any]]:
    size = _size_for(bench, source, kind, commit_ms, records, want)
    found: dict[str, list[dict[str, Any]]] = {choice: [] for choice in CHOICES}
    for turn in range(rounds):
        for choice in CHOICES if turn % 2 == 0 else reversed(CHOICES):
            ran = run_choice(bench, source, choice, kind(), size, want)
            found[choice].append(ran)
            bench.say(f"{name}, {commit_ms} ms, {choice:20} {ran['rate']:10,.0f} records/s {ran['problem']}")
    base = statistics.median(ran["rate"] for ran in found[EXACTLY])
    for choice, runs in found.items():
        rates = sorted(ran["rate"] for ran in runs)
        yield {
            "bench": "state, weaker choices: throughput",
            "processor": name,
            "choice": choice,
            "records_per_batch": size,
            "records_per_s": round(statistics.median(rates)),
            "min_records_per_s": round(rates[0]),
            "max_records_per_s": round(rates[-1]),
            "ratio_to_exactly_once": round(statistics.median(rates) / base, 3),
            "commit_ms_median": round(statistics.median(ms for ran in runs for ms in ran["batch_ms"] or [0.0])),
            "correct": "; ".join(dict.fromkeys(ran["problem"] for ran in runs if ran["problem"])) or "yes",
        }


def _size_for(bench: Bench, source: str, kind: Any, commit_ms: int, records: int, want: Expected) -> int:
    """How many records exactly-once commits in this time, found in two steps; a run has several batches."""
    size = records // 10 if commit_ms >= 1000 else records // 100
    for _ in range(2):
        ran = run_choice(bench, source, EXACTLY, kind(), size, want)
        batch_ms = statistics.median(ran["batch_ms"] or [float(commit_ms)])
        size = max(500, min(round(size * commit_ms / batch_ms / 100) * 100, records // 4))
    return size


def run_choice(bench: Bench, source: str, choice: str, processor: Any, size: int, want: Expected) -> dict[str, Any]:
    """Process the topic once, from its start to its end, and check what came out."""
    process, write = CHOICES[choice]
    target = bench.topic("bench-out")
    try:
        query = start_flow(bench, target, source, target, processor, size, process=process, **write)
        wait(query)
        rate, batch_ms = rate_of(batches_of(query.recentProgress))
        rows = local_rows(bench, target) if process else table_rows(bench, f"{target}-table")
        problem = problem_of(bench.outputs(target), rows, want)
        return {"rate": rate, "batch_ms": batch_ms, "problem": problem}
    finally:
        bench.delete(target, *table_topics(target))
        shutil.rmtree(bench.folder / target, ignore_errors=True)


def _latency(bench: Bench, rounds: int) -> Iterator[dict[str, Any]]:
    found: dict[str, list[float]] = {choice: [] for choice in CHOICES}
    for turn in range(rounds):
        for choice in CHOICES if turn % 2 == 0 else reversed(CHOICES):
            found[choice] += _latencies(bench, choice)
            bench.say(f"latency, {choice}: median {statistics.median(found[choice]):.0f} ms")
    for choice, latencies in found.items():
        yield {
            "bench": "state, weaker choices: latency",
            "choice": choice,
            "records_per_second": _LATENCY_RATE,
            "trigger": _LATENCY_TRIGGER,
            **{f"p{percent}_ms": round(latency.percentile(latencies, percent), 1) for percent in (50, 95, 99)},
        }


def _latencies(bench: Bench, choice: str) -> list[float]:
    """Milliseconds of each record, from producing it to consuming what became of it."""
    process, write = CHOICES[choice]
    source, target = bench.topic("bench-live"), bench.topic("bench-out")
    try:
        more = {"once": False, "trigger": _LATENCY_TRIGGER, **write}
        query = start_flow(bench, target, source, target, Counted(), 200_000, process=process, **more)
        try:
            plan = latency.Plan(bench.servers, source, target, _LATENCY_RATE, _WARM_SECONDS, _LATENCY_SECONDS)
            return latency.measure(plan, lambda: bool(query.isActive)).latencies_ms
        finally:
            query.stop()
    finally:
        bench.delete(source, target, *table_topics(target))
        shutil.rmtree(bench.folder / target, ignore_errors=True)
