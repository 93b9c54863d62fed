"""The handle of a query that another engine than Spark runs: nothing of Spark's JVM is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkValueError, StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from onceflow import BrokerUnreachableError, FencedError
from onceflow.engine_query import DIRECT, EngineQuery, as_spark
from onceflow.query import FlowQuery


class Engine:
    """Does nothing but wait for its end."""

    engine = DIRECT
    id = "6d0a3c5e-5a39-4d5f-8b38-6f1c1a5e2c11"
    runId = "0f9a2f1e-6d0c-4c8e-9a1d-3c1f0a7b9d22"
    name = "deposits"

    def __init__(self) -> None:
        self.lastProgress = {"batchId": 4}
        self.recentProgress = [{"batchId": 3}, self.lastProgress]
        self.lag = {"in": {0: 7}}
        self.over = threading.Event()
        self.waits = False
        self.failed: Exception | None = None
        self.call: Callable[[], None] = lambda: None

    @property
    def isActive(self) -> bool:
        return not self.over.is_set()

    @property
    def status(self) -> dict[str, Any]:
        return {"message": "Waiting for data to arrive", "isDataAvailable": False, "isTriggerActive": False}

    def awaitTermination(self, timeout: float | None) -> bool:
        ended = self.over.wait(timeout)
        if ended and self.failed is not None:
            raise self.failed
        return ended

    def processAllAvailable(self) -> None:
        if self.failed is not None:
            raise self.failed

    def stop(self) -> None:
        self.end(None)

    def end(self, error: Exception | None) -> None:
        self.failed = error
        self.over.set()
        self.call()

    def error(self) -> BaseException | None:
        return self.failed

    def exception(self) -> StreamingQueryException | None:
        return None if self.failed is None else as_spark(self.failed, self)

    def explain(self, extended: bool = False) -> None:
        print("Parsed Logical Plan" if extended else "Physical Plan")

    def when_ended(self, call: Callable[[], None]) -> None:
        self.call = call


class Run:
    """A query, as a run starts it."""

    def __init__(self, **facts: Any) -> None:
        self.engine = Engine()
        self.sink = SimpleNamespace(
            **{
                "flow": "deposits",
                "failure": None,
                "stopping": False,
                "over": False,
                "awaited": 0,
                "turn": threading.Lock(),
                "held": threading.Event(),
                "history": [],
                "drained": [],
                "idle": False,
                "progress": SimpleNamespace(offsets={}),
                **facts,
            }
        )
        self.released: list[bool] = []
        engine: EngineQuery = self.engine
        sink: Any = self.sink
        self.query = FlowQuery(engine, sink, lambda: self.released.append(True), engine_reason="it is simple")
        self.engine.when_ended(self.query.terminated)


def test_nothing_of_pysparks_own_handle_is_left() -> None:
    """It would ask Spark's JVM. A new version of PySpark may have new members."""
    public = {name for name in vars(StreamingQuery) if not name.startswith("_")}
    assert {"id", "lastProgress", "awaitTermination", "exception"} <= public
    own = {name for each in FlowQuery.__mro__ if each is not StreamingQuery for name in vars(each)}
    assert public - own == set()


def test_the_handle_asks_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run()
    query = run.query
    assert isinstance(query, StreamingQuery)
    assert (query.engine, query.engine_reason) == ("direct", "it is simple")
    assert (query.id, query.runId, query.name) == (Engine.id, Engine.runId, "deposits")
    assert query.lastProgress == query.recentProgress[-1] == {"batchId": 4}
    assert query.lag == {"in": {0: 7}}
    assert set(query.status) == {"message", "isDataAvailable", "isTriggerActive"}
    query.explain()
    query.explain(extended=True)
    assert capsys.readouterr().out == "Physical Plan\nParsed Logical Plan\n"


def test_it_is_stopped() -> None:
    run = Run()
    query = run.query
    assert query.isActive
    assert query.awaitTermination(timeout=0.01) is False
    assert query.condition == "starting"
    run.engine.waits = True
    assert query.condition == "running"
    assert run.released == []
    query.stop()
    assert run.released == [True]
    assert run.sink.over, "the engine says when it has ended"
    assert query.condition == query.outcome == "stopped"
    assert query.awaitTermination() is None
    assert query.awaitTermination(timeout=5) is True
    assert query.exception() is None


def test_it_ends_by_itself_when_everything_is_read() -> None:
    run = Run()
    run.engine.end(None)
    assert run.query.awaitTermination(timeout=5) is True
    assert (run.query.condition, run.query.outcome) == ("stopped", "complete")
    assert run.released == [True]


def test_it_fails() -> None:
    run = Run()
    error = FencedError("taken over", flow="deposits")
    run.sink.failure = error
    run.engine.end(error)
    with pytest.raises(FencedError) as raised:
        run.query.awaitTermination()
    assert raised.value is error
    assert run.released == [True]
    with pytest.raises(FencedError):
        run.query.processAllAvailable()
    assert run.query.condition == run.query.outcome == "failed"
    found = run.query.exception()
    assert type(found) is StreamingQueryException
    assert f"Query deposits [id = {Engine.id}, runId = {Engine.runId}] terminated with exception: " in str(found)
    assert "taken over" in str(found)
    assert found.__cause__ is error


def test_it_goes_on_if_brokers_do_not_say_where_the_sources_end() -> None:
    """The query itself waits for brokers as long as it takes."""
    run = Run()
    run.engine.failed = BrokerUnreachableError("no broker answers", next_step="wait")
    with pytest.raises(BrokerUnreachableError, match="no broker answers"):
        run.query.processAllAvailable()
    run.engine.failed = None
    assert run.query.isActive
    assert run.released == []
    run.query.stop()
    assert run.released == [True]


def test_an_error_that_is_none_of_onceflows() -> None:
    run = Run()
    cause = KeyError("amount")
    run.engine.end(as_spark(cause, run.engine))
    with pytest.raises(StreamingQueryException, match="terminated with exception: KeyError: 'amount'") as raised:
        run.query.awaitTermination()
    assert raised.value.__cause__ is cause, "its traceback is shown"
    assert run.query.condition == "failed"


def test_a_failure_that_nobody_waits_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.engine.end(as_spark(KeyError("amount"), run.engine))
    assert "the query of flow deposits has ended: Query deposits" in caplog.text
    assert "'amount'" in caplog.text


def test_the_last_batch_may_be_aborted_by_a_stop() -> None:
    run = Run(stopping=True)
    run.engine.end(FencedError("aborted", flow="deposits"))
    assert run.query.awaitTermination(timeout=5) is True
    assert run.query.outcome == "stopped"


@pytest.mark.parametrize("timeout", [0, -1, "5"])
def test_a_timeout_that_is_none(timeout: Any) -> None:
    with pytest.raises(PySparkValueError, match="timeout"):
        Run().query.awaitTermination(timeout)
