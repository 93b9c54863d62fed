"""The running query: Spark's StreamingQuery, that also knows why onceflow stopped it."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from onceflow.errors import OnceflowError
from onceflow.sink.batch import BatchSink
from onceflow.sink.options import BatchSummary


class FlowQuery(StreamingQuery):
    """Returned by ``Flow.write(...).start()``.

    ``awaitTermination`` raises onceflow's own error (``FencedError``, ``BatchAbortedError``, ...) where
    Spark would raise its text wrapped in a ``StreamingQueryException``; that one stays as the cause.
    """

    def __init__(self, query: StreamingQuery, sink: BatchSink, on_stop: Callable[[], None]) -> None:
        super().__init__(query._jsq)
        self._sink = sink
        self._on_stop = on_stop

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        """Wait for the query to stop. ``timeout`` in seconds; True when it has stopped.

        Raises:
            OnceflowError: why onceflow stopped it.
            StreamingQueryException: why Spark did.
        """
        try:
            ended = super().awaitTermination(timeout)  # type: ignore[arg-type]
            if not self.isActive:
                self._on_stop()
            return ended
        except StreamingQueryException as error:
            self._on_stop()
            raise self._reason(error) from error

    def processAllAvailable(self) -> None:
        """Block until everything that is in the sources now has been committed."""
        try:
            super().processAllAvailable()
        except StreamingQueryException as error:
            self._on_stop()
            raise self._reason(error) from error

    def stop(self) -> None:
        """Stop between two batches, or abort the one under way: it is run again at the next start."""
        self._sink.stopping = True
        try:
            super().stop()
        finally:
            self._on_stop()

    @property
    def failure(self) -> BaseException | None:
        """The error onceflow stopped the query with, if it did."""
        return self._sink.failure

    @property
    def batches(self) -> list[BatchSummary]:
        """The last 200 committed batches: records, bytes, seconds per step, attempts."""
        return list(self._sink.history)

    @property
    def drained(self) -> list[int]:
        """Batches that were committed before this run, and that it had to run again for Spark's state."""
        return list(self._sink.drained)

    def _reason(self, error: StreamingQueryException) -> BaseException:
        failure = self._sink.failure
        return failure if isinstance(failure, OnceflowError) else error
