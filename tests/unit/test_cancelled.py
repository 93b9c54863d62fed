"""Whether Spark has cancelled a job is told by classes and error conditions, not by words of user code."""

from __future__ import annotations

from typing import Any

import pytest
from py4j.protocol import Py4JError

from onceflow.spark import versions
from onceflow.spark.jvm import was_cancelled


class Thrown:
    """A Throwable of the JVM."""

    def __init__(self, name: str, condition: str | None = None, cause: Thrown | None = None, *, message: str = ""):
        self.name, self.condition, self.cause, self.message = name, condition, cause, message

    def getClass(self) -> Any:
        return self

    def getName(self) -> str:
        return self.name

    def getMessage(self) -> str:
        return self.message

    def getCause(self) -> Thrown | None:
        return self.cause

    def getCondition(self) -> str | None:
        if versions.current() < (4, 0) or self.condition is None:
            raise Py4JError("Method getCondition([]) does not exist")
        return self.condition


def error(thrown: Thrown | None, attribute: str = "_origin") -> Exception:
    made = RuntimeError("Job 7 cancelled part of cancelled job group: InterruptedException")
    setattr(made, attribute, thrown)
    return made


SPARK = "org.apache.spark.SparkException"
CANCELLED = Thrown(SPARK, "SPARK_JOB_CANCELLED")
# As Spark 3.5 says it: without a condition.
CANCELLED_3_5 = Thrown(SPARK, message="Job 7 cancelled part of cancelled job group 4f")


@pytest.fixture(params=[(3, 5), (4, 2)], ids=["3.5", "4.2"], autouse=True)
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> versions.Version:
    monkeypatch.setattr(versions, "_current", request.param)
    found: versions.Version = request.param
    return found


@pytest.fixture
def cancelled(version: versions.Version) -> Thrown:
    return CANCELLED if version >= (4, 0) else CANCELLED_3_5


@pytest.mark.parametrize("attribute", ["_origin", "java_exception"])
def test_cancelled(cancelled: Thrown, attribute: str) -> None:
    for thrown in (
        cancelled,
        Thrown(SPARK, None, Thrown("java.lang.RuntimeException", None, cancelled)),
        Thrown("java.lang.InterruptedException"),
        Thrown("java.nio.channels.ClosedByInterruptException"),
    ):
        assert was_cancelled(error(thrown, attribute))


@pytest.mark.parametrize(
    "thrown",
    [
        None,
        Thrown(SPARK),
        Thrown(SPARK, "TASK_WRITE_FAILED", Thrown("java.io.IOException")),
        Thrown("org.apache.spark.api.python.PythonException"),
        # What user code raises, and how Spark tells of it.
        Thrown("org.apache.spark.api.python.PythonException", message="Job 7 cancelled"),
        Thrown(SPARK, message="Job aborted due to stage failure: RuntimeError: Job 7 cancelled"),
    ],
)
def test_words_do_not_count(thrown: Thrown | None) -> None:
    assert not was_cancelled(error(thrown))
    assert not was_cancelled(RuntimeError("the order was cancelled: InterruptedException"))


def test_causes_in_a_circle_end() -> None:
    one = Thrown(SPARK)
    one.cause = one
    assert not was_cancelled(error(one))


def test_a_jvm_that_is_gone_tells_nothing() -> None:
    class Gone(Thrown):
        def getName(self) -> str:
            raise Py4JError("gone")

    assert not was_cancelled(error(Gone(SPARK)))
