"""Metrics of real flows: what is scraped is what consumers see."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from openlineage.client import OpenLineageClient
from openlineage.client.transport.file import FileConfig, FileTransport
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from pyspark.errors import StreamingQueryException
from sqlite_sink import SqliteSink

import onceflow
from onceflow import EnvironmentUnusableError, hooks
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.testing import faults, independent
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration


def status(endpoint: onceflow.MetricsEndpoint, path: str) -> int:
    try:
        with urllib.request.urlopen(endpoint.url.replace("/metrics", path), timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


class Scrape:
    """What one scrape of an endpoint has shown."""

    def __init__(self, url: str) -> None:
        with urllib.request.urlopen(url, timeout=20) as answer:
            self._families = list(text_string_to_metric_families(answer.read().decode()))

    def sum(self, name: str, **labels: str) -> float | None:
        """Of all samples with these labels; None: there are none."""
        found = [
            sample.value
            for family in self._families
            for sample in family.samples
            if sample.name == f"onceflow_{name}" and labels.items() <= sample.labels.items()
        ]
        return sum(found) if found else None

    def values(self, *without: str) -> dict[tuple[str, ...], float]:
        """All values by name and labels; of histograms the sums."""
        return {
            (name, *sorted(sample.labels.values())): sample.value
            for family in self._families
            for sample in family.samples
            if (name := sample.name.removeprefix("onceflow_")).endswith(("_total", "_sum")) or family.type == "gauge"
            if name not in without
        }


#: The time of each observer; a sample that each takes by itself.
NOT_COMPARED = ("last_commit_timestamp_seconds", "latency_seconds_sum")


def collected(reader: InMemoryMetricReader) -> dict[tuple[str, ...], float]:
    """The same of OpenTelemetry."""
    data: Any = reader.get_metrics_data()
    found = {}
    for metric in (m for resource in data.resource_metrics for scope in resource.scope_metrics for m in scope.metrics):
        for point in metric.data.data_points:
            name = metric.name.removeprefix("onceflow_")
            key = (name if hasattr(point, "value") else f"{name}_sum", *sorted(point.attributes.values()))
            found[key] = point.value if hasattr(point, "value") else pytest.approx(point.sum)
    return {key: value for key, value in found.items() if key[0] not in NOT_COMPARED}


def check_spans(spans: Sequence[Any], flow: str, attempts: Sequence[int]) -> None:
    """One span for each batch, with its steps and aborted attempts."""
    batches = [span for span in spans if span.name == "onceflow.batch" and span.attributes["onceflow.flow"] == flow]
    assert [span.attributes["onceflow.batch"] for span in batches] == [*range(1, len(attempts) + 1)]
    assert [span.attributes["onceflow.attempts"] for span in batches] == [*attempts]
    assert [len(span.events) for span in batches] == [count - 1 for count in attempts]
    assert all(span.attributes["onceflow.producer_epoch"] >= 0 for span in batches)
    for batch in batches:
        steps = [span for span in spans if span.parent and span.parent.span_id == batch.context.span_id]
        names = [span.name.removeprefix("onceflow.") for span in sorted(steps, key=lambda span: span.start_time)]
        again = ["begin"] * (batch.attributes["onceflow.attempts"] - 1)
        assert names == ["plan", *again, "begin", "write", "audit", "progress", "end"]
        assert all(batch.start_time <= span.start_time <= span.end_time <= batch.end_time for span in steps)
    assert [span for span in spans if span.name == "onceflow.init" and span.attributes["onceflow.flow"] == flow]


class Seen(onceflow.Processor):
    """Remembers the last value of a key, passes all values on, and refuses some."""

    def process(self, key: bytes, records: Any, state: Any) -> Any:
        for record in records:
            if record.value.endswith(b"13"):
                raise ValueError("unlucky")
            state.put(record.value)
            yield onceflow.Record(key=key, value=record.value)


class Counted(onceflow.Processor):
    """A value, entries and a timer for each key."""

    def process(self, key: bytes, records: Any, state: Any) -> Any:
        state.put(b"%d" % len(records))
        for record in records:
            state.map("seen").put(record.value, b"")
        state.timers.register("end", 4_000_000_000_000, "processing")
        yield onceflow.Record(key=key, value=b"seen")

    def on_timer(self, key: bytes, timer: Any, state: Any) -> None: ...


def visible(pipe: Any, topics: Mapping[str, str]) -> dict[str, int]:
    """How many records librdkafka sees in each topic, read_committed."""
    return {name: len(independent.read_topic(pipe.bootstrap, topic)) for name, topic in topics.items()}


def test_sums_are_what_consumers_see(
    make_pipe: Any, make_topic: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A flow with a table and dead letters, of whose batches one is aborted and run again. Beside it a copy, which
    fails and is started again."""
    pipe, copy = make_pipe(), make_pipe()
    letters = make_topic("letters", 1)
    pipe.fill(2500)
    copy.fill(300)
    rules = [
        {"step": "write", "action": "raise", "where": "task", "task": 0, "batch": 2, "once_file": str(tmp_path / "1")},
        {"step": "progress", "action": "raise", "batch": 3, "flow": copy.flow, "once_file": str(tmp_path / "2")},
    ]
    monkeypatch.setenv(hooks.VARIABLE, faults.value_of(*rules))
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    meters = MeterProvider([reader], shutdown_on_exit=False)
    with onceflow.serve_metrics(0) as endpoint, onceflow.Telemetry(tracers, meters):
        assert (status(endpoint, "/healthz"), status(endpoint, "/readyz")) == (200, 503)
        flow = pipe.open()
        rows = flow.process(
            flow.read(pipe.source, max_records_per_batch=1000),
            Seen(),
            table=(table := make_topic("seen", 4, cleanup_policy="compact")),
            on_error="dead-letter",
            dead_letter_topic=letters,
        )
        query = flow.write(rows, topic=pipe.target, engine="tasks").start()
        try:
            query.processAllAvailable()
            with pytest.raises(StreamingQueryException, match="injected"):
                copy.run(read={"max_records_per_batch": 100})
            assert (status(endpoint, "/healthz"), status(endpoint, "/readyz")) == (503, 503)
            copy.run(read={"max_records_per_batch": 100})
            found, same = Scrape(endpoint.url), collected(reader)
            assert (status(endpoint, "/healthz"), status(endpoint, "/readyz")) == (200, 200)
        finally:
            query.stop()
    assert same == found.values(*NOT_COMPARED)
    check_spans(exporter.get_finished_spans(), pipe.flow, [batch.attempts for batch in query.batches])
    named = {"flow": pipe.flow}
    topics = {"outputs": pipe.target, "table": table, "letters": letters}
    counted = {name: found.sum("records_written_total", topic=topic, **named) for name, topic in topics.items()}
    assert counted == visible(pipe, topics)
    assert counted["outputs"] == 2475
    assert found.sum("dead_letters_total", **named) == counted["letters"] == 25
    assert found.sum("offsets_read_total", topic=pipe.source, **named) == 2500
    assert found.sum("attempts_aborted_total", **named) == 1
    assert found.sum("batches_committed_total", **named) == len(query.batches) == 3
    assert found.sum("attempts_total", **named) == 4
    assert found.sum("step_seconds_count", step="end", **named) == 3
    assert found.sum("bytes_written_total", **named) == sum(batch.nbytes for batch in query.batches)
    lag = [found.sum("source_lag", topic=pipe.source, partition=str(number), **named) for number in range(4)]
    assert lag == [0, 0, 0, 0]
    assert (found.sum("up", **named), found.sum("ready", **named), found.sum("up", flow=copy.flow)) == (1, 1, 0)
    # The other flow.
    named = {"flow": copy.flow}
    assert found.sum("records_written_total", topic=copy.target, **named) == 300 == visible(copy, {"": copy.target})[""]
    counters = ("attempts_total", "attempts_aborted_total", "batches_committed_total", "failures_total")
    assert [found.sum(name, **named) for name in counters] == [3, 1, 3, 1]


