"""State: balances by a ``Processor`` and a ``ColumnProcessor`` against Spark's own ``transformWithState``.

Everything runs in one SparkSession against one broker and contenders take turns. After every run all outputs and all
rows of the table are compared with a fold that knows nothing of either; a figure of a wrong run says so. Further parts:
how fast lost state comes back, and what memory a large table takes. Processor time and memory are read from ``/proc``.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow_workshop.bench.balance_runs import (
    COLUMNS,
    COLUMNS_OFTEN,
    RECORDS,
    RECORDS_OFTEN,
    SPARK,
    SPARK_PANDAS,
    VARIANTS,
    Measured,
    run_variant,
)
from onceflow_workshop.bench.balances import Expected, expected, payments
from onceflow_workshop.bench.environment import Bench, end_session
from onceflow_workshop.bench.processes import worker_memory
from onceflow_workshop.bench.restore import large, restore
from onceflow_workshop.bench.spark_state import why_no_transform_with_state
from onceflow_workshop.bench.weaker import weaker

PARTS = ("throughput", "restore", "large", "weaker")


@dataclass(frozen=True)
class Choices:
    """What to measure.

    Args:
        records: over this many accounts. rounds: how often each variant runs; medians are reported.
        often: records in a batch of the variants that commit as often as they can.
        spark_records_per_batch: of transformWithState, whose cost falls with the size of a batch.
        keys: in the table that is restored. large_keys: of the large one.
        parts: of PARTS. pandas: whether transformWithStateInPandas takes part, too.
    """

    records: int
    accounts: int
    rounds: int
    often: int
    spark_records_per_batch: int
    keys: int
    large_keys: int
    parts: tuple[str, ...]
    pandas: bool = False
    cores: int = 2


def run(choices: Choices, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Run all parts; yields one result (a JSON object) after the other. ``correct`` is what a check found."""
    from onceflow.broker.local import LocalBroker
    from onceflow.session import session

    with tempfile.TemporaryDirectory(prefix="onceflow-") as folder, LocalBroker(Path(folder) / "broker") as broker:
        config = {"spark.sql.streaming.numRecentProgressUpdates": "5000"}
        spark = session(app_name="onceflow-bench", master=f"local[{choices.cores}]", config=config)
        try:
            bench = Bench(spark, broker.bootstrap_servers, broker.status().pids, Path(folder) / "state", say)
            if "throughput" in choices.parts:
                yield from throughput(bench, choices)
            if "restore" in choices.parts:
                yield from restore(bench, choices.keys)
            if "large" in choices.parts:
                yield from large(bench, choices.large_keys, choices.records)
            if "weaker" in choices.parts:
                yield from weaker(bench, choices.records, choices.accounts, choices.rounds)
        finally:
            end_session(spark)


def throughput(bench: Bench, choices: Choices) -> Iterator[dict[str, Any]]:
    """All variants in turn."""
    sent = list(payments(choices.records, choices.accounts))
    want = expected(sent)
    source = bench.topic("bench-in")
    bench.say(f"broker at {bench.servers}; {bench.fill(source, sent):,} records; warming up")
    variants = [variant for variant in VARIANTS if choices.pandas or variant != SPARK_PANDAS]
    lacking = why_no_transform_with_state()
    if lacking:
        variants = [variant for variant in variants if variant not in (SPARK, SPARK_PANDAS)]
        bench.say(f"transformWithState is left out: {lacking}")
    sizes = {variant: warmed_up(bench, source, sent, want, variant, choices) for variant in variants}
    found: dict[str, list[Measured]] = {variant: [] for variant in variants}
    for turn in range(choices.rounds):
        for variant in variants if turn % 2 == 0 else variants[::-1]:
            measured = run_variant(bench, source, variant, sizes[variant], want)
            found[variant].append(measured)
            rate, problem = f"{measured.records_per_s:10,.0f} records/s", measured.problem
            bench.say(f"round {turn + 1} of {choices.rounds}: {variant:26} {rate} {problem}")
    bench.delete(source)
    base = statistics.median(measured.records_per_s for measured in found[SPARK]) if SPARK in found else 0.0
    for variant, runs in found.items():
        yield summary(variant, runs, base, records_per_batch=sizes[variant], records=choices.records)


def warmed_up(
    bench: Bench, source: str, sent: Sequence[tuple[bytes, bytes]], want: Expected, variant: str, choices: Choices
) -> int:
    """Run a variant for the first time. Returns how many records its batches shall have."""
    if variant in (RECORDS, COLUMNS):
        # So many as it does in a second, found in two steps; a run has three batches at least.
        size = choices.records // 10
        for _ in range(2):
            warm = run_variant(bench, source, variant, size, want)
            size = max(1000, min(round(warm.records_per_s / 1000) * 1000, choices.records // 3))
        return size
    often = variant in (RECORDS_OFTEN, COLUMNS_OFTEN)
    size = choices.often if often else min(choices.spark_records_per_batch, choices.records // 3)
    part = sent[: size * (10 if often else 3)]
    topic = bench.topic("bench-warm")
    bench.fill(topic, part)
    run_variant(bench, topic, variant, size, expected(part))
    bench.delete(topic)
    return size


def summary(variant: str, runs: Sequence[Measured], base: float, **more: Any) -> dict[str, Any]:
    """One line of the table."""
    rates = sorted(measured.records_per_s for measured in runs)
    total = sum(measured.records for measured in runs)
    cpu_s = {name: sum(measured.cpu_s[name] for measured in runs) for name in runs[0].cpu_s}
    own = sum(cpu_s[name] for name in ("driver", "jvm", "workers"))
    return {
        "bench": "state",
        "variant": variant,
        "guarantee": "at_least_once" if variant in (SPARK, SPARK_PANDAS) else "exactly_once",
        **more,
        "path": runs[-1].path,
        "records_per_s": round(statistics.median(rates)),
        "min_records_per_s": round(rates[0]),
        "max_records_per_s": round(rates[-1]),
        "ratio_to_transform_with_state": round(statistics.median(rates) / base, 2) if base else None,
        "commits": runs[-1].commits,
        "commit_ms_median": round(statistics.median(ms for measured in runs for ms in measured.batch_ms or [0.0])),
        "cpu_us_per_record": round(own / max(1, total) * 1e6, 1),
        "cpu_s_per_run": {name: round(seconds / len(runs), 2) for name, seconds in cpu_s.items()},
        **worker_memory([measured.meter for measured in runs]),
        "steps_ms_median": runs[-1].steps_ms,
        "correct": "; ".join(dict.fromkeys(measured.problem for measured in runs if measured.problem)) or "yes",
    }
