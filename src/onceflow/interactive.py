"""Support for REPLs and notebooks, where a cell is run again while the query that it started earlier is running."""

from __future__ import annotations

import builtins
import logging
import sys
import threading
from typing import Protocol

log = logging.getLogger("onceflow")


class RunningQuery(Protocol):
    """The part of ``onceflow.FlowQuery`` that is needed here."""

    @property
    def flow(self) -> str: ...

    @property
    def isActive(self) -> bool: ...

    def stop(self) -> None: ...


_lock = threading.Lock()
_queries: dict[tuple[str, str], RunningQuery] = {}  # the last query of each flow


def is_interactive() -> bool:
    """Whether the process is interactive: Python's prompt, IPython or a notebook."""
    return hasattr(sys, "ps1") or hasattr(builtins, "get_ipython") or bool(sys.flags.interactive)


def again() -> str:
    """The beginning of a next step that needs a new process; empty in a program."""
    return "restart the kernel, then " if is_interactive() else ""


def started(servers: str, transactional_id: str, query: RunningQuery) -> None:
    """Note that a query of this process is running."""
    if not is_interactive():
        return
    with _lock:
        _queries[servers, transactional_id] = query


def stop_earlier(servers: str, transactional_id: str) -> None:
    """Stop the query that an earlier cell has started, when the same flow is started again.

    In a program, the query is not stopped. It gets fenced, as any older driver: there, two queries of one flow are a
    mistake, which must be reported.
    """
    if not is_interactive():
        return
    with _lock:
        query = _queries.pop((servers, transactional_id), None)
    if query is not None and query.isActive:
        log.warning("flow %s: the query that an earlier cell has started is stopped", query.flow)
        query.stop()
