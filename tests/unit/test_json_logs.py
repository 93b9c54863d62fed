"""Log lines as JSON: their fields, which flow they are about, and where they go."""

from __future__ import annotations

import contextvars
import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import onceflow
from onceflow.calls.concurrently import concurrently
from onceflow.calls.runner import CallRunner
from onceflow.calls.target import Call
from onceflow.driver.batch.batches import timed
from onceflow.driver.batch.sink import BatchSink
from onceflow.errors import FencedError, OptionError
from onceflow.logs import json_logs, log_context
from onceflow.messages import TaskInfo
from onceflow.planning.options import SinkOptions
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.task import task_logs

log = logging.getLogger("shop.orders")


class Lines(logging.StreamHandler[StringIO]):
    """What was logged, as it was written."""

    def __init__(self) -> None:
        super().__init__(StringIO())
        self.setFormatter(onceflow.JsonLogFormatter())

    def taken(self) -> list[dict[str, Any]]:
        text = self.stream.getvalue()
        return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield handler
    log.removeHandler(handler)


def test_a_line_is_an_object(lines: Lines) -> None:
    before = datetime.now(timezone.utc)
    log.info("paid %d of %d\nand more", 1, 2)
    (line,) = lines.taken()
    assert list(line) == ["time", "level", "logger", "message"], "and nothing that is not known"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {"level": "INFO", "logger": "shop.orders", "message": "paid 1 of 2\nand more"}
    assert before.tzinfo is not None


def test_the_time_is_utc_with_milliseconds(lines: Lines) -> None:
    record = log.makeRecord(log.name, logging.INFO, "f", 1, "m", (), None)
    record.created = 1_700_000_000.25
    log.handle(record)
    assert lines.taken()[0]["time"] == "2023-11-14T22:13:20.250Z"


def test_fields_of_a_batch(lines: Lines) -> None:
    with log_context.within(flow="f", batch=7):
        log_context.add(producer_id=4000, producer_epoch=3)
        with timed(SimpleNamespace(seconds={}), "write"):  # type: ignore[arg-type]
            log.info("in the step")
        log.info("behind it")
    log.info("outside")
    inside, behind, outside = lines.taken()
    expected = {"flow": "f", "batch": 7, "producer_id": 4000, "producer_epoch": 3}
    assert list(inside)[4:] == [*expected, "step"]
    assert inside["step"] == "write"
    assert expected.items() <= behind.items()
    assert "step" not in behind
    assert not outside.keys() & {*expected, "step"}


def test_an_error_is_a_field(lines: Lines) -> None:
    try:
        raise FencedError("a newer driver runs", flow="f", batch=3, detail="epoch 4", next_step="stop one")
    except FencedError:
        log.exception("it ended")
    try:
        {}["missing"]
    except KeyError as error:
        log.warning("not found: %s", error)
    log.error("%(problem)s", {"problem": OptionError("wrong")})
    first, second, third = lines.taken()
    assert first["message"] == "it ended"
    assert (first["flow"], first["batch"]) == ("f", 3)
    stack = first["error"].pop("stack")
    assert stack.startswith("Traceback (most recent call last):\n")
    assert "stop one" in stack
    assert first["error"] == {
        "type": "onceflow.FencedError",
        "what": "a newer driver runs",
        "detail": "epoch 4",
        "next_step": "stop one",
    }
    assert second["error"] == {"type": "KeyError", "what": "'missing'"}
    assert third["error"] == {"type": "onceflow.OptionError", "what": "wrong"}


def test_an_error_of_another_flow_has_its_own_fields(lines: Lines) -> None:
    with log_context.within(flow="ours", batch=7, step="write"):
        log.error("%s", FencedError("fenced", flow="theirs"))
        log.error("%s", FencedError("fenced", flow="ours"))
    other, own = lines.taken()
    assert (other["flow"], other.get("batch"), other.get("step")) == ("theirs", None, None)
    assert (own["flow"], own["batch"], own["step"]) == ("ours", 7, "write")


