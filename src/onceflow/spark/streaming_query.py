"""A handle of a running streaming query, and a clear error when Spark's JVM has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.errors.exceptions.captured import convert_exception
from pyspark.sql.streaming.query import StreamingQuery

from onceflow.errors import EnvironmentUnusableError


class SparkQuery(StreamingQuery):
    """A second handle of a running query, to be extended."""

    def __init__(self, query: StreamingQuery) -> None:
        super().__init__(query._jsq)

    def spark_error(self) -> PySparkException | None:
        """The error that has ended the query; None if it has not failed."""
        thrown = self._jsq.exception()
        return convert_exception(thrown.get()) if thrown.isDefined() else None


@contextlib.contextmanager
def jvm_needed() -> Iterator[None]:
    """Raise a clear error if the driver's JVM has ended, for example killed by the kernel for its memory.

    py4j would only say that a call failed.

    Raises:
        EnvironmentUnusableError: the JVM has ended.
    """
    try:
        yield
    except (Py4JError, ConnectionError) as error:
        if isinstance(error, (Py4JNetworkError, ConnectionError)) or type(error) is Py4JError:
            raise EnvironmentUnusableError(
                "Spark's JVM has ended, and the query with it",
                detail=str(error),
                next_step="start the driver again: the flow continues where its progress ends. If it repeats, check "
                "whether the kernel killed the JVM (dmesg), and set spark.driver.memory to a value that fits",
            ) from error
        raise
