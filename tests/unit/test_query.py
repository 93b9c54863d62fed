"""What a query says when Spark's JVM is gone: a clear error instead of one of py4j's."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError

from onceflow import BatchAbortedError, EnvironmentUnusableError, OptionError, hooks
from onceflow.driver.batch.sink import BatchSink
from onceflow.planning.options import SinkOptions
from onceflow.query import FlowQuery
from onceflow.spark.streaming_query import SparkQuery
from onceflow.testing.waiting import WaitedInVainError, wait_until


class Gone:
    """A reference to an object in a JVM that has ended."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            raise self.error

        return call


@pytest.fixture(
    params=[
        Py4JError("An error occurred while calling o1.isActive"),
        Py4JNetworkError("empty"),
        ConnectionRefusedError(),
    ],
    ids=lambda error: type(error).__name__,
)
def query(request: pytest.FixtureRequest) -> FlowQuery:
    stopped: list[bool] = []
    sink: Any = SimpleNamespace(flow="f", stopping=False, failure=None, history=[], drained=[], awaited=0)
    spark: Any = SimpleNamespace(_jsq=Gone(request.param))
    query = FlowQuery(SparkQuery(spark), sink, lambda: stopped.append(True))
    query.stopped = stopped  # type: ignore[attr-defined]
    return query


@pytest.mark.parametrize("batch_s", [0.0, 30.0])
def test_a_batch_under_way_may_end_before_the_query_is_stopped(batch_s: float) -> None:
    """And the next one does not begin."""
    ended: list[str] = []
    commit: Any = SimpleNamespace(flow="deposits", progress=SimpleNamespace(batch_id=6), machine=None)
    commit.ended_batch = lambda df: None
    sink = BatchSink(commit, SinkOptions("out", "key", "none", 60.0))
    begun = threading.Event()

    def run(*_: Any) -> None:
        begun.set()
        with contextlib.suppress(WaitedInVainError):
            wait_until(lambda: sink.stopping, 0.3 if batch_s else 30, "the sink is stopped")
        ended.append("cut short" if sink.stopping else "whole")

    sink._run = run  # type: ignore[method-assign]

    def batches() -> None:
        """As Spark's thread calls it, until it fails."""
        frame: Any = SimpleNamespace()
        with contextlib.suppress(BatchAbortedError):
            while True:
                sink(frame, 0)
                if sink.stopping:
                    return

    spark_thread = threading.Thread(target=batches)
    spark: Any = SimpleNamespace(_jsq=SimpleNamespace(stop=lambda: spark_thread.join(30)))
    query = FlowQuery(SparkQuery(spark), sink, lambda: None)
    spark_thread.start()
    assert begun.wait(30)
    query.stop(batch_s=batch_s)
    assert not spark_thread.is_alive()
    assert ended == (["whole"] if batch_s else ["cut short"])


@pytest.mark.parametrize("guarantee, outcome", [("exactly_once", "stopped"), ("at_most_once", "failed")])
def test_a_batch_that_fails_by_the_signal_for_a_stop(guarantee: str, outcome: str) -> None:
    """SIGTERM to the group of processes ends Spark's JVM before the query is stopped."""
    progress = SimpleNamespace(batch_id=6, offsets={})
    commit: Any = SimpleNamespace(flow="deposits", progress=progress, machine=None)
    commit.ended_batch = lambda df: None
    sink = BatchSink(commit, SinkOptions("out", "key", "none", 60.0, guarantee=guarantee))
    sink.awaited = 1
    spark: Any = SimpleNamespace(_jsq=Gone(Py4JNetworkError("empty")))
    released: list[bool] = []
    query = FlowQuery(SparkQuery(spark), sink, lambda: released.append(True))

    def run(*_: Any) -> None:
        raise Py4JNetworkError("empty")

    sink._run = run  # type: ignore[method-assign]
    frame: Any = SimpleNamespace(sparkSession=SimpleNamespace(_jsc=None))
    told: list[str] = []
    forget = hooks.observe(lambda step, **facts: told.append(step))
    try:
        query.stop_is_asked()
        with pytest.raises(BatchAbortedError):
            sink(frame, 0)
        query.stopped_with_spark()
    finally:
        forget()
    assert query.outcome == outcome
    assert told == (["ended"] if outcome == "stopped" else ["failed", "ended"])
    assert released == [True]


@pytest.mark.parametrize("failure, outcome", [(None, "stopped"), (OptionError("wrong"), "failed")])
def test_a_query_that_has_ended_with_spark(failure: Exception | None, outcome: str) -> None:
    sink: Any = SimpleNamespace(flow="f", stopping=False, failure=failure, progress=SimpleNamespace(offsets={}))
    spark: Any = SimpleNamespace(_jsq=Gone(Py4JNetworkError("empty")))
    released: list[bool] = []
    query = FlowQuery(SparkQuery(spark), sink, lambda: released.append(True))
    assert query.outcome == "failed", "Spark cannot say how it has ended"
    query.stopped_with_spark()
    assert query.outcome == query.condition == outcome
    assert released == [True]