@pytest.mark.parametrize(
    "value", [float("nan"), b"\xff", datetime.now(timezone.utc), {1, 2}, object(), "\udc80", 2**70]
)
def test_whatever_is_given_as_extra_is_json(lines: Lines, value: Any) -> None:
    log.info("it", extra={"given": value, "level": "mine", "nested": {"a": [value]}})
    (line,) = lines.taken()
    assert line["level"] == "INFO", "own fields are not replaced"
    assert "given" in line


def test_a_message_may_be_a_dictionary(lines: Lines) -> None:
    log.info({"count": 3, "flow": "mine"})
    with log_context.within(flow="f"):
        log.info({"count": 3, "flow": "mine"})
    assert [(line["count"], line["flow"]) for line in lines.taken()] == [(3, "mine"), (3, "f")]


def test_flows_of_a_process_do_not_mix(lines: Lines) -> None:
    """Two flows at the same time, each in threads that are used again by the other."""
    meet = threading.Barrier(2)

    def work(number: int) -> None:
        with log_context.within(flow=f"flow-{number % 2}", batch=number):
            meet.wait(10)
            log.info("%d", number)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(40)))
        list(pool.map(lambda number: log.info("idle"), range(4)))
    found = lines.taken()
    busy = [line for line in found if line["message"] != "idle"]
    assert len(busy) == 40
    assert all(
        (line["flow"], line["batch"]) == (f"flow-{int(line['message']) % 2}", int(line["message"])) for line in busy
    )
    assert not [line for line in found if line["message"] == "idle" and "flow" in line]


def test_calls_in_threads_and_coroutines_are_of_their_batch(lines: Lines) -> None:
    def plain(number: int) -> None:
        log.info("plain %d", number)

    async def coroutine(number: int) -> None:
        log.info("coroutine %d", number)

    runner = CallRunner()
    try:
        for batch in (1, 2):
            with log_context.within(flow="f", batch=batch):
                for function in (plain, coroutine):
                    runner.start(Call(concurrently(function).target, (batch,), {}))
                runner.settle()
    finally:
        runner.close()
    found = lines.taken()
    assert len(found) == 4
    assert all(line["message"].endswith(f" {line['batch']}") and line["flow"] == "f" for line in found)


def test_the_sink_sets_and_removes_them(lines: Lines) -> None:
    class Commit:
        flow = "orders"
        progress = SimpleNamespace(batch_id=41)
        machine = None

        def settle(self) -> None:
            log.info("settle")
            raise FencedError("for the test")

        def ended_batch(self, df: Any) -> None:
            log.info("ended")

    commit: Any = Commit()
    sink = BatchSink(commit, SinkOptions(None, "key", "none", 60.0))
    sink.awaited = 1
    nothing: Any = None
    with pytest.raises(FencedError):
        sink(nothing, 0)
    log.info("behind it")
    assert [(line.get("flow"), line.get("batch")) for line in lines.taken()] == [("orders", 42)] * 2 + [(None, None)]


