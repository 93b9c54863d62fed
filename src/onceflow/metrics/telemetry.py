"""``Telemetry``: the metrics of the flows of this process, and a span for each batch, through OpenTelemetry's API."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from onceflow import hooks
from onceflow._version import __version__
from onceflow.errors import EnvironmentUnusableError
from onceflow.metrics.counts import COUNTER, HISTOGRAM, METRICS, Counts, Labels, Metric
from onceflow.metrics.gauges import looked_up
from onceflow.metrics.watch import FlowWatch, WatchedQuery
from onceflow.planning.options import BatchSummary

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from onceflow.metrics.spans import BatchSpans

_NAME = "onceflow"
_SharedT = TypeVar("_SharedT")


class Telemetry:
    """Reports all flows of this process to OpenTelemetry, from now on. Create it before the flows start.

    Metrics have the names, labels and values of those for Prometheus (``onceflow.serve_metrics``). Each batch is a span
    with a child for each of its steps; an attempt that was aborted is an event of it. Where they go is up to the SDK
    that the program, or ``opentelemetry-instrument``, has configured: without one nothing is recorded. Of several that
    are open at once, the newest reports the metrics, and each batch has one span.

    ::

        with onceflow.Telemetry():
            onceflow.serve(flow.write(rows, topic="validated"))

    Args:
        tracer_provider: where spans go; None: the global provider.
        meter_provider: where metrics go; None: the global provider.

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
        tracer = trace.get_tracer(_NAME, __version__, tracer_provider)
        spans = _spans_to.of(None if tracer_provider is trace.get_tracer_provider() else tracer_provider)
        self._reporters = _reporters_to.of(None if meter_provider is metrics.get_meter_provider() else meter_provider)
        self._reporters.create_once(meter)
        # What the provider has refused is known here. From now on threads and observers are there until ``close``.
        self._watch: FlowWatch | None = FlowWatch(_RecordedCounts(self))
        self._forget = spans.open(lambda: BatchSpans(tracer))
        self._reporters.open.append(self)

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
    """Those that report to one meter provider, and the instruments that they share.

    A provider keeps an instrument and its callback for its whole life, and ignores the callback of a second one of the
    same name. So the instruments are created once. Their callbacks ask the newest that is open, and only the newest
    records values of histograms, which the provider would add up.
    """

    def __init__(self) -> None:
        self.open: list[Telemetry] = []
        self.histograms: dict[str, Any] = {}
        self._created: set[str] = set()
        self._recorded: WeakValueDictionary[int, BatchSummary] = WeakValueDictionary()  # by id
        self._lock = threading.Lock()

    def create_once(self, meter: Any) -> None:
        """Create the instruments that are not there yet."""
        with self._lock:
            for name, metric in METRICS.items():
                if name not in self._created:
                    self._create(meter, name, metric)
                    self._created.add(name)

    def is_newest(self, telemetry: Telemetry) -> bool:
        """Whether it was opened last, of those that are open."""
        return self.open[-1:] == [telemetry]

    def is_recorded_now(self, batch: BatchSummary) -> bool:
        """Whether this call is the first one for a batch. It is not if an earlier reporter has recorded the batch, and
        the next one is told of its query."""
        with self._lock:
            is_new = self._recorded.get(id(batch)) is None
            self._recorded[id(batch)] = batch
            return is_new

    def _create(self, meter: Any, name: str, metric: Metric) -> None:
        if metric.kind == HISTOGRAM:
            self.histograms[name] = meter.create_histogram(
                name, unit="s", description=metric.text, explicit_bucket_boundaries_advisory=list(metric.bounds)
            )
            return
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


class _Spans:
    """The spans for one tracer provider: each batch has one, however many report to it."""

    def __init__(self) -> None:
        self._open = 0
        self._forget: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    def open(self, make: Callable[[], BatchSpans]) -> Callable[[], None]:
        """Make spans from now on. Returns a function to call once: when nobody wants them any more, there are none."""
        with self._lock:
            if self._open == 0:
                self._forget = hooks.observe(make().observed)
            self._open += 1
        return self._close

    def _close(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self._forget()


class _PerProvider(Generic[_SharedT]):
    """What those share that report to the same provider."""

    def __init__(self, make: Callable[[], _SharedT]) -> None:
        self._make = make
        self._global = make()
        self._others: WeakKeyDictionary[Any, _SharedT] = WeakKeyDictionary()

    def of(self, provider: MeterProvider | TracerProvider | None) -> _SharedT:
        """Provider: None: the global one, also if the program configures it only later."""
        return self._global if provider is None else self._others.setdefault(provider, self._make())


_reporters_to = _PerProvider(_Reporters)
_spans_to = _PerProvider(_Spans)


class _RecordedCounts(Counts):
    """Values of histograms go to the instruments, one by one: OpenTelemetry puts them into buckets itself."""

    def __init__(self, telemetry: Telemetry) -> None:
        super().__init__()
        self._telemetry = telemetry

    def _timed(self, flow: str, batch: BatchSummary) -> None:
        reporters = self._telemetry._reporters
        if reporters.is_newest(self._telemetry) and reporters.is_recorded_now(batch):
            super()._timed(flow, batch)

    def _observe(self, name: str, labels: Labels, seconds: float) -> None:
        reporters = self._telemetry._reporters
        if reporters.is_newest(self._telemetry):
            reporters.histograms[name].record(seconds, _attributes(name, labels))


def _attributes(name: str, labels: Labels) -> dict[str, str]:
    return dict(zip(METRICS[name].labels, labels, strict=True))
