"""``FlowWriter``: what ``Flow.write`` returns."""

from __future__ import annotations

from collections.abc import Callable

from onceflow.planning.write_options import CheckedWrite
from onceflow.query import FlowQuery


class FlowWriter:
    """A write that is checked, but not started yet."""

    def __init__(self, start: Callable[[CheckedWrite], FlowQuery], write: CheckedWrite) -> None:
        self._start = start
        self._write = write

    def start(self) -> FlowQuery:
        """Start the query.

        Raises:
            OnceflowError: the flow is running already, the output topic is missing, a newer driver has fenced this one,
                the checkpoint and progress do not belong together, Spark refuses the query, or tasks cannot import what
                its processors or functions need.
        """
        return self._start(self._write)
