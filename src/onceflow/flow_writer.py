"""``FlowWriter``: what ``Flow.write`` and ``Flow.write_external`` return."""

from __future__ import annotations

from collections.abc import Callable

from onceflow.query import FlowQuery


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
