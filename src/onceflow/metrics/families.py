"""Metrics in the form in which prometheus-client writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from onceflow.metrics.counts import COUNTER, HISTOGRAM, METRICS, Counts, Labels, Metric
from onceflow.metrics.watch import RUNNING, STARTING, FlowWatch


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
        }


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
