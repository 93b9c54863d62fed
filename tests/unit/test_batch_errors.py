"""What is recognised in the text of a failed Spark job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JNetworkError

from onceflow import BadRecordError, BatchAbortedError, DataLossError, EnvironmentUnusableError, ProcessorError
from onceflow.driver.batch import retries as retries_module
from onceflow.driver.batch.errors import given_up, of_task
from onceflow.driver.batch.retries import Retries
from onceflow.driver.record.offset_log import SourceRange
from onceflow.planning.options import BatchSummary
from onceflow.spark import driver_jvm

LOST = "Some data may have been lost because they are not available in Kafka any more"
PLACE = "in.put-x-0"


@pytest.mark.parametrize(
    "text, lost",
    [
        (
            f"java.lang.IllegalStateException: Cannot fetch offset 300 (GroupId: a, TopicPartition: {PLACE}). \n{LOST}",
            "offset 300",
        ),
        (
            f"Cannot fetch records in [300, 400) (GroupId: a-executor, TopicPartition: {PLACE}). \n{LOST}",
            "offsets 300 to 399",
        ),
        (
            f"""[KAFKA_DATA_LOSS.COULD_NOT_READ_OFFSET_RANGE] {LOST};
Reason:
Could not read records in offset [300, 400) for topic partition {PLACE}
with consumer group a-executor. SQLSTATE: 22000""",
            "offsets 300 to 399",
        ),
    ],
)
def test_sparks_source_has_lost_records(text: str, lost: str) -> None:
    """The texts of Spark 3.5 and 4."""
    found = of_task(RuntimeError(f"Task 0 in stage 1.0 failed 1 times: {text}\n\tat org.apache.spark"))
    assert isinstance(found, DataLossError)
    assert found.topic == PLACE
    assert found.detail == f"{lost}: not available any more, says Spark's Kafka source"


@pytest.mark.parametrize(
    "text, topic, detail",
    [
        (
            (
                "Record at topic in.put-x partition 0 offset 7 has timestamp value 1795000000000000000 that overflows "
                "when converting to Spark's microsecond-precision TimestampType."
            ),
            PLACE,
            "1795000000000000000 ms since 1970 (+56883255-",
        ),
        (
            (
                "java.lang.ArithmeticException: long overflow\n\tat java.lang.Math.multiplyExact(Math.java:1)\n\tat "
                "org.apache.spark.sql.kafka010.KafkaRecordToRowConverter$.x(KafkaRecordToRowConverter.scala:38)"
            ),
            None,
            "",
        ),
    ],
)
def test_sparks_source_cannot_express_a_time(text: str, topic: str | None, detail: str) -> None:
    """No attempt helps. The texts of Spark 4.2, and of earlier versions."""
    found = of_task(RuntimeError(f"Task 0 in stage 1.0 failed 1 times: {text}\n\tat org.apache.spark"))
    assert isinstance(found, BadRecordError)
    assert found.topic == topic
    assert found.detail.startswith(detail)
    assert "direct engine" in found.next_step


@pytest.mark.parametrize(
    "text",
    [
        "java.lang.ArithmeticException: long overflow\n\tat some.udf",
        "Cannot fetch record for offset 300 in 120000 milliseconds",
        "Cannot fetch offset 300, says a processor",
    ],
)
def test_other_texts_are_worth_another_attempt(text: str) -> None:
    assert of_task(RuntimeError(text)) is None


@pytest.mark.parametrize(
    "name, again",
    [
        ("SchemaError", False),
        ("BadRecordError", False),
        ("UnknownTopicError", False),
        ("OptionError", False),
        ("PermissionDeniedError", False),
        ("AuthenticationFailedError", False),
        ("ProtocolError", False),
        ("ProcessorError", False),
        ("DeadlineExceededError", True),
        ("StorageUnavailableError", True),
        ("EnvironmentUnusableError", True),  # of one executor: another one may be well
    ],
)
def test_errors_of_tasks_that_another_attempt_would_meet(name: str, again: bool) -> None:
    """They were run four times, and ended in "remove the cause"."""
    text = f"Job aborted\n  File x\nonceflow.errors.{name}: It is so [topic=t]\n  detail: some\n  next step: do that\n"
    found = of_task(RuntimeError(text))
    if again:
        assert found is None
    else:
        assert found is not None
        assert (type(found).__name__, found.what, found.topic) == (name, "It is so", "t")
        assert (found.detail, found.next_step) == ("some", "do that")


class Lossy:
    """In the place of `Commit`, with at_most_once: progress has moved before the attempt fails."""

    machine = SimpleNamespace(may_abort=True, is_fenced=False)

    def __init__(self, problem: Exception) -> None:
        self._problem = problem
        self.told: list[tuple[object, BaseException]] = []

    def attempt(self, rows: Any, attempt: Any) -> bool:
        raise self._problem

    def abort(self, problem: BaseException, batch: int) -> None: ...

    def learn(self, problem: BaseException) -> bool:
        return False

    def is_lost(self, rows: Any, summary: BatchSummary, problem: BaseException) -> bool:
        self.told.append((rows, problem))
        return True


@pytest.mark.parametrize(
    "problem, ends",
    [
        (DataLossError("expired", next_step="none"), True),
        (ProcessorError("failed", next_step="none"), True),
        (ValueError("neither Spark's nor onceflow's"), True),
        (BatchAbortedError("tried again", next_step="none"), False),
    ],
    ids=["expired records", "user code", "another error", "a retry"],
)
def test_records_that_are_lost_are_told_also_if_the_query_ends(problem: Exception, ends: bool) -> None:
    steps, rows, summary = Lossy(problem), SimpleNamespace(sparkSession=None), BatchSummary(1, 0)
    options = SimpleNamespace(max_attempts=4, transaction_timeout_s=60.0)
    retries = Retries(steps, options, "flow", is_stopped=lambda *_: False)  # type: ignore[arg-type]
    if ends:
        with pytest.raises(type(problem)):
            retries.run(rows, 1, SourceRange({}, {}), summary)  # type: ignore[arg-type]
    else:
        assert not retries.run(rows, 1, SourceRange({}, {}), summary)  # type: ignore[arg-type]
    assert steps.told == [(None if ends else rows, problem)]


class Interrupted(Lossy):
    """Its attempts are aborted, and nothing is lost."""

    def is_lost(self, rows: Any, summary: BatchSummary, problem: BaseException) -> bool:
        return False


@pytest.mark.parametrize("asked_after", [0, 2, None], ids=["before", "a moment later", "by itself"])
@pytest.mark.parametrize("problem", [Py4JNetworkError("no answer"), ConnectionResetError("reset")])
def test_a_signal_ends_the_jvm_first(
    problem: Exception, asked_after: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal to the group of processes is a stop, also if the JVM ends before the query is asked to."""
    monkeypatch.setattr(driver_jvm, "ended", lambda _, error: driver_jvm.ended_error(error))
    monkeypatch.setattr(retries_module, "_SIGNAL_S", 0.1)
    asked: list[BaseException] = []

    def is_stopped(_: Any, error: BaseException) -> bool:
        asked.append(error)
        return asked_after is not None and len(asked) > asked_after

    options = SimpleNamespace(max_attempts=4, transaction_timeout_s=60.0)
    retries = Retries(Interrupted(problem), options, "flow", is_stopped=is_stopped)  # type: ignore[arg-type]
    with pytest.raises(EnvironmentUnusableError if asked_after is None else BatchAbortedError) as caught:
        retries.run(SimpleNamespace(sparkSession=None), 1, SourceRange({}, {}), BatchSummary(1, 0))  # type: ignore[arg-type]
    assert ("JVM has ended" if asked_after is None else "is being stopped") in str(caught.value)


