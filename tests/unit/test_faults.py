"""Fault injection: fires exactly where a rule says, as often as it says, and never when nobody asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onceflow import hooks
from onceflow.testing import faults, processes
from onceflow.testing.faults import InjectedFaultError, fault


@pytest.fixture(autouse=True)
def _fresh_process() -> None:
    faults._fired.clear()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What would have been killed."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(faults.os, "kill", lambda pid, number: calls.append((pid, number)))
    return calls


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    calls: list[float] = []
    # Not time.sleep itself: threads that other tests have left sleep, too.
    monkeypatch.setattr(faults, "time", SimpleNamespace(sleep=calls.append, monotonic=time.monotonic))
    return calls


def rules(monkeypatch: pytest.MonkeyPatch, *given: dict[str, Any]) -> None:
    monkeypatch.setenv(hooks.VARIABLE, f"{faults.__name__}:{json.dumps(list(given))}")


def fires(step: str = "progress", where: str = "driver", **facts: Any) -> bool:
    try:
        hooks.at(step, where=where, **{"flow": "orders", "batch": 3, "task": None, **facts})
    except InjectedFaultError:
        return True
    return False


# ---- off ---------------------------------------------------------------------------------------------


def test_off_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("looked at although the variable is not set")

    monkeypatch.setattr(faults, "trip", never)
    for step in hooks.STEPS:
        for where in ("driver", "task"):
            hooks.at(step, where=where, flow="orders", batch=1, task=0)
    monkeypatch.setenv(hooks.VARIABLE, "")
    hooks.at("init", where="driver", flow="orders")


def test_off_does_not_even_import_the_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onceflow.testing.faults", None)  # an import of it would raise now
    monkeypatch.delattr("onceflow.testing.faults", raising=False)
    hooks.at("init", where="driver", flow="orders")
    monkeypatch.setenv(hooks.VARIABLE, "onceflow.testing.faults:{}")
    with pytest.raises(ImportError):
        hooks.at("init", where="driver", flow="orders")


# ---- configured / configure --------------------------------------------------------------------------


def test_rules_are_carried_to_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hooks.configured() is None
    text = fault("write", "raise", where="task")
    monkeypatch.setenv(hooks.VARIABLE, text)
    carried = hooks.configured()
    assert carried == text
    monkeypatch.delenv(hooks.VARIABLE)
    hooks.configure(carried)
    assert os.environ[hooks.VARIABLE] == text
    assert fires("write", "task", task=0)


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_reused_worker_forgets_old_rules(monkeypatch: pytest.MonkeyPatch, nothing: str | None) -> None:
    monkeypatch.setenv(hooks.VARIABLE, fault("progress", "raise"))
    hooks.configure(nothing)
    assert hooks.VARIABLE not in os.environ
    assert not fires()
    hooks.configure(nothing)  # and once more, with nothing to forget


# ---- matching ----------------------------------------------------------------------------------------

RULE = {"step": "progress", "action": "raise", "times": 99}


@pytest.mark.parametrize(
    "narrower, facts, expected",
    [
        ({}, {}, True),
        ({}, {"flow": "other", "batch": None, "task": 5}, True),
        ({}, {"step": "end"}, False),
        ({}, {"where": "task"}, False),
        ({"where": "driver"}, {}, True),
        ({"where": "task"}, {}, False),
        ({"where": "task"}, {"where": "task"}, True),
        ({"flow": "orders"}, {}, True),
        ({"flow": "orders"}, {"flow": "orders2"}, False),
        ({"batch": 3}, {}, True),
        ({"batch": 3}, {"batch": 4}, False),
        ({"batch": 3}, {"batch": None}, False),
        ({"batch": 0}, {"batch": 0}, True),
        ({"batch": 0}, {"batch": 1}, False),
        ({"batch_from": 3}, {"batch": 2}, False),
        ({"batch_from": 3}, {"batch": 3}, True),
        ({"batch_from": 3}, {"batch": 30}, True),
        ({"batch_from": 3}, {"batch": None}, False),
        ({"batch_from": 0}, {"batch": None}, False),
        ({"where": "task", "task": 0}, {"where": "task", "task": 0}, True),
        ({"where": "task", "task": 0}, {"where": "task", "task": 1}, False),
        ({"task": 0}, {}, False),
        ({"flow": "orders", "batch": 3, "where": "task", "task": 1}, {"where": "task", "task": 1}, True),
        ({"flow": "orders", "batch": 3, "where": "task", "task": 1}, {"where": "task", "task": 1, "batch": 2}, False),
    ],
)
def test_matching(
    monkeypatch: pytest.MonkeyPatch, narrower: dict[str, Any], facts: dict[str, Any], expected: bool
) -> None:
    rules(monkeypatch, {**RULE, **narrower})
    assert fires(**facts) is expected


@pytest.mark.parametrize("step", hooks.STEPS)
def test_every_step_can_be_hit(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    rules(monkeypatch, {"step": step, "action": "raise"})
    assert [other for other in hooks.STEPS if fires(other)] == [step]


def test_error_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    rules(monkeypatch, RULE)
    with pytest.raises(InjectedFaultError, match=r"injected at progress \(driver, flow orders, batch 3\)"):
        hooks.at("progress", where="driver", flow="orders", batch=3)


def test_one_rule_without_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hooks.VARIABLE, f"{faults.__name__}:{json.dumps(RULE)}")
    assert fires()


def test_the_rule_that_matches_fires_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rules(monkeypatch, {**RULE, "step": "end"}, {**RULE, "batch": 9}, {**RULE, "batch": 3})
    assert fires()


# ---- how often ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("times, expected", [(None, 1), (1, 1), (3, 3), (0, 0)])
def test_times(monkeypatch: pytest.MonkeyPatch, times: int | None, expected: int) -> None:
    rule = {"step": "progress", "action": "raise"}
    rules(monkeypatch, rule if times is None else {**rule, "times": times})
    assert [fires() for _ in range(5)] == [True] * expected + [False] * (5 - expected)


def test_calls_that_do_not_match_use_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rules(monkeypatch, {"step": "progress", "action": "raise", "batch": 3})
    assert [fires(batch=n) for n in (1, 2, 3, 3)] == [False, False, True, False]


def test_rules_count_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    rules(monkeypatch, *({"step": "progress", "action": "raise", "batch": n} for n in (1, 2)))
    assert [fires(batch=n) for n in (1, 1, 2, 2)] == [True, False, True, False]


def test_once_file_counts_over_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flag = tmp_path / "fired"
    rules(monkeypatch, {"step": "progress", "action": "raise", "once_file": str(flag), "times": 9})
    assert not fires("end")
    assert not flag.exists()
    assert fires()
    assert flag.exists()
    for _ in range(3):
        faults._fired.clear()  # as in a new process
        assert not fires()
    flag.unlink()
    assert fires()


# ---- actions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds, expected", [(2.5, 2.5), ("3", 3.0), (None, 3600.0)])
def test_pause(monkeypatch: pytest.MonkeyPatch, slept: list[float], seconds: Any, expected: float) -> None:
    rule = {"step": "progress", "action": "pause"}
    rules(monkeypatch, rule if seconds is None else {**rule, "seconds": seconds})
    assert not fires()
    assert slept == [expected]


def test_pause_until_there_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, sleeps = tmp_path / "go-on", []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 3:
            file.touch()

    monkeypatch.setattr(faults, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    rules(monkeypatch, {"step": "progress", "action": "pause", "seconds": 60, "until": str(file)})
    assert not fires()
    assert len(sleeps) == 3
    file.unlink()
    sleeps.append(0)  # nobody makes the file any more
    rules(monkeypatch, {"step": "progress", "action": "pause", "seconds": 0.01, "until": str(file)})
    assert not fires()
    assert not file.exists()


def test_kill(monkeypatch: pytest.MonkeyPatch, killed: list[tuple[int, int]]) -> None:
    rules(monkeypatch, {"step": "progress", "action": "kill"})
    assert not fires("end")
    assert killed == []
    fires()
    assert killed == [(os.getpid(), signal.SIGKILL)]


def test_kill_workers(monkeypatch: pytest.MonkeyPatch, killed: list[tuple[int, int]]) -> None:
    asked: list[int] = []

    def workers(driver: int) -> list[int]:
        asked.append(driver)
        return [70001, 70002]

    monkeypatch.setattr(faults, "python_workers", workers)
    rules(monkeypatch, {"step": "progress", "action": "kill-workers"})
    fires()
    assert asked == [os.getpid()]
    assert killed == [(70001, signal.SIGKILL), (70002, signal.SIGKILL)]


def test_orphan(monkeypatch: pytest.MonkeyPatch, killed: list[tuple[int, int]], slept: list[float]) -> None:
    monkeypatch.setattr(faults, "_parent_of", lambda pid: {os.getppid(): 80001}[pid])
    rules(monkeypatch, {"step": "write", "where": "task", "action": "orphan", "seconds": 4})
    fires("write", "task", task=0)
    assert killed == [(os.getppid(), signal.SIGKILL), (80001, signal.SIGKILL)]
    assert slept == [4.0]


def test_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(faults.os, "_exit", left.append)
    rules(monkeypatch, {"step": "progress", "action": "exit"})
    fires()
    assert left == [70]


def test_an_injected_fault_is_none_of_our_errors() -> None:
    from onceflow.errors import OnceflowError

    assert not issubclass(InjectedFaultError, OnceflowError)


def test_workers_of_a_process_without_spark() -> None:
    """No process may be taken for a worker of one that runs none (this one may, in a run of all tests)."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as idle:
        assert faults.python_workers(idle.pid) == []
        idle.communicate(b"\n", timeout=20)


