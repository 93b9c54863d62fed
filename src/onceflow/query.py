"""The query of a flow: prepared, and running. Whichever engine runs it, it looks like PySpark's StreamingQuery."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from pyspark.errors import StreamingQueryException

from onceflow import hooks
from onceflow.calls.runner import give_up
from onceflow.clock import clock_ms
from onceflow.driver.batch.batches import Batches
from onceflow.driver.batch.source_times import SourceTimes
from onceflow.driver.record.offset_log import has_reached
from onceflow.driver.start.report import Dataset, StartReport
from onceflow.engine_query import EngineHandle, EngineQuery, check_timeout
from onceflow.errors import BrokerUnreachableError, EnvironmentUnusableError, OnceflowError
from onceflow.logs import log_context
from onceflow.planning.options import AT_MOST_ONCE, BatchSummary
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.protocol.position import Position
from onceflow.protocol.progress import Offsets, Progress
from onceflow.spark import jvm
from onceflow.state.table_facts import TableFacts
from onceflow.uncaught import fenced_ends_program

log = logging.getLogger("onceflow")

#: The conditions of a query, and how it may have ended besides.
STARTING, RUNNING, STOPPED, FAILED, COMPLETE = "starting", "running", "stopped", "failed", "complete"

# The thread of a query normally ends in milliseconds, unless it waits for brokers.
_STOP_S, _LOOK_S = 10.0, 0.1


class FlowQuery(EngineHandle):
    """Returned by ``Flow.write(...).start()``.

    ``awaitTermination`` raises onceflow's own error (``FencedError``, ``BatchAbortedError``, ...). Spark would wrap the
    text of that error in a ``StreamingQueryException``.

    Attributes:
        since_ms: when it was started, epoch milliseconds.
        engine_reason: why this engine runs it, as a sentence; empty: nothing is known.
    """

    def __init__(
        self,
        engine: EngineQuery,
        sink: Batches,
        on_stop: Callable[[], None],
        until: Offsets | None = None,
        source_times: Callable[[], SourceTimes] | None = None,
        report: StartReport | None = None,
        engine_reason: str = "",
        standbys: Callable[[], int | None] = lambda: None,
    ) -> None:
        super().__init__(engine)
        self.engine_reason = engine_reason
        self._sink = sink
        self._stop_in_engine = QueryStop(engine, sink)
        self._on_stop = on_stop
        self.since_ms = clock_ms()
        self._source_times = source_times
        self._standbys = standbys
        self._release_lock = threading.Lock()
        self._awaiting = threading.Lock()
        self._released = False
        self._has_begun = False
        self._until = {} if until is None else until
        self._report = report
        self._is_start_logged = False

    def __repr__(self) -> str:
        progress = self._sink.progress
        failed = None if self.failure is None else type(self.failure).__name__
        state = "running" if self.isActive else f"stopped by {failed}" if failed else "stopped"
        last = self._sink.history[-1].path if self._sink.history else "none in this run"
        offsets = {topic: dict(sorted(partitions.items())) for topic, partitions in progress.offsets.items()}
        return (
            f"<flow {self.flow!r}: {state}, {self.guarantee}; batch {progress.batch_id} committed, "
            f"next offsets {offsets}; last batch: {last}>"
        )

    def log_start(self) -> None:
        """Log what the start has found, unless it is logged already."""
        if self._report is None or self._is_start_logged:
            return
        self._is_start_logged = log.isEnabledFor(logging.INFO) and log.hasHandlers()
        log.info("\n  ".join(self._report.lines(clock_ms())), extra={"start": self._report.facts()})

    def untold_start(self) -> list[str]:
        """Lines about the start for people, if nobody has seen them in the log."""
        if self._report is None or self._is_start_logged:
            return []
        first, *others = self._report.lines(clock_ms())
        return [first, *(f"  {line}" for line in others)]

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """For use while a caller waits for the query to end: errors are raised there, so they are not logged."""
        with self._awaiting:
            self._sink.awaited += 1
        try:
            yield
        finally:
            with self._awaiting:
                self._sink.awaited -= 1

    def terminated(self) -> None:
        """Call this when the engine has ended the query. It logs the reason, unless a caller waits for the query.

        Failures of onceflow are logged already.
        """
        self._sink.over = True
        self._announce_end()
        if self._sink.failure is not None or self._sink.stopping or self._sink.awaited:
            return
        error = self._engine.error()
        if error is not None:
            reason = self._reason(error)
            text = str(reason) if isinstance(reason, OnceflowError) else jvm.first_line(reason)
            with log_context.within(flow=self.flow):
                log.error("the query of flow %s has ended: %s", self.flow, text)

    def release(self) -> None:
        """Release the resources of the run, when it has ended. Only the first call has an effect."""
        with self._release_lock:
            released, self._released = self._released, True
        if not released:
            self._announce_end()
            self._on_stop()

    def _announce_end(self) -> None:
        hooks.at(hooks.ENDED, where="driver", flow=self.flow, query=self)

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        """Wait for the query to stop. ``timeout`` is in seconds; the result is True when it has stopped.

        Raises:
            OnceflowError: the reason why onceflow has stopped it. ``EnvironmentUnusableError``: Spark's JVM has ended.
            StreamingQueryException: the reason why Spark has stopped it.
            PySparkValueError: ``timeout`` is not a positive number.
        """
        check_timeout(timeout)
        try:
            with self.awaited():
                ended = self._engine.awaitTermination(timeout)
            if not self.isActive:
                self.release()
            return None if timeout is None else ended
        except (OnceflowError, StreamingQueryException) as error:
            self.release()
            if self._sink.stopping and self._sink.failure is None:
                return None if timeout is None else True  # stop() has interrupted the last batch
            with fenced_ends_program():
                raise self._reason(error) from _shown(error)

    def processAllAvailable(self) -> None:
        """Wait until everything that is in the sources now has been committed.

        Raises:
            OnceflowError, StreamingQueryException: as ``awaitTermination`` does.
            BrokerUnreachableError, DeadlineExceededError: also if brokers do not say what is in the sources now. Then
                the query goes on.
        """
        try:
            with self.awaited():
                self._engine.processAllAvailable()
        except (OnceflowError, StreamingQueryException) as error:
            if isinstance(error, OnceflowError) and self.isActive:
                raise  # brokers did not say where the sources end; the query waits for them
            self.release()
            with fenced_ends_program():
                raise self._reason(error) from _shown(error)

    def stop(self, *, batch_s: float = 0.0) -> None:
        """Stop the query. A running batch is aborted, and the next start runs it again.

        Args:
            batch_s: how many seconds the running batch may take to finish before it is aborted. No new batch begins.
        """
        if batch_s > 0:
            self._sink.held.set()
        ended = batch_s > 0 and self._sink.turn.acquire(timeout=batch_s)
        self._sink.stopping = True
        give_up(self.flow)
        try:
            self._stop_in_engine(idle=ended)
        finally:
            if ended:
                self._sink.turn.release()
            self.release()

    def stop_is_asked(self) -> None:
        """Call this as soon as a signal asks for a stop; it waits for nothing. `stop` or `stopped_with_spark` follows.

        The signal may go to the group of processes, and end Spark's JVM before `stop` is called. A batch that fails
        because of that is aborted, and the query has not failed. With ``at_most_once`` it has: the rows are lost.
        """
        if self.guarantee != AT_MOST_ONCE:
            self._sink.stopping = True

    def stopped_with_spark(self) -> None:
        """Call this if a stop was asked for, and the query has ended before it: Spark's JVM got the signal, too."""
        if self._sink.failure is None:
            self._sink.stopping = True
        self.release()

    @property
    def is_over(self) -> bool:
        """Whether the query has ended, has failed or is being stopped. The engine is not asked."""
        return self._sink.over or self._sink.stopping or self._sink.failure is not None

    @property
    def is_complete(self) -> bool:
        """Whether its reads have an end (``Flow.read(until=...)``), and everything before that is committed."""
        return bool(self._until) and has_reached(self._sink.progress.offsets, self._until)

    @property
    def flow(self) -> str:
        """The name of the flow."""
        return self._sink.flow

    @property
    def guarantee(self) -> str:
        """The guarantee that was given to ``Flow.write``."""
        return self._sink.guarantee

    @property
    def progress(self) -> Progress:
        """What is committed."""
        return self._sink.progress

    @property
    def transaction_timeout_s(self) -> float | None:
        """After how many seconds the broker aborts a batch. None: it is not written in a transaction of Kafka."""
        return self._sink.transaction_timeout_s

    @property
    def failure(self) -> BaseException | None:
        """The error with which onceflow has stopped the query, or None."""
        return self._sink.failure

    @property
    def condition(self) -> str:
        """``starting`` until the first batch is committed or there is nothing to read; then ``running``. At the end
        ``stopped`` (by ``stop``, or because everything is read with ``once=True``) or ``failed``."""
        if self.failure is not None:
            return FAILED
        if self._sink.stopping:
            return STOPPED
        try:
            if self.isActive:
                self._has_begun = self._has_begun or self._is_under_way()
                return RUNNING if self._has_begun else STARTING
        except EnvironmentUnusableError:
            return FAILED
        return STOPPED if self._engine.error() is None else FAILED

    @property
    def outcome(self) -> str:
        """How the query has ended: ``complete`` (it has read everything up to its bound, or with ``once=True``),
        ``stopped`` or ``failed``."""
        if self.failure is not None:
            return FAILED
        if self.is_complete:
            return COMPLETE
        if self._sink.stopping:
            return STOPPED
        return COMPLETE if self._engine.error() is None else FAILED

    @property
    def kafka(self) -> str:
        """The cluster, as OpenLineage names it: ``kafka://host:port``, with the first of the bootstrap servers."""
        return "" if self._report is None else self._report.kafka

    @property
    def datasets(self) -> tuple[dict[str, Dataset], dict[str, Dataset]]:
        """What it reads and what it writes, as OpenLineage names it: namespace and name, by the names in `batches`."""
        return ({}, {}) if self._report is None else (self._report.inputs(), self._report.datasets_written())

    def _is_under_way(self) -> bool:
        return bool(self._sink.history or self._sink.drained or self._sink.idle) or self._engine.waits

    @property
    def position(self) -> str:
        """How far the flow's tables are committed, as a short text: `Table.wait_until_current` waits for it in any
        process. It is empty if the flow has no tables."""
        progress = self._sink.progress
        companions = {name + INTERNAL_SUFFIX for name in progress.changelogs}
        offsets = {name: ends for name, ends in progress.changelogs.items() if name not in companions}
        return str(Position(offsets, progress.topic_ids))

    @property
    def tables(self) -> list[TableFacts]:
        """What this run knows of the flow's tables: rows, bytes, what is due, and how much was restored."""
        return self._sink.tables()

    @property
    def standbys(self) -> int | None:
        """How many other drivers stand by for this one, as heard every 5 seconds. None: this is not known, or the flow
        was not made with ``standby=True``."""
        return self._standbys()

    def source_times(self) -> SourceTimes:
        """Looks up when records of its sources were written. The caller closes it."""
        if self._source_times is None:
            raise RuntimeError("the query was not started by a flow")
        return self._source_times()

    @property
    def batches(self) -> list[BatchSummary]:
        """The last 200 committed batches: records, bytes, seconds per step, attempts."""
        return list(self._sink.history)

    @property
    def drained(self) -> list[int]:
        """Numbers of batches that an earlier run had committed, and that this run has drained for Spark's state."""
        return list(self._sink.drained)

    def _reason(self, error: BaseException) -> BaseException:
        if isinstance(error, OnceflowError):
            return error.with_traceback(None)
        failure = self._sink.failure
        if failure is None and (waited := jvm.kafka_timeout(error)):
            failure = self._sink.failure = BrokerUnreachableError(
                "Spark got no answer from the brokers of its sources, and has ended the query",
                flow=self.flow,
                detail=waited,
                next_step="start the flow again when they answer: it continues at its committed progress. Spark tries "
                'for about 3 minutes, with Flow.read(options={"fetchOffset.numRetries": "30"}) for half an hour',
            )
        # Without the traceback: it shows only the inside of a callback of Spark.
        return failure.with_traceback(None) if isinstance(failure, OnceflowError) else error


