"""Figures of ``onceflow bench cluster``, from the batches that the service has committed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from onceflow_workshop.bench.cluster_service import Batch


def moved(batches: Sequence[Batch], earlier: Sequence[Batch]) -> int:
    """How often a partition was processed at another place than the time before.

    Args:
        earlier: the batches before these.
    """
    homes: dict[int, str] = {}
    for batch in earlier:
        homes.update(batch.homes)
    count = 0
    for batch in batches:
        count += sum(homes.get(partition, home) != home for partition, home in batch.homes.items())
        homes.update(batch.homes)
    return count


def of_batches(batches: Sequence[Batch], earlier: Sequence[Batch]) -> dict[str, Any]:
    """What the batches of a phase tell."""
    records = sum(batch.records for batch in batches)
    again, in_batches = sum(batch.read_again for batch in batches), sum(batch.read_in_batch for batch in batches)
    return {
        "records": records,
        "batches": len(batches),
        "batch_ms_median": _median_ms(batches),
        "read_again_per_record": round(again / records, 3) if records else None,
        "read_in_batches_per_record": round(in_batches / records, 3) if records else None,
        "partitions_moved": moved(batches, earlier),
        "failed_batches": sum(batch.aborted for batch in batches),
    }


def _median_ms(batches: Sequence[Batch]) -> int | None:
    spent = [sum(batch.seconds.values()) for batch in batches]
    return round(statistics.median(spent) * 1000) if spent else None


def of_cpu(cpu_s: Mapping[str, float], records: int) -> dict[str, Any]:
    """CPU time of each record, in microseconds."""
    return {
        f"{who}_us_per_record": round(seconds * 1e6 / records, 1) if records else None for who, seconds in cpu_s.items()
    }


def rate_after_first(batches: Sequence[Batch]) -> int | None:
    """Records per second of a backlog, from the first commit to the last; None: there is only one batch."""
    if len(batches) < 2:
        return None
    return round(sum(batch.records for batch in batches[1:]) / (batches[-1].at - batches[0].at))


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """None if one of them is not known."""
    return round(ours / theirs, 2) if ours and theirs else None


def summary(rows: Sequence[Mapping[str, Any]], problem: str) -> dict[str, Any]:
    """The figures that goals are set for.

    Args:
        rows: of the phases and backlogs. problem: what is wrong with the outputs; empty: nothing.
    """
    by_name = {row["phase"]: row for row in rows if row["bench"] == "cluster"}
    backlogs = {row["runs_on"]: row for row in rows if row["bench"] == "cluster_backlog"}
    ours, local = backlogs.get("cluster", {}), backlogs.get("local", {})
    steady = by_name.get("steady", {})
    outages = [row["outage_s"] for row in by_name.values()]
    return {
        "bench": "cluster_summary",
        "read_again_per_record": steady.get("read_again_per_record"),
        "p50_ms": steady.get("p50_ms"),
        "p99_ms": steady.get("p99_ms"),
        "longest_outage_s": max(outages, default=None),
        "backlog_records_per_s": ours.get("records_per_s"),
        "backlog_ratio_to_local": ratio(ours.get("records_per_s"), local.get("records_per_s")),
        "backlog_cpu_ratio_to_local": ratio(_cpu_us(ours), _cpu_us(local)),
        "correct": problem or "yes",
    }


def _cpu_us(row: Mapping[str, Any]) -> float | None:
    known = [row[name] for name in ("executors_us_per_record", "driver_us_per_record") if row.get(name) is not None]
    return sum(known) if known else None
