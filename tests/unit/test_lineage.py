"""OpenLineage: which events there are, what is in them, and that nobody waits for them."""

from __future__ import annotations

import http.server
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openlineage.client import OpenLineageClient
from openlineage.client.serde import Serde
from openlineage.client.transport.file import FileConfig, FileTransport

import onceflow
from onceflow import hooks
from onceflow.errors import EnvironmentUnusableError, FencedError, OptionError
from onceflow.metrics import event_queue
from onceflow.planning.options import BatchSummary
from onceflow.testing.waiting import wait_until

KAFKA = "kafka://broker:9092"


class Query:
    """A query as far as lineage asks it."""

    kafka = KAFKA

    def __init__(self, flow: str = "orders") -> None:
        self.flow = flow
        self.is_over = False
        self.outcome = "stopped"
        self.failure: BaseException | None = None
        self.datasets = {"in": (KAFKA, "in")}, {"out": (KAFKA, "out"), "pg": ("postgres://db:5432", "shop.public.t")}

    def start(self) -> Query:
        hooks.at(hooks.STARTED, where="driver", flow=self.flow, query=self)
        return self

    def commit(self, number: int, **more: Any) -> None:
        hooks.at("end", where="driver", flow=self.flow, batch=number, summary=BatchSummary(number, 10, **more))

    def end(self, outcome: str, failure: BaseException | None = None) -> None:
        self.failure = failure
        if failure is not None:
            hooks.at(hooks.FAILED, where="driver", flow=self.flow, batch=1, error=failure)
        self.is_over, self.outcome = True, outcome
        for _ in range(2):  # by the listener, and by whoever releases it
            hooks.at(hooks.ENDED, where="driver", flow=self.flow, query=self)