@pytest.mark.long
@pytest.mark.parametrize("engine", [pytest.param("auto", marks=pytest.mark.long), "tasks"], ids=["driver", "tasks"])
def test_tables_restores_and_latency(
    make_pipe: Any,
    make_topic: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    engine: str,
) -> None:
    """The copies are deleted between two runs. A batch of the second run is aborted once, when tasks write."""
    pipe = make_pipe()
    table, began = make_topic("seen", 4, cleanup_policy="compact"), time.monotonic()
    rule = {"step": "write", "action": "raise", "where": "task", "task": 0, "once_file": str(tmp_path / "once")}

    def ran(endpoint: onceflow.MetricsEndpoint, restored: int | None) -> None:
        flow = pipe.open()
        step = {"table": table, "state_dir": tmp_path / "state"}
        rows = flow.process(flow.read(pipe.source), Counted(), **step)
        query = flow.write(rows, topic=pipe.target, engine=engine).start()
        try:
            query.processAllAvailable()
            if restored is not None:
                monkeypatch.setenv(hooks.VARIABLE, faults.value_of(rule))
                pipe.fill(300)
                query.processAllAvailable()
            found = Scrape(endpoint.url)
        finally:
            query.stop()
        named = {"flow": pipe.flow, "table": table}
        last = {record.key: record.value for record in independent.read_topic(pipe.bootstrap, table)}
        rest = {record.key: record.value for record in independent.read_topic(pipe.bootstrap, table + INTERNAL_SUFFIX)}
        kinds = Counter((key or b"")[:1] for key, value in rest.items() if value is not None)
        assert found.sum("table_rows", kind="value", **named) == len(last) == 50
        assert found.sum("table_rows", kind="timer", **named) == kinds[b"t"] == len(last)
        assert found.sum("table_rows", kind="entry", **named) == kinds[b"m"] > len(last)
        assert found.sum("next_timer_timestamp_seconds", clock="processing", **named) == 4e9
        assert found.sum("table_partitions_open", **named) == found.sum("table_partitions", **named) == 4
        assert (found.sum("table_bytes", **named) or 0) > 4 * 4096
        assert found.sum("letters_waiting", **named) is None, "it is no table of Retry"
        assert found.sum("restored_records_total", **named) == restored
        assert found.sum("restore_seconds_count", **named) == (None if restored is None else 4)
        assert Scrape(endpoint.url).sum("table_rows", **named) is None, "it does not run any more"

    with onceflow.serve_metrics(0) as endpoint:
        pipe.fill(300)
        ran(endpoint, None)
        shutil.rmtree(tmp_path / "state")
        restored = sum(visible(pipe, {"": table, "more": table + INTERNAL_SUFFIX}).values())
        pipe.fill(300)
        ran(endpoint, restored)
        named = {"flow": pipe.flow}
        wait_until(lambda: Scrape(endpoint.url).sum("latency_seconds_count", **named), 30, "a batch was looked at")
        found = Scrape(endpoint.url)
        assert found.sum("attempts_aborted_total", **named) == (1 if engine == "tasks" else None)
        ages, count = found.sum("latency_seconds_sum", **named), found.sum("latency_seconds_count", **named)
        assert 0 < (ages or 0) / (count or 0) < time.monotonic() - began


