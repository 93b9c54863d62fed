"""Answers for a whole table: from the partitions that are here, and from other instances."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import pyarrow as pa
from kafka.partitioner.default import murmur2

from onceflow.errors import counted
from onceflow.protocol.partitioners import key_partitions
from onceflow.server.local import LocalTable, NotHereError, Room, Rows
from onceflow.server.merging import Part, merged
from onceflow.server.options import Limits
from onceflow.server.problems import Problem
from onceflow.server.routes import HERE, Routes
from onceflow.server.staleness import AnswerAge, Freshness

T = TypeVar("T")
A = TypeVar("A", bound="tuple[Any, AnswerAge]")

_FEW_KEYS = 16
_MAP_PAUSE_S = 0.1  # until routes are looked at again, after an instance did not have a partition
_MAP_WAIT_S = 2.0
_MORE_PARTITIONS = 100
_LIMITS = Limits()


class UnreachableError(Exception):
    """Another instance did not answer, or not as an instance of the group does.

    Args:
        answered: what it answers instead; empty: nothing.
        next_step: what helps.
    """

    def __init__(self, address: str, answered: str = "", next_step: str = "") -> None:
        super().__init__(f"{address} {answered or 'does not answer'}")
        self.answered = answered
        self.next_step = next_step


class Peers(Protocol):
    """Other instances (`onceflow.server.peers.HttpPeers`). Each method may raise NotHereError, UnreachableError and
    Problem."""

    async def get_many(
        self, address: str, topic: str, keys: Sequence[bytes], places: Mapping[int, Sequence[int]], freshness: Freshness
    ) -> tuple[dict[int, list[bytes | None]], AnswerAge]: ...

    async def page(
        self, address: str, topic: str, part: Part, freshness: Freshness, *, reverse: bool, limit: int
    ) -> tuple[Rows, bool, AnswerAge]: ...

    async def count(
        self, address: str, topic: str, partitions: Collection[int], freshness: Freshness
    ) -> tuple[int, AnswerAge]: ...


class _Shape(NamedTuple):
    """What is known of where keys are. Another one means that some of them may be elsewhere."""

    partitions: int
    placed: bool
    layout: tuple[int, int]


class RoutedTable:
    """One table, wherever its partitions are.

    Args:
        local: the partitions that are here.
        routes: which instance has which partition.
        peers: None: there are no other instances.
        limits: of the rows of one request.
    """

    def __init__(
        self, topic: str, local: LocalTable, routes: Routes, peers: Peers | None, limits: Limits = _LIMITS
    ) -> None:
        self.topic = topic
        self._local = local
        self._routes = routes
        self._peers = peers
        self._limits = limits

    async def get(self, key: bytes, freshness: Freshness) -> tuple[bytes | None, AnswerAge]:
        """The value of a key, or None."""
        await self._know_partitions(freshness)
        if (shape := self._shape()).placed:
            partition = (murmur2(key) & 0x7FFFFFFF) % shape.partitions
            if self._local.has(partition, restored=True):
                with suppress(NotHereError):  # it goes away just now
                    seen = await self._local.wait((partition,), freshness)
                    value = self._local.get(partition, key)
                    if self._shape() == shape:  # else the row may be elsewhere now
                        return value, seen
        values, seen = await self.get_many([key], freshness)
        return values[0], seen

    async def get_many(self, keys: Sequence[bytes], freshness: Freshness) -> tuple[list[bytes | None], AnswerAge]:
        """The values of keys, in their order; None where there is none.

        Raises:
            Problem: 413, they are too large together, or too many have to be looked for in all partitions.
        """
        await self._know_partitions(freshness)
        return await self._settled(lambda: self._get_many(keys, freshness))

    async def _get_many(self, keys: Sequence[bytes], freshness: Freshness) -> tuple[list[bytes | None], AnswerAge]:
        own = self._partitions_of(keys)
        places: dict[int, list[int]] = {}
        if self.placed:
            for at, partition in enumerate(own):
                places.setdefault(partition, []).append(at)
        else:
            if len(keys) * self.partitions > max(self._limits.lookups, self.partitions):
                most = max(1, self._limits.lookups // self.partitions)
                raise Problem(
                    413,
                    f"The keys of table {self.topic} may be in any of its {self.partitions:,} partitions, so at most "
                    f"{most:,} can be looked for at a time",
                    next_step="ask for fewer keys at a time",
                )
            everywhere = list(range(len(keys)))
            places = dict.fromkeys(range(self.partitions), everywhere)

        async def ask(
            address: str, partitions: Collection[int], freshness: Freshness
        ) -> tuple[dict[int, list[bytes | None]], AnswerAge]:
            if address != HERE:
                part = {partition: places[partition] for partition in partitions}
                return await self._others().get_many(address, self.topic, keys, part, freshness)
            seen = await self._local.wait(partitions, freshness)
            room = Room(self._limits.answer_bytes)
            return {
                each: await self._local.get_many(each, [keys[at] for at in places[each]], room) for each in partitions
            }, seen

        found: list[bytes | None] = [None] * len(keys)
        answers = await self._spread(places, ask, freshness)
        for values, _ in answers:
            for partition, of_partition in values.items():
                for at, value in zip(places[partition], of_partition, strict=True):
                    # A key that several partitions have counts where the default partitioner puts it.
                    if value is not None and (found[at] is None or own[at] == partition):
                        found[at] = value
        room = Room(self._limits.answer_bytes)  # for those of all instances together
        for value in found:
            room.take(value)
        return found, AnswerAge.all_of(seen for _, seen in answers)

    async def count(self, freshness: Freshness) -> tuple[int, AnswerAge]:
        """How many keys there are."""
        await self._know_partitions(freshness)

        async def ask(address: str, partitions: Collection[int], freshness: Freshness) -> tuple[int, AnswerAge]:
            if address != HERE:
                return await self._others().count(address, self.topic, partitions, freshness)
            seen = await self._local.wait(partitions, freshness)
            return await self._local.count(partitions), seen

        async def counted() -> tuple[int, AnswerAge]:
            answers = await self._spread(range(self.partitions), ask, freshness)
            return sum(count for count, _ in answers), AnswerAge.all_of(seen for _, seen in answers)

        return await self._settled(counted)

    async def range(
        self, low: bytes, high: bytes | None, freshness: Freshness, *, reverse: bool, page_rows: int
    ) -> tuple[AsyncIterator[Rows], AnswerAge]:
        """The rows of a range in the order of keys, page by page, and how old the first of them are at most.

        Later pages are as new as the first ones, or newer.
        """
        await self._know_partitions(freshness)
        seen: dict[int, int] = {}

        async def read(parts: Sequence[Part], freshness: Freshness) -> list[tuple[list[Part], AnswerAge]]:
            async def ask(
                address: str, partitions: Collection[int], freshness: Freshness
            ) -> tuple[list[Part], AnswerAge]:
                part = Part(tuple(partitions), parts[0].low, parts[0].high)
                if address != HERE:
                    rows, done, how_old = await self._others().page(
                        address, self.topic, part, freshness, reverse=reverse, limit=page_rows
                    )
                else:
                    how_old = await self._local.wait(partitions, freshness)
                    rows, done = await self._local.page(
                        partitions, part.low, part.high, reverse=reverse, limit=page_rows
                    )
                return [part.filled(rows, done, reverse=reverse)], how_old

            return await self._spread([each for part in parts for each in part.partitions], ask, freshness)

        first = await self._settled(lambda: read([Part(tuple(range(self.partitions)), low, high)], freshness))
        layout = self._local.layout
        how_old = AnswerAge.all_of(each for _, each in first)
        seen.update(how_old.offsets)

        async def refill(part: Part) -> list[Part]:
            again = replace(freshness, least=dict(seen), until=max(freshness.until, _soon()))
            found = [each for parts, _ in await read([part], again) for each in parts]
            if self._local.layout != layout:  # some rows of this page may be in a partition that was read before
                raise Problem(
                    503,
                    f"Rows of table {self.topic} were moved to other partitions while the range was read",
                    next_step="ask again, with the cursor if there is one",
                )
            return found

        return merged([part for parts, _ in first for part in parts], refill, reverse=reverse), how_old

    # ---- inside --------------------------------------------------------------------------------------

    @property
    def partitions(self) -> int:
        """How many partitions the topic has."""
        return max(self._routes.partitions(self.topic), self._local.layout[0])

    @property
    def placed(self) -> bool:
        """Whether a key can only be in the partition where Kafka's default partitioner puts it."""
        return self._routes.placed(self.topic) and self._local.placed

    async def _settled(self, read: Callable[[], Awaitable[T]]) -> T:
        """What was read while no partitions were added, and no rows moved to other ones."""
        while True:
            shape = self._shape()
            found = await read()
            if self._shape() == shape:
                return found

    def _shape(self) -> _Shape:
        return _Shape(self.partitions, self.placed, self._local.layout)

    async def _know_partitions(self, freshness: Freshness) -> None:
        """Wait until all partitions are known that a request names: the topic may have got more a moment ago.

        Raises:
            Problem: 503, they were not known in time.
        """
        last = max(freshness.least, default=-1)
        while last >= self.partitions:
            # Nobody waits for partitions that there will hardly ever be: a position with many is kept meanwhile.
            left_s = freshness.left_s if last < 2 * self.partitions + _MORE_PARTITIONS else 0.0
            if not left_s:
                raise Problem(
                    503,
                    f"Table {self.topic} has {counted(self.partitions, 'partition')} as far as is known here, and "
                    f"min_position names partition {last}",
                    next_step="ask again: partitions that were added are known after some seconds",
                )
            await asyncio.sleep(min(_MAP_PAUSE_S, left_s))

    def _partitions_of(self, keys: Sequence[bytes]) -> list[int]:
        if len(keys) <= _FEW_KEYS:
            return [(murmur2(key) & 0x7FFFFFFF) % self.partitions for key in keys]
        found: list[int] = key_partitions(pa.array(keys, pa.binary()), self.partitions).tolist()
        return found

    def _others(self) -> Peers:
        if self._peers is None:
            raise UnreachableError("there are no other instances")
        return self._peers

    async def _spread(
        self,
        partitions: Collection[int],
        ask: Callable[[str, Collection[int], Freshness], Awaitable[A]],
        freshness: Freshness,
    ) -> list[A]:
        """Ask those who have these partitions, as few as possible, and others if they do not answer.

        Raises:
            Problem: 503, nobody who has a partition answers.
        """
        answers: list[A] = []
        left = set(partitions)
        tried: dict[int, set[str]] = {partition: set() for partition in left}
        refused: dict[int, UnreachableError] = {}
        moved_until = min(freshness.until, _soon())
        while left:
            groups: dict[str, list[int]] = {}
            for partition in sorted(left):
                groups.setdefault(self._choose(partition, tried[partition]), []).append(partition)
            nobody = groups.pop("", None)
            if nobody is not None:
                emptied, lacks_rows = self._local.emptied(nobody[0]), self._lacks_rows(nobody[0])
                if time.monotonic() >= (freshness.until if emptied or lacks_rows else moved_until):
                    raise self._nobody_has(nobody[0], refused.get(nobody[0]), emptied=emptied, lacks_rows=lacks_rows)
                await asyncio.sleep(_MAP_PAUSE_S)
                for partition in nobody:
                    tried[partition].clear()
                continue
            for (address, asked), answer in await self._ask_all(groups, ask, freshness):
                if isinstance(answer, (NotHereError, UnreachableError)):
                    for partition in asked:
                        tried[partition].add(address)
                        if isinstance(answer, UnreachableError) and answer.answered:
                            refused[partition] = answer
                else:
                    answers.append(answer)
                    left.difference_update(asked)
        return answers

    def _lacks_rows(self, partition: int) -> bool:
        """Whether rows are being moved to a partition: it is not known here yet, or does not have all of them."""
        return partition >= self._routes.partitions(self.topic) or self._local.lacks_rows(partition)

    def _nobody_has(
        self, partition: int, refused: UnreachableError | None, *, emptied: bool, lacks_rows: bool
    ) -> Problem:
        if lacks_rows:
            detail = (
                f"Rows of table {self.topic} were moved to partition {partition}, which does not have all of them yet"
            )
            return Problem(503, detail, next_step="ask again")
        if emptied:
            detail = (
                f"The copy of partition {partition} of table {self.topic} was damaged, and is read from Kafka again"
            )
            return Problem(503, detail, next_step="ask again; /ready says what this instance waits for")
        if self._peers is None:
            detail = f"Partition {partition} of table {self.topic} is not open"
            return Problem(503, detail, next_step="ask again; /ready says what this instance waits for")
        detail = f"No instance that answers has partition {partition} of table {self.topic}"
        if refused is None:
            return Problem(503, detail, next_step="ask again: another instance takes it over")
        return Problem(503, f"{detail}: {refused}", next_step=refused.next_step)

    async def _ask_all(
        self,
        groups: dict[str, list[int]],
        ask: Callable[[str, Collection[int], Freshness], Awaitable[A]],
        freshness: Freshness,
    ) -> list[tuple[tuple[str, list[int]], A | NotHereError | UnreachableError]]:
        async def one(address: str, asked: list[int]) -> A | NotHereError | UnreachableError:
            least = {each: freshness.least[each] for each in asked if each in freshness.least}
            try:
                answer = await ask(address, asked, replace(freshness, least=least, layout=self._local.layout))
                self._local.hear(answer[1].layout)
                return answer
            except (NotHereError, UnreachableError) as other:
                return other

        if len(groups) == 1:
            group = next(iter(groups.items()))
            return [(group, await one(*group))]
        answers = await asyncio.gather(*(one(*group) for group in groups.items()))
        return list(zip(groups.items(), answers, strict=True))

    def _choose(self, partition: int, tried: Collection[str]) -> str:
        """Whom to ask: this instance if it is up to date, otherwise the owner, then other copies; "": nobody."""
        if HERE not in tried and self._local.has(partition, restored=True):
            return HERE
        for address in self._routes.addresses(self.topic, partition):
            if address not in tried:
                return address
        return HERE if HERE not in tried and self._local.has(partition) else ""


def _soon() -> float:
    return time.monotonic() + _MAP_WAIT_S
