"""What a demo shows: bars on a terminal, elsewhere a plain line every few seconds. On stderr: stdout is the result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from onceflow_workshop.demos.audit import KINDS, Findings
from onceflow_workshop.demos.harness import Service

_PLAIN_EVERY_S = 5.0
# lost and duplicated have columns of their own, the other kinds of damage share one.
_OTHERS = f"* {', '.join(KINDS[2:])}. aborted: written by killed drivers, shown to nobody."


class Display:
    """Named counters with totals, and messages in between.

    Args:
        totals: name of each counter and where it ends.
    """

    def __init__(self, totals: Mapping[str, int], console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._totals = dict(totals)
        self._counts = dict.fromkeys(totals, 0)
        self._started = time.monotonic()
        self._plain_at = 0.0
        self._bars = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks = {name: self._bars.add_task(name, total=total) for name, total in totals.items()}

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """A line of its own, with the time."""
        self._console.print(f"[{time.monotonic() - self._started:5.1f} s] {text}", markup=False, soft_wrap=True)

    def count(self, **counts: int) -> None:
        """Show new values of counters; they never go back or beyond their total."""
        for name, value in counts.items():
            self._counts[name] = max(self._counts[name], min(value, self._totals[name]))
            self._bars.update(self._tasks[name], completed=self._counts[name])
        if not self._console.is_terminal and time.monotonic() - self._plain_at >= _PLAIN_EVERY_S:
            self._plain_at = time.monotonic()
            self.say(", ".join(f"{name} {value:,} of {self._totals[name]:,}" for name, value in self._counts.items()))


def topics_table(findings: Sequence[Findings], hidden: Mapping[str, int]) -> Table:
    """One row per topic: what the audit found. ``hidden``: records of aborted transactions per topic."""
    table = Table(title="Topics, as a read_committed consumer sees them", caption=_OTHERS)
    table.add_column("topic")
    for name in ("expected", "found", "lost", "duplicated", "wrong*", "aborted"):
        table.add_column(name, justify="right")
    for finding in findings:
        lost, duplicated, *others = finding.counts.values()
        aborted = f"{hidden[finding.topic]:,}" if finding.topic in hidden else ""
        numbers = (finding.expected, finding.found, lost, duplicated, sum(others))
        table.add_row(finding.topic, *(f"{number:,}" for number in numbers), aborted)
    return table


def services_table(services: Sequence[Service]) -> Table:
    """One row per flow: its batches, where its driver was killed, and how soon it went on."""
    table = Table(title="Flows: SIGKILL to the driver right after these steps")
    for name in ("flow", "batches", "killed after step (last batch)", "next batch committed after"):
        table.add_column(name)
    for service in services:
        kills = ", ".join(f"{d.step} ({d.batch}{', state deleted' if d.lost_state else ''})" for d in service.deaths)
        back = ", ".join(f"{d.back_s:.1f} s" if d.back_s is not None else "-" for d in service.deaths)
        table.add_row(service.flow, str(service.batch), kills, back)
    return table


def print_result(tables: Sequence[Table], lines: Sequence[str]) -> None:
    """The result on stdout, as wide as it needs when that is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    for table in tables:
        console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
