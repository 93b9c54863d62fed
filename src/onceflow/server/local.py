"""Reads the partitions of a table that this instance has."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from typing import TypeVar

from onceflow.clock import clock_ms
from onceflow.errors import OnceflowError
from onceflow.server.problems import Problem, another_topic, unavailable
from onceflow.server.staleness import AnswerAge, Freshness
from onceflow.state.format import rows
from onceflow.state.stores.base import Store, StoreCorruptError
from onceflow.state.stores.stored_rows import StoredRows, Stores
from onceflow.tables.lag import Progress
from onceflow.tables.share import Share

log = logging.getLogger("onceflow.server")

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.05
PAGE_BYTES = 4 << 20  # a page of a range ends when its rows have this many bytes

Rows = list[tuple[bytes, bytes]]


_READ_AT_ONCE = 32  # keys, until it is looked at how much there is and others get their turn


class Room:
    """How many bytes of rows there is room for in an answer. One row always fits.

    Args:
        nbytes: in all.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._used = self._rows = 0

    def take(self, value: bytes | None) -> None:
        """A value goes into the answer.

        Raises:
            Problem: 413, there is no room for it.
        """
        if value is None:
            return
        self._used += len(value)
        self._rows += 1
        if self._rows > 1 and self._used > self._nbytes:
            raise Problem(
                413,
                f"The rows that are asked for have more than {self._nbytes:,} bytes",
                next_step="ask for fewer keys at a time",
            )


class NotHereError(Exception):
    """This instance does not have these partitions (any more)."""

    def __init__(self, partitions: Collection[int]) -> None:
        super().__init__(f"partitions {sorted(partitions)} are not here")
        self.partitions = list(partitions)


