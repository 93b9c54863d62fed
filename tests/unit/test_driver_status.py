"""Endpoints that `onceflow status` asks: those that are down, that lie, that are somebody else's, and what is shown."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from onceflow.admin.status.driver_compared import attach
from onceflow.admin.status.driver_status import DriverStatus, DriverTable, LastBatch, ask_endpoint, checked_endpoint
from onceflow.admin.status.flow_status import FlowStatus
from onceflow.admin.status.flow_status_reader import StatusReader
from onceflow.cli.main import cli
from onceflow.driver.record.progress_log import partition_of
from onceflow.errors import OptionError

Serve = Callable[[bytes], str]

FLOW = {
    "flow": "orders",
    "condition": "running",
    "since_ms": 1_700_000_000_000,
    "guarantee": "exactly_once",
    "batch": 4,
    "producer_id": 17,
    "producer_epoch": 2,
    "failure": None,
    "lag": 3,
    "last_batch": {"read": 2000, "records": 1200, "attempts": 2, "seconds": 0.5, "ran_in": "4 tasks"},
    "counts": {"batches_committed": 4, "attempts_aborted": 1, "dead_letters": 0},
    "tables": [
        {
            "table": "sums",
            "partitions": 4,
            "opened": 3,
            "rows": {"value": 7, "entry": 0, "timer": 2},
            "nbytes": 8192,
            "next_timer_ms": {"event": 1_600_000_000_000, "processing": 1_700_000_060_000},
            "restored": 12,
            "restore_seconds": 0.25,
            "waiting_letters": True,
        }
    ],
}
DRIVER = {"service": "onceflow", "version": "0.1.0", "host": "web-1", "pid": 412, "flows": [FLOW]}


def answer(body: Any, status: str = "200 OK", *headers: str) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(raw)}", *headers, "", ""]).encode() + raw


@pytest.fixture
def serve() -> Iterator[Serve]:
    """The address of a server that answers everything with these bytes."""
    servers = []

    def start(raw: bytes) -> str:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.recv(65536)
                self.request.sendall(raw)

        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def driver(**more: Any) -> DriverStatus:
    known = {name: value for name, value in FLOW.items() if name not in ("last_batch", "tables")}
    tables = [DriverTable(**each) for each in FLOW["tables"]]  # type: ignore[attr-defined]
    last = LastBatch(**FLOW["last_batch"])  # type: ignore[arg-type]
    who = {"endpoint": "http://web-1:9404", "version": "0.1.0", "host": "web-1", "pid": 412}
    return DriverStatus(**{**who, **known, "last_batch": last, "tables": tables, **more})  # type: ignore[arg-type]


def flow(**more: Any) -> FlowStatus:
    return FlowStatus("orders", **{"batch": 4, "producer_id": 17, "producer_epoch": 2, **more})


def test_what_a_driver_says_is_read(serve: Serve) -> None:
    url = serve(answer(DRIVER))
    assert ask_endpoint(url, 10) == ([driver(endpoint=url)], "")


@pytest.mark.parametrize(
    "raw, says",
    [
        (answer(b"<html>"), "cannot be read"),
        (answer(b"[" * 100_000), "cannot be read"),
        (answer([]), "it does not say that it is one"),
        (answer({**DRIVER, "service": "other"}), "it does not say that it is one"),
        (answer({**DRIVER, "pid": "412"}), "pid is '412'"),
        (answer({**DRIVER, "flows": {}}), "flows is {}"),
        (answer({**DRIVER, "flows": [1]}), "a flow is no object"),
        (answer({**DRIVER, "flows": [{**FLOW, "batch": True}]}), "batch is True"),
        (answer({**DRIVER, "flows": [{**FLOW, "lag": 1.5}]}), "lag is 1.5"),
        (answer({**DRIVER, "flows": [{**FLOW, "tables": [{}]}]}), "table is None"),
        (answer({**DRIVER, "flows": [{**FLOW, "counts": {"a": "b"}}]}), "a is 'b'"),
        (answer(b"no", "404 Not Found"), "/status answers 404"),
        (answer(b"no", "302 Found", "Location: http://127.0.0.1:1/status"), "/status answers 302"),
        (answer(b" " * 8_100_000), "more than 8,000,000 bytes"),
        (b"SSH-2.0-OpenSSH_9\r\n", "cannot be read"),
        (b"", "does not answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "cannot be read"),
    ],
)
def test_what_is_no_endpoint_is_said(serve: Serve, raw: bytes, says: str) -> None:
    url = serve(raw)
    found, problem = ask_endpoint(url, 10)
    assert found == []
    assert problem.startswith(url)
    assert says in problem


def test_an_endpoint_that_is_down_or_silent_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        assert ask_endpoint(url, 0.3) == ([], f"{url} does not answer: timed out")
        assert time.monotonic() - began < 5
    assert "does not answer" in ask_endpoint(url, 5)[1]


@pytest.mark.parametrize("text", ["ftp://h:1", "http://", "http://h:99999", "", "http://[::1:9404"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(OptionError, match="no address of an endpoint"):
        checked_endpoint(text)


@pytest.mark.parametrize("text", ["http://user:secret@h:9404", "user:secret@h:9404", "http://:secret@h:9404"])
def test_a_password_is_neither_used_nor_shown(text: str) -> None:
    with pytest.raises(OptionError, match="a user name or a password") as refused:
        checked_endpoint(text)
    assert "secret" not in str(refused.value)


def test_addresses() -> None:
    assert checked_endpoint("h:9404") == checked_endpoint("http://h:9404/metrics") == "http://h:9404"
    assert checked_endpoint("https://[::1]:9404/") == "https://[::1]:9404"


# ---- compared with Kafka -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "known, says",
    [
        (driver(), []),
        (driver(batch=3, producer_epoch=1), []),  # Kafka was asked later
        (driver(batch=0, producer_id=-1, producer_epoch=-1), []),  # nothing is committed in this run
        (driver(batch=5), ["says that batch 5 is committed, and Kafka has 4"]),
        (driver(producer_epoch=1), ["producer 17, epoch 1 has committed batch 4, and Kafka has producer 17, epoch 2"]),
        (driver(condition="failed", failure="FencedError"), ["has failed: FencedError"]),
    ],
)
def test_a_driver_that_does_not_agree_with_kafka(known: DriverStatus, says: list[str]) -> None:
    status = flow()
    assert attach([status], [known], "") == []
    assert len(status.warnings) == len(says)
    assert all(text in warning for text, warning in zip(says, status.warnings, strict=True))


def test_two_drivers_and_a_prefix() -> None:
    status = flow()
    old = driver(endpoint="http://b:1", host="b", condition="failed", failure="FencedError")
    assert attach([status], [driver(), old], "") == []
    assert status.driver == driver(), "the one that runs"
    both = flow()
    attach([both], [driver(), driver(endpoint="http://b:1", host="b")], "")
    assert both.warnings == ["two drivers say that they run it: http://web-1:9404 and http://b:1; one will be fenced"]
    twice = flow()
    attach([twice], [driver(), driver(endpoint="http://10.0.0.1:9404")], "")
    assert twice.warnings == [], "one driver, under two addresses"
    prefixed = FlowStatus("team-orders", batch=4)
    assert attach([prefixed], [driver()], "team-") == []
    assert prefixed.driver == driver()
    assert attach([flow()], [driver(flow="else")], "") == [
        "http://web-1:9404 serves flow else, which is not shown here"
    ]


# ---- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(StatusReader, "read", lambda *_: [flow()])
    arguments = ["--bootstrap-servers", "h:1"]
    return lambda *more, **env: CliRunner().invoke(cli, ["status", *more, *arguments], env=env, standalone_mode=False)


def test_details_with_a_driver(serve: Serve, call: Callable[..., Any]) -> None:
    url = serve(answer(DRIVER))
    expected = [
        "driver: running on host web-1, process 412, since 2023-11-14T22:13:20+00:00; exactly_once; onceflow 0.1.0",
        "last batch of this run: 2,000 offsets read, 1,200 records written in 2 attempts, 0.5 s, by 4 tasks",
        "counted by this driver: batches committed 4, attempts aborted 1",
        (
            "LOCAL STATE             OPEN  VALUES  ENTRIES  TIMERS  BYTES  RESTORED           NEXT EVENT TIMER  "
            "    NEXT PROCESSING TIMER"
        ),
        (
            "sums (waiting letters)   3/4       7        0       2   8192        12  2020-09-13T12:26:40+00:00  "
            "2023-11-14T22:14:20+00:00"
        ),
    ]
    assert call("orders", "--endpoint", url).stdout.splitlines()[2:] == expected
    assert call("orders", ONCEFLOW_ENDPOINT=f"{url} {url}/metrics").stdout.splitlines()[2:] == expected
    told = json.loads(call("orders", "--json", "--endpoint", url).stdout)
    assert told["driver"]["tables"][0]["rows"]["timer"] == 2
    assert (told["driver"]["endpoint"], told["driver_answer"], told["warnings"]) == (url, "answers", [])
    older = {**FLOW, "last_batch": {**FLOW["last_batch"], "read": None}}  # type: ignore[dict-item]
    text = call("orders", "--endpoint", serve(answer({**DRIVER, "flows": [older]}))).stdout
    assert "last batch of this run: 1,200 records written in 2 attempts" in text


def test_whether_it_runs_is_answered_in_every_case(serve: Serve, call: Callable[..., Any]) -> None:
    """Not asked, no answer, an answer of other flows, and an answer: as text, as JSON and in the list of all flows."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        down = f"http://127.0.0.1:{closed.getsockname()[1]}"
    other, good = serve(answer({**DRIVER, "flows": [{**FLOW, "flow": "else"}]})), serve(answer(DRIVER))
    cases = [
        ([], "driver: not asked (give --endpoint)", "not asked", None),
        (["--endpoint", down], "driver: does not answer", "does not answer", f"{down} does not answer: "),
        (
            ["--endpoint", other, "--endpoint", down],
            "driver: not known, no endpoint here serves this flow",
            "not at these endpoints",
            f"{down} does not answer: ",
        ),
        (["--endpoint", down, "--endpoint", good], "driver: running on host web-1, process 412", "answers", None),
    ]
    for arguments, line, answered, warned in cases:
        lines = call("orders", *arguments).stdout.splitlines()
        assert [each for each in lines if each.startswith(line)], lines
        told = json.loads(call("orders", "--json", *arguments).stdout)
        assert told["driver_answer"] == answered
        assert (told["driver"] is not None) is (answered == "answers")
        assert any(each.startswith(warned or "-") for each in told["warnings"]) is (warned is not None)
        assert sum(each.startswith(f"warning: {down}") for each in lines) == (down in arguments), "said once"
        columns, row = call(*arguments).stdout.splitlines()[:2]
        assert ("DRIVER" in columns) is bool(arguments)
        if arguments:
            assert row.split()[-2] == ("running" if good in arguments else "?")


