"""The sentence with which each benchmark ends."""

from __future__ import annotations

from typing import Any

import pytest

from onceflow_workshop.cli.bench_findings import finding

SINK = [
    {"bench": "throughput", "contender": "spark", "guarantee": "at_least_once", "rows_per_s": 75_330},
    {"bench": "throughput", "contender": "key", "guarantee": "exactly_once", "rows_per_s": 134_547},
    {"bench": "small_batch", "contender": "key", "rows": 400},
]
STATE = [
    {"bench": "state", "variant": "Processor, 1 s", "guarantee": "exactly_once", "records_per_s": 193_622},
    {"bench": "state", "variant": "ColumnProcessor, 1 s", "guarantee": "exactly_once", "records_per_s": 524_798},
    {"bench": "state", "variant": "transformWithState", "guarantee": "at_least_once", "records_per_s": 24_683},
    {"bench": "fill", "keys": 1_000_000},
    {"bench": "restore", "how": "tasks", "correct": "yes"},
]
LATENCY = {
    "bench": "latency", "workload": "copy", "trigger_ms": 100, "records_per_second": 2000, "p50_ms": 69.2,
    "p99_ms": 129.5, "cpu_percent": 9.0, "max_rss_mib": 554.9, "correct": "yes",
}  # fmt: skip
OVERHEAD = {
    "bench": "overhead", "overhead_percent_100ms": -5.55, "min_overhead_percent_100ms": -16.4,
    "max_overhead_percent_100ms": 15.6, "overhead_percent_1s": None, "p50_ms": 69.4, "at_least_once_p50_ms": 58.8,
}  # fmt: skip
SERVE = {
    "bench": "serve_summary", "lookups_per_s": 5006, "p99_ms": 6.75, "lookups_per_s_while_writing": 4000,
    "p99_ms_while_writing": 14.01, "correct": "yes",
}  # fmt: skip

CLUSTER = {
    "bench": "cluster_summary", "read_again_per_record": 3.74, "p50_ms": 812.6, "p99_ms": 1813.0,
    "longest_outage_s": 4.39, "backlog_records_per_s": 24_450, "backlog_ratio_to_local": 0.34, "correct": "yes",
}  # fmt: skip
UNKNOWN = dict.fromkeys(("read_again_per_record", "p50_ms", "p99_ms", "longest_outage_s"))


@pytest.mark.parametrize(
    "results, sentence",
    [
        (
            SINK,
            "onceflow wrote 134,547 rows/s exactly once, 1.8 times as many as Spark's own sink at least once (75,330).",
        ),
        (SINK[1:], "Nothing was compared."),
        (
            STATE,
            ("The fastest was 'ColumnProcessor, 1 s': 524,798 records/s exactly once; transformWithState of Spark had "
            "24,683 at least once."),
        ),
        (
            [LATENCY],
            "copy, 2,000 records/s, a commit every 100 ms: p50 69.2 ms, p99 129.5 ms, with 0.09 cores and 555 MiB.",
        ),
        (
            [{**LATENCY, "p50_ms": 80.0}, {**LATENCY, "cpu_percent": None}],
            "The fastest of 2 settings: copy, 2,000 records/s, a commit every 100 ms: p50 69.2 ms, p99 129.5 ms.",
        ),
        (
            [OVERHEAD],
            ("Exactly once costs -5.55 % (-16.4 to 15.6) of the throughput at 100ms, and a p50 of 69.4 ms in place of "
            "58.8."),
        ),
        (
            [SERVE],
            ("One instance answered 5,006 look-ups/s with a p99 of 6.75 ms, and 4,000 while its table was written "
            "(14.01 ms)."),
        ),
        ([{**SERVE, "correct": "3 wrong"}], "Wrong: 3 wrong. The figures do not count."),
        (
            [{"bench": "postgres, 5 columns", "contender": "onceflow", "rows_per_s": 184_841, "columns": 5,
              "ratio_to_spark_jdbc": 1.37}],
            "onceflow wrote 184,841 rows/s of 5 columns, 1.37 times Spark's JDBC sink.",
        ),
        (
            [{**SERVE, "lookups_per_s_while_writing": None}],
            "One instance answered 5,006 look-ups/s with a p99 of 6.75 ms.",
        ),
        ([{"bench": "state, weaker choices: one", "figure": 1}], "Measured: state, weaker choices: one."),
        (
            [{"bench": "restore", "how": how, "records_per_s": 1_000} for how in ("driver", "tasks")],
            "Restores of lost state read 1,000 records/s (driver), and 1,000 records/s (tasks).",
        ),
        (
            [{"bench": "cluster", "phase": "steady"}, CLUSTER],
            ("On the cluster: 3.74 records of the table were read again for each processed one; p50 812.6 ms, p99 1813 "
            "ms; the longest outage took 4.39 s; a backlog: 24,450 records/s, 0.34 times a local master."),
        ),
        (
            [{**CLUSTER, **UNKNOWN, "backlog_ratio_to_local": None}],
            "On the cluster: a backlog: 24,450 records/s.",
        ),
        ([], "Nothing was measured."),
    ],
)  # fmt: skip
def test_what_was_found(results: list[dict[str, Any]], sentence: str) -> None:
    assert finding(results) == sentence
