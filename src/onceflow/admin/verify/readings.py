"""Which parts of its sources a flow has read, and how often: a reset lets it read some again, and skip others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from onceflow.admin.verify.replay_steps import begun_at, steps
from onceflow.protocol.progress import Offsets, Progress

Span = tuple[int, int]
"""The first offset, and the one behind the last."""


@dataclass
class Readings:
    """What a flow has read of one partition of a source.

    Attributes:
        once: what it has read at least once, in order and without overlaps.
        again: what it has read once more, each time.
    """

    once: list[Span] = field(default_factory=list)
    again: list[Span] = field(default_factory=list)

    @property
    def all(self) -> list[Span]:
        """Each part as often as it was read."""
        return [*self.once, *self.again]

    def add(self, start: int, end: int) -> None:
        """Add a part that was read."""
        if start >= end:
            return
        if self.once and self.once[-1][1] == start:  # nearly always
            self.once[-1] = (self.once[-1][0], end)
            return
        for a, b in self.once:
            span = (max(a, start), min(b, end))
            if span[0] >= span[1]:
                continue
            if self.again and self.again[-1][1] == span[0]:
                self.again[-1] = (self.again[-1][0], span[1])
            else:
                self.again.append(span)
        self.once = _united([*self.once, (start, end)])

    def missing(self, first: int, end: int) -> list[Span]:
        """The parts of a range that it has not read."""
        found, at = [], first
        for a, b in self.once:
            if at < min(a, end):
                found.append((at, min(a, end)))
            at = max(at, b)
        return [*found, (at, end)] if at < end else found


def readings(life: Sequence[Progress], given: Offsets | None) -> dict[tuple[str, int], Readings]:
    """What a flow has read, by topic and partition, from its progress records since its progress was deleted last.

    What is read without outputs after a promotion (``driver/record/handover.py``) counts once, because the earlier
    version has written them.

    Args:
        given: where it has begun, as somebody says, see `begun_at`.
    """
    found: dict[tuple[str, int], Readings] = {}
    for topic, partition, start, end, muted in _parts(life, given):
        known = found.setdefault((topic, partition), Readings())
        if muted:
            for span in known.missing(start, end):
                known.add(*span)
        else:
            known.add(start, end)
    return found


def _parts(life: Sequence[Progress], given: Offsets | None) -> Iterator[tuple[str, int, int, int, bool]]:
    # What the first records say of the beginning does not count if somebody says something else.
    known = life if given is None else [each for each in life if each.batch_id]
    for step in steps(begun_at(life, given), None, known, ""):
        for topic, offsets in step.end.items():
            for partition, end in offsets.items():
                yield topic, partition, step.start[topic][partition], end, step.muted


def _united(spans: Sequence[Span]) -> list[Span]:
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
