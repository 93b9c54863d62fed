"""Decides which instance has which partition."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from onceflow.protocol.names import TopicPartition

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
    chosen: dict[TopicPartition, list[Member]] = {}
    for topic_partition in places:
        ranked = [
            (-each.rank(*topic_partition), load[each.address], at) for at, each in enumerate(able[topic_partition[0]])
        ]
        chosen[topic_partition] = [able[topic_partition[0]][at] for *_, at in sorted(ranked)[:copies]]
        for each in chosen[topic_partition]:
            load[each.address] += 1
    _Moves(chosen, able, load).level()
    for topic_partition, holders in chosen.items():
        holders.sort(key=lambda member: member.address)
        if not any(each.rank(*topic_partition) == 2 for each in holders):
            holders += [each for each in ordered if each.rank(*topic_partition) == 2][:1]
    owners = _owners(chosen)
    found: Holders = {topic: [] for topic in sorted(partitions)}
    for topic_partition, holders in chosen.items():
        ranked = [
            (-each.rank(*topic_partition), each is not owners[topic_partition], at) for at, each in enumerate(holders)
        ]
        found[topic_partition[0]].append([holders[at].address for *_, at in sorted(ranked)])
    return found


class _Moves:
    """Which partitions may move from an instance to another one.

    It is kept up to date while partitions move: with 10,000 of them, a search through all for each move would take
    longer than the group waits for its leader.

    Args:
        chosen: who is to have each partition. It is changed.
        able: who serves each topic. load: how many partitions each address has. It is changed.
    """

    def __init__(
        self, chosen: dict[TopicPartition, list[Member]], able: Mapping[str, list[Member]], load: dict[str, int]
    ) -> None:
        self._chosen, self._able, self._load = chosen, able, load
        # By the rank of the new one, both addresses, and the rank of the old one. Entries may be out of date.
        self._waiting: dict[tuple[int, str, str, int], deque[tuple[TopicPartition, Member]]] = {}
        for topic_partition, holders in chosen.items():
            others = [each for each in able[topic_partition[0]] if each not in holders]
            for old in holders:
                for new in others:
                    self._add(topic_partition, old, new)

    def _add(self, topic_partition: TopicPartition, old: Member, new: Member) -> None:
        key = new.rank(*topic_partition), old.address, new.address, old.rank(*topic_partition)
        self._waiting.setdefault(key, deque()).append((topic_partition, new))

    def level(self) -> None:
        """Move partitions, one after the other, from an instance to one that has two less. Those that the new one has a
        copy of come first, then those of the greatest difference, then those that the old one has no good copy of."""
        while (found := self._next()) is not None:
            topic_partition, old, new = found
            holders = self._chosen[topic_partition]
            at = next(n for n, each in enumerate(holders) if each.address == old)
            gone, holders[at] = holders[at], new
            self._load[old] -= 1
            self._load[new.address] += 1
            for each in self._able[topic_partition[0]]:
                if each not in holders:
                    self._add(topic_partition, new, each)
            for each in holders:
                if each is not new:
                    self._add(topic_partition, each, gone)

    def _next(self) -> tuple[TopicPartition, str, Member] | None:
        """The best move: the partition, the address of the old one, and the new one."""
        load = self._load
        keys = [key for key in self._waiting if load[key[1]] - load[key[2]] >= 2]
        for key in sorted(keys, key=lambda key: (-key[0], load[key[2]] - load[key[1]], key[3], key[1], key[2])):
            waiting = self._waiting[key]
            while waiting:
                topic_partition, new = waiting[0]
                holders = self._chosen[topic_partition]
                if new not in holders and any(each.address == key[1] for each in holders):
                    return topic_partition, key[1], new
                waiting.popleft()
            del self._waiting[key]
        return None


def _owners(chosen: Mapping[TopicPartition, list[Member]]) -> dict[TopicPartition, Member | None]:
    """One of those who are up to date, if somebody is. Each instance owns about the same number."""
    found: dict[TopicPartition, Member | None] = {}
    owned: Counter[str] = Counter()
    best: dict[TopicPartition, list[Member]] = {}
    for topic_partition, holders in chosen.items():
        highest = max((each.rank(*topic_partition) for each in holders), default=0)
        best[topic_partition] = [each for each in holders if each.rank(*topic_partition) == highest]
        found[topic_partition] = min(best[topic_partition], key=lambda each: owned[each.address], default=None)
        if (owner := found[topic_partition]) is not None:
            owned[owner.address] += 1
    changed = True
    while changed:
        changed = False
        for topic_partition, owner in found.items():
            for other in best[topic_partition]:
                if owner is not None and owned[other.address] + 2 <= owned[owner.address]:
                    owned[owner.address] -= 1
                    owned[other.address] += 1
                    found[topic_partition] = owner = other
                    changed = True
    return found
