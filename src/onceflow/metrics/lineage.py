"""``Lineage``: OpenLineage events of the runs of flows, with the topics that they read and write."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onceflow import hooks
from onceflow.errors import EnvironmentUnusableError, OptionError
from onceflow.metrics.event_queue import EventQueue
from onceflow.metrics.lineage_run import COMPLETE, FAILED, STOPPED, LineageQuery, LineageRun
from onceflow.options.durations import option_seconds

if TYPE_CHECKING:
    from openlineage.client import OpenLineageClient

_VARIABLE = "OPENLINEAGE_NAMESPACE"

_LAST = {COMPLETE: "COMPLETE", STOPPED: "ABORT", FAILED: "FAIL"}


class Lineage:
    """Sends OpenLineage events of all flows of this process, from now on. Create it before the flows start.

    Each run of a query is a run of the job that has the name of the flow: START, RUNNING at most once per
    ``interval``, and at its end COMPLETE (everything is read), ABORT (it was stopped) or FAIL. Events are sent by a
    thread of their own. If the endpoint cannot be reached, events are dropped, with a warning; flows never wait for it.

    ::

        with onceflow.Lineage():
            onceflow.serve(flow.write(rows, topic="validated"))

    Args:
        client: an ``OpenLineageClient``, which is not closed; None: one as OpenLineage's variables and files say.
        namespace: of the jobs; None: ``$OPENLINEAGE_NAMESPACE``, else ``default``.
        interval: how often a run that commits batches sends RUNNING.

    Raises:
        EnvironmentUnusableError: the package openlineage-python is missing, or its configuration is wrong.
        OptionError: ``interval`` is no duration of at least a second.
    """

    def __init__(
        self,
        client: OpenLineageClient | None = None,
        *,
        namespace: str | None = None,
        interval: str | float = "1 minute",
    ) -> None:
        self._interval_s = option_seconds(interval, "interval", None)
        if namespace is not None and not namespace.strip():
            raise OptionError("The namespace of lineage is empty", next_step="name one, or leave it out")
        try:
            from onceflow.metrics.lineage_events import EventMaker, new_client
        except ImportError as missing:
            raise EnvironmentUnusableError(
                "Lineage needs the package openlineage-python",
                detail=str(missing),
                next_step="pip install 'onceflow[lineage]'",
            ) from missing
        self._maker = EventMaker(namespace or os.environ.get(_VARIABLE) or "default")
        finish = None
        if client is None:
            client = new_client()
            finish = client.close  # some transports send only later what they are given
        self._events = EventQueue(client.emit, what="OpenLineage event", finish=finish)
        self._lock = threading.Lock()
        self._runs: dict[str, LineageRun] = {}
        self._forget = hooks.observe(self._observed)

    def add(self, query: LineageQuery) -> None:
        """Send events of a query that was started before. What it has committed until now is not counted."""
        inputs, outputs = query.datasets
        with self._lock:
            known = self._runs.get(query.flow)
            if query.is_over or (known is not None and known.query is query):
                return
            if known is not None:  # its query has not told yet how it ends, and a flow has one driver
                self._put_last(known, FAILED if known.query.failure is not None else STOPPED, known.query.failure)
            run = LineageRun(self._maker.new_run_id(), query, dict(inputs), dict(outputs), time.monotonic())
            self._runs[query.flow] = run
            self._events.put(self._maker.event("START", run))

    def close(self, timeout: float | None = None) -> None:
        """Send what is left, and nothing more. The second call has no effect.

        Args:
            timeout: how many seconds this may take, at most 5; None: 5.
        """
        self._events.close(self._forget, timeout)

    def __enter__(self) -> Lineage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _observed(self, step: str, *, flow: str, batch: int | None = None, **facts: Any) -> None:
        try:
            self._take(step, flow, facts)
        except Exception:  # a batch does not fail because of its lineage
            self._events.log.exception("flow %s: the lineage of batch %s is incomplete", flow, batch)

    def _take(self, step: str, flow: str, facts: Mapping[str, Any]) -> None:
        if step == hooks.STARTED:
            self.add(facts["query"])
        elif step == "end" and "summary" in facts:
            with self._lock:
                run = self._runs.get(flow)
                if run is None:
                    return
                run.add(facts["summary"])
                if time.monotonic() - run.told_at >= self._interval_s:
                    run.told_at = time.monotonic()
                    self._events.put(self._maker.event("RUNNING", run))
        elif step == hooks.FAILED:
            self._failed(flow, facts["error"])
        elif step == hooks.ENDED:
            query: LineageQuery = facts["query"]
            outcome, error = query.outcome, query.failure
            with self._lock:
                run = self._runs.get(flow)
                if run is not None and run.query is query:  # else told already, or a later run of the flow
                    del self._runs[flow]
                    self._put_last(run, outcome, error)

    def _failed(self, flow: str, error: BaseException) -> None:
        with self._lock:
            run = self._runs.get(flow)
            if run is not None and run.query.failure is error:  # else that of another query of the flow
                del self._runs[flow]
                self._put_last(run, FAILED, error)

    def _put_last(self, run: LineageRun, outcome: str, error: BaseException | None) -> None:
        self._events.put(self._maker.event(_LAST[outcome], run, error if outcome == FAILED else None))
