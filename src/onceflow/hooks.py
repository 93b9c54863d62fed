"""Named points that tests may attach faults to; a dictionary look-up when nobody does.

Production code announces where it is (``at("progress", where="driver", batch=7)``). Only when the
environment variable ``ONCEFLOW_FAULTS`` is set does anything happen: see ``onceflow.testing.faults``.
"""

from __future__ import annotations

import os

VARIABLE = "ONCEFLOW_FAULTS"

#: The steps of a batch, in order (docs/architecture.md). Code, logs, tests and faults use these names.
STEPS = ("init", "plan", "begin", "write", "audit", "progress", "end", "settle")


def configured() -> str | None:
    """The rules of this process, to be carried to its tasks."""
    return os.environ.get(VARIABLE)


def configure(rules: str | None) -> None:
    """Take over the driver's rules in a task: Python workers are reused and keep an older environment."""
    if rules:
        os.environ[VARIABLE] = rules
    else:
        os.environ.pop(VARIABLE, None)


def at(step: str, *, where: str, flow: str, batch: int | None = None, task: int | None = None) -> None:
    """Announce that ``step`` has just been done. No-op unless faults are configured."""
    rules = os.environ.get(VARIABLE)
    if rules:
        from onceflow.testing import faults

        faults.trip(rules, step=step, where=where, flow=flow, batch=batch, task=task)
