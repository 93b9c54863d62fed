"""What an endpoint knows of the flows of this process: it observes their steps, and asks their queries."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any, Protocol

from onceflow import hooks
from onceflow.errors import FencedError
from onceflow.metrics.counts import Counts
from onceflow.metrics.latency import LatencyMeter, Times
from onceflow.planning.options import BatchSummary
from onceflow.state.table_facts import TableFacts

log = logging.getLogger("onceflow")

#: The conditions of a query (``onceflow.query``).
STARTING, RUNNING, STOPPED, FAILED = "starting", "running", "stopped", "failed"
# How long a request waits for Spark's JVM. Kubernetes waits a second for a probe.
_ANSWER_S = 0.5


def are_healthy(conditions: Iterable[str]) -> bool:
    """Whether no query has failed without being started again."""
    return FAILED not in conditions


def are_ready(conditions: Iterable[str]) -> bool:
    """Whether there is a query that has begun to commit or has nothing to read, and none that has not."""
    return {*conditions} - {STOPPED} == {RUNNING}


class Committed(Protocol):
    """What is read of a flow's progress (`onceflow.protocol.progress.Progress`)."""

    @property
    def flow(self) -> str:
        """The name of the flow, after its prefix if it has one."""
        ...

    @property
    def batch_id(self) -> int:
        """Number of the last committed batch."""
        ...

    @property
    def producer_id(self) -> int:
        """Of its transaction; -1: not known."""
        ...

    @property
    def producer_epoch(self) -> int:
        """Of its transaction; -1: not known."""
        ...