class Client:
    """Keeps what it is given, as JSON."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.may_send = threading.Event()
        self.may_send.set()
        self.fails = False
        self.asked = threading.Event()

    def emit(self, event: Any) -> None:
        self.asked.set()
        self.may_send.wait(30)
        if self.fails:
            raise ConnectionError("refused")
        self.events.append(json.loads(Serde.to_json(event)))

    @property
    def states(self) -> list[str]:
        return [event["eventType"] for event in self.events]


@pytest.fixture
def client() -> Client:
    return Client()


def lineage(client: Any, **options: Any) -> onceflow.Lineage:
    return onceflow.Lineage(client, **options)


def test_a_run_from_its_start_to_its_end(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("onceflow.metrics.lineage.time.monotonic", lambda: now[0])
    with lineage(client, namespace="shop", interval="10 seconds"):
        query = Query().start()
        query.commit(1, read={"in": 5}, written={"out": (4, 40), "letters": (1, 9)})
        now[0] += 10
        query.commit(2, read={"in": 3}, written={"out": (3, 30)})
        query.commit(3, read={"in": 1}, written={"pg": (7, 70)})
        query.end("complete")
    assert client.states == ["START", "RUNNING", "COMPLETE"]
    start, running, complete = client.events
    assert {event["run"]["runId"] for event in client.events} == {start["run"]["runId"]}
    assert start["job"]["namespace"] == "shop"
    assert start["job"]["name"] == "orders"
    assert start["job"]["facets"]["jobType"]["processingType"] == "STREAMING"
    assert start["run"]["facets"]["processing_engine"]["name"] == "Spark"
    assert start["producer"].startswith("urn:onceflow:")
    assert [(each["namespace"], each["name"]) for each in start["inputs"]] == [(KAFKA, "in")]
    assert [each["name"] for each in start["outputs"]] == ["out", "shop.public.t"]

    def counts(event: dict[str, Any]) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
        inputs = {each["name"]: each["inputFacets"]["inputStatistics"]["rowCount"] for each in event["inputs"]}
        outputs = {each["name"]: each["outputFacets"]["outputStatistics"] for each in event["outputs"]}
        return inputs, {name: (found["rowCount"], found["size"]) for name, found in outputs.items()}

    assert counts(start) == ({"in": 0}, {"out": (0, 0), "shop.public.t": (0, 0)})
    assert counts(running) == ({"in": 8}, {"out": (7, 70), "letters": (1, 9), "shop.public.t": (0, 0)})
    assert counts(complete) == ({"in": 9}, {"out": (7, 70), "letters": (1, 9), "shop.public.t": (7, 70)})


@pytest.mark.parametrize("outcome, last", [("complete", "COMPLETE"), ("stopped", "ABORT")])
def test_how_a_run_ends(client: Client, outcome: str, last: str) -> None:
    with lineage(client):
        Query().start().end(outcome)
    assert client.states == ["START", last]
    assert "errorMessage" not in client.events[-1]["run"]["facets"]


def test_a_failure_has_its_error(client: Client) -> None:
    with lineage(client):
        Query().start().end("failed", FencedError("a newer driver runs", next_step="stop one"))
    assert client.states == ["START", "FAIL"]
    assert "a newer driver runs" in client.events[-1]["run"]["facets"]["errorMessage"]["message"]


def test_each_run_of_a_flow_is_a_run_and_flows_do_not_mix(client: Client) -> None:
    with lineage(client):
        first, other = Query().start(), Query("other").start()
        first.commit(1, read={"in": 5})
        first.end("stopped")
        second = Query().start()
        hooks.at(hooks.ENDED, where="driver", flow=first.flow, query=first)  # late
        second.commit(1, read={"in": 1})
        second.end("stopped")
        other.end("stopped")
    found = [(event["job"]["name"], event["eventType"]) for event in client.events]
    assert found == [
        ("orders", "START"),
        ("other", "START"),
        ("orders", "ABORT"),
        ("orders", "START"),
        ("orders", "ABORT"),
        ("other", "ABORT"),
    ]
    runs = [event["run"]["runId"] for event in client.events]
    assert runs[0] == runs[2] != runs[3] == runs[4]
    assert client.events[4]["inputs"][0]["inputFacets"]["inputStatistics"]["rowCount"] == 1


def test_a_second_query_of_a_flow_has_a_run_of_its_own(client: Client) -> None:
    """Two Flow objects of one name: the second query fences the first, which learns that at its next batch."""
    with lineage(client):
        first = Query().start()
        first.commit(1, read={"in": 5})
        second = Query().start()
        first.end("failed", FencedError("a newer driver runs"))
        second.commit(2, read={"in": 1})
        second.end("complete")
    assert client.states == ["START", "ABORT", "START", "COMPLETE"]
    runs = [event["run"]["runId"] for event in client.events]
    assert runs[0] == runs[1] != runs[2] == runs[3]
    assert client.events[3]["inputs"][0]["inputFacets"]["inputStatistics"]["rowCount"] == 1


def test_a_query_that_had_failed_before_its_successor(client: Client) -> None:
    """Spark has not told yet that it has ended."""
    with lineage(client):
        first = Query().start()
        first.failure = FencedError("a newer driver runs")
        Query().start().end("complete")
    assert client.states == ["START", "FAIL", "START", "COMPLETE"]
    assert "a newer driver" in client.events[1]["run"]["facets"]["errorMessage"]["message"]


def test_a_query_that_runs_already(client: Client) -> None:
    over = Query("over")
    over.is_over = True
    with lineage(client) as watching:
        query = Query()
        for each in (query, query, over):
            watching.add(each)
        query.end("stopped")
    assert client.states == ["START", "ABORT"]


def test_an_endpoint_that_does_not_answer_stops_nothing(
    client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_queue, "_MOST", 3)
    monkeypatch.setattr(event_queue, "_CLOSE_S", 0.2)
    client.may_send.clear()
    began = time.monotonic()
    with lineage(client):
        for number in range(20):
            Query(f"flow-{number}").start()
            wait_until(client.asked.is_set, 4, "the thread sends the first event, so that the next ones wait")
    assert time.monotonic() - began < 5
    assert "OpenLineage events that were not sent: 1 (3 are waiting); flows go on" in caplog.text
    assert "OpenLineage events that were not sent: 4 (the endpoint does not answer)" in caplog.text
    client.may_send.set()


def test_an_endpoint_that_refuses_is_told_once_a_minute(
    client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.fails = True
    with lineage(client):
        query = Query().start()
        query.end("stopped")
    told = [record.getMessage() for record in caplog.records if "not sent" in record.getMessage()]
    assert told == ["OpenLineage events that were not sent: 1 (ConnectionError: refused); flows go on"]


def test_an_error_of_the_lineage_is_none_of_the_batch(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with lineage(client):
        query = Query().start()
        query.commit(1, read=None)
        assert "flow orders: the lineage of batch 1 is incomplete" in caplog.text
        query.end("stopped")
    assert client.states == ["START", "ABORT"]


def test_nothing_is_sent_after_the_end(client: Client) -> None:
    with lineage(client) as watching:
        Query().start()
    watching.close()
    watching.add(Query("late"))
    assert client.states == ["START"]
    assert hooks._observers == []


@pytest.mark.parametrize("options", [{"interval": "soon"}, {"interval": 0}, {"namespace": " "}])
def test_bad_options(client: Client, options: Any) -> None:
    with pytest.raises(OptionError):
        lineage(client, **options)
    assert hooks._observers == []


def test_the_namespace_of_the_environment(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "warehouse")
    with lineage(client):
        Query().start()
    assert client.events[0]["job"]["namespace"] == "warehouse"


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "onceflow.metrics.lineage_events", raising=False)
    monkeypatch.setitem(sys.modules, "openlineage.client", None)
    with pytest.raises(EnvironmentUnusableError, match=r"onceflow\[lineage\]"):
        onceflow.Lineage()
    assert hooks._observers == []


@pytest.mark.parametrize(
    "root, expected",
    [
        ("/data/rows", ("file", "/data/rows")),
        ("file:///data/rows", ("file", "/data/rows")),
        ("s3://bucket/a/b/", ("s3://bucket", "a/b")),
        ("s3://bucket", ("s3://bucket", "/")),
    ],
)
def test_names_of_folders(root: str, expected: tuple[str, str]) -> None:
    assert onceflow.DeltaSink(root).dataset == expected


@pytest.mark.parametrize(
    "dsn, table, expected",
    [
        ("postgresql://u:secret@db/shop", "t", ("postgres://db:5432", "shop.public.t")),
        ("host=db port=6432 dbname=shop password=secret", "s.t", ("postgres://db:6432", "shop.s.t")),
    ],
)
def test_names_of_tables(dsn: str, table: str, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGPORT", "PGDATABASE", "PGUSER"):
        monkeypatch.delenv(name, raising=False)
    assert onceflow.PostgresSink(dsn, table).dataset == expected
    assert onceflow.DeltaSink("/data/shop").dataset == ("file", "/data/shop")


# ---- with OpenLineage's own client -------------------------------------------------------------------


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that takes events. Its URL, and what it got."""
    got: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(201)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", got
        server.shutdown()
        thread.join(10)


