"""Where the copies of one table are on a cluster, how far they go, and where its tasks run."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from onceflow.driver.step.table_state import TableState
from onceflow.messages import Owners
from onceflow.planning import placement
from onceflow.planning.homes import ACCEPTABLE_LAG, Assignment, StateHost, assign, tasks_of
from onceflow.planning.placement import HomeTasks
from onceflow.state.prepare import Prepared
from onceflow.state.table_facts import CopyFacts

# So many groups for each host, if the partition counts allow it: else the shares of hosts would be too unequal.
_GROUPS_PER_HOST = 2
_GROUPS_MIN = 8
_RATE_OVER_S, _PIECES_MAX = 15.0, 10_000
_NEVER = 1 << 60  # records that a copy lacks which cannot be brought up


@dataclass(frozen=True)
class StateExecutors:
    """What the executors of a cluster are for the copies of a table.

    Args:
        hosts: by location.
        names: at each location, the preference of each executor, and how many tasks it runs at once.
    """

    hosts: Mapping[str, StateHost]
    names: Mapping[str, Sequence[tuple[str, int]]]


class TableHomes:
    """The copies of one table on a cluster.

    Args:
        groups: how many groups its partitions are divided into, see ``planning/homes.py``.
        copies: how many copies of each partition there shall be.
        waits: whether batches wait while any group is restored. Else only the records of its partitions do.
    """

    def __init__(self, table: TableState, groups: int, copies: int, waits: bool = True) -> None:
        self.table = table
        self.groups = groups
        self.waits = waits
        self._copies = copies if table.spec.topics.changelog else 1
        self._ends: dict[tuple[int, str], tuple[int, int]] = {}
        self.plan = Assignment(waiting=frozenset(range(groups)))
        self._moved = 0
        # When each piece of a restore was done (monotonic), how long it took, and how many records were read.
        self._read: deque[tuple[float, float, int]] = deque(maxlen=_PIECES_MAX)
        self._assigned_to: frozenset[StateHost] = frozenset()  # the hosts that the plan is for
        self._has_changed = True  # copies have, since then

    @property
    def name(self) -> str:
        """Name of the table."""
        return self.table.spec.table

    @property
    def is_restored(self) -> bool:
        """Whether copies can be restored: the table has a changelog."""
        return self.table.spec.topics.changelog

    @property
    def moves(self) -> int:
        """How many partitions have got another home so far."""
        return self._moved * (self.table.partitions // self.groups)

    def partitions(self, group: int) -> range:
        """The partitions of a group."""
        return range(group, self.table.partitions, self.groups)

    # ---- copies --------------------------------------------------------------------------------------

    def found(self, location: str, copies: Mapping[int, tuple[int, int]]) -> None:
        """A host was asked for its copies: up to which offsets each goes."""
        self._has_changed = True
        for known in [known for known in self._ends if known[1] == location]:
            del self._ends[known]
        for partition, ends in copies.items():
            self._ends[partition, location] = ends

    def reached(self, partition: int, location: str, ends: tuple[int, int]) -> None:
        """A copy goes up to these offsets of the two topics."""
        self._has_changed = True
        self._ends[partition, location] = ends

    def restored(self, done: Prepared, now: float) -> None:
        """A copy was brought up, at least in part. What standby copies read does not count: they always do.

        Args:
            now: monotonic seconds.
        """
        pair = done.partition % self.groups, done.location
        if done.records and (self.plan.homes.get(pair[0]) == pair[1] or pair in self.plan.restores):
            self._read.append((now, done.seconds, done.records))

    def _restored_per_s(self, now: float) -> int:
        while self._read and self._read[0][0] < now - _RATE_OVER_S:
            self._read.popleft()
        if not self._read:
            return 0
        ended, seconds, _ = self._read[0]
        return round(sum(records for _, _, records in self._read) / max(now - ended + seconds, 1.0))

    def removed(self, partition: int, location: str) -> None:
        """A copy was removed."""
        self._has_changed = True
        self._ends.pop((partition, location), None)

    def on_commit(self, written: Iterable[tuple[int, str]]) -> None:
        """A batch is committed that has worked on these partitions at these locations."""
        committed = self.table.committed()
        for partition, location in written:
            self._ends[partition, location] = committed[partition]

    def lags(self, locations: Collection[str]) -> dict[tuple[int, str], int]:
        """How many records the copies of each group lack at these locations. There is no copy without an entry."""
        committed = self.table.committed()
        found: dict[tuple[int, str], int] = {}
        for group in range(self.groups):
            whole = [(partition, committed[partition]) for partition in self.partitions(group)]
            is_empty = not any(any(ends) for _, ends in whole)
            for location in locations:
                if is_empty or any((partition, location) in self._ends for partition, _ in whole):
                    lacking = sum(self._lag(partition, location, ends) for partition, ends in whole)
                    found[group, location] = lacking
        return found

    def _lag(self, partition: int, location: str, committed: tuple[int, int]) -> int:
        ends = self._ends.get((partition, location), (0, 0))
        if ends == committed:
            return 0
        return max(1, sum(committed) - sum(ends)) if self.is_restored else _NEVER

    def missing(self, pairs: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
        """Which partitions are to be brought up, by location, the one with the shortest way first.

        Args:
            pairs: groups and locations.
        """
        committed = self.table.committed()
        found: dict[str, list[tuple[int, int]]] = {}
        for group, location in pairs:
            for partition in self.partitions(group):
                lag = self._lag(partition, location, committed[partition])
                is_there = (partition, location) in self._ends
                if lag or (is_there and not self.table.is_verified(partition, location)):
                    found.setdefault(location, []).append((lag, partition))
        return {location: [partition for _, partition in sorted(lacking)] for location, lacking in found.items()}

    def surplus_at(self, locations: Collection[str]) -> dict[str, list[int]]:
        """Partitions whose copies nobody needs any more, by location."""
        found: dict[str, list[int]] = {}
        for group, location in self.plan.surplus:
            if location in locations:
                here = [partition for partition in self.partitions(group) if (partition, location) in self._ends]
                found.setdefault(location, []).extend(here)
        return {location: partitions for location, partitions in found.items() if partitions}

    # ---- homes ---------------------------------------------------------------------------------------

    def assign(self, hosts: Collection[StateHost]) -> None:
        """Decide anew which host has which group, if hosts or copies have changed."""
        now = frozenset(hosts)
        if now == self._assigned_to and not self._has_changed:
            return
        self._assigned_to, self._has_changed = now, False
        lags = self.lags([host.location for host in hosts])
        before = self.plan.homes
        self.plan = assign(self.groups, hosts, lags, self.plan, copies=self._copies, acceptable=ACCEPTABLE_LAG)
        self._moved += sum(before.get(group, home) != home for group, home in self.plan.homes.items())

    def homes_of(self, groups: Iterable[int]) -> list[tuple[int, str]]:
        """These groups, each with the location of its home."""
        return [(group, self.plan.homes[group]) for group in groups if group in self.plan.homes]

    def orphans(self, locations: Collection[str]) -> tuple[set[str], int]:
        """Homes that are not among these locations and that no level copy can replace; how many records a restore of
        their groups would have to read. Before the first assignment, the home of each group is ''."""
        homes = self.plan.homes
        if homes and all(home in locations for home in homes.values()):
            return set(), 0  # as before almost every batch
        lags, committed = self.lags(locations), self.table.committed()
        gone: set[str] = set()
        records = 0
        for group in range(self.groups):
            home = homes.get(group, "")
            if home in locations:
                continue
            least = min((lags.get((group, at), _NEVER) for at in locations), default=_NEVER)
            if least > ACCEPTABLE_LAG:
                gone.add(home)
                everything = sum(sum(committed[partition]) for partition in self.partitions(group))
                records += min(least, everything) if self.is_restored else _NEVER
        return gone, records

    def standby_lacking(self) -> int:
        """How many records the standby copies lack."""
        there = {host.location for host in self._assigned_to if not host.away}
        pairs = self._standbys(there)
        return self._lacking(pairs, self.lags(there)) if pairs else 0

    @property
    def unplaced(self) -> int:
        """How many standby copies of partitions have no place, because there are too few machines."""
        return sum(self._unplaced().values()) * (self.table.partitions // self.groups)

    def _unplaced(self) -> dict[int, int]:
        """The same by group, before the first assignment none."""
        if self._copies == 1 or not self.plan.homes:
            return {}
        wanted = self._copies - 1
        return {group: wanted - len(self.plan.standbys.get(group, ())) for group in range(self.groups)}

    def _unplaced_records(self) -> int:
        """What those copies lack: everything."""
        committed = self.table.committed()
        return sum(
            count * sum(sum(committed[partition]) for partition in self.partitions(group))
            for group, count in self._unplaced().items()
            if count
        )

    def _standbys(self, there: Collection[str]) -> set[tuple[int, str]]:
        """The standby copies at these locations, as groups and locations."""
        plan = self.plan
        return {pair for pair in plan.copies_beside() - {*plan.homes.items(), *plan.restores} if pair[1] in there}

    def facts(self, now: float) -> CopyFacts:
        """What is known of the copies now.

        Args:
            now: monotonic seconds.
        """
        plan = self.plan
        there = {host.location for host in self._assigned_to if not host.away}
        lags = self.lags(there)
        wanted = {pair for pair in {*plan.homes.items(), *plan.restores} if pair[1] in there}
        beside = self._standbys(there)
        each = self.table.partitions // self.groups
        return CopyFacts(
            hosts=len(set(plan.homes.values())),
            waiting=len(plan.waiting) * each if plan.homes else 0,
            lacking=self._lacking(wanted, lags),
            standby=each * sum(lags.get(pair, _NEVER) <= ACCEPTABLE_LAG for pair in beside),
            standby_lacking=self._lacking(beside, lags) + self._unplaced_records(),
            moved=self.moves,
            restored_per_s=self._restored_per_s(now),
        )

    def _lacking(self, pairs: Iterable[tuple[int, str]], lags: Mapping[tuple[int, str], int]) -> int:
        """How many records these copies lack. One that does not exist lacks everything; one that cannot be restored
        lacks nothing."""
        if not self.is_restored:
            return 0
        committed = self.table.committed()
        return sum(
            lags[pair] if pair in lags else sum(sum(committed[partition]) for partition in self.partitions(pair[0]))
            for pair in pairs
        )

    def tasks(self, executors: StateExecutors, touched: Collection[int], rows: int, cores: int) -> HomeTasks:
        """The tasks of a job for these groups; all groups, if there are none.

        Args:
            rows: how many rows the job may get. cores: how many tasks run at once.
        """
        groups = touched or range(self.groups)
        wanted = max(1, min(cores, round(rows / placement.TASK_ROWS + 0.5)))
        tasks = tasks_of(self.plan.homes, executors.names, groups, wanted)
        by_group = [-1] * self.groups
        for number, task in enumerate(tasks):
            for group in task.groups:
                by_group[group] = number
        return HomeTasks(
            Owners(self.groups, tuple(by_group)),
            tuple(task.executor for task in tasks),
            tuple(task.location for task in tasks),
        )


def group_count(partitions: int, sources: Iterable[int], outputs: Iterable[int], hosts: int) -> int:
    """How many groups the partitions of a table are divided into.

    A divisor of the partition counts of sources and outputs is best: then tasks process records where they have read
    them, and write outputs without moving them. But hosts can share only what is divided finely.

    Args:
        hosts: how many there are now.
    """
    enough = min(partitions, max(_GROUPS_MIN, _GROUPS_PER_HOST * hosts))
    read = [partitions, *sources]
    for counts in ([*read, *outputs], read):
        if gcd(*counts) >= enough:
            return gcd(*counts)
    return partitions
