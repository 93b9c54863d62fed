"""The partitions of a topic that one process follows: they may come and go, for example with a consumer group."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from onceflow.client.cluster import TopicInfo
from onceflow.clock import clock_ms
from onceflow.errors import DeadlineExceededError, OnceflowError
from onceflow.state.stores.base import Store
from onceflow.tables.copies import Copy, Followed
from onceflow.tables.following import Follower
from onceflow.tables.lag import Progress
from onceflow.tables.layout import Layout
from onceflow.tables.opening import OpenedTable, stable_ends

log = logging.getLogger("onceflow.tables")

_HALT_S = 30.0  # a thread looks at least this often whether it is to end


class Share:
    """The open copies of some partitions of a topic.

    One follower has all partitions that are up to date. Partitions that are added get one of their own, so that they
    are restored while the others are followed; the next change joins them.

    `change` and `close` are called by one thread at a time; all else may be called by any thread.

    Args:
        topic: the name of the topic.
        table: further arguments of `OpenedTable`.
    """

    def __init__(self, topic: str, **table: Any) -> None:
        self._table = OpenedTable(topic, partitions=None, **table)
        self._info: TopicInfo
        self._followed: Followed
        self._followers: list[Follower] = []
        self._copies: dict[int, Copy] = {}
        self._by_partition: dict[int, Follower] = {}
        self._opened = 0  # how many partitions the topic had when it was opened

    @property
    def topic(self) -> str:
        return self._table.topic

    @property
    def topic_id(self) -> str:
        return self._info.topic_id

    @property
    def partitions(self) -> int:
        """How many partitions the topic has."""
        return self._info.partitions

    @property
    def partitions_now(self) -> int:
        """How many partitions the topic has, as last heard while it is followed: it may have got more."""
        return max([self.partitions, *(each.partitions_now for each in list(self._followers))])

    @property
    def layout(self) -> Layout:
        """Over how many partitions the rows are spread, if they were moved."""
        return self._followed.layout

    @property
    def placed(self) -> bool:
        """Whether all keys that are here are where Kafka's default partitioner puts them.

        If the topic got more partitions meanwhile, its older keys are not.
        """
        return self.partitions_now == self._opened and all(copy.placed for copy in list(self._copies.values()))

    @property
    def ignored(self) -> int:
        """How many records could not be kept, because they have no key."""
        return sum(copy.ignored for copy in list(self._copies.values()))

    @property
    def held(self) -> Collection[int]:
        """The partitions that can be read."""
        return tuple(self._by_partition)

    def open(self) -> None:
        """Find the topic, and take a folder. No partition is followed yet. Errors are those of `Table.start`."""
        with self._table.connected(f"opening table {self.topic}") as (cluster, deadline):
            self._info, self._followed = self._table.followed(cluster, deadline)
        self._opened = self.partitions

    def on_disk(self) -> list[int]:
        """The partitions that have a copy in the folder, whether it is open or not."""
        folder, opener = self._followed.folder, self._followed.opener
        if not opener.on_disk or not folder.is_dir():
            return []
        names = (int(path.name) for path in folder.iterdir() if path.name.isdecimal())
        return sorted(partition for partition in names if opener.exists(folder / str(partition)))

    def change(self, wanted: Collection[int]) -> None:
        """Follow exactly these partitions. Copies of others are closed and removed from disk.

        A partition can be read as soon as its copy is open and verified.

        Raises:
            OnceflowError: Kafka could not be read, or the folder cannot be used. What was followed before still is.
        """
        dropped = [partition for partition in self._copies if partition not in wanted]
        added = [partition for partition in wanted if partition not in self._copies]
        if not dropped and not added and not any(each.stopping for each in self._followers):
            return
        if max(added, default=0) >= self.partitions:
            self._grow()
        asked_ms = clock_ms()
        ends = self._ends(added)
        for partition in dropped:  # from now on nobody begins to read them
            self._by_partition.pop(partition, None)
        busy = self._join(set(dropped))
        for partition in set(dropped) - busy:
            copy = self._copies.pop(partition)
            copy.close()
            copy.remove()
        if busy:
            raise DeadlineExceededError(
                f"The thread of table {self.topic} did not end within {_HALT_S:g} s",
                topic=self.topic,
                next_step="look at the log: a broker may not answer, or the disk may be slow",
            )
        if added:
            copies = {partition: Copy(self._followed, partition) for partition in added}
            self._copies.update(copies)
            self._follow(copies, ends, asked_ms)

    def store(self, partition: int) -> Store | None:
        """The store of a partition; None: it is not here, or lacks rows: it was emptied and has to be restored first,
        or rows are being moved to it.

        Raises:
            OnceflowError: the error that has stopped the thread behind it.
        """
        follower = self._by_partition.get(partition)
        copy = self._copies.get(partition)
        if follower is None or copy is None:
            return None
        follower.check()
        store = copy.store
        # Asked afterwards: then it is not the store of an emptied copy.
        return None if copy.emptied or copy.incomplete else store

    def progress(self, partition: int) -> Progress | None:
        """How far a partition is; None: it is not here."""
        follower = self._by_partition.get(partition)
        return None if follower is None else follower.progress(partition)

    @property
    def failure(self) -> OnceflowError | None:
        """The error that has stopped a thread."""
        return next((each.failure for each in list(self._followers) if each.failure is not None), None)

    def close(self) -> None:
        """End the threads and close the copies, which stay on disk."""
        self._by_partition.clear()
        self._table.release(self._followers)
        self._followers, self._copies = [], {}

    # ---- inside --------------------------------------------------------------------------------------

    def _ends(self, partitions: Collection[int]) -> dict[int, int]:
        if not partitions:
            return {}
        with self._table.connected(f"looking for the end of topic {self.topic}", running=True) as (cluster, deadline):
            return stable_ends(cluster, self._info, sorted(partitions), deadline)

    def _grow(self) -> None:
        """The topic has got more partitions."""
        with self._table.connected(f"looking up topic {self.topic}", running=True) as (cluster, deadline):
            info = cluster.topic(self.topic, deadline, fresh=True)
        info.check_same(self._info.topic_id)
        log.info("table %s: its topic has %d partitions now, it had %d", self.topic, info.partitions, self.partitions)
        self._info, self._followed = info, replace(self._followed, partitions=info.partitions)

    def _join(self, dropped: set[int]) -> set[int]:
        """Replace all followers that are up to date by one, without the dropped partitions.

        Returns the partitions of those that do not end: they have to be joined later.
        """
        busy: set[int] = set()
        copies: dict[int, Copy] = {}
        targets: dict[int, int] = {}
        asked_ms = clock_ms()
        for follower in list(self._followers):
            restoring = follower.restored().running and not follower.stopping
            if restoring and dropped.isdisjoint(follower.partitions_here):
                continue
            if not follower.halt(_HALT_S):
                busy.update(follower.partitions_here)
                continue
            self._followers.remove(follower)
            asked_ms = min(asked_ms, follower.targets_ms)
            for partition in set(follower.partitions_here) - dropped:
                copy = copies[partition] = self._copies[partition]
                # Not the end of now: what was read already would count as lost if that end were lower.
                targets[partition] = max(follower.targets[partition], copy.position)
        if copies:
            self._follow(copies, targets, asked_ms, of_now=False)
        return busy

    def _follow(
        self, copies: Mapping[int, Copy], ends: Mapping[int, int], asked_ms: int, *, of_now: bool = True
    ) -> None:
        follower = Follower(self._table.settings, self._info, copies, all_partitions=False)
        follower.start(ends, asked_ms, of_now=of_now)
        self._followers.append(follower)
        self._by_partition.update(dict.fromkeys(copies, follower))
