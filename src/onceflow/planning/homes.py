"""Which host keeps which part of a table: a home for each group of partitions, and standby copies on other hosts.

A *group* are the partitions of a table whose number, modulo the number of groups, is the same. They are processed by
one task, so they have one home. `assign` is a pure function: it knows which hosts there are, and how far the copies on
them are behind. Its rules are those of Kafka Streams (KIP-441):

- hosts get groups in proportion to their cores, and no group moves without need: a host that comes takes its share from
  those that have too many, and the groups of a host that goes are shared by the others;
- a group stays where its copy is level until the copy at its *target* is level, too. It is restored there meanwhile;
- standby copies are on hosts that do not have the home, in another rack if there is one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

#: A copy that lacks at most so many records is level: to read them takes less time than a batch (KIP-441:
#: ``acceptable.recovery.lag``).
ACCEPTABLE_LAG = 10_000


@dataclass(frozen=True)
class StateHost:
    """A place where local copies are kept: a state folder of a host, with the executors that use it.

    Args:
        location: see `ProcessSpec.location`.
        host: the name by which Spark knows the machine.
        rack: a label; hosts of one rack or zone may fail together. Empty: not known.
        cores: how many tasks its executors run at once.
        away: whether it has lost its executors a moment ago. It keeps its share for a while, because they may be
            replaced; but no group can be there now.
    """

    location: str
    host: str
    rack: str = ""
    cores: int = 1
    away: bool = False


@dataclass(frozen=True)
class Assignment:
    """Where the groups of a table are.

    Args:
        homes: location of each group's home; empty while there is no host.
        restores: group and location of copies that are not level and will be homes.
        standbys: locations of each group's standby copies.
        surplus: group and location of copies that nobody needs any more.
        waiting: groups whose home is not level: no other host has a copy that is.
        targets: where each group is going to be.
    """

    homes: Mapping[int, str] = field(default_factory=dict)
    restores: frozenset[tuple[int, str]] = frozenset()
    standbys: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    surplus: frozenset[tuple[int, str]] = frozenset()
    waiting: frozenset[int] = frozenset()
    targets: Mapping[int, str] = field(default_factory=dict)

    def copies_beside(self) -> set[tuple[int, str]]:
        """Group and location of all copies that are kept beside the homes."""
        kept = {(group, location) for group, locations in self.standbys.items() for location in locations}
        return kept | self.restores


Lags = Mapping[tuple[int, str], int]
"""How many records the copies lack, by group and location. There is no copy without an entry."""


def assign(
    groups: int,
    hosts: Collection[StateHost],
    lags: Lags,
    before: Assignment,
    *,
    copies: int = 1,
    acceptable: int = ACCEPTABLE_LAG,
) -> Assignment:
    """Where the groups of a table are from now on.

    Args:
        groups: how many there are.
        hosts: those that have executors now.
        before: where they are until now.
        copies: how many copies of each group there shall be, each on another host.
        acceptable: a copy that lacks at most so many records is level.
    """
    present = {host.location for host in hosts if not host.away}
    if not present:
        return replace(before, homes={}, restores=frozenset(), waiting=frozenset(range(groups)))
    every = sorted(hosts, key=_order)
    by_location = {host.location: host for host in hosts}
    targets = _targets(groups, every, lags, before.targets)
    now = targets  # while hosts are away, others take their part
    if len(present) < len(every):
        now = _targets(groups, [host for host in every if not host.away], lags, before.homes)
    homes: dict[int, str] = {}
    waiting: set[int] = set()
    for group in range(groups):
        level = [at for at in present if lags.get((group, at), acceptable + 1) <= acceptable]
        target = targets[group] if targets[group] in present else now[group]
        homes[group] = _home(group, target, level, lags, before.homes)
        if not level:
            waiting.add(group)
    standbys = _standbys(groups, every, by_location, homes, targets, lags, copies)
    restores = frozenset((group, at) for group, at in targets.items() if at != homes[group])
    surplus = _surplus(homes, restores, standbys, lags, waiting, acceptable)
    return Assignment(homes, restores, standbys, surplus, frozenset(waiting), targets)


def _order(host: StateHost) -> str:
    return host.location


def _quotas(total: int, hosts: Sequence[StateHost], have: Mapping[str, int]) -> dict[str, int]:
    """How many of ``total`` each host gets: in proportion to its cores. What is left over goes where more are now."""
    cores = sum(host.cores for host in hosts)
    quotas = {host.location: total * host.cores // cores for host in hosts}
    left = total - sum(quotas.values())
    wish = sorted(
        hosts,
        key=lambda host: (
            total * host.cores % cores == 0,
            have.get(host.location, 0) <= quotas[host.location],
            -(total * host.cores % cores),
            host.location,
        ),
    )
    for host in wish[:left]:
        quotas[host.location] += 1
    return quotas


def _targets(groups: int, hosts: Sequence[StateHost], lags: Lags, before: Mapping[int, str]) -> dict[int, str]:
    """A balanced home for each group. Groups stay where they are as far as the balance allows."""
    have = dict.fromkeys((host.location for host in hosts), 0)
    for group in range(groups):
        if before.get(group) in have:
            have[before[group]] += 1
    room = _quotas(groups, hosts, have)
    targets: dict[int, str] = {}
    # Of those that are too many, the ones leave that have a copy elsewhere.
    for group in sorted(range(groups), key=lambda group: _copies_elsewhere(group, hosts, lags, before)):
        at = before.get(group, "")
        if room.get(at, 0) > 0:
            targets[group] = at
            room[at] -= 1
    for group in range(groups):
        if group in targets:
            continue
        free = [at for at, count in room.items() if count > 0]
        copied = [at for at in free if (group, at) in lags]
        best = min(copied, key=lambda at: (lags[group, at], at)) if copied else max(free, key=lambda at: (room[at], at))
        targets[group] = best
        room[best] -= 1
    return targets


def _copies_elsewhere(group: int, hosts: Iterable[StateHost], lags: Lags, before: Mapping[int, str]) -> int:
    return sum((group, host.location) in lags for host in hosts if host.location != before.get(group))


def _home(group: int, target: str, level: Sequence[str], lags: Lags, before: Mapping[int, str]) -> str:
    """Where the group is processed now. ``level``: where its copies are level."""
    at = before.get(group, "")
    if target in level:
        return target
    if at in level:
        return at
    if level:
        return min(level, key=lambda at: (lags[group, at], at))
    return target


def _standbys(
    groups: int,
    hosts: Sequence[StateHost],
    known: Mapping[str, StateHost],
    homes: Mapping[int, str],
    targets: Mapping[int, str],
    lags: Lags,
    copies: int,
) -> dict[int, tuple[str, ...]]:
    """Locations of the standby copies. A home that moves has one at its target for as long as that takes."""
    if copies < 2:
        return {}
    cores = sum(host.cores for host in hosts)
    room = {host.location: -(-groups * (copies - 1) * host.cores // cores) for host in hosts}
    # First all of them stay that are there already, as far as the balance allows.
    kept: dict[int, list[StateHost]] = {}
    for group in range(groups):
        target = known[targets[group]]
        kept[group] = []
        for host in hosts:
            others = {target.host, *(other.host for other in kept[group])}
            if len(kept[group]) == copies - 1 or room[host.location] <= 0 or host.host in others:
                continue
            if (group, host.location) in lags and not _same_rack(host, target, hosts):
                kept[group].append(host)
                room[host.location] -= 1
    # Then one of each home, and so on: else the last ones would all be of the same home, and the room left be there.
    seen: dict[str, int] = {}
    order = []
    for group in range(groups):
        seen[targets[group]] = seen.get(targets[group], 0) + 1
        order.append((seen[targets[group]], targets[group], group))
    return {
        group: _filled(group, known[targets[group]], kept[group], hosts, lags, room, copies)
        for _, _, group in sorted(order)
    }


def _same_rack(host: StateHost, target: StateHost, hosts: Sequence[StateHost]) -> bool:
    """Whether a standby copy there could fail together with its home, and need not."""
    return host.rack == target.rack and any(other.rack != target.rack for other in hosts)


def _filled(
    group: int,
    target: StateHost,
    chosen: list[StateHost],
    hosts: Sequence[StateHost],
    lags: Lags,
    room: dict[str, int],
    copies: int,
) -> tuple[str, ...]:
    """The standby copies of a group: those that stay, and further ones, which take up room."""
    places = [host.location for host in hosts]
    own = places.index(target.location)
    while len(chosen) < copies - 1:
        used = {target.host, *(host.host for host in chosen)}
        racks = {target.rack, *(host.rack for host in chosen)}
        free = [host for host in hosts if host.host not in used]
        if not free:
            break
        best = min(
            free,
            key=lambda host: (
                host.rack in racks,
                room[host.location] <= 0,
                (group, host.location) not in lags,
                -room[host.location],
                (places.index(host.location) - own) % len(places),  # around a ring: homes have different standbys
            ),
        )
        chosen.append(best)
        room[best.location] -= 1
    return tuple(host.location for host in chosen)


def _surplus(
    homes: Mapping[int, str],
    restores: Collection[tuple[int, str]],
    standbys: Mapping[int, tuple[str, ...]],
    lags: Lags,
    waiting: Collection[int],
    acceptable: int,
) -> frozenset[tuple[int, str]]:
    """Copies that may be removed: all that the group needs are level."""
    moving = {group for group, _ in restores}
    found = set()
    for group, at in lags:
        if group in waiting or group in moving or at == homes[group] or at in standbys.get(group, ()):
            continue
        if all(lags.get((group, other), acceptable + 1) <= acceptable for other in standbys.get(group, ())):
            found.add((group, at))
    return frozenset(found)


# ---- tasks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacedTask:
    """A task that runs where its groups have their home.

    Args:
        executor: the executor that shall run it. location: where that keeps its copies.
    """

    executor: str
    location: str
    groups: tuple[int, ...]


def tasks_of(
    homes: Mapping[int, str], executors: Mapping[str, Sequence[tuple[str, int]]], touched: Collection[int], wanted: int
) -> list[PlacedTask]:
    """The tasks of a job: each has groups of one home.

    Args:
        homes: location of each group.
        executors: at each location, names of executors, and how many tasks each runs at once.
        touched: the groups that the job needs.
        wanted: how many tasks suit the batch. There is at least one for each home, and no more than it runs at once,
            unless more are wanted than all executors run: tasks that wait make Spark add executors.
    """
    waits = wanted > sum(cores for there in executors.values() for _, cores in there)
    at: dict[str, list[int]] = {}
    for group in sorted(touched):
        at.setdefault(homes[group], []).append(group)
    tasks = []
    for location, groups in sorted(at.items()):
        slots = [name for name, cores in executors[location] for _ in range(cores)]
        share = round(wanted * len(groups) / len(touched) + 0.499)
        count = max(1, min(share, len(groups) if waits else min(len(groups), len(slots))))
        tasks += [PlacedTask(slots[n % len(slots)], location, tuple(groups[n::count])) for n in range(count)]
    return tasks
