"""Whether Spark has cancelled a job is told by classes and error conditions, not by words."""

from __future__ import annotations

from typing import Any

import pytest
from py4j.protocol import Py4JError

from onceflow.spark.jvm import was_cancelled


class Thrown:
    """A Throwable of the JVM."""

    def __init__(self, name: str, condition: str | None = None, cause: Thrown | None = None, *, spark_3: bool = False):
        self.name, self.condition, self.cause, self.spark_3 = name, condition, cause, spark_3

    def getClass(self) -> Any:
        return self

    def getName(self) -> str:
        return self.name

    def getCause(self) -> Thrown | None:
        return self.cause

    def getCondition(self) -> str | None:
        if self.spark_3 or self.condition is None:
            raise Py4JError("Method getCondition([]) does not exist")
        return self.condition

    def getErrorClass(self) -> str | None:
        if self.condition is None:
            raise Py4JError("Method getErrorClass([]) does not exist")
        return self.condition


def error(thrown: Thrown | None, attribute: str = "_origin") -> Exception:
    made = RuntimeError("Job 7 cancelled part of cancelled job group: InterruptedException")
    setattr(made, attribute, thrown)
    return made


SPARK = "org.apache.spark.SparkException"
CANCELLED = Thrown(SPARK, "SPARK_JOB_CANCELLED")


@pytest.mark.parametrize("attribute", ["_origin", "java_exception"])
@pytest.mark.parametrize(
    "thrown",
    [
        CANCELLED,
        Thrown(SPARK, "SPARK_JOB_CANCELLED", spark_3=True),
        Thrown("java.lang.InterruptedException"),
        Thrown("java.nio.channels.ClosedByInterruptException"),
        Thrown(SPARK, None, Thrown("java.lang.RuntimeException", None, CANCELLED)),
    ],
)
def test_cancelled(thrown: Thrown, attribute: str) -> None:
    assert was_cancelled(error(thrown, attribute))


@pytest.mark.parametrize(
    "thrown",
    [
        None,
        Thrown(SPARK),
        Thrown(SPARK, "TASK_WRITE_FAILED", Thrown("java.io.IOException")),
        Thrown("org.apache.spark.api.python.PythonException"),
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