class LocalTable:
    """The partitions of one table that this instance has. Used by the thread of the event loop."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._counts: dict[tuple[int, ...], asyncio.Task[int]] = {}  # that have not begun, by their partitions
        self._turn = asyncio.Lock()  # of the count that runs
        self._looked_up = 0  # keys, since others had their turn

    def has(self, partition: int, *, restored: bool = False) -> bool:
        """Whether a partition can be read here; restored: and is not being restored."""
        progress = self._share.progress(partition)
        return progress is not None and not _lacks_rows(progress) and (progress.restored or not restored)

    def emptied(self, partition: int) -> bool:
        """Whether a partition is here, but was emptied because it was damaged. It is not read until it is restored, so
        that answers do not go back behind earlier ones."""
        progress = self._share.progress(partition)
        return progress is not None and progress.emptied

    @property
    def layout(self) -> tuple[int, int]:
        """Over how many partitions the rows are spread since they were moved, and when that was; (0, 0): not known."""
        layout = self._share.layout
        return layout.partitions, layout.since_ms

    def hear(self, layout: tuple[int, int]) -> None:
        """Another instance has this layout. Partitions that are here are not read before their rows are complete."""
        if layout[0] and self._share.layout.hear(*layout):
            log.info(
                "table %s: its rows are spread over %d partitions, says another instance", self._share.topic, layout[0]
            )

    def lacks_rows(self, partition: int) -> bool:
        """Whether a partition is here, but rows are missing that were moved between partitions."""
        progress = self._share.progress(partition)
        return progress is not None and progress.incomplete

    @property
    def placed(self) -> bool:
        """Whether all keys that are here are where Kafka's default partitioner puts them."""
        return self._share.placed

    def seen(self, partitions: Collection[int]) -> AnswerAge:
        """How far these partitions are.

        Raises:
            NotHereError: they are not all here.
        """
        offsets: dict[int, int] = {}
        records: int | None = 0
        ms: int | None = 0
        for partition in partitions:
            progress = self._share.progress(partition)
            if progress is None or _lacks_rows(progress):
                raise NotHereError([each for each in partitions if not self.has(each)])
            offsets[partition] = progress.position
            lag = progress.lag
            records = None if records is None or lag.records is None else records + lag.records
            ms = None if ms is None or lag.ms is None else max(ms, lag.ms)
        return AnswerAge(offsets, records, ms, self._share.topic_id, self._share.partitions_now)

    async def wait(self, partitions: Collection[int], freshness: Freshness) -> AnswerAge:
        """Wait until these partitions are as far as is asked.

        Raises:
            NotHereError: they are not all here.
            Problem: 503, they were not as far in time; 400, the request is about an earlier topic of this name.
        """
        if freshness.topic_id not in ("", self._share.topic_id):
            raise another_topic(self._share.topic)
        self.hear(freshness.layout)
        pause_s = _FIRST_PAUSE_S
        while True:
            if (failure := self._share.failure) is not None:
                raise unavailable(failure)
            seen = self.seen(partitions)
            behind = _behind(seen, freshness)
            if not behind:
                return seen
            left_s = freshness.left_s
            if not left_s:
                topic = self._share.topic
                raise Problem(
                    503,
                    f"Table {topic} is not as far as was asked for: {behind}",
                    next_step="ask again later, or accept an older answer",
                    headers=seen.headers(topic),
                    more=seen.members(topic),
                )
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def get(self, partition: int, key: bytes) -> bytes | None:
        """The value of a key in one partition."""
        with reading():
            row = self._store(partition).get(rows.value_key(key))
        return None if not row else rows.live_payload(row, clock_ms())

    async def get_many(self, partition: int, keys: Sequence[bytes], room: Room) -> list[bytes | None]:
        """The values of keys in one partition. A key that is there several times is read once.

        Raises:
            Problem: 413, there is no room for them.
        """
        now_ms = clock_ms()
        places: dict[bytes, list[int]] = {}
        for at, key in enumerate(keys):
            places.setdefault(key, []).append(at)
        order = sorted(places)
        found: list[bytes | None] = [None] * len(keys)
        for start in range(0, len(order), _READ_AT_ONCE):
            part = order[start : start + _READ_AT_ONCE]
            self._looked_up += len(part)
            if self._looked_up > _READ_AT_ONCE:  # of one partition, or of many
                self._looked_up = len(part)
                await asyncio.sleep(0)
            with reading():
                stored = self._store(partition).get_many([rows.value_key(key) for key in part])
            for key, row in zip(part, stored, strict=True):
                value = rows.live_payload(row, now_ms) if row else None
                for at in places[key]:
                    room.take(value)
                    found[at] = value
        return found

    async def page(
        self, partitions: Collection[int], low: bytes, high: bytes | None, *, reverse: bool, limit: int
    ) -> tuple[Rows, bool]:
        """The first rows of a range, in the order of keys, and whether these are all."""
        # Not in the thread: if a copy is damaged and replaced meanwhile, its new store has less than was just said.
        stores = [self._store(partition) for partition in partitions]

        def read() -> tuple[Rows, bool]:
            scans = [_scan(store, low, high, reverse) for store in stores]
            merged = scans[0] if len(scans) == 1 else heapq.merge(*scans, key=itemgetter(0), reverse=reverse)
            found: Rows = []
            size = 0
            for row in islice(merged, limit):
                found.append(row)
                size += len(row[0]) + len(row[1])
                if size > PAGE_BYTES:
                    return found, False
            return found, len(found) < limit

        return await self._in_thread(read)

    async def count(self, partitions: Collection[int]) -> int:
        """How many keys these partitions have. It may take long, so a table has one count at a time: requests that come
        while it runs share the next one, because it may lack rows that they have been told of."""
        wanted = tuple(sorted(partitions))
        counting = self._counts.get(wanted)
        if counting is None:
            counting = self._counts[wanted] = asyncio.create_task(self._count(wanted))
            counting.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may wait any more
        return await asyncio.shield(counting)

    async def _count(self, partitions: tuple[int, ...]) -> int:
        async with self._turn:
            del self._counts[partitions]
            stores = {partition: self._store(partition) for partition in partitions}
            return await self._in_thread(StoredRows(lambda: _given(stores)).count)

    # ---- inside --------------------------------------------------------------------------------------

    def _store(self, partition: int) -> Store:
        try:
            store = self._share.store(partition)
        except OnceflowError as error:
            raise unavailable(error) from error
        if store is None:
            raise NotHereError([partition])
        return store

    async def _in_thread(self, work: Callable[[], T]) -> T:
        with reading():
            return await asyncio.to_thread(work)


def _scan(store: Store, low: bytes, high: bytes | None, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
    now_ms = clock_ms()
    first, last = rows.value_key(low), rows.after(rows.VALUE) if high is None else rows.value_key(high)
    for row_key, row in store.scan(first, last, reverse=reverse):
        value = rows.live_payload(row, now_ms)
        if value is not None:
            yield row_key[1:], value


@contextmanager
def reading() -> Iterator[None]:
    """Turns what a store raises while it is closed or replaced into an error that makes the caller ask others."""
    try:
        yield
    except StoreCorruptError as error:
        raise NotHereError([]) from error
    except OnceflowError as error:
        raise unavailable(error) from error


@contextmanager
def _given(stores: Stores) -> Iterator[Stores]:
    yield stores


def _lacks_rows(progress: Progress) -> bool:
    return progress.emptied or progress.incomplete


def _behind(seen: AnswerAge, freshness: Freshness) -> str:
    """What is missing; an empty text: nothing."""
    if freshness.least and any(seen.offsets.get(at, offset) < offset for at, offset in freshness.least.items()):
        return "it has not read up to min_position"
    if freshness.staleness_ms is not None and (seen.lag_ms is None or seen.lag_ms > freshness.staleness_ms):
        age = "it has never been current" if seen.lag_ms is None else f"it is {seen.lag_ms:,} ms old"
        return f"{age}, max_staleness is {freshness.staleness_ms:,} ms"
    return ""
