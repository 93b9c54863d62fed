"""Named points that tests may attach faults to; a dictionary look-up when nobody does.

Production code announces where it is (``at("progress", where="driver", batch=7)``). Only when the
environment variable ``ONCEFLOW_FAULTS`` is set does anything happen: see ``onceflow.testing.faults``.
"""

from __future__ import annotations

import os

VARIABLE = "ONCEFLOW_FAULTS"

#: The steps of a batch, in order (docs/internals.md). Code, logs, tests and faults use these names.
STEPS = ("init", "plan", "begin", "write", "audit", "progress", "end", "settle")


def at(step: str, *, where: str, flow: str, batch: int | None = None, task: int | None = None) -> None:
    """Announce that ``step`` has just been done. No-op unless faults are configured."""
    rules = os.environ.get(VARIABLE)
    if rules:
        from onceflow.testing import faults

        faults.trip(rules, step=step, where=where, flow=flow, batch=batch, task=task)