def test_descent_ends_on_any_table() -> None:
    parents = {5: 4, 4: 3, 3: 1, 9: 8}
    assert processes._descends(5, 3, parents)
    assert not processes._descends(5, 5, parents)
    assert not processes._descends(5, 9, parents)
    assert not processes._descends(9, 3, parents)


# ---- wrong rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step, action, word",
    [("comit", "kill", "unknown step 'comit'"), ("end", "explode", "unknown action 'explode'")],
)
def test_wrong_rules_are_found_where_they_are_made(step: str, action: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        fault(step, action)


@pytest.mark.parametrize("rule", [{}, {"step": "progress"}, {"action": "raise"}, {"step": "x", "action": "raise"}])
def test_wrong_rules_in_the_variable_are_not_ignored(monkeypatch: pytest.MonkeyPatch, rule: dict[str, Any]) -> None:
    rules(monkeypatch, rule)
    with pytest.raises(ValueError, match=hooks.VARIABLE):
        hooks.at("init", where="driver", flow="orders")


def test_fault_writes_what_the_hook_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    text = fault("end", "raise", batch=4, times=2)
    assert faults.parsed(text) == [{"step": "end", "action": "raise", "batch": 4, "times": 2}]
    monkeypatch.setenv(hooks.VARIABLE, text)
    assert fires("end", batch=4)


@pytest.mark.parametrize("value", ["{}", '{"step": "end", "action": "raise"}', "onceflow.testing.nothing:[]"])
def test_rules_for_nobody_are_not_ignored(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(hooks.VARIABLE, value)
    with pytest.raises(ImportError):
        hooks.at("init", where="driver", flow="orders")
