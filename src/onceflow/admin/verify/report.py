"""What an audit has found: findings by kind, what was compared, and what could not be checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from onceflow.admin.verify.tally import RecordOffset
from onceflow.protocol.progress import Progress

LOST, DOUBLED, FOREIGN, MISPLACED, REORDERED, PROGRESS, GROUP, TABLE, STATE, LOCAL = KINDS = (
    "lost", "doubled", "foreign", "misplaced", "reordered", "progress", "group", "table", "state", "local",
)  # fmt: skip

Tell = Callable[[str, int, "int | None"], None]
"""Called with what is read, how much of it is done, and of how much (None: not known)."""


@dataclass(frozen=True)
class Finding:
    """Something that is not as it has to be: what, and the records that it concerns."""

    kind: str
    text: str
    places: tuple[RecordOffset, ...] = ()


@dataclass
class Report:
    """What an audit has found.

    Attributes:
        counts: by kind of finding, how many.
        examples: findings of each kind, the first ones.
        checked: what was compared, as name and number.
        notes: what a reader has to know of the findings.
        unjudged: what was looked at or left out, and may be right or wrong: how much of it, and why.
        not_checked: what was asked for and could not be checked at all, so that nothing is known of it.
    """

    limit: int
    counts: dict[str, int] = field(default_factory=dict)
    examples: list[Finding] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether all that was asked for was checked and judged, and nothing was found."""
        return not (self.counts or self.not_checked or self.unjudged)

    def add(self, kind: str, text: str, places: Iterable[RecordOffset] = ()) -> None:
        """Count a finding, and keep it if it is one of the first of its kind."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.counts[kind] <= self.limit:
            self.examples.append(Finding(kind, text, tuple(places)))

    def add_all(self, kind: str, count: int, described: Iterable[tuple[str, Iterable[RecordOffset]]]) -> None:
        """Count findings of a kind, of which some are described."""
        self.counts[kind] = self.counts.get(kind, 0) + count
        room = self.limit - sum(each.kind == kind for each in self.examples)
        self.examples += [Finding(kind, text, tuple(places)) for text, places in islice(described, max(0, room))]

    def drop(self, *kinds: str) -> None:
        """Forget the findings of these kinds."""
        for kind in kinds:
            self.counts.pop(kind, None)
        self.examples[:] = [each for each in self.examples if each.kind not in kinds]


def unknown_past(life: Sequence[Progress], report: Report) -> str | None:
    """What a reader has to know of records that are there too often, if compaction has removed progress records.

    Args:
        life: the progress records that are left.
    """
    if life[0].batch_id == 0 or not (report.counts.get(DOUBLED) or report.counts.get(FOREIGN)):
        return None
    return (
        f"progress records from before batch {life[0].batch_id} are gone: if the flow was reset before, outputs from "
        "then are there too often, rightly"
    )
