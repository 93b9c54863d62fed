"""Waiting ends with the condition, with its deadline, or when it has become useless."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from onceflow.testing import waiting
from onceflow.testing.waiting import WaitedInVainError, wait_until


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock of its own: sleeping moves it on, and nothing else."""
    slept: list[float] = []
    monkeypatch.setattr(waiting.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(waiting.time, "sleep", slept.append)
    return slept


def answers(*given: Any) -> Callable[[], Any]:
    left = list(given)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_the_first_true_answer_is_returned(slept: list[float]) -> None:
    assert wait_until(answers("", [], "here"), 5, "somebody comes") == "here"
    assert slept == [waiting.POLL_S] * 2


def test_what_holds_already_costs_no_time(slept: list[float]) -> None:
    assert wait_until(lambda: True, 0, "nothing") is True
    assert slept == []


def test_the_condition_is_asked_once_more_at_the_deadline(slept: list[float]) -> None:
    assert wait_until(lambda: time.monotonic() >= 0.9, 0.9, "the end", poll_s=0.4)
    assert slept == pytest.approx([0.4, 0.4, 0.1])


def test_an_error_tells_what_was_waited_for(slept: list[float]) -> None:
    with pytest.raises(WaitedInVainError, match=r"within 1\.5 s: the fleet arrives"):
        wait_until(lambda: False, 1.5, "the fleet arrives", poll_s=0.5)
    assert sum(slept) == pytest.approx(1.5)
    seen: list[int] = []
    with pytest.raises(WaitedInVainError, match="only 4 ships"):
        wait_until(lambda: seen.append(1), 1.5, lambda: f"only {len(seen)} ships", poll_s=0.5)


def test_waiting_ends_when_it_is_useless(slept: list[float]) -> None:
    with pytest.raises(WaitedInVainError, match=r"no longer happen: a batch.\nthe query has failed"):
        wait_until(lambda: False, 60, "a batch", useless=answers("", None, "the query has failed"))
    assert len(slept) == 2


def test_what_came_true_with_the_end_counts(slept: list[float]) -> None:
    """A process may do what is waited for and end before anybody looks."""
    assert wait_until(lambda: "done", 60, "it is done", useless=lambda: "the process has ended") == "done"