class WatchedQuery(Protocol):
    """What is asked of a query (`onceflow.query.FlowQuery`)."""

    @property
    def flow(self) -> str:
        """The name of its flow."""
        ...

    @property
    def condition(self) -> str:
        """One of the conditions above."""
        ...

    @property
    def lag(self) -> Mapping[str, Mapping[int, int]]:
        """How many offsets were left to read at the last batch, by topic and partition."""
        ...

    @property
    def batches(self) -> Sequence[BatchSummary]:
        """The last batches."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether it has ended, has failed or is being stopped."""
        ...

    @property
    def progress(self) -> Committed:
        """What is committed."""
        ...

    @property
    def guarantee(self) -> str:
        """The guarantee of its writes."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """The error that has ended it."""
        ...

    @property
    def since_ms(self) -> int:
        """When it was started, epoch milliseconds."""
        ...

    @property
    def transaction_timeout_s(self) -> float | None:
        """After how many seconds the broker aborts a batch."""
        ...

    @property
    def tables(self) -> Sequence[TableFacts]:
        """What it knows of the tables of the flow."""
        ...

    @property
    def standbys(self) -> int | None:
        """How many other drivers stand by for this one; None: not known."""
        ...

    def source_times(self) -> Times:
        """Looks up when records of its sources were written."""
        ...


class FlowWatch:
    """Watches the flows of this process, from its creation to ``close``.

    Args:
        counts: to count in.

    Attributes:
        counts: what was counted since then.
    """

    def __init__(self, counts: Counts | None = None) -> None:
        self.counts = Counts() if counts is None else counts
        self._latency = LatencyMeter(self.counts.latency)
        self._last: dict[str, BatchSummary] = {}  # counted last
        self._queries: dict[str, WatchedQuery] = {}  # the newest of each flow
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], futures.Future[Any]] | None] = queue.SimpleQueue()
        self._conditions: dict[str, str] = {}
        self._lags: dict[str, Mapping[str, Mapping[int, int]]] = {}
        # py4j has a connection and a thread of the JVM for each Python thread, so one thread asks.
        self._thread = threading.Thread(target=self._answer, daemon=True, name="onceflow-metrics-jvm")
        self._thread.start()
        self._forget = hooks.observe(self._observed)

    def close(self) -> None:
        """Stop watching."""
        self._forget()
        self._latency.close()
        self._asked.put(None)

    def add(self, query: WatchedQuery) -> None:
        """Watch a query, also if it was started before. Batches that it has committed and that are in its list are
        counted, unless they are counted already."""
        with self.counts.lock:
            self._queries[query.flow] = query
            self.counts.begin(query.flow)
            known = list(query.batches)
            last = self._last.get(query.flow)
            counted = next((place for place, batch in enumerate(known, 1) if batch is last), 0)
            for batch in known[counted:]:
                self._finished(query.flow, batch)

    def conditions(self) -> dict[str, str]:
        """The condition of the newest query of each flow. If Spark's JVM does not answer, those of the last time."""

        def look() -> dict[str, str]:
            return {flow: query.condition for flow, query in self.queries()}

        self._conditions = self._ask(look, self._conditions)
        return self._conditions

    def lags(self) -> dict[str, Mapping[str, Mapping[int, int]]]:
        """The lag of each flow that runs. If Spark's JVM does not answer, that of the last time."""

        def look() -> dict[str, Mapping[str, Mapping[int, int]]]:
            return {flow: query.lag for flow, query in self.queries() if query.condition in (STARTING, RUNNING)}

        self._lags = self._ask(look, self._lags)
        return self._lags

    def transaction_timeouts(self) -> dict[str, float]:
        """Of each flow whose newest query runs and writes in transactions. Spark is not asked."""
        known = {flow: query.transaction_timeout_s for flow, query in self.queries() if not query.is_over}
        return {flow: seconds for flow, seconds in known.items() if seconds is not None}

    def tables(self) -> dict[str, Sequence[TableFacts]]:
        """What the newest query of each flow knows of its tables, unless it has ended. Spark is not asked."""
        return {flow: query.tables for flow, query in self.queries() if not query.is_over}

    def standbys(self) -> dict[str, int]:
        """How many other drivers stand by for each flow that runs, if that is known. Spark is not asked."""
        known = {flow: query.standbys for flow, query in self.queries() if not query.is_over}
        return {flow: count for flow, count in known.items() if count is not None}

    def queries(self) -> list[tuple[str, WatchedQuery]]:
        """The newest query of each flow, by the name of the flow."""
        with self.counts.lock:
            return list(self._queries.items())

    def _ask(self, look: Callable[[], Any], otherwise: Any) -> Any:
        answer: futures.Future[Any] = futures.Future()
        self._asked.put((look, answer))
        try:
            return answer.result(_ANSWER_S)
        except futures.TimeoutError:
            return otherwise

    def _answer(self) -> None:
        while (asked := self._asked.get()) is not None:
            look, answer = asked
            try:
                answer.set_result(look())
            except Exception as error:
                answer.set_exception(error)

    def _observed(self, step: str, *, flow: str, batch: int | None = None, **facts: Any) -> None:
        try:
            self._take(step, flow, facts)
        except Exception:  # a batch does not fail because it cannot be counted
            log.exception("flow %s: the metrics of batch %s are incomplete", flow, batch)

    def _take(self, step: str, flow: str, facts: Mapping[str, Any]) -> None:
        error = facts.get("error")
        name = type(error).__name__
        if step == hooks.STARTED:
            self.add(facts["query"])
        elif step == "begin":
            self._latency.begun(flow, facts.get("source"))
        elif step == hooks.RESTORED:
            self.counts.restored(flow, facts["table"], facts["records"], facts["seconds"])
        elif step in ("end", hooks.LOST) and "summary" in facts:
            with self.counts.lock:
                if facts["summary"] is not self._last.get(flow):
                    self._finished(flow, facts["summary"])
                query = self._queries.get(flow)
            if step == "end" and query is not None:
                self._latency.committed(flow, query.source_times, time.time())
        elif step == hooks.ABORTED and error is not None:
            self.counts.aborted(flow, name)
        elif step == hooks.FAILED:
            self.counts.failed(flow, name, fenced=isinstance(error, FencedError))

    def _finished(self, flow: str, batch: BatchSummary) -> None:
        self._last[flow] = batch
        if batch.lost:
            self.counts.lost(flow)
        else:
            self.counts.committed(flow, batch, time.time())
