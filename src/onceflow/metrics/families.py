"""Metrics in the form in which prometheus-client writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from onceflow.metrics.counts import COUNTER, HISTOGRAM, METRICS, Counts, Labels, Metric
from onceflow.metrics.gauges import looked_up
from onceflow.metrics.watch import FlowWatch


class Collector:
    """Gives every metric of METRICS to prometheus-client at each scrape."""

    def __init__(self, watch: FlowWatch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Any]:
        """All metrics."""
        found = {name: looked_up(self._watch, name) for name in METRICS}  # before the lock, because Spark may be slow
        with self._watch.counts.lock:
            return iter([_family(name, metric, self._watch.counts, found[name]) for name, metric in METRICS.items()])


def _family(name: str, metric: Metric, counts: Counts, given: Mapping[Labels, float] | None) -> Any:
    if metric.kind == HISTOGRAM:
        histogram = HistogramMetricFamily(name, metric.text, labels=metric.labels)
        for labels, found in counts.distributions.get(name, {}).items():
            histogram.add_metric(labels, buckets=found.cumulative(), sum_value=found.total)
        return histogram
    values = counts.values.get(name, {}) if given is None else given
    kind = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
    family: Any = kind(name.removesuffix("_total"), metric.text, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
