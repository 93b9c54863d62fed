"""What the demo ``tables`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from rich.table import Table

from onceflow_workshop.demos.tables_asking import Figures
from onceflow_workshop.demos.tables_check import Checked

#: The time after a kill in which the longest time without an answer is looked for.
_AFTER_S = 15.0


@dataclass
class Killed:
    """A kill that happened.

    Args:
        at: when, on the monotonic clock. lost_state: whether the local state or the copies were deleted.
        back_s: until the flow had committed a batch, or both instances were up to date again.
        silent_s: the longest time that a question took after it.
    """

    name: str
    at: float
    lost_state: bool
    back_s: float | None = None
    silent_s: float = 0.0


@dataclass(frozen=True)
class Line:
    """All figures of one kind of question."""

    kind: str
    checked: Checked
    refused: int
    disconnected: int
    p50_ms: float | None
    p99_ms: float | None


def lines(figures: Sequence[Figures], checked: Mapping[str, Checked]) -> list[Line]:
    """A line for each kind, in the order in which they were asked."""
    found = []
    for kind in dict.fromkeys(each.kind for each in figures):
        of_kind = [each for each in figures if each.kind == kind]
        seconds = [took for each in of_kind for _, took in each.answered]
        # Changes are not asked for one by one.
        cuts = quantiles(seconds, n=100) if len(seconds) > 1 and any(seconds) else None
        found.append(
            Line(
                kind,
                checked.get(kind, Checked()),
                sum(each.refused for each in of_kind),
                sum(each.disconnected for each in of_kind),
                None if cuts is None else cuts[49] * 1000,
                None if cuts is None else cuts[98] * 1000,
            )
        )
    return found


def silences(kills: Sequence[Killed], figures: Sequence[Figures]) -> None:
    """Note for each kill the longest time until an answer, for questions before the next kill.

    Args:
        figures: of those who ask all the time.
    """
    for number, killed in enumerate(kills, 1):
        until = min([killed.at + _AFTER_S, *(each.at for each in kills[number : number + 1])])
        killed.silent_s = max((each.longest_s(killed.at, until) for each in figures), default=0.0)


def answers_table(found: Sequence[Line]) -> Table:
    table = Table(
        title="Answers, each compared with the fold of the topic at its position",
        caption="newer: rows that were newer than their position. refused: 503. lost: no answer, and asked again",
    )
    table.add_column("kind")
    for name in ("answers", "rows", "newer", "wrong", "stale", "refused", "lost", "p50 ms", "p99 ms"):
        table.add_column(name, justify="right")
    for each in found:
        checked = each.checked
        numbers = (checked.answers, checked.rows, checked.newer, checked.wrong, checked.stale)
        times = ["" if ms is None else f"{ms:.1f}" for ms in (each.p50_ms, each.p99_ms)]
        table.add_row(each.kind, *(f"{n:,}" for n in (*numbers, each.refused, each.disconnected)), *times)
    return table


def kills_table(kills: Sequence[Killed]) -> Table:
    table = Table(title="SIGKILL", caption="back: the flow had committed a batch; both instances had all partitions")
    table.add_column("process")
    for name in ("local state deleted", "longest without an answer", "back after"):
        table.add_column(name, justify="right")
    for each in kills:
        back = "-" if each.back_s is None else f"{each.back_s:.1f} s"
        table.add_row(each.name, "yes" if each.lost_state else "", f"{each.silent_s:.2f} s", back)
    return table