def test_serve_starts_a_query_behind_its_endpoint(
    make_pipe: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty topic is no reason to wait; a port in use is one not to start; a failure shows."""
    pipe = make_pipe()

    def writer() -> Any:
        flow = pipe.open()
        return flow.write(flow.read(pipe.source).select("key", "value"), topic=pipe.target)

    with onceflow.serve_metrics(0) as other, pytest.raises(EnvironmentUnusableError, match="cannot be served"):
        onceflow.serve(writer(), metrics_port=other.port)
    assert f"onceflow-direct-{pipe.flow}" not in {thread.name for thread in threading.enumerate()}
    told: list[Any] = []

    def ask() -> None:
        try:
            said = ""

            def url() -> str:
                nonlocal said
                said += capsys.readouterr().err
                return said.partition("metrics at ")[2].partition("\n")[0]

            wait_until(lambda: url() != "", 30, lambda: said)
            endpoint: Any = type("Endpoint", (), {"url": url()})
            wait_until(lambda: status(endpoint, "/readyz") == 200, 60, "ready")
            told.append(Scrape(endpoint.url).sum("batches_committed_total", flow=pipe.flow))
            pipe.fill(10)
            wait_until(lambda: Scrape(endpoint.url).sum("records_written_total", flow=pipe.flow) == 10, 60, "written")
            told.append("written")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    onceflow.serve(writer(), metrics_port=0)
    asking.join(60)
    assert told == [0, "written"]
    # A query that fails.
    monkeypatch.setenv(hooks.VARIABLE, faults.fault("plan", "raise", flow=pipe.flow))
    faults._fired.clear()
    pipe.fill(10)
    with onceflow.serve_metrics(0) as endpoint:
        query = writer().start()
        wait_until(lambda: status(endpoint, "/healthz") == 503, 60, "failed")
        found = Scrape(endpoint.url)
        assert (found.sum("up", flow=pipe.flow), found.sum("failures_total", flow=pipe.flow)) == (0, 1)
        with pytest.raises(Exception, match="injected"):
            query.awaitTermination(60)


@pytest.mark.long
def test_other_systems_lost_batches_and_newer_drivers(
    make_pipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with onceflow.serve_metrics(0) as endpoint:
        outside = make_pipe()
        outside.fill(500)
        path = tmp_path / "outside.db"
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("create table seen (key text, value text)")
            flow = outside.open()
            df = flow.read(outside.source, max_records_per_batch=200)
            rows = df.selectExpr("cast(key as string) as key", "cast(value as string) as value")
            flow.write_external(rows, SqliteSink(path, "seen"), once=True).start().awaitTermination(60)
            ((there,),) = database.execute("select count(*) from seen")
        wait_until(lambda: Scrape(endpoint.url).sum("latency_seconds_count", flow=outside.flow), 30, "its latency")
        found = Scrape(endpoint.url)
        assert found.sum("records_written_total", flow=outside.flow, topic="outside.db:seen") == there == 500
        assert found.sum("batches_committed_total", flow=outside.flow) == 3
        assert (status(endpoint, "/healthz"), found.sum("up", flow=outside.flow)) == (200, 0)

        lost = make_pipe()
        lost.fill(200)
        rule = faults.fault("write", "raise", where="task", batch=1, task=0, once_file=str(tmp_path / "lost"))
        monkeypatch.setenv(hooks.VARIABLE, rule)
        lost.run(guarantee="at_most_once", engine="tasks")
        monkeypatch.delenv(hooks.VARIABLE)
        found = Scrape(endpoint.url)
        assert found.sum("batches_lost_total", flow=lost.flow) == 1
        assert found.sum("batches_committed_total", flow=lost.flow) == 0
        assert found.sum("records_written_total", flow=lost.flow) is None

        pipe = make_pipe()
        pipe.fill(100)
        queries = []
        for _ in range(2):
            flow = pipe.open()
            queries.append(flow.write(flow.read(pipe.source).select("key", "value"), topic=pipe.target).start())
            queries[-1].processAllAvailable()
        pipe.fill(100)
        try:
            wait_until(lambda: queries[0].failure is not None, 60, "the older driver is fenced")
            queries[1].processAllAvailable()
            found = Scrape(endpoint.url)
            assert found.sum("fences_total", flow=pipe.flow) == 1
            assert found.sum("failures_total", flow=pipe.flow, error="FencedError") == 1
            assert (status(endpoint, "/healthz"), found.sum("up", flow=pipe.flow)) == (200, 1), "the newer one counts"
            seen = visible(pipe, {"outputs": pipe.target})["outputs"]
            assert found.sum("records_written_total", flow=pipe.flow, topic=pipe.target) == seen == 200
        finally:
            queries[1].stop()


def test_lineage_has_what_flows_read_and_write(make_pipe: Any, make_state_pipe: Any, tmp_path: Path) -> None:
    """Events of OpenLineage's own client: of a flow that ends by itself, one that is stopped, and one that fails."""
    copy, table = make_pipe(partitions=2), make_state_pipe(partitions=2)
    copy.fill(300)
    table.fill(40)
    file = tmp_path / "events.json"
    client = OpenLineageClient(transport=FileTransport(FileConfig(log_file_path=str(file), append=True)))
    with onceflow.Lineage(client, namespace="tests"):
        with copy.open() as flow:
            rows = flow.read(copy.source).select("key", "value")
            flow.write(rows, topic=copy.target, once=True).start().awaitTermination()
        query = table.run()
        path = tmp_path / "rows.db"
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE rows (key TEXT, value TEXT CHECK (value = 'none'))")
        with onceflow.Flow(f"{table.flow}-rows", table.spark, bootstrap_servers=table.bootstrap) as flow:
            rows = flow.read(table.source).selectExpr("CAST(key AS STRING) AS key", "CAST(value AS STRING) AS value")
            with pytest.raises(onceflow.OnceflowError) as refused:
                flow.write_external(rows, SqliteSink(path, "rows"), once=True).start().awaitTermination()
    events = [json.loads(line) for line in file.read_text().splitlines()]
    cluster = f"kafka://{copy.bootstrap.split(',')[0]}"
    assert [event["eventType"] for event in events] == ["START", "COMPLETE", "START", "ABORT", "START", "FAIL"]
    assert all(each["namespace"] == cluster for event in events[:4] for each in event["inputs"] + event["outputs"])
    (read,), (written,) = events[1]["inputs"], events[1]["outputs"]
    assert (read["name"], written["name"]) == (copy.source, copy.target)
    assert read["inputFacets"]["inputStatistics"]["rowCount"] == 300
    assert written["outputFacets"]["outputStatistics"]["rowCount"] == 300 == len(copy.check())
    counted = {each["name"]: each["outputFacets"]["outputStatistics"]["rowCount"] for each in events[3]["outputs"]}
    assert counted.keys() >= {table.target, table.table}
    assert counted[table.target] == sum(batch.records for batch in query.batches)
    assert [each["name"] for each in events[2]["outputs"]] == [table.target, table.table]
    assert events[5]["outputs"][0]["namespace"] == "file"
    assert events[5]["run"]["facets"]["errorMessage"]["message"] == str(refused.value)
