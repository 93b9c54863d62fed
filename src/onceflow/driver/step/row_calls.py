"""The driver's part of ``Flow.enrich`` in a batch: how long its calls may take, its dead letters, and its errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

from onceflow.clock import clock_ms
from onceflow.driver.batch.errors import raised_error
from onceflow.driver.batch.fetched_rows import Rows
from onceflow.driver.batch.properties import set_property
from onceflow.driver.batch.retries import Attempt
from onceflow.messages import CALLS_PROPERTY
from onceflow.planning.dead_letter_limit import NO_LETTERS, DeadLetters, Letters, merged
from onceflow.planning.options import BatchSummary
from onceflow.protocol.output_limits import OutputLimits
from onceflow.spark.jvm import SPARK_ERRORS
from onceflow.task.call_rows import CallOrder, reports_of


class RowCalls:
    """The calls row by row of one query.

    Args:
        orders: of the ``Flow.enrich`` steps of the flow. The query may use some of them only.
        limit_s: how long the calls of one task may take.
    """

    def __init__(self, orders: Sequence[CallOrder], limit_s: float) -> None:
        self._limit_s = limit_s
        self._steps = [(order, _letters_of(order)) for order in orders]
        self._found: list[Letters] = []
        self._attempt = ""
        self._without_outputs = False

    def begin(
        self, rows: Rows, attempt: Attempt, limits_of: Callable[[Iterable[str]], Mapping[str, OutputLimits]]
    ) -> None:
        """An attempt begins: tell its tasks.

        Args:
            limits_of: returns what topics take, as far as they are known.
        """
        if not self._steps:
            return
        self._attempt = f"{attempt.batch}/{attempt.summary.attempts}"
        self._without_outputs = attempt.without_outputs
        self._found = []
        for order, _ in self._steps:
            order.reports.value = {}
        described = {"attempt": self._attempt, "begun_ms": clock_ms(), "limit_s": self._limit_s}
        topics = {topic for order, _ in self._steps for topic in (order.topic, order.dead_letter_topic) if topic}
        described["limits"] = [asdict(limits) for limits in limits_of(topics).values()]
        set_property(rows, CALLS_PROPERTY, json.dumps(described))

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Errors of the tasks are raised with the class that they have there, and not as an error of Spark."""
        try:
            yield
        except SPARK_ERRORS as problem:
            error = raised_error(str(problem)) if self._steps else None
            if error is None:
                raise
            raise error from problem

    def check(self) -> None:
        """All rows are written: check the number of dead letters.

        Raises:
            DeadLetterLimitError: there are more than ``max_dead_letters`` of a step allows.
        """
        self._found = []
        for order, letters in self._steps:
            reports = reports_of(order.reports.value, self._attempt)
            found = Letters(
                sum(each.records for each in reports),
                sum(each.dead_letters for each in reports),
                merged(each.causes for each in reports),
            )
            found = NO_LETTERS if self._without_outputs else found
            letters.check(found)
            self._found.append(found)

    def on_commit(self, summary: BatchSummary) -> None:
        """The batch is committed."""
        for (_, letters), found in zip(self._steps, self._found, strict=True):
            letters.on_commit(found)
            summary.dead_letters += found.count
            summary.records -= found.count


def _letters_of(order: CallOrder) -> DeadLetters:
    source = f"calls of {order.calls.target.name}"
    return DeadLetters(order.flow, order.dead_letter_topic, order.max_dead_letters, source)