def test_an_endpoint_of_the_environment(
    endpoint: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, got = endpoint
    monkeypatch.setenv("OPENLINEAGE_URL", url)
    with onceflow.Lineage():
        query = Query().start()
        wait_until(lambda: bool(got), 20, "an event")
        query.end("stopped")
    assert [event["eventType"] for event in got] == ["START", "ABORT"]
    assert got[0]["inputs"][0]["namespace"] == KAFKA


def test_a_transport_that_sends_later(
    endpoint: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client is closed, so the last event of a short run arrives."""
    url, got = endpoint
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "async_http")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__URL", url)
    with onceflow.Lineage():
        Query().start().end("complete")
    assert [event["eventType"] for event in got] == ["START", "COMPLETE"]


class Later(Client):
    """Sends only when it is closed."""

    def __init__(self, result: bool | Exception | None) -> None:
        super().__init__()
        self.result, self.closed = result, 0.0

    def close(self, timeout: float) -> bool:
        self.closed = timeout
        if self.result is None:
            self.may_send.wait(30)
        if isinstance(self.result, Exception):
            raise self.result
        return bool(self.result)


@pytest.mark.parametrize(
    "result, told",
    [
        (True, []),
        (False, ["OpenLineage events may not have arrived: the endpoint has not taken them in time"]),
        (None, ["OpenLineage events may not have arrived: the endpoint has not taken them in time"]),
        (ConnectionError("refused"), ["OpenLineage events may not have arrived: ConnectionError: refused"]),
    ],
)
def test_what_the_client_says_at_its_end(
    result: Any, told: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    later = Later(result)
    monkeypatch.setattr("onceflow.metrics.lineage_events.new_client", lambda: later)
    watching = onceflow.Lineage()
    Query().start().end("complete")
    if result is None:
        wait_until(lambda: later.states == ["START", "COMPLETE"], 10, "only the end of the client is left")
        later.may_send.clear()
    began = time.monotonic()
    watching.close(timeout=0.5)
    assert time.monotonic() - began < 4
    assert 0 < later.closed <= 0.5
    assert [record.getMessage() for record in caplog.records] == told
    later.may_send.set()


def test_a_client_of_the_program_is_not_closed() -> None:
    later = Later(True)
    with onceflow.Lineage(later):  # type: ignore[arg-type]
        Query().start().end("complete")
    assert later.states == ["START", "COMPLETE"]
    assert later.closed == 0


def test_an_endpoint_that_is_not_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its client tries again and again, which is nobody's business but that of its thread."""
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "http")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__URL", "http://127.0.0.1:9")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__RETRY", '{"total": 2, "backoff_factor": 0.1}')
    monkeypatch.setattr(event_queue, "_CLOSE_S", 0.1)
    caplog.set_level(logging.WARNING)
    began = time.monotonic()
    with onceflow.Lineage():
        query = Query().start()
        query.commit(1)
        query.end("stopped")
    assert time.monotonic() - began < 5
    wait_until(lambda: "ConnectionError" in caplog.text, 60, "a warning")
    assert {record.name for record in caplog.records} == {"onceflow"}, "each of its attempts is not logged"


def test_a_configuration_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "pigeon")
    with pytest.raises(EnvironmentUnusableError, match="cannot be configured"):
        onceflow.Lineage()
    assert hooks._observers == []


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import onceflow
from onceflow import hooks
from onceflow.query import FlowWriter
from test_lineage import Query as Lined
from test_serving import Query as Served