def test_a_flow_whose_progress_could_not_be_read_is_listed(
    serve: Serve, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(reader: StatusReader, *_: Any) -> list[FlowStatus]:
        reader.unseen = {partition_of("else"): "it has no leader"}
        return [flow()]

    monkeypatch.setattr(StatusReader, "read", read)
    monkeypatch.setattr(StatusReader, "_transaction", lambda *_: None)
    url = serve(answer({**DRIVER, "flows": [FLOW, {**FLOW, "flow": "else"}]}))
    _, first, second, *remarks = call("--endpoint", url).stdout.splitlines()
    assert (first.split()[:2], second.split()[:2]) == (["orders", "4"], ["else", "?"])
    assert remarks == [
        f"else: not asked: __onceflow_progress-{partition_of('else')}, with its progress: it has no leader"
    ]
    assert json.loads(call("--endpoint", url, "--json").stdout.splitlines()[1])["driver"]["batch"] == 4


def test_what_kafka_knows_is_shown_whatever_endpoints_say(serve: Serve, call: Callable[..., Any]) -> None:
    alien, other = serve(answer(b"hello")), serve(answer({**DRIVER, "flows": [{**FLOW, "flow": "else"}]}))
    found = call("orders", "--endpoint", alien, "--endpoint", other)
    assert found.return_value == 0
    first, *_, strange, elsewhere = found.stdout.splitlines()
    assert first.startswith("orders: batch 4")
    assert strange.startswith(f"warning: {alien} is no endpoint of onceflow")
    assert elsewhere == f"warning: {other} serves flow else, which is not shown here"
    said = call("orders", "--json", "--endpoint", alien)
    assert json.loads(said.stdout)["driver"] is None
    assert said.stderr.startswith(f"onceflow: {alien} is no endpoint of onceflow")
    assert isinstance(call("--endpoint", "ftp://h").exception, OptionError)
