"""A REPL or a notebook: cells are run again, and the query that a cell started before still runs."""

from __future__ import annotations

import builtins
import logging
import sys
import threading
from typing import Protocol

log = logging.getLogger("onceflow")


class RunningQuery(Protocol):
    """A query as far as it is needed here (``onceflow.FlowQuery``)."""

    @property
    def flow(self) -> str: ...

    @property
    def isActive(self) -> bool: ...

    def stop(self) -> None: ...


_lock = threading.Lock()
_queries: dict[tuple[str, str], RunningQuery] = {}  # the last one of each flow


def is_interactive() -> bool:
    """Whether a person types here: Python's prompt, IPython or a notebook."""
    return hasattr(sys, "ps1") or hasattr(builtins, "get_ipython") or bool(sys.flags.interactive)


def again() -> str:
    """How a next step begins that needs a new process; empty in a program."""
    return "restart the kernel, then " if is_interactive() else ""


def started(servers: str, transactional_id: str, query: RunningQuery) -> None:
    """A query of this process runs."""
    if not is_interactive():
        return
    with _lock:
        _queries[servers, transactional_id] = query


def stop_earlier(servers: str, transactional_id: str) -> None:
    """Stop the query that an earlier cell has started for a flow that is started again.

    In a program it would be fenced, as any older driver is: two of them there are a mistake that has to be seen.
    """
    if not is_interactive():
        return
    with _lock:
        query = _queries.pop((servers, transactional_id), None)
    if query is not None and query.isActive:
        log.warning("flow %s: the query that an earlier cell has started is stopped", query.flow)
        query.stop()
