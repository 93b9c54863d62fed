"""What a check of ``onceflow doctor`` has found: how bad it is, what it is about, and what to do."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from onceflow.errors import OnceflowError, PermissionDeniedError

T = TypeVar("T")


class Level(enum.Enum):
    """How bad a finding is."""

    OK = "ok"
    SKIPPED = "skipped"
    """It could not be found out. The finding says why."""
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Args:
        subject: what was looked at: a topic, a broker, a folder.
        found: what was found there.
        fix: what to do about it; empty if there is nothing to do.
        check: the name of the check.
    """

    level: Level
    subject: str
    found: str
    fix: str = ""
    check: str = ""


@dataclass(frozen=True)
class Check(Generic[T]):
    """A named check.

    Args:
        run: yields findings about its argument. They get the name of the check.
    """

    name: str
    run: Callable[[T], Iterable[Finding]]


def ok(subject: str, found: str) -> Finding:
    return Finding(Level.OK, subject, found)


def skipped(subject: str, found: str, fix: str = "") -> Finding:
    return Finding(Level.SKIPPED, subject, found, fix)


def warning(subject: str, found: str, fix: str) -> Finding:
    return Finding(Level.WARNING, subject, found, fix)


def error(subject: str, found: str, fix: str) -> Finding:
    return Finding(Level.ERROR, subject, found, fix)


def of_error(subject: str, problem: OnceflowError, level: Level = Level.ERROR) -> Finding:
    """The finding for an error: its text, and its next step as the fix."""
    text = f"{problem.what}: {problem.detail}" if problem.detail else problem.what
    return Finding(level, subject, text, problem.next_step)


def examine(checks: Iterable[Check[T]], about: T) -> Iterator[Finding]:
    """Run checks. A check that fails does not stop the others: its error is a finding."""
    for check in checks:
        try:
            for finding in check.run(about):
                yield replace(finding, check=check.name)
        except PermissionDeniedError as denied:
            yield replace(of_error(check.name, denied, Level.SKIPPED), check=check.name)
        except Exception as problem:  # of whatever kind: the others run, and this one is no success
            known = problem if isinstance(problem, OnceflowError) else OnceflowError(str(problem) or repr(problem))
            yield replace(of_error(check.name, known, Level.ERROR), check=check.name)


def failed(findings: Iterable[Finding], *, strict: bool) -> bool:
    """Whether there is an error among the findings; with ``strict`` also whether there is a warning."""
    bad = (Level.ERROR, Level.WARNING) if strict else (Level.ERROR,)
    return any(finding.level in bad for finding in findings)
