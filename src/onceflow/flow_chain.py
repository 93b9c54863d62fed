"""``FlowChain``: two flows that bring a stream to Kafka and to another system, each exactly once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from onceflow.query import FlowQuery, FlowWriter

_LOOK_EVERY_S = 0.1


class FlowChain:
    """What ``Flow.write_chain(...).start()`` returns. Iterating gives both queries: ``onceflow.serve(*chain)``.

    Args:
        once: whether the first query has written everything already.

    Attributes:
        changes: the query that writes the topic. sink: the query that writes the other system.
    """

    def __init__(self, changes: FlowQuery, sink: FlowQuery, *, once: bool) -> None:
        self.changes = changes
        self.sink = sink
        self._waited = (sink,) if once else (changes, sink)

    def __iter__(self) -> Iterator[FlowQuery]:
        return iter((self.changes, self.sink))

    def __repr__(self) -> str:
        return f"<chain of {self.changes!r} and {self.sink!r}>"

    @property
    def isActive(self) -> bool:
        """Whether both queries run; with ``once=True`` the second one."""
        return all(query.isActive for query in self._waited)

    def awaitTermination(self, timeout: float | None = None) -> bool:
        """Wait until one of the queries ends, and stop the other one. With ``once=True`` wait for the second one.

        Args:
            timeout: seconds; None: no limit.

        Returns:
            Whether the chain has ended.

        Raises:
            OnceflowError, StreamingQueryException: the reason why a query has stopped.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with contextlib.ExitStack() as stack:
            for query in self:
                stack.enter_context(query.awaited())
            while self.isActive:
                if until is not None and time.monotonic() >= until:
                    return False
                time.sleep(_LOOK_EVERY_S)
            try:
                for query in self:
                    if not query.isActive:
                        query.awaitTermination()  # raises the error for which it has stopped
            finally:
                self.stop()
            return True

    def processAllAvailable(self) -> None:
        """Wait until everything that is in the sources now has reached the other system.

        Raises:
            OnceflowError, StreamingQueryException: as `awaitTermination` does.
        """
        for query in self:
            query.processAllAvailable()

    def stop(self) -> None:
        """Stop both queries. Running batches are aborted, and the next start runs them again."""
        for query in self:
            if query.isActive:
                query.stop()


class ChainWriter:
    """A chain that is checked, but not started yet.

    Args:
        sink: prepares the second flow.
        once: whether the second flow begins when the first one has ended.
    """

    def __init__(self, changes: FlowWriter, sink: Callable[[], FlowWriter], *, once: bool) -> None:
        self._changes = changes
        self._sink = sink
        self._once = once

    def start(self) -> FlowChain:
        """Start both flows. With ``once=True`` it returns when the first one has ended and the second one runs.

        Raises:
            OnceflowError: as of ``FlowWriter.start``. Then neither of them runs.
        """
        if self._once:
            writer = self._sink()  # what is wrong is told before anything is written
            changes = self._changes.start()
            changes.awaitTermination()
            return FlowChain(changes, writer.start(), once=True)
        sink = self._sink().start()
        try:
            return FlowChain(self._changes.start(), sink, once=False)
        except BaseException:
            sink.stop()
            raise
