"""A query that the direct engine runs, as `FlowQuery` sees it."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any
from uuid import uuid4

from pyspark.errors import StreamingQueryException

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.client.settings import ClientSettings
from onceflow.direct.loop import DirectLoop
from onceflow.driver.batch.batches import Batches
from onceflow.driver.record.offset_log import has_reached
from onceflow.engine_query import DIRECT, as_spark
from onceflow.errors import OnceflowError
from onceflow.spark.query_progress import ProgressReports

_LOOK_S = 30.0
_WAIT_S = 0.05
_CANCEL_EVERY_S = 1.0
_EXIT_S = 5.0


class DirectQuery:
    """See `onceflow.engine_query.EngineQuery`.

    Args:
        loop: not started yet.
        plan: returns what is done with the records, as a text; called with whether more is to be said.
        settings: how to connect, to ask where the sources end.
    """

    engine = DIRECT

    def __init__(
        self, loop: DirectLoop, batches: Batches, plan: Callable[[bool], str], settings: ClientSettings
    ) -> None:
        self._loop = loop
        self._batches = batches
        self._plan = plan
        self._settings = settings
        self._id, self._run_id = str(uuid4()), str(uuid4())
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._begins_after = batches.progress.batch_id
        self._reports = ProgressReports(self._id, self._run_id, batches.flow)
        loop.prepare(self._reports, self._end)

    @property
    def id(self) -> str:
        """It differs from start to start: there is no checkpoint to keep it in."""
        return self._id

    @property
    def runId(self) -> str:
        return self._run_id

    @property
    def name(self) -> str:
        return self._batches.flow

    @property
    def isActive(self) -> bool:
        return not self._ended.is_set()

    @property
    def status(self) -> dict[str, Any]:
        if not self.isActive:
            message = "Stopped" if self._loop.error is None else f"Terminated with exception: {self._loop.error}"
        else:
            message = "Waiting for data to arrive" if self._loop.waiting else "Processing new data"
        available = any(left for offsets in self.lag.values() for left in offsets.values())
        return {
            "message": message,
            "isDataAvailable": available,
            "isTriggerActive": self.isActive and not self._loop.waiting,
        }

    @property
    def lastProgress(self) -> Any:
        return self._reports.last

    @property
    def recentProgress(self) -> list[Any]:
        return self._reports.recent

    @property
    def waits(self) -> bool:
        return self._loop.waiting and not any(any(offsets.values()) for offsets in self.lag.values())

    @property
    def lag(self) -> Mapping[str, Mapping[int, int]]:
        return self._loop.lag

    def awaitTermination(self, timeout: float | None) -> bool:
        ended = self._ended.wait(timeout)
        if ended:
            self._raise()
        return ended

    def processAllAvailable(self) -> None:
        ends = self._source_ends() if self.isActive else {}
        while not self._ended.is_set() and not has_reached(self._batches.progress.offsets, ends):
            time.sleep(_WAIT_S)
        self._wait_for_batch()
        self._raise()

    def _wait_for_batch(self) -> None:
        """Until the batch that progress shows is over: with at-most-once, progress moves before anything is written."""
        batch, history = self._batches.progress.batch_id, self._batches.history
        while batch > max(self._begins_after, history[-1].batch if history else -1) and not self._ended.wait(_WAIT_S):
            pass
        if self._batches.failure is not None:
            self._ended.wait(_LOOK_S)

    def stop(self) -> None:
        self._loop.stop()
        self._loop.cancel_tasks()
        while not self._ended.wait(_CANCEL_EVERY_S):
            self._loop.cancel_tasks()  # their job may have begun only now

    def error(self) -> BaseException | None:
        error = self._loop.error
        return error if error is None or isinstance(error, OnceflowError) else as_spark(error, self)

    def exception(self) -> StreamingQueryException | None:
        error = self._loop.error
        return None if error is None else as_spark(error, self)

    def explain(self, extended: bool = False) -> None:
        print(self._plan(extended))

    def when_ended(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._calls.append(call)
                return
        call()

    def begin(self) -> None:
        atexit.register(self._stop_at_exit)
        self._loop.start()

    def run_through(self) -> None:
        """Instead of `begin`, see `DirectLoop.run_through`.

        Raises:
            OnceflowError, StreamingQueryException: the query has failed.
        """
        self._loop.run_through()
        self._raise()

    def _stop_at_exit(self) -> None:
        """The program ends without a stop. Its batch gets a moment to end: a thread that is in a library such as
        deltalake while Python ends crashes the process, and the exit code is that of the crash."""
        self._loop.stop()
        self._loop.cancel_tasks()
        self._ended.wait(_EXIT_S)

    def _end(self) -> None:
        """In the thread of the loop, when it ends."""
        atexit.unregister(self._stop_at_exit)
        with self._lock:
            self._ended.set()
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def _raise(self) -> None:
        error = self.error()
        if error is not None:
            raise error

    def _source_ends(self) -> dict[str, dict[int, int]]:
        """Where the sources end. Brokers may not answer, and the query may fail because of that meanwhile."""
        answer: Future[dict[str, dict[int, int]]] = Future()

        def look() -> None:
            try:
                answer.set_result(self._look_for_ends())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=look, daemon=True, name=f"onceflow-ends-{self._batches.flow}").start()
        while not self._ended.is_set():
            if wait([answer], _WAIT_S).done:
                return answer.result()
        return {}

    def _look_for_ends(self) -> dict[str, dict[int, int]]:
        deadline = Deadline(_LOOK_S, f"looking for the ends of the sources of flow {self._batches.flow}")
        wanted = {topic: sorted(offsets) for topic, offsets in self._loop.read.items()}
        cluster = Cluster(self._settings, refused_s=None)
        try:
            cluster.connect(deadline)
            return list_offsets(cluster, wanted, LATEST, deadline)
        finally:
            cluster.close()
