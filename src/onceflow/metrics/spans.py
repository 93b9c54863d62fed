"""A span for each batch of a flow, with a child for each of its steps.

A batch is known to be one only when it has ended: Spark also calls the sink when there is nothing to do. So spans are
made at the end of a batch, with the times at which its steps were done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context

from onceflow import hooks
from onceflow.planning.options import BatchSummary

log = logging.getLogger("onceflow")

_S = 1_000_000_000  # nanoseconds
_STEPS = frozenset((*hooks.STEPS, *hooks.EXTERNAL_STEPS)) - {"init", "settle"}


@dataclass
class _Batch:
    """A batch that is under way. Times are in nanoseconds since 1970.

    Args:
        last_ns: when its last step was done, or its last attempt was aborted.
        steps: name, begin, end, number of the attempt.
        aborted: the error of each aborted attempt, and when.
    """

    number: int | None
    begun_ns: int
    last_ns: int
    attempt: int = 0
    producer: Any = None
    steps: list[tuple[str, int, int, int]] = field(default_factory=list)
    aborted: list[tuple[BaseException, int]] = field(default_factory=list)


class BatchSpans:
    """Makes the spans of all flows of the process. Each flow calls it on one thread at a time."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._batches: dict[str, _Batch] = {}

    def observed(self, step: str, *, flow: str, batch: int | None = None, **facts: Any) -> None:
        """An observer of `onceflow.hooks`."""
        try:
            self._take(step, flow, batch, facts)
        except Exception:  # a batch does not fail because it cannot be traced
            log.exception("flow %s: the spans of batch %s are incomplete", flow, batch)

    def _take(self, step: str, flow: str, batch: int | None, facts: Mapping[str, Any]) -> None:
        now = time.time_ns()
        if step == "init":
            begun = now - round(facts.get("seconds", 0.0) * _S)
            self._tracer.start_span("onceflow.init", attributes={"onceflow.flow": flow}, start_time=begun).end(now)
        elif step == "plan":
            self._batches[flow] = _Batch(batch, now, now)
        elif step in ("end", hooks.LOST):
            if "summary" in facts:
                self._ended(flow, facts["summary"], now, lost=step == hooks.LOST)
        elif step == hooks.FAILED:
            self._failed(flow, batch, facts.get("error"), now)
        elif flow in self._batches:
            self._passed(self._batches[flow], step, facts, now)

    def _passed(self, at: _Batch, step: str, facts: Mapping[str, Any], now: int) -> None:
        if step == hooks.ABORTED:
            error = facts.get("error")
            if error is not None:
                at.aborted.append((error, now))
        elif step in _STEPS:
            if step == "begin":
                at.attempt += 1
                at.producer = facts.get("producer")
            at.steps.append((step, at.last_ns, now, at.attempt))
        else:
            return
        at.last_ns = now

    def _ended(self, flow: str, summary: BatchSummary, now: int, *, lost: bool) -> None:
        at = self._batches.pop(flow, None) or _Batch(summary.batch, now, now)
        planned_ns = at.begun_ns
        at.begun_ns -= round(summary.seconds.get("plan", 0.0) * _S)
        at.steps.insert(0, ("plan", at.begun_ns, planned_ns, 1))
        if not lost:
            at.steps.append(("end", at.last_ns, now, max(1, at.attempt)))
        span = self._span(flow, at)
        span.set_attributes(
            {
                "onceflow.records": summary.records,
                "onceflow.offsets_read": sum(summary.read.values()),
                "onceflow.bytes": summary.nbytes,
                "onceflow.dead_letters": summary.dead_letters,
                "onceflow.attempts": summary.attempts,
                "onceflow.path": summary.path,
            }
        )
        if lost:
            span.set_status(Status(StatusCode.ERROR, "records of the batch may be lost, as at_most_once allows"))
        span.end(now)

    def _failed(self, flow: str, batch: int | None, error: BaseException | None, now: int) -> None:
        at = self._batches.pop(flow, None) or _Batch(batch, now, now)
        span = self._span(flow, at)
        if error is not None:
            span.record_exception(error, timestamp=now)
            span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}".partition("\n")[0]))
        span.end(now)

    def _span(self, flow: str, at: _Batch) -> Span:
        """The span of a batch, with its steps and aborted attempts. It is not ended."""
        attributes: dict[str, Any] = {"onceflow.flow": flow}
        if at.number is not None:
            attributes["onceflow.batch"] = at.number
        if at.producer is not None:
            attributes["onceflow.producer_id"] = at.producer.producer_id
            attributes["onceflow.producer_epoch"] = at.producer.producer_epoch
        span = self._tracer.start_span("onceflow.batch", attributes=attributes, start_time=at.begun_ns)
        for number, (error, when) in enumerate(at.aborted, 1):
            described = {"exception.type": type(error).__name__, "exception.message": str(error)}
            span.add_event("attempt aborted", {**described, "onceflow.attempt": number}, timestamp=when)
        if span.is_recording():
            parent = set_span_in_context(span)
            for name, begun, ended, attempt in at.steps:
                step = self._tracer.start_span(
                    f"onceflow.{name}", parent, attributes={"onceflow.attempt": attempt}, start_time=begun
                )
                step.end(ended)
        return span
