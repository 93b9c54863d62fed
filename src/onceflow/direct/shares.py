"""How much of each partition a batch takes: of what waits in the driver, or of what tasks read by themselves."""

from __future__ import annotations

from collections.abc import Mapping

from onceflow.driver.record.offset_log import TopicOffsets
from onceflow.protocol.names import TopicPartition

Left = Mapping[str, Mapping[int, int]]

# Tasks take at least so many records of a partition, or none: responses have whole record batches, so of a very short
# range most of what is fetched would be thrown away. A small batch is divided among so many partitions instead: if
# records cost much, all tasks have to have some, and that responses are not used whole costs little.
_RANGE_MIN = 4_000
_SMALL, _PARTITIONS = 20_000, 64


class Shares:
    """The shares of one batch after the other. No partition waits for ever, however much others have left.

    Args:
        most: most offsets of one batch, by topic.
    """

    def __init__(self, most: Mapping[str, int]) -> None:
        self._most = most
        self._passed_over: dict[TopicPartition, int] = {}  # how many batches in a row

    def next(self, left: Left, records: int) -> TopicOffsets:
        """How many offsets of each partition the next batch takes that tasks read.

        Args:
            left: how many offsets are left of each partition, by topic. records: how many it takes.
        """
        wanted = {
            topic: self._in_turn({topic: offsets}, most, _least(min(most, records)))[topic]
            if (most := self._most.get(topic)) is not None
            else offsets
            for topic, offsets in left.items()
        }
        whole = {topic: dict(wanted[topic]) for topic in self._whole(_totals(left), records)}
        others = {topic: offsets for topic, offsets in wanted.items() if topic not in whole}
        rest = records - sum(_totals(whole).values())
        return self._noted(left, {**whole, **self._in_turn(others, rest, _least(rest))})

    def _whole(self, left: Mapping[str, int], records: int) -> list[str]:
        """The topics whose limit is small against the batch. They get all that it allows: a part of it, because others
        have more left, would be next to nothing."""
        found: list[str] = []
        for topic in sorted(self._most.keys() & left.keys(), key=self._most.__getitem__):
            if left[topic] > self._most[topic]:
                records -= 2 * self._most[topic]
                if records < 0:
                    break
                found.append(topic)
        return found

    def of_waiting(self, waiting: Left, left: Left, records: int) -> TopicOffsets:
        """How many offsets of each partition the next batch of the driver takes.

        Each partition of a topic has its part of what is left to read. In the order of arrival one would be read after
        the other, and the watermark would stand still meanwhile: it is the least of all partitions.

        Args:
            waiting: how many offsets of each partition wait and may be taken, by topic. left: how many are left to
                read, as far as it is known. records: how many it takes.
        """
        shares: TopicOffsets = {}
        for topic, most in self._by_topic(_totals(waiting), records).items():
            offsets, known = waiting[topic], left.get(topic, {})
            wanted = {n: count and max(count, known.get(n, 0)) for n, count in offsets.items()}
            share = self._in_turn({topic: wanted}, most, 1)[topic]
            taken = {n: min(count, share[n]) for n, count in offsets.items()}
            rest = {n: count - taken[n] for n, count in offsets.items()}
            more = spread({topic: rest}, most - sum(taken.values()))[topic]
            shares[topic] = {n: count + more[n] for n, count in taken.items()}
        return self._noted(waiting, shares)

    def _by_topic(self, waiting: Mapping[str, int], records: int) -> dict[str, int]:
        """How much of each topic: something of every one that has anything."""
        most = {topic: min(count, self._most.get(topic, count)) for topic, count in waiting.items()}
        whole = self._whole(waiting, records)
        rest = records - sum(most[topic] for topic in whole)
        others = spread({topic: {0: count} for topic, count in most.items() if topic not in whole}, rest)
        return {**most, **{topic: max(share[0], min(1, most[topic])) for topic, share in others.items()}}

    def _noted(self, left: Left, shares: TopicOffsets) -> TopicOffsets:
        self._passed_over = {
            (topic, n): self._passed_over.get((topic, n), 0) + 1
            for topic, offsets in left.items()
            for n, count in offsets.items()
            if count and not shares[topic][n]
        }
        return shares

    def _in_turn(self, left: Left, records: int, least: int) -> TopicOffsets:
        """First the partitions that were passed over, the longest waiting first; then those that have the most left."""
        waiting = sorted(
            (-self._passed_over[topic, n], topic, n)
            for topic, offsets in left.items()
            for n, count in offsets.items()
            if count and (topic, n) in self._passed_over
        )
        shares = {topic: dict.fromkeys(offsets, 0) for topic, offsets in left.items()}
        for _, topic, n in waiting:
            shares[topic][n] = min(left[topic][n], least, records)
            records -= shares[topic][n]
        more = spread({t: {n: left[t][n] - had for n, had in s.items()} for t, s in shares.items()}, records, least)
        return {topic: {n: had + more[topic][n] for n, had in offsets.items()} for topic, offsets in shares.items()}


def _totals(offsets: Left) -> dict[str, int]:
    return {topic: sum(each.values()) for topic, each in offsets.items()}


def _least(records: int) -> int:
    return _RANGE_MIN if records >= _SMALL else max(1, records // _PARTITIONS)


def spread(left: Left, records: int, least: int = 1) -> TopicOffsets:
    """Divide the offsets of a batch among the partitions that have the most left.

    Args:
        left: how many offsets are left of each partition, by topic. least: of one partition, or nothing of it.

    Returns:
        Of each partition that is taken the same part of what it has left.
    """
    shares = {topic: dict.fromkeys(offsets, 0) for topic, offsets in left.items()}
    places = [(count, topic, n) for topic, offsets in left.items() for n, count in offsets.items() if count]
    places.sort(key=lambda each: -each[0])
    number, total = 0, 0
    while number < len(places) and (number < records // least or total < records):
        total += places[number][0]
        number += 1
    places = places[:number]
    records = min(records, total)
    for count, topic, n in places:
        shares[topic][n] = count * records // total
    over = records - sum(shares[topic][n] for _, topic, n in places)
    for count, topic, n in places:
        if over and shares[topic][n] < count:
            shares[topic][n] += 1
            over -= 1
    return shares
