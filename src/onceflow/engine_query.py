"""What `FlowQuery` needs of the engine that runs a query, and the part of PySpark's handle that it only passes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pyspark.errors import PySparkValueError, StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from onceflow.errors import OnceflowError

#: The engines: Spark's micro-batches, and onceflow's own loop, which reads the sources by itself.
SPARK, DIRECT = "spark", "direct"


class EngineQuery(Protocol):
    """A query that an engine runs. All members may be used in any thread, also when it has ended.

    Names in Spark's style mean what they mean in PySpark's ``StreamingQuery``.
    """

    @property
    def engine(self) -> str:
        """``spark`` or ``direct``."""
        ...

    @property
    def id(self) -> str:
        """A UUID."""
        ...

    @property
    def runId(self) -> str:
        """A UUID, another one for every start."""
        ...

    @property
    def name(self) -> str | None:
        """The name of the query."""
        ...

    @property
    def isActive(self) -> bool:
        """Whether it runs. It raises nothing."""
        ...

    @property
    def status(self) -> dict[str, Any]:
        """``message``, ``isDataAvailable`` and ``isTriggerActive``."""
        ...

    @property
    def lastProgress(self) -> Any:
        """The report of the last batch, as this version of PySpark returns it; None before the first batch."""
        ...

    @property
    def recentProgress(self) -> list[Any]:
        """The reports of the last batches."""
        ...

    @property
    def waits(self) -> bool:
        """Whether it waits for new data or for the next trigger: there was nothing to read, or it is read."""
        ...

    @property
    def lag(self) -> Mapping[str, Mapping[int, int]]:
        """How many offsets of each source partition were left to read at the last batch, by topic.

        Brokers are not asked. Empty before the first batch.
        """
        ...

    def awaitTermination(self, timeout: float | None) -> bool:
        """Wait for the end. ``timeout`` is in seconds and positive; None: no limit.

        Returns:
            Whether it has ended.

        Raises:
            OnceflowError, StreamingQueryException: what has ended it, if it has failed. If it was stopped, the abort
                of its last batch may be raised.
        """
        ...

    def processAllAvailable(self) -> None:
        """Wait until everything that is in the sources now has been committed.

        Raises:
            OnceflowError, StreamingQueryException: as ``awaitTermination`` does.
        """
        ...

    def stop(self) -> None:
        """End it, and wait until it has ended. The batch that runs knows already that it is to be aborted.

        If nothing depends on its end any more, `FlowQuery` calls this in a thread, and does not wait for long.
        """
        ...

    def error(self) -> BaseException | None:
        """The error that has ended it, as ``awaitTermination`` would raise it. None: it runs, or has not failed."""
        ...

    def exception(self) -> StreamingQueryException | None:
        """The same error as PySpark returns it, see `as_spark`."""
        ...

    def explain(self, extended: bool = False) -> None:
        """Print the plan."""
        ...

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call this function, in any thread, when it has ended for any reason."""
        ...

    def begin(self) -> None:
        """Begin with the batches, if it has not begun: whoever watches it knows of it now."""
        ...


def as_spark(error: BaseException, query: EngineQuery) -> StreamingQueryException:
    """The error that has ended a query, if it is none of Spark's, with a text like Spark's."""
    what = str(error) if isinstance(error, OnceflowError) else f"{type(error).__name__}: {error}"
    found = StreamingQueryException(
        f"Query {query.name} [id = {query.id}, runId = {query.runId}] terminated with exception: {what}"
    )
    found.__cause__ = error
    return found


def check_timeout(timeout: object) -> None:
    """Check a timeout as PySpark does.

    Raises:
        PySparkValueError: it is not a positive number.
    """
    if timeout is not None and (not isinstance(timeout, (int, float)) or timeout <= 0):
        # By position: the names of these parameters differ between versions.
        facts = {"arg_name": "timeout", "arg_value": type(timeout).__name__}
        raise PySparkValueError(None, "VALUE_NOT_POSITIVE", facts)


class EngineHandle(StreamingQuery):
    """PySpark's handle of a query that any engine runs: what needs no more than to ask the engine.

    Nothing of PySpark's own handle is used: it would need a query in Spark's JVM.
    """

    def __init__(self, engine: EngineQuery) -> None:
        super().__init__(None)
        self._engine = engine

    @property
    def engine(self) -> str:
        """What runs it: ``spark`` or ``direct``."""
        return self._engine.engine

    @property
    def id(self) -> str:
        """A UUID of the query."""
        return self._engine.id

    @property
    def runId(self) -> str:
        """A UUID of this run of the query."""
        return self._engine.runId

    @property
    def name(self) -> str:
        """The name of the query: that of its flow, unless an older query of the flow runs in this Spark session."""
        return self._engine.name  # type: ignore[return-value]  # PySpark, too, declares no None

    @property
    def isActive(self) -> bool:
        """Whether the query is running. False if Spark's JVM has ended."""
        return self._engine.isActive

    @property
    def status(self) -> dict[str, Any]:
        """What the query does now: ``message``, ``isDataAvailable`` and ``isTriggerActive``."""
        return self._engine.status

    @property
    def lastProgress(self) -> Any:
        """The report of the last batch, as PySpark returns it: its rows, offsets and durations. None before it."""
        return self._engine.lastProgress

    @property
    def recentProgress(self) -> list[Any]:
        """The reports of the last batches."""
        return self._engine.recentProgress

    @property
    def lag(self) -> Mapping[str, Mapping[int, int]]:
        """How many offsets of each source partition were left to read at the last batch, by topic.

        Brokers are not asked. With Spark's micro-batches it is what Spark knew when it planned the batch, with the
        direct engine what the brokers have said last. Empty before the first batch, and when its JVM has ended.
        """
        return self._engine.lag

    def explain(self, extended: bool = False) -> None:
        """Print the plan of the last batch; with ``extended`` also Spark's logical plans, or the columns used."""
        self._engine.explain(extended)

    def exception(self) -> StreamingQueryException | None:
        """The error that has ended the query, as Spark wraps it: None if it has not failed. See `FlowQuery.failure`."""
        return self._engine.exception()
