"""Suppresses the log messages of kafka-python about onceflow's own connections.

kafka-python logs every refused connection as an error. onceflow retries its connections and reports a failure once.
Other code in the process that uses kafka-python keeps its log messages: only those inside of ``muted`` are dropped.
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
    """Drops the messages of this thread inside of ``muted``, unless the logger ``onceflow.client`` is at DEBUG."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(_here, "depth", 0) or record.levelno >= logging.CRITICAL or _at_debug()


_FILTER = _Filter()


def _at_debug() -> bool:
    # Not ``isEnabledFor``: from Python 3.13.4 on it returns False while a record is handled, as it is in a filter.
    return _OURS.getEffectiveLevel() <= logging.DEBUG


@contextmanager
def muted() -> Iterator[None]:
    """Suppress the messages that kafka-python logs on this thread inside of the block. May be nested."""
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        yield
    finally:
        _here.depth -= 1


def filter_loggers() -> None:
    """Add the filter to every logger of kafka-python, because a logger's filter does not apply to its child loggers.
    Call it after kafka-python has been imported."""
    for name in list(logging.root.manager.loggerDict):
        if name not in _filtered and (name == "kafka" or name.startswith("kafka.")):
            _filtered.add(name)
            logging.getLogger(name).addFilter(_FILTER)
