"""``Telemetry``: the metrics of the flows of this process, and a span for each batch, through OpenTelemetry's API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from onceflow import hooks
from onceflow._version import __version__
from onceflow.errors import EnvironmentUnusableError
from onceflow.metrics.counts import COUNTER, HISTOGRAM, METRICS, Counts, Labels, Metric
from onceflow.metrics.gauges import looked_up
from onceflow.metrics.watch import FlowWatch, WatchedQuery

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

_NAME = "onceflow"


class Telemetry:
    """Reports all flows of this process to OpenTelemetry, from now on. Create it before the flows start.

    Metrics have the names, labels and values of those for Prometheus (``onceflow.serve_metrics``). Each batch is a span
    with a child for each of its steps; an attempt that was aborted is an event of it. Where they go is up to the SDK
    that the program, or ``opentelemetry-instrument``, has configured: without one nothing is recorded.

    ::

        with onceflow.Telemetry():
            onceflow.serve(flow.write(rows, topic="validated"))

    Args:
        tracer_provider, meter_provider: None: the global ones.

    Raises:
        EnvironmentUnusableError: the package opentelemetry-api is missing.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        try:
            from opentelemetry import metrics, trace

            from onceflow.metrics.spans import BatchSpans
        except ImportError as missing:
            raise EnvironmentUnusableError(
                "Telemetry needs the package opentelemetry-api",
                detail=str(missing),
                next_step="pip install 'onceflow[otel]', and the SDK and exporter that you use",
            ) from missing
        meter = metrics.get_meter(_NAME, __version__, meter_provider)
        histograms = {
            name: _histogram(meter, name, metric) for name, metric in METRICS.items() if _is_histogram(metric)
        }
        self._watch: FlowWatch | None = FlowWatch(_RecordedCounts(histograms))
        self._reporters = _reporters_to(None if meter_provider is metrics.get_meter_provider() else meter_provider)
        self._reporters.open.append(self)
        self._reporters.create_once(meter)
        spans = BatchSpans(trace.get_tracer(_NAME, __version__, tracer_provider))
        self._forget = hooks.observe(spans.observed)

    def add(self, query: WatchedQuery) -> None:
        """Count a query that was started before, with its last 200 batches. These have no spans."""
        if self._watch is not None:
            self._watch.add(query)

    def close(self) -> None:
        """Report nothing more. The second call has no effect."""
        watch, self._watch = self._watch, None
        if watch is not None:
            self._reporters.open.remove(self)
            self._forget()
            watch.close()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def values(self, name: str) -> Mapping[Labels, float]:
        """The values of a metric now, by its labels."""
        watch = self._watch
        if watch is None:
            return {}
        given = looked_up(watch, name)  # before the lock is taken, because Spark may be slow
        with watch.counts.lock:
            return dict(watch.counts.values.get(name, {}) if given is None else given)


class _Reporters:
    """Those that report to one meter provider, and the instruments of counters and gauges that they share.

    A provider keeps an instrument and its callback for its whole life, and ignores the callback of a second one of the
    same name. So the callbacks are created once, and ask the newest that is open.
    """

    def __init__(self) -> None:
        self.open: list[Telemetry] = []
        self._are_created = False

    def create_once(self, meter: Any) -> None:
        """Create the instruments, at the first call."""
        if self._are_created:
            return
        self._are_created = True
        for name, metric in METRICS.items():
            if not _is_histogram(metric):
                create = meter.create_observable_counter if metric.kind == COUNTER else meter.create_observable_gauge
                create(name, [self._callback(name)], description=metric.text)

    def _callback(self, name: str) -> Callable[[Any], Iterable[Any]]:
        from opentelemetry.metrics import Observation

        def observe(options: Any) -> Iterable[Any]:
            newest = self.open[-1:]
            return [
                Observation(value, _attributes(name, labels))
                for each in newest
                for labels, value in each.values(name).items()
            ]

        return observe


_to_global = _Reporters()
_to_others: WeakKeyDictionary[Any, _Reporters] = WeakKeyDictionary()


def _reporters_to(provider: MeterProvider | None) -> _Reporters:
    """Provider: None: the global one, also if the program configures it only later."""
    return _to_global if provider is None else _to_others.setdefault(provider, _Reporters())


class _RecordedCounts(Counts):
    """Values of histograms go to the instruments, one by one: OpenTelemetry puts them into buckets itself."""

    def __init__(self, histograms: dict[str, Any]) -> None:
        super().__init__()
        self._histograms = histograms

    def _observe(self, name: str, labels: Labels, seconds: float) -> None:
        self._histograms[name].record(seconds, _attributes(name, labels))


def _is_histogram(metric: Metric) -> bool:
    return metric.kind == HISTOGRAM


def _histogram(meter: Any, name: str, metric: Metric) -> Any:
    bounds = list(metric.bounds)
    return meter.create_histogram(name, unit="s", description=metric.text, explicit_bucket_boundaries_advisory=bounds)


def _attributes(name: str, labels: Labels) -> dict[str, str]:
    return dict(zip(METRICS[name].labels, labels, strict=True))
