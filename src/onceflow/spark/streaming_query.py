"""A query that Spark runs, and a clear error when Spark's JVM has ended."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import StreamingQueryException
from pyspark.errors.exceptions.captured import convert_exception
from pyspark.sql.streaming.query import StreamingQuery

from onceflow.engine_query import SPARK
from onceflow.errors import EnvironmentUnusableError
from onceflow.spark import driver_jvm, query_listener
from onceflow.spark.query_progress import left


class SparkQuery(StreamingQuery):
    """A query that Spark runs (`onceflow.engine_query.EngineQuery`).

    If Spark's JVM has ended, calls raise ``EnvironmentUnusableError``, or return it if they return what has ended the
    query.
    """

    engine = SPARK

    def __init__(self, query: StreamingQuery) -> None:
        super().__init__(query._jsq)
        self._call_at_end: Callable[[], None] = lambda: None

    @property
    def isActive(self) -> bool:
        """Whether it runs. False if Spark's JVM has ended."""
        try:
            with jvm_needed():
                return bool(super().isActive)
        except EnvironmentUnusableError:
            return False

    @property
    def status(self) -> dict[str, Any]:
        """What it does now."""
        with jvm_needed():
            return super().status

    @property
    def lastProgress(self) -> Any:
        """Spark's report of the last batch."""
        with jvm_needed():
            return super().lastProgress

    @property
    def recentProgress(self) -> list[Any]:
        """Spark's reports of the last batches."""
        with jvm_needed():
            return list(super().recentProgress)

    @property
    def waits(self) -> bool:
        """Whether Spark waits for new data or for the next trigger: there was nothing to read, or it is read."""
        with jvm_needed():
            return str(self._jsq.status().message()).startswith("Waiting for")

    @property
    def lag(self) -> dict[str, dict[int, int]]:
        """How many offsets of each source partition were left to read when the last batch ended, by topic.

        It is what Spark knew when it planned that batch; brokers are not asked. Empty before the first batch, and when
        Spark's JVM has ended.
        """
        try:
            with jvm_needed():
                progress = self._jsq.lastProgress()
                return {} if progress is None else _lag_of(json.loads(str(progress.json())))
        except EnvironmentUnusableError:
            return {}

    def awaitTermination(self, timeout: float | None = None) -> bool:
        """Wait for its end. ``timeout`` is in seconds; the result says whether it has ended.

        Raises:
            StreamingQueryException: what has ended it.
        """
        with jvm_needed():
            ended = super().awaitTermination(timeout)  # type: ignore[arg-type]
        return timeout is None or bool(ended)

    def processAllAvailable(self) -> None:
        """Wait until everything that is in the sources now has been committed."""
        with jvm_needed():
            super().processAllAvailable()

    def stop(self) -> None:
        """Stop it, and wait for its thread."""
        try:
            with contextlib.suppress(EnvironmentUnusableError), jvm_needed():
                super().stop()
        except Exception as error:
            # A signal to the group of processes ends Spark at the same time, and its queries with it.
            if "stopped SparkContext" not in str(error):
                raise

    def error(self) -> Exception | None:
        """The error that has ended it; None if it has not failed."""
        try:
            with jvm_needed():
                thrown = self._jsq.exception()
                return convert_exception(thrown.get()) if thrown.isDefined() else None
        except EnvironmentUnusableError as lost:
            return lost

    def exception(self) -> StreamingQueryException | None:
        """The error that has ended it, as PySpark returns it."""
        with jvm_needed():
            return super().exception()

    def explain(self, extended: bool = False) -> None:
        """Print the plan of the last batch."""
        with jvm_needed():
            super().explain(extended)

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call this function, on a thread of py4j, when Spark has ended the query."""
        self._call_at_end = call
        query_listener.started(self)

    def begin(self) -> None:
        """Spark has begun already."""

    def terminated(self) -> None:
        """Called by the listener when Spark has ended the query."""
        self._call_at_end()


def _lag_of(progress: dict[str, Any]) -> dict[str, dict[int, int]]:
    """From Spark's report of a batch."""
    found: dict[str, dict[int, int]] = {}
    for source in progress.get("sources", ()):
        end, latest = source.get("endOffset"), source.get("latestOffset")
        if not isinstance(end, dict) or not isinstance(latest, dict):
            continue  # not a Kafka source, or nothing was asked for
        for topic, partitions in left(_by_number(end), _by_number(latest)).items():
            found.setdefault(topic, {}).update(partitions)
    return found


def _by_number(offsets: dict[str, Any]) -> dict[str, dict[int, int]]:
    """Offsets of a Kafka source; those of another source have other fields."""
    return {
        topic: {int(number): offset for number, offset in partitions.items()}
        for topic, partitions in offsets.items()
        if isinstance(partitions, dict)
    }


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
        if driver_jvm.cannot_answer(error):
            raise driver_jvm.ended_error(error) from error
        raise
