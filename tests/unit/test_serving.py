"""`onceflow.serve`: what it prints, when it stops, and what it raises."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from typing import Any

import pytest

import onceflow
from onceflow.errors import OptionError
from onceflow.planning.options import BatchSummary


class Query:
    """A query as far as serve() knows it: it commits a batch every time it is asked whether it runs."""

    def __init__(self, flow: str = "f", *, guarantee: str = "exactly_once", asks: Any = None, batches: int = 3) -> None:
        self.flow, self.guarantee = flow, guarantee
        self.batches: list[BatchSummary] = []
        self.calls: list[str] = []
        self.failure: Exception | None = None
        self._running, self._asks, self._most = True, asks, batches

    @property
    def isActive(self) -> bool:
        if self._running and len(self.batches) < self._most:
            number = len(self.batches) + 1
            self.batches.append(BatchSummary(number, 10, records=10 * number, seconds={"write": 0.25, "end": 0.125}))
            if number == self._most and self._asks is not None:
                self._asks(self)
        return self._running

    def stop(self, *, batch_s: float = 0.0) -> None:
        self.calls.append(f"stop after {batch_s:g} s" if batch_s else "stop")
        self._running = False

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


def test_every_batch_is_a_line_and_sigterm_an_orderly_end(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    query = Query(asks=terminate)
    serve(query)
    assert query.calls == ["stop"]
    put_aside = {"dead_letters": 0, "late": 0, "duplicates": 0, "dropped": 0}
    said = capsys.readouterr()
    assert said.err == "onceflow: flow f runs; SIGTERM or Ctrl-C stops it\nonceflow: flow f is being stopped\n"
    assert [json.loads(line) for line in said.out.splitlines()] == [
        {"flow": "f", "batch": number, "records": 10 * number, **put_aside, "seconds": 0.375} for number in (1, 2, 3)
    ]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_ctrl_c_is_an_orderly_end_too() -> None:
    query = Query(asks=lambda query: os.kill(os.getpid(), signal.SIGINT))
    serve(query)
    assert query.calls == ["stop"]


def test_whoever_asks_twice_does_not_wait() -> None:
    def twice(query: Query) -> None:
        terminate(query)
        terminate(query)

    query = Query(asks=twice)
    with pytest.raises(KeyboardInterrupt):
        serve(query)
    assert query.calls[-1] == "stop"


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


def test_with_at_most_once_what_is_begun_is_finished() -> None:
    query = Query(guarantee="at_most_once", asks=terminate)
    serve(query)
    assert query.calls == ["stop after 60 s"]


def test_no_query_and_other_threads_are_refused() -> None:
    with pytest.raises(OptionError, match="no query"):
        serve()
    raised: list[Exception] = []

    def elsewhere() -> None:
        try:
            serve(Query())
        except OptionError as error:
            raised.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert "main thread" in str(raised[0])