def test_lines_of_a_task(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(json_logs.VARIABLE, "yaml")  # the driver refuses it; a task does not fail because of it
    order: Any = SimpleNamespace(flow="f", batch=7, producer=ProducerIdAndEpoch(4000, 3))

    def rows() -> Iterator[int]:
        with task_logs.of_batch(order, TaskInfo("task", 5, 0, 0)):
            log.info("first")
            yield 1
            log.info("second")

    assert list(rows()) == [1]
    log.info("the next task")
    first, second, after = lines.taken()
    assert first.items() >= {"flow": "f", "batch": 7, "producer_id": 4000, "producer_epoch": 3, "task": 5}.items()
    assert (second["task"], after.get("task")) == (5, None)


def test_a_worker_without_the_package_for_json(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(json_logs.VARIABLE, "json")
    monkeypatch.setitem(sys.modules, "onceflow.logs.json_logs", None)
    monkeypatch.delattr(onceflow.logs, "json_logs")
    for _ in range(2):
        task_logs.use_format()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "lacks a package" in line


def test_a_generator_that_another_context_closes(lines: Lines) -> None:
    def rows() -> Iterator[int]:
        with log_context.within(flow="f"):
            yield 1

    generator = rows()
    next(generator)
    with log_context.within(flow="g"):
        contextvars.copy_context().run(generator.close)
        log.info("it")
    assert lines.taken()[0]["flow"] == "g"


# ---- where they go -----------------------------------------------------------------------------------

_PROGRAM = """
import logging, sys
sys.path.insert(0, sys.argv[1])
from test_serving import Query, serve
import onceflow
from onceflow.logs import json_logs
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    command = [sys.executable, "-c", _PROGRAM + code, str(Path(__file__).parent)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}, check=False
    )


@pytest.mark.slow
def test_a_service_writes_nothing_else_to_stderr() -> None:
    fails = "lambda query: query.fail(onceflow.OptionError('wrong', flow='f', next_step='look'))"
    ended = run(f"logging.getLogger('onceflow').warning('before')\nserve(Query(asks={fails}), log_format='json')\n")
    assert ended.returncode == 1, ended.stderr
    before, *after = ended.stderr.splitlines()
    assert before == "before", "nobody has asked for JSON yet"
    told = [json.loads(line) for line in after]
    assert told[0]["message"] == "flow f runs; SIGTERM or Ctrl-C stops it"
    assert (told[0]["flow"], told[0]["logger"], told[0]["level"]) == ("f", "onceflow.serve", "INFO")
    assert (told[-1]["level"], told[-1]["flow"]) == ("CRITICAL", "f")
    assert told[-1]["error"]["next_step"] == "look"
    assert [json.loads(line)["batch"] for line in ended.stdout.splitlines()] == [1, 2, 3]


@pytest.mark.long
def test_the_environment_and_a_handler_of_the_program() -> None:
    configured = "logging.basicConfig(level=logging.ERROR, format='mine %(message)s')\n"
    quits = "serve(Query(asks=lambda query: query.fail(None)))\nlogging.getLogger('x').error('done')\n"
    ended = run(configured + quits, ONCEFLOW_LOG_FORMAT="json")
    assert ended.returncode == 0, ended.stderr
    assert [json.loads(line)["message"] for line in ended.stderr.splitlines()] == ["done"], "its level is kept"
    ended = run(configured + quits, ONCEFLOW_LOG_FORMAT="")
    assert ended.stderr.splitlines()[-1] == "mine done"


def test_a_hook_of_the_program_is_still_called() -> None:
    """Whether it was set before or after, and however many flows there are."""
    use = "from onceflow.logs import json_logs\nfor _ in range(2): json_logs.use_json()\n"
    hook = "import sys\ndef hook(kind, error, trace):\n    print('reported', error)\nsys.excepthook = hook\n"

    def ends(code: str) -> tuple[str, str]:
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 1
        return ended.stdout, ended.stderr

    said, logged = ends(f"{hook}{use}1 / 0")
    assert said == "reported division by zero\n"
    assert [json.loads(line)["error"]["type"] for line in logged.splitlines()] == ["ZeroDivisionError"]
    assert ends(f"{use}{hook}{use}1 / 0") == ("reported division by zero\n", "")


@pytest.mark.long
def test_the_exit_code_of_a_fenced_flow_survives_another_flow() -> None:
    fenced = "lambda query: query.fail(onceflow.FencedError('a newer driver runs'))"
    ended = run(
        f"try:\n    serve(Query(asks={fenced}))\n"
        "except onceflow.FencedError:\n    for _ in range(2): json_logs.use_json()\n    raise\n"
    )
    assert ended.returncode == 79, ended.stderr
    log_lines = [line for line in ended.stderr.splitlines() if line.startswith("{")]
    assert [json.loads(line)["error"]["what"] for line in log_lines] == ["a newer driver runs"]


@pytest.mark.parametrize("given", [{"log_format": "xml"}, {"log_format": "JSON"}])
def test_an_unknown_format_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match="log_format"):
        onceflow.serve(SimpleNamespace(isActive=False), **given)  # type: ignore[arg-type]


def test_an_unknown_format_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(json_logs.VARIABLE, "yaml")
    with pytest.raises(OptionError, match="ONCEFLOW_LOG_FORMAT is 'yaml'") as caught:
        json_logs.use(None)
    assert "json" in caught.value.next_step
    assert json_logs.use("text") is False, "an argument goes first"