@pytest.mark.parametrize(
    "last, told",
    [
        (None, "remove the cause. Then start the flow again: it continues at this batch"),
        (ValueError("x"), "remove the cause. Then start the flow again: it continues at this batch"),
        ("none: the batch is run again", "remove the cause. Then start the flow again: it continues at this batch"),
        ("raise the timeout", "raise the timeout. Then start the flow again: it continues at this batch"),
        (
            "look at the log; report this.",
            "look at the log; report this. Then start the flow again: it continues at this batch",
        ),
        ("start the flow again: it continues at this batch", "start the flow again: it continues at this batch"),
        (
            "add memory. Start the driver again when it is there",
            "add memory. Start the driver again when it is there",
        ),
        (
            "check that the brokers are up; a flow that is started again continues from its last committed batch",
            "check that the brokers are up; a flow that is started again continues from its last committed batch",
        ),
        (
            "call query.stop() before spark.stop(); the next start continues where progress ends",
            "call query.stop() before spark.stop(); the next start continues where progress ends",
        ),
    ],
)
def test_a_batch_that_is_given_up_has_the_next_step_of_its_last_error(last: Any, told: str) -> None:
    problem = BatchAbortedError("rolled back", next_step=last) if isinstance(last, str) else last
    assert given_up("orders", 7, 4, problem).next_step == told
