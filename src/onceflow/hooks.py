"""Named steps at which tests can inject faults. Without faults, a step takes only a dictionary look-up.

Production code announces its steps (``at("progress", where="driver", batch=7)``). Something happens only if the
environment variable ``ONCEFLOW_FAULTS`` is set. Its value is ``<module>:<rules>``: the module is imported, and its
function ``trip`` is called with the rules at every step. The value names the module (``onceflow.testing.faults``), so
this module does not depend on it. Code that records the steps of a driver (``onceflow.testing.history``) registers an
observer here.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

VARIABLE = "ONCEFLOW_FAULTS"

#: The steps of a batch, in order (docs/architecture.md). Code, logs, tests and faults use these names.
STEPS = ("init", "plan", "begin", "write", "audit", "progress", "end", "settle")
#: Those of a batch that goes to an external sink: ``commit`` is the transaction of the other system, and then
#: comes a transaction of Kafka's for its progress.
EXTERNAL_STEPS = tuple(each for step in STEPS for each in (("commit", step) if step == "progress" else (step,)))
#: Announced by tasks that bring local copies up outside of batches, whenever they have read records that are not in the
#: copy yet.
RESTORE = "restore"
#: Also announced: an attempt was aborted, and nothing of it can become visible any more. Faults are not injected here.
ABORTED = "aborted"
#: And: the query of a flow was started; a batch was given up after its progress was written (at_most_once); a query
#: has failed; a query has ended, for whatever reason (this may be announced twice).
STARTED, LOST, FAILED, ENDED = "started", "lost", "failed", "ended"
#: And: the local copy of a partition was restored from its changelog, or caught up with it.
RESTORED = "restored"

#: Called with the step, and with the keyword arguments ``flow``, ``batch`` and more facts: at ``init`` the ``seconds``
#: that it took; at ``begin`` the producer id and epoch as ``producer``, and the ``source`` range; at ``end`` and
#: ``lost`` the ``summary`` of the batch; at ``aborted`` and ``failed`` the ``error``; at ``started`` and
#: ``ended`` the ``query``; at ``restored`` the ``table``, and how many ``records`` were read in how many ``seconds``.
Observer = Callable[..., None]
_observers: list[Observer] = []


def configured() -> str | None:
    """The rules of this process, to be sent to its tasks."""
    return os.environ.get(VARIABLE)


def configure(rules: str | None) -> None:
    """Set the driver's rules in a task: Python workers are reused, and may have an older environment."""
    if rules:
        os.environ[VARIABLE] = rules
    else:
        os.environ.pop(VARIABLE, None)


def observe(observer: Observer) -> Callable[[], None]:
    """Call ``observer`` at every step of the drivers in this process. Returns a function that ends this."""
    _observers.append(observer)
    return lambda: _observers.remove(observer)


def at(step: str, *, where: str, flow: str, batch: int | None = None, task: int | None = None, **facts: Any) -> None:
    """Announce that ``step`` has just been done. Does nothing unless faults are configured or an observer is there."""
    if where == "driver":
        for observer in tuple(_observers):
            observer(step, flow=flow, batch=batch, **facts)
    rules = os.environ.get(VARIABLE)
    if rules and (step in STEPS or step in EXTERNAL_STEPS or step == RESTORE):
        module, _, text = rules.partition(":")
        importlib.import_module(module).trip(text, step=step, where=where, flow=flow, batch=batch, task=task)
