"""What a benchmark has found, in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

Result = dict[str, Any]


def finding(results: Sequence[Result]) -> str:
    """The sentence for the results of a run; that outputs were wrong comes first."""
    wrong = [str(each["correct"]) for each in results if each.get("correct", "yes") != "yes"]
    if wrong:
        return f"Wrong: {'; '.join(dict.fromkeys(wrong))}. The figures do not count."
    by_name: dict[str, list[Result]] = {}
    for each in results:
        by_name.setdefault(each["bench"], []).append(each)
    for name, sentence in _SENTENCES:
        if found := [each for key, those in by_name.items() if re.fullmatch(name, key) for each in those]:
            return sentence(found)
    return f"Measured: {', '.join(by_name)}." if by_name else "Nothing was measured."


def _sink(found: list[Result]) -> str:
    rows = {each["contender"]: each for each in found}
    ours, others = rows.get("key"), rows.get("spark")
    if ours is None or others is None:
        return "Nothing was compared."
    ratio = ours["rows_per_s"] / max(1, others["rows_per_s"])
    return (
        f"onceflow wrote {ours['rows_per_s']:,} rows/s exactly once, {ratio:.1f} times as many as Spark's own sink at "
        f"least once ({others['rows_per_s']:,})."
    )


def _state(found: list[Result]) -> str:
    rows = {each["variant"]: each for each in found}
    ours = [each for each in found if each["guarantee"] == "exactly_once"]
    others = rows.get("transformWithState")
    if not ours:
        return "Nothing was compared."
    best = max(ours, key=lambda each: each["records_per_s"])
    text = f"The fastest was {best['variant']!r}: {best['records_per_s']:,} records/s exactly once"
    if others is None:
        return f"{text}."
    return f"{text}; transformWithState of Spark had {others['records_per_s']:,} at least once."


def _overhead(found: list[Result]) -> str:
    (summary,) = found[-1:]
    parts = []
    for name in ("100ms", "1s"):
        if summary.get(f"overhead_percent_{name}") is not None:
            spread = f"{summary[f'min_overhead_percent_{name}']:g} to {summary[f'max_overhead_percent_{name}']:g}"
            parts.append(f"{summary[f'overhead_percent_{name}']:g} % ({spread}) of the throughput at {name}")
    if summary.get("p50_ms") is not None:
        parts.append(f"a p50 of {summary['p50_ms']:g} ms in place of {summary['at_least_once_p50_ms']:g}")
    return f"Exactly once costs {', and '.join(parts)}." if parts else "Nothing was measured."


def _serve(found: list[Result]) -> str:
    (summary,) = found[-1:]
    text = f"One instance answered {summary['lookups_per_s']:,} look-ups/s with a p99 of {summary['p99_ms']:g} ms"
    if summary.get("lookups_per_s_while_writing") is None or summary.get("p99_ms_while_writing") is None:
        return f"{text}."
    writing = f"{summary['lookups_per_s_while_writing']:,} while its table was written"
    return f"{text}, and {writing} ({summary['p99_ms_while_writing']:g} ms)."


def _postgres(found: list[Result]) -> str:
    parts = []
    for name in dict.fromkeys(each["bench"] for each in found):
        ours = next((each for each in found if each["bench"] == name and each["contender"] == "onceflow"), None)
        if ours is not None:
            ratio = ours["ratio_to_spark_jdbc"]
            parts.append(
                f"{ours['rows_per_s']:,} rows/s of {ours['columns']} columns, {ratio:g} times Spark's JDBC sink"
            )
    return f"onceflow wrote {', and '.join(parts)}." if parts else "Nothing was measured."


def _latency(found: list[Result]) -> str:
    best = min(found, key=lambda each: each["p50_ms"])
    text = (
        f"{best['workload']}, {best['records_per_second']:,} records/s, a commit every {best['trigger_ms']:g} ms: p50 "
        f"{best['p50_ms']:g} ms, p99 {best['p99_ms']:g} ms"
    )
    if best.get("cpu_percent") is not None:
        text += f", with {best['cpu_percent'] / 100:g} cores and {best['max_rss_mib']:,.0f} MiB"
    return f"{'The fastest of ' + str(len(found)) + ' settings: ' if len(found) > 1 else ''}{text}."


def _cluster(found: list[Result]) -> str:
    (summary,) = found[-1:]
    parts = []
    if summary["read_again_per_record"] is not None:
        parts.append(
            f"{summary['read_again_per_record']:g} records of the table were read again for each processed one"
        )
    if summary["p99_ms"] is not None:
        parts.append(f"p50 {summary['p50_ms']:g} ms, p99 {summary['p99_ms']:g} ms")
    if summary["longest_outage_s"] is not None:
        parts.append(f"the longest outage took {summary['longest_outage_s']:g} s")
    if summary["backlog_records_per_s"] is not None:
        text, times = f"a backlog: {summary['backlog_records_per_s']:,} records/s", summary["backlog_ratio_to_local"]
        parts.append(text if times is None else f"{text}, {times:g} times a local master")
    return f"On the cluster: {'; '.join(parts)}." if parts else "Nothing was measured."


def _restore(found: list[Result]) -> str:
    ways = [f"{each['records_per_s']:,} records/s ({each['how']})" for each in found]
    return f"Restores of lost state read {', and '.join(ways)}."


# By the name of what was measured (a regular expression), the most telling first: a command measures several things.
_SENTENCES: tuple[tuple[str, Callable[[list[Result]], str]], ...] = (
    ("throughput", _sink),
    ("state", _state),
    ("overhead", _overhead),
    ("serve_summary", _serve),
    ("postgres.*", _postgres),
    ("cluster_summary", _cluster),
    ("latency", _latency),
    ("restore", _restore),
)
