"""`onceflow.serve`: what it prints, when it stops, and what it raises."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import onceflow
from onceflow import uncaught
from onceflow.errors import EnvironmentUnusableError, OptionError
from onceflow.planning.options import BatchSummary
from onceflow.query import FlowWriter
from onceflow.service import stop_signals

pytestmark = pytest.mark.faults  # processes get signals


class Query:
    """A query as far as serve() knows it: it commits a batch every time it is asked whether it runs."""

    def __init__(self, flow: str = "f", *, guarantee: str = "exactly_once", asks: Any = None, batches: int = 3) -> None:
        self.flow, self.guarantee = flow, guarantee
        self.batches: list[BatchSummary] = []
        self.calls: list[str] = []
        self.failure: Exception | None = None
        self.is_complete = self.is_over = False
        self.told: list[str] = []
        self.was_logged = False
        self.asked = 0
        self._running, self._asks, self._most = True, asks, batches

    @property
    def isActive(self) -> bool:
        if self._running and len(self.batches) < self._most:
            number, seconds = len(self.batches) + 1, {"write": 0.25, "end": 0.125}
            self.batches.append(
                BatchSummary(number, 10, records=10 * number, read={"a": 7, "b": number}, seconds=seconds)
            )
            if number == self._most and self._asks is not None:
                self._asks(self)
        return self._running

    def stop(self, *, batch_s: float = 0.0) -> None:
        self.calls.append(f"stop after {batch_s:g} s" if batch_s else "stop")
        self._running = False

    def stop_is_asked(self) -> None:
        self.asked += 1

    def stopped_with_spark(self) -> None:
        self.calls.append("stopped with Spark")

    def log_start(self) -> None:
        self.was_logged = True

    def untold_start(self) -> list[str]:
        return self.told if self.was_logged else []

    def awaited(self) -> Any:
        return contextlib.nullcontext()

    def awaitTermination(self) -> None:
        self.calls.append("awaitTermination")
        if self.failure is not None:
            raise self.failure

    def fail(self, error: Exception | None) -> None:
        self.failure, self._running = error, False


def terminate(query: Query) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def serve(*queries: Any, **options: Any) -> None:
    onceflow.serve(*queries, **options)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(autouse=True)
def own_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test begins with Python's own handlers: a `serve` of another test of the process may have left its own."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = {number: signal.getsignal(number) for number in stop_signals.STOPS}
    for number in before:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_every_batch_is_a_line_and_sigterm_an_orderly_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [signal.getsignal(number) for number in stop_signals.STOPS]
    query = Query(asks=terminate)
    serve(query)
    assert query.calls == ["stop"]
    put_aside = {"dead_letters": 0, "late": 0, "duplicates": 0, "dropped": 0}
    said = capsys.readouterr()
    assert said.err == "onceflow: flow f runs; SIGTERM or Ctrl-C stops it\nonceflow: flow f is being stopped\n"
    assert [json.loads(line) for line in said.out.splitlines()] == [
        {"flow": "f", "batch": number, "read": 7 + number, "records": 10 * number, **put_aside, "seconds": 0.375}
        for number in (1, 2, 3)
    ]
    # For a second they ignore what comes with the first signal, and then do what they did before.
    number = signal.SIGINT
    monkeypatch.setattr(stop_signals.time, "monotonic", lambda: 1e12)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    assert [signal.getsignal(number) for number in stop_signals.STOPS] == before


def test_what_a_start_has_found_is_told_first(capsys: pytest.CaptureFixture[str]) -> None:
    query = Query(asks=terminate)
    query.told = ["flow f starts: exactly_once", "  resumes after batch 3"]
    serve(query)
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["onceflow: flow f starts: exactly_once", "onceflow:   resumes after batch 3"]
    assert said[2].startswith("onceflow: flow f runs")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_hangup_are_an_orderly_end_too(number: signal.Signals) -> None:
    query = Query(asks=lambda query: os.kill(os.getpid(), number))
    serve(query)
    assert query.calls == ["stop"]


def test_signals_that_come_together_are_one() -> None:
    """As from `timeout`, which signals a process and its group; also if the second one finds everything stopped."""

    def twice(query: Query) -> None:
        terminate(query)
        terminate(query)

    query = Query(asks=twice)
    serve(query)
    assert query.calls == ["stop"]
    signal.raise_signal(signal.SIGINT)


FENCED = "onceflow.FencedError('a newer driver runs')"
_PROCESS = """
import sys, time, types
sys.path.insert(0, sys.argv[1])
from pyspark.errors import StreamingQueryException
import onceflow
from onceflow.client.settings import ClientSettings
from onceflow.flow_runs import FlowRuns
from onceflow.protocol.names import Names
from onceflow.query import FlowQuery, FlowWriter
from onceflow.spark.streaming_query import SparkQuery
from test_serving import Query, serve

