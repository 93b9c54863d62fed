"""Runs of the balance service: started, measured, and compared with a fold that knows nothing of it."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onceflow_workshop.bench.balances import Balance, ColumnBalance, Expected, problem_of, row_of
from onceflow_workshop.bench.environment import Bench, wait
from onceflow_workshop.bench.processes import Meter
from onceflow_workshop.bench.spark_state import transform_with_state

SPARK = "transformWithState"
SPARK_PANDAS = "transformWithStateInPandas"
RECORDS, RECORDS_OFTEN = "Processor, 1 s", "Processor, often"
COLUMNS, COLUMNS_OFTEN = "ColumnProcessor, 1 s", "ColumnProcessor, often"
VARIANTS = (RECORDS, RECORDS_OFTEN, COLUMNS, COLUMNS_OFTEN, SPARK, SPARK_PANDAS)


@dataclass
class Measured:
    """One run of one variant, without its first batch."""

    records_per_s: float
    records: int
    commits: int
    batch_ms: list[float]
    cpu_s: dict[str, float]
    meter: Meter
    path: str = ""
    steps_ms: dict[str, float] = field(default_factory=dict)
    problem: str = ""


def run_variant(bench: Bench, source: str, variant: str, records_per_batch: int, want: Expected) -> Measured:
    """Process the topic once, from its start to its end, and check what came out."""
    target = bench.topic("bench-out")
    try:
        with bench.meter(variant) as meter:
            query = _started(bench, source, target, variant, records_per_batch)
            wait(query, meter.reset)
            cpu_s = meter.cpu_s()
        batches = batches_of(query.recentProgress)
        rate, batch_ms = rate_of(batches)
        measured = Measured(rate, sum(rows for rows, _ in batches[1:]), len(batches), batch_ms, cpu_s, meter)
        if variant not in (SPARK, SPARK_PANDAS):
            measured.path = "/".join(dict.fromkeys(batch.path for batch in query.batches[1:]))
            measured.steps_ms = steps_ms(query.batches)
        rows = None if variant in (SPARK, SPARK_PANDAS) else table_rows(bench, f"{target}-table")
        measured.problem = problem_of(bench.outputs(target), rows, want)
        return measured
    finally:
        bench.delete(target, *table_topics(target))
        shutil.rmtree(bench.folder / target, ignore_errors=True)


def _started(bench: Bench, source: str, target: str, variant: str, records_per_batch: int) -> Any:
    if variant in (SPARK, SPARK_PANDAS):
        return transform_with_state(bench, source, target, records_per_batch, pandas=variant == SPARK_PANDAS)
    processor = Balance() if variant in (RECORDS, RECORDS_OFTEN) else ColumnBalance()
    return start_flow(bench, target, source, target, processor, records_per_batch)


def start_flow(
    bench: Bench,
    name: str,
    source: str,
    target: str,
    processor: Any,
    records_per_batch: int,
    *,
    process: Mapping[str, Any] | None = None,
    **write: Any,
) -> Any:
    """A started query that processes everything there is; its table is called as the flow.

    Args:
        process, write: further arguments of Flow.process and of Flow.write.
    """
    from onceflow import Flow

    flow = Flow(name, bench.spark, bootstrap_servers=bench.servers)
    try:
        df = flow.read(source, max_records_per_batch=records_per_batch)
        outputs = flow.process(df, processor, table=f"{name}-table", state_dir=bench.folder, **(process or {}))
        return flow.write(outputs, topic=target, **{"once": True, **write}).start()
    except BaseException:
        flow.close()
        raise


def table_rows(bench: Bench, table: str) -> dict[bytes, tuple[int, int]]:
    """The table topic: last value of each key."""
    return {key: row_of(raw) for key, raw in bench.outputs(table) if key is not None and raw is not None}


def local_rows(bench: Bench, name: str) -> dict[bytes, tuple[int, int]]:
    """What the local stores of a flow's table hold."""
    from onceflow import Table

    return {key: row_of(raw) for key, raw in Table.of_flow(bench.folder / name / f"{name}-table").range()}


def state_mib(bench: Bench, name: str) -> float:
    """Local files of a flow."""
    return round(sum(f.stat().st_size for f in (bench.folder / name).rglob("*") if f.is_file()) / 2**20, 1)


def table_topics(name: str) -> tuple[str, str]:
    """The topics of a flow's table."""
    return f"{name}-table", f"{name}-table-internal"


def batches_of(reports: Iterable[Any]) -> list[tuple[int, float]]:
    """Rows and milliseconds of each batch, from Spark's progress reports."""
    return [
        (int(report["numInputRows"]), float(report["durationMs"]["triggerExecution"]))
        for report in reports
        if report["numInputRows"] > 0
    ]


def rate_of(batches: Sequence[tuple[int, float]]) -> tuple[float, list[float]]:
    """Rows per second, and the milliseconds of each batch that counts: not the first one, and not a small rest."""
    most = max((rows for rows, _ in batches), default=0)
    full = [(rows, ms) for rows, ms in batches[1:] if rows * 2 >= most]
    total_ms = sum(ms for _, ms in full)
    return (sum(rows for rows, _ in full) / total_ms * 1000 if total_ms else 0.0), [ms for _, ms in full]


def steps_ms(batches: Sequence[Any]) -> dict[str, float]:
    """Median milliseconds of each step, without the first batch."""
    later = batches[1:] or batches
    return {
        name: round(statistics.median(batch.seconds.get(name, 0.0) for batch in later) * 1000, 1)
        for name in (later[0].seconds if later else ())
    }
