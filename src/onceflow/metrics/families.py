"""Metrics in the form in which prometheus-client writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from onceflow.metrics.counts import COUNTER, HISTOGRAM, METRICS, Counts, Labels, Metric
from onceflow.metrics.watch import RUNNING, STARTING, FlowWatch
from onceflow.state.table_facts import TableFacts

_TABLES = (
    "onceflow_table_rows",
    "onceflow_table_bytes",
    "onceflow_table_partitions",
    "onceflow_table_partitions_open",
    "onceflow_next_timer_timestamp_seconds",
    "onceflow_letters_waiting",
)


class Collector:
    """Gives every metric of METRICS to prometheus-client at each scrape."""

    def __init__(self, watch: FlowWatch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Any]:
        """All metrics."""
        gauges = self._gauges()  # before the lock is taken, because Spark may be slow
        with self._watch.counts.lock:
            return iter([_family(name, metric, self._watch.counts, gauges) for name, metric in METRICS.items()])

    def _gauges(self) -> dict[str, dict[Labels, float]]:
        """The values that are looked up at a scrape."""
        conditions = self._watch.conditions()
        return {
            "onceflow_up": {(flow,): float(found in (STARTING, RUNNING)) for flow, found in conditions.items()},
            "onceflow_ready": {(flow,): float(found == RUNNING) for flow, found in conditions.items()},
            "onceflow_source_lag": {
                (flow, topic, str(partition)): float(left)
                for flow, topics in self._watch.lags().items()
                for topic, partitions in topics.items()
                for partition, left in partitions.items()
            },
            "onceflow_transaction_timeout_seconds": {
                (flow,): seconds for flow, seconds in self._watch.transaction_timeouts().items()
            },
            **_of_tables(self._watch.tables()),
        }


def _of_tables(flows: Mapping[str, Sequence[TableFacts]]) -> dict[str, dict[Labels, float]]:
    found: dict[str, dict[Labels, float]] = {name: {} for name in _TABLES}
    for flow, tables in flows.items():
        for table in tables:
            labels = flow, table.table
            found["onceflow_table_partitions"][labels] = table.partitions
            found["onceflow_table_partitions_open"][labels] = table.opened
            for kind, count in table.rows.items():
                found["onceflow_table_rows"][(*labels, kind)] = count
            if table.nbytes is not None:
                found["onceflow_table_bytes"][labels] = table.nbytes
            for clock, ms in table.next_timer_ms.items():
                if ms is not None:
                    found["onceflow_next_timer_timestamp_seconds"][(*labels, clock)] = ms / 1000
            if table.waiting_letters and table.rows:
                found["onceflow_letters_waiting"][labels] = table.rows["value"]
    return found


def _family(name: str, metric: Metric, counts: Counts, gauges: Mapping[str, Mapping[Labels, float]]) -> Any:
    if metric.kind == HISTOGRAM:
        histogram = HistogramMetricFamily(name, metric.text, labels=metric.labels)
        for labels, found in counts.distributions.get(name, {}).items():
            histogram.add_metric(labels, buckets=found.cumulative(), sum_value=found.total)
        return histogram
    values = gauges[name] if name in gauges else counts.values.get(name, {})
    kind = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
    family: Any = kind(name.removesuffix("_total"), metric.text, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
