"""OpenTelemetry: the same metrics as for Prometheus, and a span for each batch."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import onceflow
from onceflow import hooks
from onceflow.errors import BatchAbortedError, EnvironmentUnusableError, FencedError
from onceflow.metrics.counts import METRICS
from onceflow.planning.options import BatchSummary
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.state.table_facts import TableFacts

S = 1_000_000_000


class Collected:
    """What the SDK has got."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.meters = MeterProvider([self._reader], shutdown_on_exit=False)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == f"onceflow.{name}"]

    def children(self, span: ReadableSpan) -> list[ReadableSpan]:
        """In the order of their begin."""
        assert span.context is not None
        found = [
            each
            for each in self._exporter.get_finished_spans()
            if each.parent and each.parent.span_id == span.context.span_id
        ]
        return sorted(found, key=lambda each: each.start_time or 0)

    def metrics(self) -> dict[tuple[str, ...], Any]:
        """Values by name and labels; of histograms count and sum."""
        data = self._reader.get_metrics_data()
        found: dict[tuple[str, ...], Any] = {}
        for metric in (m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics) if data else ():
            for point in metric.data.data_points:
                labels = tuple(str(point.attributes[name]) for name in METRICS[metric.name].labels)
                value = point.value if hasattr(point, "value") else (point.count, point.sum)
                found[(metric.name.removeprefix("onceflow_"), *labels)] = value
        return found


@pytest.fixture
def sdk() -> Iterator[Collected]:
    collected = Collected()
    yield collected
    collected.tracers.shutdown()
    collected.meters.shutdown()


