"""What is counted: the metrics by name, and their values. Values are read and changed under one lock, so that a scrape
never sees half of a batch."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from onceflow.planning.options import BatchSummary

Labels = tuple[str, ...]
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

#: Upper bounds of the histograms, in seconds. For ages and restores: up to a day.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
LONG_BUCKETS_S = (*BUCKETS_S, 300.0, 900.0, 3600.0, 14400.0, 86400.0)


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        kind: counter, gauge or histogram. labels: names of its labels.
        text: what it means. bounds: upper bounds of the buckets of a histogram, in seconds.
    """

    kind: str
    labels: Labels
    text: str
    bounds: tuple[float, ...] = BUCKETS_S


_FLOW = ("flow",)
_TABLE = ("flow", "table")
#: All metrics, by the names that Prometheus shows. The names of counters end in ``_total``.
METRICS: Mapping[str, Metric] = {
    "onceflow_records_written_total": Metric(COUNTER, ("flow", "topic"), "Records in committed batches, by topic"),
    "onceflow_bytes_written_total": Metric(COUNTER, ("flow", "topic"), "Bytes in committed batches, by topic"),
    "onceflow_offsets_read_total": Metric(
        COUNTER, ("flow", "topic"), "Offsets of source topics in committed batches (markers count, too)"
    ),
    "onceflow_batches_committed_total": Metric(COUNTER, _FLOW, "Committed batches"),
    "onceflow_batches_lost_total": Metric(COUNTER, _FLOW, "Batches given up after their progress (at_most_once)"),
    "onceflow_attempts_total": Metric(COUNTER, _FLOW, "Attempts of committed batches"),
    "onceflow_attempts_aborted_total": Metric(COUNTER, ("flow", "error"), "Aborted attempts, by class of the error"),
    "onceflow_failures_total": Metric(COUNTER, ("flow", "error"), "Failures of the query, by class of the error"),
    "onceflow_fences_total": Metric(COUNTER, _FLOW, "How often a newer driver has taken the flow over"),
    "onceflow_dead_letters_total": Metric(COUNTER, _FLOW, "Records that became dead letters"),
    "onceflow_late_records_total": Metric(COUNTER, _FLOW, "Late records"),
    "onceflow_duplicates_total": Metric(COUNTER, _FLOW, "Duplicates that Flow.deduplicate has found"),
    "onceflow_rows_dropped_total": Metric(COUNTER, _FLOW, "Rows that Spark dropped as later than its watermark"),
    "onceflow_timers_fired_total": Metric(COUNTER, _FLOW, "Timers of processors that have fired"),
    "onceflow_rows_expired_total": Metric(COUNTER, _FLOW, "Rows of state that have expired"),
    "onceflow_state_lost_total": Metric(COUNTER, _FLOW, "Partitions without a changelog that have lost their state"),
    "onceflow_batch_seconds": Metric(HISTOGRAM, _FLOW, "Seconds of a committed batch, all its attempts together"),
    "onceflow_step_seconds": Metric(HISTOGRAM, ("flow", "step"), "Seconds of a step of a committed batch"),
    "onceflow_latency_seconds": Metric(
        HISTOGRAM, _FLOW, "Age of the first record of a partition when its batch was committed, sampled", LONG_BUCKETS_S
    ),
    "onceflow_restore_seconds": Metric(
        HISTOGRAM, _TABLE, "Seconds in which the local copy of a partition was restored or caught up", LONG_BUCKETS_S
    ),
    "onceflow_restored_records_total": Metric(COUNTER, _TABLE, "Records read to restore local copies, or to catch up"),
    "onceflow_table_rows": Metric(
        GAUGE, ("flow", "table", "kind"), "Rows of the local copies: values of keys, entries of maps and lists, timers"
    ),
    "onceflow_table_bytes": Metric(GAUGE, _TABLE, "Size of the local copies on disk"),
    "onceflow_table_partitions": Metric(GAUGE, _TABLE, "Partitions of the table"),
    "onceflow_table_partitions_open": Metric(
        GAUGE, _TABLE, "Partitions whose local copy was brought up to date in this run"
    ),
    "onceflow_table_hosts": Metric(GAUGE, _TABLE, "Hosts of a cluster that have partitions of the table at home"),
    "onceflow_table_partitions_waiting": Metric(
        GAUGE, _TABLE, "Partitions that are being restored while batches wait for them"
    ),
    "onceflow_table_partitions_moved": Metric(GAUGE, _TABLE, "Moves of partitions to another host in this run"),
    "onceflow_table_records_lacking": Metric(
        GAUGE, _TABLE, "Records that local copies lack which are homes of partitions, or will be"
    ),
    "onceflow_standby_copies": Metric(GAUGE, _TABLE, "Standby copies that can take over at once"),
    "onceflow_standby_records_lacking": Metric(GAUGE, _TABLE, "Records that standby copies lack"),
    "onceflow_next_timer_timestamp_seconds": Metric(
        GAUGE, ("flow", "table", "clock"), "When the next timer is due or the next row expires, Unix time"
    ),
    "onceflow_letters_waiting": Metric(GAUGE, _TABLE, "Dead letters that wait in a table of onceflow.Retry"),
    "onceflow_source_lag": Metric(
        GAUGE, ("flow", "topic", "partition"), "Offsets of a source partition that were left at the last batch"
    ),
    "onceflow_last_batch": Metric(GAUGE, _FLOW, "Number of the last committed batch"),
    "onceflow_last_commit_timestamp_seconds": Metric(GAUGE, _FLOW, "When the last batch was committed, Unix time"),
    "onceflow_transaction_timeout_seconds": Metric(GAUGE, _FLOW, "After how many seconds the broker aborts a batch"),
    "onceflow_standby_drivers": Metric(GAUGE, _FLOW, "Other drivers that stand by, if this one has standby=True"),
    "onceflow_up": Metric(GAUGE, _FLOW, "1 while the query runs, else 0"),
    "onceflow_ready": Metric(GAUGE, _FLOW, "1 when the query has begun to commit, or there is nothing to read"),
}

