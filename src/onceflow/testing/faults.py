"""Fault injection at the named steps of a batch: kill, raise or pause. Off unless ``ONCEFLOW_FAULTS`` is set.

The variable holds the name of this module and JSON, one rule or a list of rules (`fault` writes it)::

    onceflow.testing.faults:{"step": "progress", "action": "kill", "batch": 3}

``step`` is one of ``onceflow.hooks.STEPS`` or ``EXTERNAL_STEPS``. ``where`` is ``driver`` (default) or ``task`` (which
announces ``begin``, ``write`` and, with state, ``settle``; a task that brings up a copy outside of batches announces
``restore``, without a batch).
Further fields restrict a rule: ``flow``, ``batch``, ``task``, ``batch_from`` (that batch or a later one).
Actions: ``kill`` (SIGKILL to its own process), ``kill-workers`` (SIGKILL to the Python workers of this driver),
``orphan`` (in a task: SIGKILL to its executor; the worker continues after ``seconds``), ``lose-shuffle``
(delete Spark's shuffle files below ``folder``), ``exit``, ``raise``, ``pause``
(for ``seconds``, or until the file ``until`` exists). A rule fires ``times`` times (default 1) in a process; with
``once_file`` it fires once over all processes and restarts: the file is created then, and shows a test that it has
fired.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onceflow.hooks import EXTERNAL_STEPS, RESTORE, STEPS, VARIABLE
from onceflow.testing.processes import descendants

_fired: dict[str, int] = {}
ACTIONS = ("kill", "kill-workers", "orphan", "lose-shuffle", "exit", "raise", "pause")


class InjectedFaultError(RuntimeError):
    """The exception of the action ``raise``. It is deliberately not an error of onceflow."""


def fault(step: str, action: str, **fields: Any) -> str:
    """Check one rule, and return the value of the variable for it."""
    return value_of({"step": step, "action": action, **fields})


def value_of(*rules: Mapping[str, Any]) -> str:
    """Check these rules, and return the value of the variable for them."""
    for rule in rules:
        _check(rule)
    return f"{__name__}:{json.dumps(rules)}"


def parsed(value: str) -> list[dict[str, Any]]:
    """The rules in a value of the variable."""
    module, _, text = value.partition(":")
    if module != __name__:
        raise ValueError(f"{VARIABLE}: {value!r} does not begin with {__name__}:")
    return _rules(text)


def trip(text: str, *, step: str, where: str, flow: str, batch: int | None, task: int | None) -> None:
    """Called by ``onceflow.hooks`` at every step while the variable is set.

    Args:
        text: the value of the variable after the name of this module.
    """
    for rule in _rules(text):
        _check(rule)
        if _matches(rule, step=step, where=where, flow=flow, batch=batch, task=task) and _first_times(rule):
            _act(rule, f"{step} ({where}, flow {flow}, batch {batch})")


def _rules(text: str) -> list[dict[str, Any]]:
    rules = json.loads(text)
    return rules if isinstance(rules, list) else [rules]


def _check(rule: Mapping[str, Any]) -> None:
    known = dict.fromkeys([*STEPS, *EXTERNAL_STEPS, RESTORE])
    if rule.get("step") not in known:
        raise ValueError(f"{VARIABLE}: unknown step {rule.get('step')!r}, known: {', '.join(known)}")
    if rule.get("action") not in ACTIONS:
        raise ValueError(f"{VARIABLE}: unknown action {rule.get('action')!r}, known: {', '.join(ACTIONS)}")


def _matches(rule: Mapping[str, Any], **facts: Any) -> bool:
    if facts["step"] != rule["step"] or facts["where"] != rule.get("where", "driver"):
        return False
    if "batch_from" in rule and (facts["batch"] is None or facts["batch"] < rule["batch_from"]):
        return False
    return all(rule[name] == facts[name] for name in ("flow", "batch", "task") if name in rule)


def _first_times(rule: Mapping[str, Any]) -> bool:
    once_file = rule.get("once_file")
    if once_file:
        try:
            Path(once_file).open("x").close()
        except FileExistsError:
            return False
        return True
    key = json.dumps(rule, sort_keys=True)
    _fired[key] = _fired.get(key, 0) + 1
    return _fired[key] <= int(rule.get("times", 1))


def _act(rule: Mapping[str, Any], place: str) -> None:
    action = rule["action"]
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "kill-workers":
        for pid in python_workers(os.getpid()):
            os.kill(pid, signal.SIGKILL)
    elif action == "orphan":
        daemon = os.getppid()
        executor = _parent_of(daemon)
        os.kill(daemon, signal.SIGKILL)  # otherwise it would end its workers when its executor dies
        os.kill(executor, signal.SIGKILL)
        time.sleep(float(rule.get("seconds", 10)))
    elif action == "lose-shuffle":
        for file in Path(rule["folder"]).rglob("shuffle_*.data"):
            file.unlink(missing_ok=True)
    elif action == "exit":
        os._exit(70)
    elif action == "raise":
        raise InjectedFaultError(f"injected at {place}")
    else:
        _pause(float(rule.get("seconds", 3600)), rule.get("until"))


def _pause(seconds: float, until: str | None) -> None:
    if until is None:
        time.sleep(seconds)
        return
    end = time.monotonic() + seconds
    while time.monotonic() < end and not Path(until).exists():
        time.sleep(0.02)


def python_workers(driver_pid: int) -> list[int]:
    """Processes below ``driver_pid`` that run Spark's Python worker code."""
    daemons = [
        pid for pid, line in descendants(driver_pid).items() if "pyspark.daemon" in line or "pyspark.worker" in line
    ]
    # The daemon forks the workers and looks like them; only those below another one are workers.
    return sorted({pid for daemon in daemons for pid in descendants(daemon)} & set(daemons))


def _parent_of(pid: int) -> int:
    return int((Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[1])