@pytest.mark.parametrize("batch_s", [0.0, 0.3])
def test_brokers_that_are_away_are_not_waited_for(
    batch_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark's thread waits for them at its end. A batch that is under way is waited for."""
    monkeypatch.setattr("onceflow.query._STOP_S", 0.05)
    released: list[str] = []
    turn, answer = threading.Lock(), threading.Event()
    sink: Any = SimpleNamespace(stopping=False, failure=None, turn=turn, flow="deposits", history=[])
    spark: Any = SimpleNamespace(_jsq=SimpleNamespace(stop=lambda: answer.wait(30)))
    query = FlowQuery(SparkQuery(spark), sink, lambda: released.append("turn" if turn.locked() else "too soon"))
    turn.acquire()
    batch = threading.Timer(batch_s, turn.release)
    began = time.monotonic()
    batch.start()
    try:
        query.stop()
        query.stop()  # nor is it the second time
    finally:
        answer.set()
        batch.join()
    assert batch_s <= time.monotonic() - began < 20
    assert released == ["turn"]  # nobody else may begin a batch
    assert "flow deposits: stopped, without waiting for requests" in caplog.text


def test_what_spark_raises_at_a_stop_is_raised() -> None:
    def stop() -> None:
        raise ValueError("no")

    spark: Any = SimpleNamespace(_jsq=SimpleNamespace(stop=stop))
    with pytest.raises(ValueError, match="no"):
        FlowQuery(SparkQuery(spark), SimpleNamespace(flow="deposits"), lambda: None).stop()  # type: ignore[arg-type]


def test_it_is_not_active(query: FlowQuery) -> None:
    assert query.isActive is False


def test_waiting_says_what_happened(query: FlowQuery) -> None:
    with pytest.raises(EnvironmentUnusableError, match=r"JVM has ended(.|\n)*next step: start the driver again"):
        query.awaitTermination()
    with pytest.raises(EnvironmentUnusableError, match="JVM has ended"):
        query.processAllAvailable()


def test_it_can_be_stopped(query: FlowQuery) -> None:
    query.stop()
    assert query.stopped == [True]  # type: ignore[attr-defined]


def test_it_gives_back_what_it_holds_once(query: FlowQuery) -> None:
    """A newer run of the flow may hold things of the same names by then."""
    query.stop()
    query.stop()
    query.release()
    assert query.stopped == [True]  # type: ignore[attr-defined]


def test_errors_of_java_are_not_taken_for_it() -> None:
    class JavaError(Py4JError):
        pass

    spark: Any = SimpleNamespace(_jsq=Gone(JavaError("an exception")))
    with pytest.raises(JavaError):
        FlowQuery(SparkQuery(spark), SimpleNamespace(failure=None, awaited=0), lambda: None).processAllAvailable()  # type: ignore[arg-type]


class Spark:
    """A query of Spark as far as its condition is asked for."""

    def __init__(self, *, active: bool = True, message: str = "Initializing sources", failed: bool = False) -> None:
        self.active, self.message, self.failed = active, message, failed

    def isActive(self) -> bool:
        return self.active

    def status(self) -> Any:
        return SimpleNamespace(message=lambda: self.message)

    def exception(self) -> Any:
        error = Py4JError("for the test")
        return SimpleNamespace(isDefined=lambda: self.failed, get=lambda: error)

    def lastProgress(self) -> Any:
        sources = '[{"endOffset": {"s": {"0": 5}}, "latestOffset": {"s": {"0": 9}}}]'
        return None if not self.active else SimpleNamespace(json=lambda: f'{{"sources": {sources}}}')


def condition_of(spark: Any, **more: Any) -> str:
    facts = {"stopping": False, "failure": None, "history": [], "drained": [], "idle": False, **more}
    query: Any = FlowQuery(SparkQuery(SimpleNamespace(_jsq=spark)), SimpleNamespace(flow="f", **facts), lambda: None)  # type: ignore[arg-type]
    return str(query.condition)


def test_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceflow.spark.streaming_query.convert_exception", lambda error: error)
    assert condition_of(Spark()) == "starting"
    assert condition_of(Spark(message="Getting offsets from KafkaV2[Subscribe[s]]")) == "starting"
    assert condition_of(Spark(message="Waiting for data to arrive")) == "running"
    assert condition_of(Spark(), history=["batch"]) == "running"
    assert condition_of(Spark(), drained=[3]) == condition_of(Spark(), idle=True) == "running"
    assert condition_of(Spark(active=False)) == "stopped", "with once=True everything is read"
    assert condition_of(Spark(active=False), stopping=True) == condition_of(Spark(), stopping=True) == "stopped"
    assert condition_of(Spark(active=False, failed=True)) == "failed"
    assert condition_of(Spark(), failure=ValueError()) == "failed"
    assert condition_of(Spark(active=False, failed=True), stopping=True) == "stopped", "by the interrupt of stop()"


def test_a_query_that_runs_is_not_starting_again() -> None:
    spark = Spark(message="Waiting for next trigger")
    sink = SimpleNamespace(flow="f", stopping=False, failure=None, history=[], drained=[], idle=False)
    query: Any = FlowQuery(SparkQuery(SimpleNamespace(_jsq=spark)), sink, lambda: None)  # type: ignore[arg-type]
    assert query.condition == "running"
    spark.message = "Processing new data"
    assert query.condition == "running"
    assert query.lag == {"s": {0: 4}}
    spark.active = False
    assert query.lag == {}


def test_condition_and_lag_without_a_jvm(query: FlowQuery) -> None:
    assert query.condition == "failed"
    assert query.lag == {}
