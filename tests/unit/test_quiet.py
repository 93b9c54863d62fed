"""What is said when something goes wrong: once, in one place, and in a notebook as well."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JNetworkError
from pyspark import SparkContext
from pyspark.errors import StreamingQueryException

from onceflow import interactive
from onceflow.driver.batch import batches
from onceflow.errors import FencedError
from onceflow.host.private_folders import private_temporary
from onceflow.query import FlowQuery
from onceflow.spark import logs
from onceflow.spark.streaming_query import SparkQuery


class Query:
    flow = "orders"

    def __init__(self, *, active: bool = True) -> None:
        self.isActive = active
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1
        self.isActive = False


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interactive.sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(interactive, "_queries", {})


def test_a_cell_that_runs_again_stops_what_it_has_started(prompt: None, caplog: pytest.LogCaptureFixture) -> None:
    query, other = Query(), Query()
    interactive.started("b:1", "onceflow.orders", query)  # type: ignore[arg-type]
    interactive.started("b:1", "onceflow.other", other)  # type: ignore[arg-type]
    interactive.stop_earlier("b:2", "onceflow.orders")
    assert query.stops == 0
    assert interactive.again() == "restart the kernel, then "
    interactive.stop_earlier("b:1", "onceflow.orders")
    interactive.stop_earlier("b:1", "onceflow.orders")
    assert (query.stops, other.stops) == (1, 0)
    assert "flow orders: the query that an earlier cell has started is stopped" in caplog.text


def test_a_program_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """There two drivers of a flow are a mistake, and the older one says so: it is fenced."""
    monkeypatch.setattr(interactive, "_queries", {})
    query: Any = Query()
    interactive.started("b:1", "onceflow.orders", query)
    interactive.stop_earlier("b:1", "onceflow.orders")
    assert query.stops == 0


@pytest.mark.parametrize("slow, told", [(5, 0), (50, 1)])
def test_slow_batches_are_told_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, slow: int, told: int
) -> None:
    now = [0.0]
    monkeypatch.setattr(batches.time, "monotonic", lambda: now[0])
    run = batches.Pace("orders", 0.5)
    for number in range(120):
        now[0] += 0.55
        run.batch(0.75 if number < slow else 0.2)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == told
    assert all("took longer than trigger=0.5 s, the slowest 0.8 s" in message for message in messages)


def test_without_a_trigger_no_batch_is_slow(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    monkeypatch.setattr(batches.time, "monotonic", lambda: now[0])
    run = batches.Pace("orders", 0.0)
    for _ in range(10):
        now[0] += 30
        run.batch(30)
    assert not caplog.records


def test_log_settings_of_the_user_win(tmp_path: Path) -> None:
    assert "-Dlog4j2.configurationFile=" in logs.with_settings("-Xss4m", tmp_path)
    assert logs.with_settings("-Xss4m", tmp_path).startswith("-Xss4m ")
    own = "-Dlog4j.configurationFile=mine.xml"
    assert logs.with_settings(own, tmp_path) == own
    (tmp_path / "log4j2.properties").write_text("")
    assert logs.with_settings("", tmp_path) == ""


def test_logs_of_processes_that_have_ended_are_removed_a_day_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = [
        "onceflow-spark-pid999999999.log",
        "onceflow-spark-pid999999999.log.1",
        f"onceflow-spark-pid{os.getpid()}.log",
    ]
    folder = private_temporary()
    assert folder.parent == tmp_path
    for name in [*names, "onceflow-spark-pid999999998.log"]:
        (folder / name).touch()
    for name in names:
        os.utime(folder / name, (0, 0))
    assert logs.log_file() == folder / names[2]
    assert sorted(path.name for path in folder.iterdir()) == [names[2], "onceflow-spark-pid999999998.log"]


def test_why_a_query_ended_is_raised_without_the_stacks_of_spark() -> None:
    class Failed:
        def awaitTermination(self) -> None:
            raise StreamingQueryException("a" * 5000)

        isActive = awaitTermination

    try:
        raise FencedError("taken over")
    except FencedError as raised:
        failure = raised
    sink: Any = SimpleNamespace(flow="f", failure=failure, awaited=0, stopping=False)
    query = FlowQuery(SparkQuery(SimpleNamespace(_jsq=Failed())), sink, lambda: None)  # type: ignore[arg-type]
    with pytest.raises(FencedError) as caught:
        query.awaitTermination()
    assert len("".join(traceback.format_exception(caught.value)).splitlines()) < 12
    assert isinstance(caught.value.__context__, StreamingQueryException)
    assert sink.awaited == 0


def test_py4j_keeps_quiet_about_our_own_errors(caplog: pytest.LogCaptureFixture) -> None:
    logs.silence_py4j()
    logs.silence_py4j()
    logger = logging.getLogger("py4j.clientserver")
    for error in (FencedError("taken over"), ValueError("of somebody else")):
        try:
            raise error
        except Exception:
            logger.exception("There was an exception")
    try:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise BrokenPipeError from None
    except BrokenPipeError:
        logger.exception("Exception occurred while shutting down connection")
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError]


@pytest.mark.parametrize("error", [Py4JNetworkError("Answer from Java side is empty"), BrokenPipeError(), EOFError()])
def test_py4j_keeps_quiet_about_connections_that_break(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """When the JVM ended, tracebacks of py4j stood in front of the error that says so."""
    logs.silence_py4j()
    for file, is_told in (("/x/py4j/java_gateway.py", False), ("/x/service.py", True)):
        caplog.clear()
        try:
            raise error
        except Exception:
            info = sys.exc_info()
        record = logging.LogRecord("root", logging.ERROR, file, 1, "Exception while sending command.", None, info)
        logging.root.handle(record)
        assert (record in caplog.records) is is_told


def test_the_server_of_accumulators_keeps_quiet_about_connections_that_break(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[object] = []

    class Server:
        def handle_error(self, *about: object) -> None:
            told.append(about)

    server = Server()
    monkeypatch.setattr(SparkContext, "_active_spark_context", SimpleNamespace(_accumulatorServer=server))
    logs.silence_py4j()
    logs.silence_py4j()
    for error in (ConnectionResetError(), ValueError("a mistake")):
        try:
            raise error
        except Exception:
            server.handle_error("request", "address")
    assert told == [("request", "address")]
