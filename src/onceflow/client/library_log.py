"""Keeps what kafka-python logs of onceflow's own connections out of the log.

kafka-python logs every refused connection as an error; ours are retried, counted and reported once. Whoever uses
kafka-python in the same process keeps its log as it is: only what is logged inside of ``muted`` is left out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_OURS = logging.getLogger("onceflow.client")
_here = threading.local()
_filtered: set[str] = set()


class _Filter(logging.Filter):
    """Drops what this thread logs inside of ``muted``, unless onceflow's own log is at level DEBUG."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(_here, "depth", 0) or record.levelno >= logging.CRITICAL or _at_debug()


_FILTER = _Filter()


def _at_debug() -> bool:
    # Not ``isEnabledFor``: from Python 3.13.4 it is False while a record is handled, and a filter runs then.
    return _OURS.getEffectiveLevel() <= logging.DEBUG


@contextmanager
def muted() -> Iterator[None]:
    """What kafka-python logs on this thread meanwhile is not shown. May be nested."""
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        yield
    finally:
        _here.depth -= 1


def filter_loggers() -> None:
    """To be called when modules of kafka-python were imported: a filter of a logger does not count for those below."""
    for name in list(logging.root.manager.loggerDict):
        if name not in _filtered and (name == "kafka" or name.startswith("kafka.")):
            _filtered.add(name)
            logging.getLogger(name).addFilter(_FILTER)
