"""How long the steps of a batch take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from onceflow import log_context
from onceflow.planning.options import BatchSummary


@contextlib.contextmanager
def timed(summary: BatchSummary, step: str) -> Iterator[None]:
    """Adds the seconds of a step to the summary of its batch, and its name to log lines."""
    started = time.monotonic()
    try:
        with log_context.within(step=step):
            yield
    finally:
        summary.seconds[step] = summary.seconds.get(step, 0.0) + time.monotonic() - started
