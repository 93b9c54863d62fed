"""The arithmetic of ``onceflow bench overhead``: what counts, and what is compared with what."""

from __future__ import annotations

import datetime
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

#: Seconds after the first batch that do not count.
WARM_SECONDS = 1.0
#: A batch takes so many times the trigger: the trigger must never be what a batch waits for.
FULL = 1.25
_MIN_FULL, _MAX_FULL = 1.1, 1.5


class Commit(NamedTuple):
    """A batch in Spark's clock."""

    rows: int
    began_ms: float
    ended_ms: float


def turns(contenders: Sequence[str], rounds: int) -> list[tuple[str, ...]]:
    """Who runs after whom: A B, B A, A B ... so that a drift of the machine meets all alike."""
    return [tuple(contenders if turn % 2 == 0 else contenders[::-1]) for turn in range(rounds)]


def rotations(contenders: Sequence[str]) -> list[tuple[str, ...]]:
    """A turn for each contender in each place: the first of a turn may find the machine in another state."""
    return [tuple(contenders[place:]) + tuple(contenders[:place]) for place in range(len(contenders))]


def overhead_percent(pairs: Iterable[tuple[float, float]]) -> float:
    """How much less is done in the same time; of pairs of rates of one round: (exactly once, at least once)."""
    return (1 - statistics.median(exactly / at_least for exactly, at_least in pairs)) * 100


def commits_of(reports: Iterable[Mapping[str, Any]]) -> list[Commit]:
    """Batches that read something, of Spark's progress reports: the same clock and the same code for every sink."""
    found = []
    for report in reports:
        if report["numInputRows"] > 0:
            began = datetime.datetime.fromisoformat(report["timestamp"].replace("Z", "+00:00")).timestamp() * 1000
            ended = began + float(report["durationMs"]["triggerExecution"])
            found.append(Commit(int(report["numInputRows"]), began, ended))
    return found


def warm_span(commits: Sequence[Commit], warm_ms: float = WARM_SECONDS * 1000) -> tuple[int, int]:
    """The batches that count: [first, end). Not the first one, not those of the first second, not a small rest."""
    if not commits:
        return 0, 0
    first = 1
    while first < len(commits) and commits[first].began_ms < commits[0].ended_ms + warm_ms:
        first += 1
    # The direct engine makes batches as large as fits the trigger, so the largest one says little of the others.
    full = statistics.median(commit.rows for commit in commits[first:] or commits) * 0.9
    end = len(commits)
    while end > first and commits[end - 1].rows < full:
        end -= 1
    return first, end


def rate_of(commits: Sequence[Commit], first: int, end: int) -> tuple[float, float]:
    """Records per second from the commit before ``first`` to the last one, and the share of it without a batch."""
    span_ms = commits[end - 1].ended_ms - commits[first - 1].ended_ms
    # Spark's clock has milliseconds: a gap of one is none.
    gaps = [after.began_ms - before.ended_ms for before, after in itertools.pairwise(commits[first - 1 : end])]
    return sum(c.rows for c in commits[first:end]) / span_ms * 1000, sum(gap for gap in gaps if gap > 1.5) / span_ms


def next_bound(tried: Mapping[int, float], trigger_ms: float) -> int | None:
    """The bound to try next, from milliseconds of a batch at the bounds tried so far; None: one of them will do."""
    if any(trigger_ms * _MIN_FULL <= ms <= trigger_ms * _MAX_FULL for ms in tried.values()):
        return None
    want = trigger_ms * FULL
    under = max((bound for bound, ms in tried.items() if ms < want), default=None)
    over = min((bound for bound, ms in tried.items() if ms >= want), default=None)
    if under is None or over is None or over <= under:
        bound, ms = list(tried.items())[-1]
        guess = bound * min(4.0, max(0.25, want / ms))
    else:
        share = (want - tried[under]) / (tried[over] - tried[under])
        guess = under + (over - under) * min(0.9, max(0.1, share))
    rounded = max(100, round(guess / 100) * 100)
    return None if rounded in tried else rounded


def chosen_bound(tried: Mapping[int, float], trigger_ms: float) -> int:
    """The least bound whose batches fill the trigger, else the largest one tried."""
    full = [bound for bound, ms in tried.items() if ms >= trigger_ms * _MIN_FULL]
    return min(full, default=max(tried))
