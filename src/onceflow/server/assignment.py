"""Decides which instance has which partition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Holders = dict[str, list[list[str]]]
"""By topic, the addresses of those who have each partition; the first one is its owner."""


@dataclass(frozen=True)
class Member:
    """What an instance says about itself.

    Args:
        restored: by topic, the partitions that are up to date there.
        begun: by topic, other partitions of which it has a copy, which is older or is being restored.
        topics: the tables that it serves.
    """

    address: str
    topics: frozenset[str]
    restored: Mapping[str, frozenset[int]] = field(default_factory=dict)
    begun: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def rank(self, topic: str, partition: int) -> int:
        """2: the partition is up to date here; 1: there is a copy; 0: there is none."""
        if partition in self.restored.get(topic, ()):
            return 2
        return 1 if partition in self.begun.get(topic, ()) else 0


def assign(members: list[Member], partitions: Mapping[str, int], copies: int) -> Holders:
    """Who has each partition.

    Instances have about the same number of first copies, and of all copies. Within that, a partition stays where it is.
    If nobody among those who are to have a partition is up to date, somebody who is has it, too, and owns it meanwhile.

    Args:
        partitions: how many each topic has.
        copies: how many instances are to have each partition, if there are so many.
    """
    places = [(topic, partition) for topic in sorted(partitions) for partition in range(partitions[topic])]
    chosen: dict[tuple[str, int], list[Member]] = {place: [] for place in places}
    load = dict.fromkeys((member.address for member in members), 0)
    ordered = sorted(members, key=lambda member: member.address)
    for copy in range(min(copies, len(ordered))):
        most = -(-len(places) * (copy + 1) // len(ordered))
        # First those that can stay, so that they do not have to make room for others.
        for staying in (True, False):
            for place in places:
                if len(chosen[place]) == copy + 1:
                    continue
                free = [each for each in ordered if place[0] in each.topics and each not in chosen[place]]
                if staying:
                    free = [each for each in free if each.rank(*place) and load[each.address] < most]
                if free:
                    best = min(free, key=lambda each: (-each.rank(*place) if staying else 0, load[each.address]))
                    chosen[place].append(best)
                    load[best.address] += 1
    return _named(chosen, ordered, partitions)


def _named(
    chosen: Mapping[tuple[str, int], list[Member]], members: list[Member], partitions: Mapping[str, int]
) -> Holders:
    found: Holders = {topic: [] for topic in sorted(partitions)}
    for (topic, partition), holders in chosen.items():
        if not any(each.rank(topic, partition) == 2 for each in holders):
            others = [each for each in members if each.rank(topic, partition) == 2]
            holders = [*others[:1], *holders]

        # Those that are up to date first. Among them the one that was chosen first, because first copies are spread.
        ranked = sorted(holders, key=lambda each, place=(topic, partition): -each.rank(*place))  # type: ignore[misc]
        found[topic].append([each.address for each in ranked])
    return found