def Writer(error):
    def start():
        raise error
    return FlowWriter(start)

def start(error):
    def prepare(startup):
        raise error
    FlowRuns(Names("f"), ClientSettings("localhost:1", {}), 1.0).start(prepare)

def await_end(error):
    def ended(*_):
        raise StreamingQueryException("Spark's text")
    sink = types.SimpleNamespace(flow="f", stopping=False, failure=error, awaited=0)
    spark = types.SimpleNamespace(_jsq=types.SimpleNamespace(awaitTermination=ended))
    FlowQuery(SparkQuery(spark), sink, lambda: None).awaitTermination()

class Slow(Query):
    def stop(self, *, batch_s=0.0):
        time.sleep(60)
"""


@contextlib.contextmanager
def process(code: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that serves."""
    command = [sys.executable, "-c", _PROCESS + code, str(Path(__file__).parent)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    with subprocess.Popen(command, text=True, **options) as service:
        try:
            yield service
        finally:
            service.kill()


def until(service: subprocess.Popen[str], text: str) -> None:
    assert service.stderr is not None
    assert text in service.stderr.readline()


# ---- processes of their own; `make fast` leaves these out ------------------------------------------------


# The rows of the table of exit codes in docs/run.md; a negative one is the signal that has ended the process.
@pytest.mark.long_but("SIGTERM", "failure", "fenced")
@pytest.mark.parametrize(
    "code, sent, exit_code",
    [
        pytest.param("serve(Query())", signal.SIGTERM, 0, id="SIGTERM"),
        pytest.param("serve(Query())", signal.SIGINT, 0, id="Ctrl-C"),
        pytest.param("serve(Query())", signal.SIGHUP, 0, id="SIGHUP"),
        pytest.param("serve(Query())", signal.SIGKILL, -9, id="SIGKILL"),
        pytest.param("serve(Slow(), stop_timeout=1)", signal.SIGTERM, 143, id="stop_timeout"),
        pytest.param("serve(Query(asks=lambda query: query.fail(None)))", None, 0, id="all read"),
        pytest.param(
            "serve(Query(asks=lambda query: [setattr(query, 'is_complete', True), query.fail(None)]))",
            None,
            0,
            id="until",
        ),
        pytest.param("serve(Query(asks=lambda query: query.fail(OSError('disk'))))", None, 1, id="failure"),
        pytest.param(f"serve(Query(asks=lambda query: query.fail({FENCED})))", None, 79, id="fenced"),
        pytest.param(f"serve(Writer({FENCED}))", None, 79, id="fenced at its start"),
        pytest.param(f"start({FENCED})", None, 79, id="fenced at its start, before serve"),
        pytest.param(f"try: start({FENCED})\nexcept onceflow.FencedError: 1 / 0", None, 1, id="another error after it"),
        pytest.param(f"await_end({FENCED})", None, 79, id="fenced without serve"),
        pytest.param(
            f"try: serve(Query(asks=lambda query: query.fail({FENCED})))\nfinally: 1 / 0", None, 1, id="other"
        ),
        pytest.param("serve()", None, 1, id="refused"),
    ],
)
def test_exit_codes(code: str, sent: signal.Signals | None, exit_code: int) -> None:
    with process(code) as service:
        if sent is not None:
            until(service, "runs; SIGTERM or Ctrl-C stops it")
            service.send_signal(sent)
        _, told = service.communicate(timeout=20)
        assert service.returncode == exit_code, told
    if exit_code == 79:
        assert told.rstrip().endswith("onceflow.errors.FencedError: a newer driver runs")
    if "Slow" in code:
        assert "not everything was stopped in 1 s (stop_timeout), so it ends now; the next start continues" in told
    elif sent in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        assert told == "onceflow: flow f is being stopped\n"


@pytest.mark.long
@pytest.mark.parametrize(
    "first, second",
    [("SIGTERM", "SIGINT")]
    + [
        pytest.param(*pair, marks=pytest.mark.long)
        for pair in (("SIGTERM", "SIGTERM"), ("SIGINT", "SIGINT"), ("SIGTERM", "SIGHUP"))
    ],
)
def test_a_later_second_signal_ends_the_process_at_once(first: str, second: str) -> None:
    numbers = signal.Signals[first], signal.Signals[second]
    with process("serve(Slow())") as service:
        until(service, "runs")
        service.send_signal(numbers[0])
        until(service, "is being stopped")
        service.send_signal(numbers[0])  # with the first one
        time.sleep(stop_signals._REPEATED_S + 0.1)
        assert service.poll() is None
        service.send_signal(numbers[1])
        assert service.wait(10) == 128 + numbers[1]
        assert service.stderr is not None
        assert len(service.stderr.read().splitlines()) == 1


@pytest.mark.long
def test_the_limit_holds_whatever_the_main_thread_does() -> None:
    """A function of the user that hangs, or a request to Spark, does not return to `serve`."""
    hangs = "lambda query: [print('hangs', file=sys.stderr, flush=True), time.sleep(60)]"
    with process(f"serve(Query(), more={hangs}, stop_timeout=1)") as service:
        until(service, "runs")
        until(service, "hangs")
        service.send_signal(signal.SIGTERM)
        until(service, "stop_timeout")
        assert service.wait(10) == 128 + signal.SIGTERM


@pytest.mark.long
def test_a_closed_terminal_is_an_orderly_end() -> None:
    """It sends SIGHUP, and nothing can be printed any more."""
    master, terminal = pty.openpty()

    def control() -> None:
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    with process("serve(Query())", start_new_session=True, preexec_fn=control, **streams) as service:
        os.close(terminal)
        said = b""
        while b"runs" not in said:
            said += os.read(master, 1000)
        os.close(master)
        assert service.wait(10) == 0


# ---- in this process -------------------------------------------------------------------------------------


def test_nohup_is_respected(capsys: pytest.CaptureFixture[str]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def twice(query: Query) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        query.fail(None)

    query = Query(asks=twice)
    serve(query)
    assert query.calls == ["awaitTermination"]
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("value", ["soon", 0, "100 ms", -1])
def test_a_limit_that_is_none_is_refused(value: Any) -> None:
    query = Query()
    with pytest.raises(OptionError, match="stop_timeout") as caught:
        serve(query, stop_timeout=value)
    assert "flow" not in str(caught.value)
    assert query.calls == [], "it runs on: serve has not begun"


def test_a_notebook_survives_a_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "is_interactive", lambda: True)
    monkeypatch.setattr(stop_signals, "_REPEATED_S", 0.0)

    def twice(query: Query) -> None:
        terminate(query)
        terminate(query)

    with pytest.raises(KeyboardInterrupt):
        serve(Query(asks=twice))


def test_only_a_fenced_error_changes_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often one was caught: the hook of the program is called once."""
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))
    for _ in range(3):
        with pytest.raises(onceflow.FencedError) as caught:
            serve(Query(asks=lambda query: query.fail(onceflow.FencedError("fenced"))))
    later = OSError("disk")
    sys.excepthook(type(later), later, None)
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(type(caught.value), caught.value, None)
    assert ended.value.code == caught.value.exit_code == 79
    assert printed == [later, caught.value]


def test_a_hook_that_a_program_sets_after_it_was_fenced_is_called_too(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda *_: printed.append("python"))
    with pytest.raises(onceflow.FencedError):
        serve(Query(asks=lambda query: query.fail(onceflow.FencedError("fenced"))))
    ours = sys.excepthook

    def theirs(kind: Any, error: Any, trace: Any) -> None:
        printed.append("theirs")
        ours(kind, error, trace)

    monkeypatch.setattr(sys, "excepthook", theirs)
    with pytest.raises(onceflow.FencedError) as caught:
        serve(Query(asks=lambda query: query.fail(onceflow.FencedError("fenced again"))))
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(type(caught.value), caught.value, None)
    assert (ended.value.code, printed) == (79, ["theirs", "python"])


def test_a_notebook_keeps_its_own_excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncaught, "is_interactive", lambda: True)
    before = sys.excepthook
    with pytest.raises(onceflow.FencedError):
        serve(Query(asks=lambda query: query.fail(onceflow.FencedError("fenced"))))
    assert sys.excepthook is before


def test_why_a_query_ended_is_raised_and_the_others_are_stopped() -> None:
    failed = Query("bad", asks=lambda query: query.fail(onceflow.FencedError("fenced", next_step="look")))
    other = Query("good")
    with pytest.raises(onceflow.FencedError):
        serve(other, failed)
    assert other.calls == ["stop"]


def test_a_query_that_is_done_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    query = Query(asks=lambda query: query.fail(None))
    serve(query, more=lambda query: {"left": 0})
    assert query.calls == ["awaitTermination"]
    assert [line["left"] for line in lines(capsys)] == [0, 0, 0]


def test_a_signal_that_has_ended_spark_too_is_a_stop(capsys: pytest.CaptureFixture[str]) -> None:
    """It has reached the whole group of processes: one query has ended with the JVM, the other one is seen before."""

    def both(query: Query) -> None:
        terminate(query)
        assert (query.asked, other.asked) == (1, 1), "before anything that asks Spark"
        query.fail(None)

    query, other = Query(asks=both), Query("g", batches=99)
    serve(query, other)
    assert query.calls == ["stopped with Spark"]
    assert other.calls == ["stop"]


def test_the_last_events_of_the_lineage_are_part_of_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    class Lineage:
        def add(self, query: Any) -> None:
            pass

        def close(self, timeout: float) -> None:
            limits.append(timeout)

    monkeypatch.setattr("onceflow.service.serving.Lineage", Lineage)
    serve(Query(asks=terminate), lineage=True, stop_timeout="2 seconds")
    (limit_s,) = limits
    assert 0 < limit_s < 2


def test_with_at_most_once_what_is_begun_is_finished() -> None:
    query = Query(guarantee="at_most_once", asks=terminate)
    serve(query, stop_timeout="30 seconds")
    (call,) = query.calls
    assert 15 < float(call.removeprefix("stop after ").removesuffix(" s")) <= 20


def test_no_query_is_refused() -> None:
    with pytest.raises(OptionError, match="no query"):
        serve()


def test_in_another_thread_it_ends_with_its_query(capsys: pytest.CaptureFixture[str]) -> None:
    """Such a thread gets no signals, and leaves those of the process alone."""
    before = [signal.getsignal(number) for number in stop_signals.STOPS]
    during: list[Any] = []

    def stop(query: Query) -> None:
        during.extend(signal.getsignal(number) for number in stop_signals.STOPS)
        query.fail(None)

    query = Query(asks=stop)
    thread = threading.Thread(target=serve, args=(query,))
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert during == before
    said = capsys.readouterr()
    assert said.err == "onceflow: flow f runs; query.stop() stops it\n"
    assert [json.loads(line)["batch"] for line in said.out.splitlines()] == [1, 2, 3]


def test_an_error_in_another_thread_is_raised_there() -> None:
    raised: list[Exception] = []

    def elsewhere() -> None:
        query = Query(asks=lambda query: query.fail(OptionError("it broke")))
        try:
            serve(query)
        except OptionError as error:
            raised.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert str(raised[0]) == "it broke"


def test_in_a_notebook_the_handlers_are_those_of_before(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(stop_signals, "is_interactive", lambda: True)
    before = [signal.getsignal(number) for number in stop_signals.STOPS]
    serve(Query(asks=lambda query: os.kill(os.getpid(), signal.SIGINT)))
    assert [signal.getsignal(number) for number in stop_signals.STOPS] == before


def test_a_writer_is_started_and_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    query = Query(asks=terminate)
    serve(FlowWriter(lambda: query))  # type: ignore[arg-type, return-value]
    assert [line["batch"] for line in lines(capsys)] == [1, 2, 3]
    assert query.calls == ["stop"]


def test_without_its_port_nothing_is_started() -> None:
    started: list[str] = []
    running = Query()

    def start() -> Any:
        started.append("started")

    with onceflow.serve_metrics(0) as other, pytest.raises(EnvironmentUnusableError, match="in use") as caught:
        serve(FlowWriter(start), running, metrics_port=other.port)
    assert started == []
    assert running.calls == ["stop"]
    assert f"127.0.0.1:{other.port}" in str(caught.value)


def test_if_a_writer_cannot_be_started_the_others_are_stopped() -> None:
    first = Query()

    def start() -> Any:
        raise OptionError("for the test")

    with pytest.raises(OptionError, match="for the test"):
        serve(FlowWriter(lambda: first), FlowWriter(start))  # type: ignore[arg-type, return-value]
    assert first.calls == ["stop"]