_OF_FLOW = tuple(name for name, metric in METRICS.items() if metric.kind == COUNTER and metric.labels == _FLOW)


@dataclass
class Distribution:
    """The values of one histogram.

    Args:
        bounds: upper bounds of the buckets, in ascending order.
        counts: how many values are in each bucket and in none of those before it; the last one has no bound.
    """

    bounds: tuple[float, ...] = BUCKETS_S
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Bounds, and how many values are not above them."""
        found, below = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            found.append((bound, float(below)))
        return found


class Counts:
    """The values of counters, histograms, and the gauges that a commit sets. Usable from several threads.

    Attributes:
        lock: held while values change; hold it to read several that belong together.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.values: dict[str, dict[Labels, float]] = {}
        self.distributions: dict[str, dict[Labels, Distribution]] = {}

    def begin(self, flow: str) -> None:
        """A flow is known: its counters are shown from now on, so that the first event is an increase."""
        with self.lock:
            for name in _OF_FLOW:
                self.values.setdefault(name, {}).setdefault((flow,), 0.0)

    def committed(self, flow: str, batch: BatchSummary, at_s: float) -> None:
        """Count a committed batch.

        Args:
            at_s: when it was committed, in Unix time.
        """
        with self.lock:
            self.begin(flow)
            for topic, (records, nbytes) in batch.written.items():
                self._add("onceflow_records_written_total", (flow, topic), records)
                self._add("onceflow_bytes_written_total", (flow, topic), nbytes)
            for topic, offsets in batch.read.items():
                self._add("onceflow_offsets_read_total", (flow, topic), offsets)
            for name, count in _counts_of(batch):
                self._add(name, (flow,), count)
            self._timed(flow, batch)
            self._set("onceflow_last_batch", (flow,), batch.batch)
            self._set("onceflow_last_commit_timestamp_seconds", (flow,), at_s)

    def lost(self, flow: str) -> None:
        """Count a batch that was given up."""
        with self.lock:
            self.begin(flow)
            self._add("onceflow_batches_lost_total", (flow,), 1)

    def aborted(self, flow: str, error: str) -> None:
        """Count an aborted attempt. ``error`` is the class of its error."""
        with self.lock:
            self._add("onceflow_attempts_aborted_total", (flow, error), 1)

    def failed(self, flow: str, error: str, *, fenced: bool) -> None:
        """Count a failure of a query. ``error`` is the class of its error."""
        with self.lock:
            self.begin(flow)
            self._add("onceflow_failures_total", (flow, error), 1)
            self._add("onceflow_fences_total", (flow,), int(fenced))

    def of_flow(self, flow: str, names: Iterable[str]) -> dict[str, float]:
        """The sums of counters of a flow, over their other labels. Names: without ``onceflow_`` and ``_total``."""
        with self.lock:
            return {
                name: sum(
                    count
                    for labels, count in self.values.get(f"onceflow_{name}_total", {}).items()
                    if labels[0] == flow
                )
                for name in names
            }

    def latency(self, flow: str, seconds: float) -> None:
        """Count how old a record was when its batch was committed."""
        with self.lock:
            self._observe("onceflow_latency_seconds", (flow,), seconds)

    def restored(self, flow: str, table: str, records: int, seconds: float) -> None:
        """Count the restore of the local copy of one partition."""
        with self.lock:
            self._add("onceflow_restored_records_total", (flow, table), records)
            self._observe("onceflow_restore_seconds", (flow, table), seconds)

    def _add(self, name: str, labels: Labels, count: float) -> None:
        values = self.values.setdefault(name, {})
        values[labels] = values.get(labels, 0.0) + count

    def _set(self, name: str, labels: Labels, value: float) -> None:
        self.values.setdefault(name, {})[labels] = float(value)

    def _timed(self, flow: str, batch: BatchSummary) -> None:
        """Put the seconds of a committed batch into the histograms."""
        for step, seconds in batch.seconds.items():
            self._observe("onceflow_step_seconds", (flow, step), seconds)
        self._observe("onceflow_batch_seconds", (flow,), sum(batch.seconds.values()))

    def _observe(self, name: str, labels: Labels, seconds: float) -> None:
        found = self.distributions.setdefault(name, {})
        found.setdefault(labels, Distribution(METRICS[name].bounds)).add(seconds)


def _counts_of(batch: BatchSummary) -> Iterable[tuple[str, int]]:
    """The counters that have no label but the flow."""
    return (
        ("onceflow_batches_committed_total", 1),
        ("onceflow_attempts_total", batch.attempts),
        ("onceflow_dead_letters_total", batch.dead_letters),
        ("onceflow_late_records_total", batch.late),
        ("onceflow_duplicates_total", batch.duplicates),
        ("onceflow_rows_dropped_total", batch.dropped),
        ("onceflow_timers_fired_total", batch.timers_fired),
        ("onceflow_rows_expired_total", batch.expired),
        ("onceflow_state_lost_total", batch.state_lost),
    )