@pytest.fixture
def telemetry(sdk: Collected) -> Iterator[onceflow.Telemetry]:
    with onceflow.Telemetry(sdk.tracers, sdk.meters) as telemetry:
        yield telemetry


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time, in seconds."""
    now = [0]
    monkeypatch.setattr("onceflow.metrics.spans.time.time_ns", lambda: now[0])

    def set_to(seconds: float) -> None:
        now[0] = round(seconds * S)

    return set_to


class Query:
    def __init__(self, flow: str = "f") -> None:
        self.flow, self.condition = flow, "running"
        self.batches: list[BatchSummary] = []
        self.lag = {"s": {0: 4, 1: 0}}
        self.is_over = False
        self.tables = [TableFacts("t", 4, 2, rows={"value": 7})]

    def source_times(self) -> Any:
        raise NotImplementedError("nothing was read")


def at(step: str, batch: int = 1, flow: str = "f", **facts: Any) -> None:
    hooks.at(step, where="driver", flow=flow, batch=batch, **facts)


def test_one_after_the_other(sdk: Collected) -> None:
    """A program may call `serve` again. The SDK ignores the callback of a second instrument of the same name."""
    for flow in ("first", "second"):
        assert sdk.metrics() == {}
        with onceflow.Telemetry(sdk.tracers, sdk.meters):
            at(hooks.STARTED, flow=flow, query=Query(flow))
            found = sdk.metrics()
            assert {labels[0] for _, *labels in found} == {flow}
            assert (found["up", flow], found["batches_committed_total", flow]) == (1, 0)


def test_metrics_are_those_for_prometheus(sdk: Collected, telemetry: onceflow.Telemetry) -> None:
    query = Query()
    at(hooks.STARTED, query=query)
    for number in (1, 2):
        summary = BatchSummary(
            number,
            10,
            attempts=2,
            dead_letters=3,
            seconds={"write": 0.5, "end": 0.25},
            written={"out": (10, 100)},
            read={"s": 12},
        )
        at("end", number, summary=summary)
    at(hooks.ABORTED, 2, error=BatchAbortedError("for the test"))
    found = sdk.metrics()
    assert found["records_written_total", "f", "out"] == 20
    assert found["bytes_written_total", "f", "out"] == 200
    assert found["offsets_read_total", "f", "s"] == 24
    assert found["batches_committed_total", "f"] == 2
    assert found["attempts_total", "f"] == 4
    assert found["attempts_aborted_total", "f", "BatchAbortedError"] == 1
    assert found["dead_letters_total", "f"] == 6
    assert found["batch_seconds", "f"] == (2, 1.5)
    assert found["step_seconds", "f", "write"] == (2, 1.0)
    assert found["last_batch", "f"] == 2
    assert (found["up", "f"], found["ready", "f"]) == (1, 1)
    assert (found["source_lag", "f", "s", "0"], found["source_lag", "f", "s", "1"]) == (4, 0)
    assert (found["table_rows", "f", "t", "value"], found["table_partitions_open", "f", "t"]) == (7, 2)
    assert {f"onceflow_{name}" for name, *_ in found} <= METRICS.keys()
    assert found["onceflow_fences_total".removeprefix("onceflow_"), "f"] == 0


def test_a_batch_is_a_span_with_its_steps(
    sdk: Collected, telemetry: onceflow.Telemetry, clock: Callable[[float], None]
) -> None:
    steps = {"plan": 101.0, "begin": 102.0, "write": 105.0, "audit": 105.5, "progress": 106.0}
    for step, when in steps.items():
        clock(when)
        at(step, 7, **({"producer": ProducerIdAndEpoch(40, 3)} if step == "begin" else {}))
    clock(107.0)
    summary = BatchSummary(
        7, 10, attempts=1, records=9, nbytes=90, path="driver", seconds={"plan": 0.25}, read={"s": 10}
    )
    at("end", 7, summary=summary)
    (batch,) = sdk.spans("batch")
    assert (batch.start_time, batch.end_time) == (100.75 * S, 107 * S)
    assert batch.attributes == {
        "onceflow.flow": "f",
        "onceflow.batch": 7,
        "onceflow.producer_id": 40,
        "onceflow.producer_epoch": 3,
        "onceflow.records": 9,
        "onceflow.offsets_read": 10,
        "onceflow.bytes": 90,
        "onceflow.dead_letters": 0,
        "onceflow.attempts": 1,
        "onceflow.path": "driver",
    }
    times = {"plan": (100.75, 101), "begin": (101, 102), "write": (102, 105), "audit": (105, 105.5)}
    times |= {"progress": (105.5, 106), "end": (106, 107)}
    seen = {span.name: (span.start_time, span.end_time) for span in sdk.children(batch)}
    assert seen == {f"onceflow.{name}": (begun * S, ended * S) for name, (begun, ended) in times.items()}
    assert batch.status.status_code is StatusCode.UNSET


def test_an_aborted_attempt_is_an_event(
    sdk: Collected, telemetry: onceflow.Telemetry, clock: Callable[[float], None]
) -> None:
    clock(1)
    at("plan")
    clock(2)
    at("begin", producer=ProducerIdAndEpoch(40, 3))
    clock(3)
    at(hooks.ABORTED, error=BatchAbortedError("a task failed", detail="of worker 3"))
    clock(4)
    at("begin", producer=ProducerIdAndEpoch(40, 4))
    clock(5)
    at("write")
    at("end", summary=BatchSummary(1, 10, attempts=2))
    (batch,) = sdk.spans("batch")
    (event,) = batch.events
    assert (event.name, event.timestamp) == ("attempt aborted", 3 * S)
    assert event.attributes is not None
    assert event.attributes["exception.type"] == "BatchAbortedError"
    assert "of worker 3" in str(event.attributes["exception.message"])
    assert batch.attributes is not None
    assert batch.attributes["onceflow.producer_epoch"] == 4
    begins = [span for span in sdk.children(batch) if span.name == "onceflow.begin"]
    assert [(span.start_time, (span.attributes or {})["onceflow.attempt"]) for span in begins] == [
        (1 * S, 1),
        (3 * S, 2),
    ]


def test_a_failure_ends_the_span_with_the_error(sdk: Collected, telemetry: onceflow.Telemetry) -> None:
    at("plan")
    at("begin", producer=ProducerIdAndEpoch(40, 3))
    at(hooks.FAILED, error=FencedError("a newer driver runs", next_step="stop one"))
    at(hooks.FAILED, 2, "g", error=ValueError("before anything was planned"))
    fenced, other = sdk.spans("batch")
    assert fenced.status.status_code is StatusCode.ERROR
    assert fenced.status.description == "FencedError: a newer driver runs"
    assert [event.name for event in fenced.events] == ["exception"]
    assert other.attributes == {"onceflow.flow": "g", "onceflow.batch": 2}


def test_what_has_nothing_to_do_is_no_span_and_flows_do_not_mix(sdk: Collected, telemetry: onceflow.Telemetry) -> None:
    at("plan", 1, "idle")
    for flow in ("one", "two"):
        at("plan", 1, flow)
    for flow in ("two", "one"):
        at("begin", 1, flow, producer=ProducerIdAndEpoch(len(flow), 3))
        at("write", 1, flow)
    for flow in ("one", "two"):
        at("end", 1, flow, summary=BatchSummary(1, 10))
    at("plan", 2, "idle")
    spans = sdk.spans("batch")
    assert [(span.attributes or {})["onceflow.flow"] for span in spans] == ["one", "two"]
    assert [len(sdk.children(span)) for span in spans] == [4, 4]


def test_a_start_is_a_span(sdk: Collected, telemetry: onceflow.Telemetry, clock: Callable[[float], None]) -> None:
    clock(10)
    hooks.at("init", where="driver", flow="f", seconds=1.5)
    (span,) = sdk.spans("init")
    assert (span.start_time, span.end_time) == (8.5 * S, 10 * S)


def test_lost_batches(sdk: Collected, telemetry: onceflow.Telemetry) -> None:
    at("plan")
    at(hooks.LOST, summary=BatchSummary(1, 10, lost=True))
    (batch,) = sdk.spans("batch")
    assert batch.status.status_code is StatusCode.ERROR
    assert sdk.metrics()["batches_lost_total", "f"] == 1


def test_an_error_of_the_telemetry_is_none_of_the_batch(
    sdk: Collected, telemetry: onceflow.Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    at("end", summary=BatchSummary(1, 10, seconds=None))  # type: ignore[arg-type]
    assert "flow f: the spans of batch 1 are incomplete" in caplog.text
    at("end", 2, summary=BatchSummary(2, 10))
    assert len(sdk.spans("batch")) == 1


def test_two_at_once(sdk: Collected) -> None:
    """The newest reports metrics, the other one continues when that is closed; nothing is recorded twice."""
    query = Query()

    def commit(number: int) -> None:
        at("plan", number)
        query.batches.append(BatchSummary(number, 10, seconds={"write": 0.5}))
        at(hooks.RESTORED, number, table="t", records=3, seconds=0.25)
        at("end", number, summary=query.batches[-1])

    with onceflow.Telemetry(sdk.tracers, sdk.meters):
        at(hooks.STARTED, query=query)
        commit(1)
        with onceflow.Telemetry(sdk.tracers, sdk.meters) as newest:
            newest.add(query)  # its first batch is recorded already
            assert sdk.metrics()["batch_seconds", "f"] == (1, 0.5)
            commit(2)
            found = sdk.metrics()
            assert (found["batch_seconds", "f"], found["batches_committed_total", "f"]) == ((2, 1.0), 2)
        commit(3)
        found = sdk.metrics()
        assert (found["batch_seconds", "f"], found["step_seconds", "f", "write"]) == ((3, 1.5), (3, 1.5))
        assert found["restore_seconds", "f", "t"] == (3, 0.75)
        assert found["batches_committed_total", "f"] == 3
    with onceflow.Telemetry(sdk.tracers, sdk.meters) as later:
        later.add(query)
        assert sdk.metrics()["batch_seconds", "f"] == (3, 1.5)
    assert [(span.attributes or {})["onceflow.batch"] for span in sdk.spans("batch")] == [1, 2, 3]
    assert hooks._observers == []


def test_an_sdk_that_refuses_an_instrument_leaves_nothing_behind(
    sdk: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    with monkeypatch.context() as patched:
        patched.setattr("opentelemetry.sdk.metrics.Meter.create_observable_gauge", lambda *_, **__: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                onceflow.Telemetry(sdk.tracers, sdk.meters)
    assert set(threading.enumerate()) <= before
    assert hooks._observers == []
    with onceflow.Telemetry(sdk.tracers, sdk.meters):
        at(hooks.STARTED, query=Query())
        at("end", summary=BatchSummary(1, 10))
        found = sdk.metrics()
    assert (found["batches_committed_total", "f"], found["up", "f"], found["batch_seconds", "f"]) == (1, 1, (1, 0.0))


def test_nothing_is_reported_after_the_end(sdk: Collected) -> None:
    with onceflow.Telemetry(sdk.tracers, sdk.meters) as telemetry:
        at("end", summary=BatchSummary(1, 10))
        assert len(hooks._observers) == 2
    telemetry.close()
    telemetry.add(Query())
    at("end", 2, summary=BatchSummary(2, 10))
    assert hooks._observers == []
    assert len(sdk.spans("batch")) == 1
    assert ("batches_committed_total", "f") not in sdk.metrics()


def test_without_an_sdk_nothing_happens() -> None:
    """The API alone gives tracers and meters that do nothing."""
    with onceflow.Telemetry():
        at("plan")
        at("end", summary=BatchSummary(1, 10))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(EnvironmentUnusableError, match=r"onceflow\[otel\]"):
        onceflow.Telemetry()
    assert hooks._observers == []


PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from opentelemetry import metrics, trace
from test_telemetry import Collected
from test_serving import Query
import onceflow

sdk = Collected()
trace.set_tracer_provider(sdk.tracers)
metrics.set_meter_provider(sdk.meters)
query = Query(asks=lambda query: query.fail(None))
query.isActive
query.condition, query.lag, query.tables, query.is_over = "running", {}, [], False
onceflow.serve(query, telemetry=True, more=lambda query: {"counted": sdk.metrics()["batches_committed_total", "f"]})
print(json.dumps({"observations": len(sdk.metrics())}))
"""


@pytest.mark.slow
def test_serve_reports_to_the_global_providers() -> None:
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert lines[0]["counted"] >= 1
    assert "observations" in lines[-1]


@pytest.mark.long
def test_nothing_is_imported_unless_it_is_asked_for() -> None:
    names = "opentelemetry", "openlineage"
    code = f"import sys, onceflow.service.serving, onceflow.metrics.endpoint; print({{*{names}}} & {{*sys.modules}})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "set()"
