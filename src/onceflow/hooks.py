"""Named points that tests may attach faults to; a dictionary look-up when nobody does.

Production code announces where it is (``at("progress", where="driver", batch=7)``). Only when the environment variable
``ONCEFLOW_FAULTS`` is set does anything happen. It holds ``<module>:<rules>``: the module is imported, and its function
``trip`` is called with the rules at every step. Whoever makes the rules names the module (``onceflow.testing.faults``),
so that nothing here knows of it. Whoever wants to know what a driver does (``onceflow.testing.history``) observes it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

VARIABLE = "ONCEFLOW_FAULTS"

#: The steps of a batch, in order (docs/architecture.md). Code, logs, tests and faults use these names.
STEPS = ("init", "plan", "begin", "write", "audit", "progress", "end", "settle")
#: Announced, too: an attempt was aborted, and nothing of it can become visible any more. No place for faults.
ABORTED = "aborted"

#: Called with the step and, by name, ``flow``, ``batch``, and what else is known of it: at ``begin`` the producer's
#: ``identity`` and the ``source`` range.
Observer = Callable[..., None]
_observers: list[Observer] = []


def configured() -> str | None:
    """The rules of this process, to be carried to its tasks."""
    return os.environ.get(VARIABLE)


def configure(rules: str | None) -> None:
    """Take over the driver's rules in a task: Python workers are reused and keep an older environment."""
    if rules:
        os.environ[VARIABLE] = rules
    else:
        os.environ.pop(VARIABLE, None)


def observe(observer: Observer) -> Callable[[], None]:
    """Call ``observer`` at every step of the drivers in this process; returns what ends that."""
    _observers.append(observer)
    return lambda: _observers.remove(observer)


def at(step: str, *, where: str, flow: str, batch: int | None = None, task: int | None = None, **facts: Any) -> None:
    """Announce that ``step`` has just been done. No-op unless faults are configured or somebody observes."""
    if where == "driver":
        for observer in tuple(_observers):
            observer(step, flow=flow, batch=batch, **facts)
    rules = os.environ.get(VARIABLE)
    if rules and step in STEPS:
        module, _, text = rules.partition(":")
        importlib.import_module(module).trip(text, step=step, where=where, flow=flow, batch=batch, task=task)