class FlowWriter:
    """A write that is checked, but not started yet."""

    def __init__(self, start: Callable[[], FlowQuery]) -> None:
        self._start = start

    def start(self) -> FlowQuery:
        """Start the query.

        Raises:
            OnceflowError: the flow is running already, the output topic is missing, a newer driver has fenced this one,
                the checkpoint and progress do not belong together, Spark refuses the query, or tasks cannot import what
                its processors or functions need (the direct engine looks at the first backlog).
        """
        return self._start()


def _shown(error: BaseException) -> BaseException | None:
    """The cause that is shown with an error. Spark's causes only add Java's stack, and repeat the reason. The direct
    engine's is the Python exception itself."""
    return error.__cause__ if isinstance(error, StreamingQueryException) else None


class QueryStop:
    """The stop of one query."""

    def __init__(self, engine: EngineQuery, sink: Batches) -> None:
        self._engine = engine
        self._sink = sink
        self._left_behind = False

    def __call__(self, *, idle: bool) -> None:
        """Stop the query in its engine, and wait for its thread.

        If brokers do not answer, Spark's thread first waits for its Kafka clients, up to ``default.api.timeout.ms``
        (``KafkaAdminClient.close``). If no batch is running, nothing depends on that, so this call returns earlier.

        Args:
            idle: whether it is certain that no batch is running, and that none begins.
        """
        if self._left_behind:
            return
        raised: list[BaseException] = []

        def stop() -> None:
            try:
                self._engine.stop()
            except BaseException as error:  # raised later in the thread of the caller
                raised.append(error)

        thread = threading.Thread(target=stop, name="onceflow-stop", daemon=True)
        thread.start()
        thread.join(_STOP_S)
        flow = self._sink.flow
        while thread.is_alive():
            give_up(flow)  # the batch may have begun its calls only now
            # The lock is never released: if a batch still begins, it ends at once.
            if idle or self._sink.turn.acquire(blocking=False):
                self._left_behind = True
                with log_context.within(flow=flow):
                    log.warning("flow %s: stopped, without waiting for requests that brokers do not answer", flow)
                return
            thread.join(_LOOK_S)
        if raised:
            raise raised[0]
