"""Decides which instance has which partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

_Place = tuple[str, int]

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

    A partition stays where it is, unless an instance has two more than another one. If nobody among those who are to
    have a partition is up to date, somebody who is has it, too, and owns it meanwhile.

    Args:
        partitions: how many each topic has.
        copies: how many instances are to have each partition, if there are so many.
    """
    ordered = sorted(members, key=lambda member: member.address)
    places = [(topic, partition) for topic in sorted(partitions) for partition in range(partitions[topic])]
    able = {topic: [each for each in ordered if topic in each.topics] for topic in partitions}
    load = dict.fromkeys((member.address for member in ordered), 0)
    chosen: dict[_Place, list[Member]] = {}
    for place in places:
        ranked = [(-each.rank(*place), load[each.address], at) for at, each in enumerate(able[place[0]])]
        chosen[place] = [able[place[0]][at] for *_, at in sorted(ranked)[:copies]]
        for each in chosen[place]:
            load[each.address] += 1
    while _moved(chosen, able, load):
        pass
    for place, holders in chosen.items():
        holders.sort(key=lambda member: member.address)
        if not any(each.rank(*place) == 2 for each in holders):
            holders += [each for each in ordered if each.rank(*place) == 2][:1]
    owners = _owners(chosen)
    found: Holders = {topic: [] for topic in sorted(partitions)}
    for place, holders in chosen.items():
        ranked = [(-each.rank(*place), each is not owners[place], at) for at, each in enumerate(holders)]
        found[place[0]].append([holders[at].address for *_, at in sorted(ranked)])
    return found


def _moved(chosen: dict[_Place, list[Member]], able: Mapping[str, list[Member]], load: dict[str, int]) -> bool:
    """Move one partition from an instance to one that has two less; rather one that the new one has a copy of."""
    best: tuple[tuple[int, int, int], _Place, int, Member] | None = None
    for place, holders in chosen.items():
        for at, old in enumerate(holders):
            for new in able[place[0]]:
                difference = load[old.address] - load[new.address]
                if difference < 2 or new in holders:
                    continue
                worth = new.rank(*place), difference, -old.rank(*place)
                if best is None or worth > best[0]:
                    best = worth, place, at, new
    if best is None:
        return False
    _, place, at, new = best
    load[chosen[place][at].address] -= 1
    load[new.address] += 1
    chosen[place][at] = new
    return True


def _owners(chosen: Mapping[_Place, list[Member]]) -> dict[_Place, Member | None]:
    """One of those who are up to date, if somebody is. Each instance owns about the same number."""
    found: dict[_Place, Member | None] = {}
    owned: Counter[str] = Counter()
    best: dict[_Place, list[Member]] = {}
    for place, holders in chosen.items():
        highest = max((each.rank(*place) for each in holders), default=0)
        best[place] = [each for each in holders if each.rank(*place) == highest]
        found[place] = min(best[place], key=lambda each: owned[each.address], default=None)
        if (owner := found[place]) is not None:
            owned[owner.address] += 1
    changed = True
    while changed:
        changed = False
        for place, owner in found.items():
            for other in best[place]:
                if owner is not None and owned[other.address] + 2 <= owned[owner.address]:
                    owned[owner.address] -= 1
                    owned[other.address] += 1
                    found[place] = owner = other
                    changed = True
    return found
