"""A handle of a running streaming query, and a clear error when Spark's JVM has ended."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

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

    def spark_waits(self) -> bool:
        """Whether Spark waits for new data or for the next trigger: there was nothing to read, or it is read."""
        return str(self._jsq.status().message()).startswith("Waiting for")

    def spark_lag(self) -> dict[str, dict[int, int]]:
        """How many offsets of each source partition were left to read when the last batch ended, by topic.

        It is what Spark knew when it planned that batch; brokers are not asked. Empty before the first batch.
        """
        progress = self._jsq.lastProgress()
        return {} if progress is None else _lag_of(json.loads(str(progress.json())))


def _lag_of(progress: dict[str, Any]) -> dict[str, dict[int, int]]:
    """From Spark's report of a batch."""
    found: dict[str, dict[int, int]] = {}
    for source in progress.get("sources", ()):
        end, latest = source.get("endOffset"), source.get("latestOffset")
        if not isinstance(end, dict) or not isinstance(latest, dict):
            continue  # not a Kafka source, or nothing was asked for
        for topic, partitions in latest.items():
            if isinstance(partitions, dict):
                read = end.get(topic, {})
                left = {int(number): max(0, last - read.get(number, last)) for number, last in partitions.items()}
                found.setdefault(topic, {}).update(left)
    return found


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
