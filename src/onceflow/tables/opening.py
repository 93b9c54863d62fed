"""Opens a table: finds its topic, takes a folder for the local copies, and opens these."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.client.settings import ClientSettings
from onceflow.clock import clock_ms
from onceflow.errors import OptionError
from onceflow.host.private_folders import make_private
from onceflow.options.durations import option_seconds
from onceflow.state.changelog.compacted_topic import find_compacted
from onceflow.state.local.format import default_state_dir, folder_name
from onceflow.state.stores.base import Store, unusable
from onceflow.state.stores.choice import check_installed, check_store, store_class
from onceflow.tables.copies import Copy, Followed
from onceflow.tables.following import Follower

#: Not a legal name of a flow, so that no flow has its copies in the same folder.
TABLES_FOLDER = "@tables"
_MAX_SLOTS = 100
_LOOK_S = 30.0


class OpenedTable:
    """The arguments of a `Table`, checked, and the folder that it holds while it is open."""

    def __init__(
        self,
        topic: str,
        bootstrap_servers: str,
        options: Mapping[str, str] | None,
        partitions: Sequence[int] | None,
        store: str | type[Store],
        state_dir: str | Path | None,
        connect_timeout: str | float,
    ) -> None:
        if not (topic and isinstance(topic, str)):
            raise OptionError(
                f"{topic!r} is not the name of a topic", next_step="give its name, for example 'balances'"
            )
        self.topic = topic
        self.settings = ClientSettings(bootstrap_servers, options or {})
        self.partitions = _checked_partitions(partitions, topic)
        check_store(store)
        check_installed(store)
        self.opener = store_class(store)
        self.state_dir = default_state_dir() if state_dir is None else Path(state_dir)
        self.refused_s = option_seconds(connect_timeout, "connect_timeout", topic)
        self._held = ExitStack()

    def take_folder(self) -> Path:
        """A folder that no other table of this machine uses: the first free one, so that it is found again."""
        base = self.state_dir / TABLES_FOLDER / folder_name(self.topic)
        if not self.opener.on_disk:
            return base / uuid4().hex
        from filelock import FileLock, Timeout  # imported here: it imports asyncio

        try:
            make_private(base)
            for slot in range(_MAX_SLOTS):
                lock = FileLock(base / f"{slot}.lock", thread_local=False)
                with suppress(Timeout):
                    lock.acquire(timeout=0)
                    self._held.callback(lock.release)
                    return base / str(slot)
        except OSError as refused:
            raise unusable(base, "The local copy of a table cannot be opened", refused) from refused
        raise OptionError(
            f"{_MAX_SLOTS} tables of topic {self.topic} are open on this machine", next_step="close some of them"
        )

    def release(self, followers: Sequence[Follower] = ()) -> None:
        """Stop the threads that use the folder, and let others use it when the last one has ended."""
        held, self._held = self._held, ExitStack()
        ended = itertools.count(1)

        def one_ended() -> None:
            if next(ended) == len(followers):
                held.close()

        for follower in followers:
            follower.stop(one_ended)
        if not followers:
            held.close()

    def ends_now(self) -> dict[int, int]:
        """The last stable offsets of the partitions to follow."""
        with self.connected(f"looking for the end of topic {self.topic}") as (cluster, deadline):
            info = cluster.topic(self.topic, deadline)
            return stable_ends(cluster, info, self.listed(info), deadline)

    @contextmanager
    def connected(self, what: str, *, running: bool = False) -> Iterator[tuple[Cluster, Deadline]]:
        """Connections for one operation, and its deadline.

        Args:
            what: what is done, for the error when the deadline is over.
            running: whether the table is open already: then brokers may be down for a while.
        """
        with closing(Cluster(self.settings, refused_s=None if running else self.refused_s)) as cluster:
            deadline = Deadline(_LOOK_S, what)
            cluster.connect(deadline)
            yield cluster, deadline

    def listed(self, info: TopicInfo) -> list[int]:
        """The partitions to follow."""
        if self.partitions is None:
            return sorted(info.leaders)
        unknown = [each for each in self.partitions if each not in info.leaders]
        if unknown:
            raise OptionError(
                f"Topic {self.topic} has no partition {unknown[0]}",
                topic=self.topic,
                next_step=f"it has the partitions 0 to {info.partitions - 1}",
            )
        return sorted(self.partitions)

    def followed(self, cluster: Cluster, deadline: Deadline) -> tuple[TopicInfo, Followed]:
        """The topic, and how it is kept on this machine. It takes a folder, which `release` gives back.

        Raises:
            UnknownTopicError, PermissionDeniedError, BrokerUnreachableError: the topic cannot be read.
            OptionError: the topic is not compacted, or lacks a partition that was asked for.
        """
        found = find_compacted(cluster, self.topic, deadline)
        self.listed(found.info)
        followed = Followed(
            topic=found.info.name,
            topic_id=found.info.topic_id,
            partitions=found.info.partitions,
            folder=self.take_folder(),
            opener=self.opener,
            tombstone_ms=found.tombstone_ms,
        )
        return found.info, followed


def open_table(table: OpenedTable) -> Follower:
    """Find the topic, open and verify the copies, and begin to follow.

    Raises:
        UnknownTopicError, PermissionDeniedError, BrokerUnreachableError: the topic cannot be read.
        OptionError: the topic is not compacted, or lacks a partition that was asked for.
        EnvironmentUnusableError: the folder of the copies cannot be used.
    """
    copies: dict[int, Copy] = {}
    try:
        with table.connected(f"opening table {table.topic}") as (cluster, deadline):
            info, followed = table.followed(cluster, deadline)
            asked_ms = clock_ms()
            ends = stable_ends(cluster, info, table.listed(info), deadline)
        copies.update((partition, Copy(followed, partition)) for partition in ends)
        follower = Follower(table.settings, info, copies, all_partitions=table.partitions is None)
        follower.start(ends, asked_ms)
        return follower
    except BaseException:
        for copy in copies.values():
            copy.close()
        table.release()
        raise


def stable_ends(cluster: Cluster, info: TopicInfo, listed: Sequence[int], deadline: Deadline) -> dict[int, int]:
    """The last stable offsets of partitions: everything below them is decided."""
    return dict(list_offsets(cluster, {info.name: listed}, LATEST, deadline)[info.name])


def _checked_partitions(partitions: Any, topic: str) -> list[int] | None:
    if partitions is None:
        return None
    listed = [partitions] if isinstance(partitions, int) else partitions
    if isinstance(listed, str) or not isinstance(listed, Sequence) or not listed:
        listed = [None]
    if any(not isinstance(each, int) or isinstance(each, bool) or each < 0 for each in listed):
        raise OptionError(
            f"partitions={partitions!r} of table {topic}",
            next_step="give a list of partition numbers, for example [0, 1]",
        )
    return sorted(set(listed))