class Query(Served, Lined):
    kafka = Lined.kafka
    def __init__(self, **options):
        Lined.__init__(self)
        Served.__init__(self, "orders", **options)
    def stop(self, *, batch_s=0.0):
        super().stop(batch_s=batch_s)
        Lined.end(self, "stopped")

other = Query(batches=1)
failing = Query(asks=lambda query: query.fail(onceflow.OptionError("wrong")))
failing.flow = "failing"
onceflow.serve(other, FlowWriter(lambda: Lined.start(failing)), lineage=True)
"""


@pytest.mark.long
def test_serve_tells_how_its_queries_end(tmp_path: Path) -> None:
    """Also those that it stops because another one has failed."""
    import os

    file = tmp_path / "events.json"
    transport = {"OPENLINEAGE__TRANSPORT__TYPE": "file", "OPENLINEAGE__TRANSPORT__LOG_FILE_PATH": str(file)}
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent)]
    environment = {**os.environ, **transport, "OPENLINEAGE__TRANSPORT__APPEND": "true"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.rstrip().endswith("OptionError: wrong")
    events = [json.loads(line) for line in file.read_text().splitlines()]
    found = [(event["job"]["name"], event["eventType"]) for event in events]
    assert found[:2] == [("orders", "START"), ("failing", "START")], ended.stderr
    assert ("orders", "ABORT") in found


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "events.json"
    client = OpenLineageClient(transport=FileTransport(FileConfig(log_file_path=str(file), append=True)))
    with onceflow.Lineage(client):
        Query().start().end("complete")
    assert [json.loads(line)["eventType"] for line in file.read_text().splitlines()] == ["START", "COMPLETE"]
