"""The drivers of a flow that stand by for each other, as their heartbeats show them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.deadline import Deadline
from onceflow.driver.standby.heartbeats import check_partitions, read_tail
from onceflow.protocol.heartbeats import ACTIVE, ENDED, HEARTBEATS_TOPIC, STANDBY

#: A driver that was silent for so long, in seconds, does not live. A standby says every second that it is there.
_SILENT_S = 10.0
# How long those are listened for that were heard before.
_LISTEN_S, _TURN_S = 2.5, 0.1


@dataclass(frozen=True)
class StandbyDriver:
    """A driver of a flow with ``standby=True``.

    Args:
        role: ``active`` or ``standby``.
        host, pid, since_ms: its process, and since when it has this role by the clock of its machine.
        age_s: how long ago it was heard last; by the clock of the broker if any driver of the flow is heard now.
        warm: whether a standby has prepared what it needs to take over soon.
    """

    role: str
    host: str
    pid: int
    since_ms: int
    age_s: float
    warm: bool


def standby_drivers(
    cluster: Cluster, there: Mapping[str, TopicInfo], flow_key: str, now_s: float, deadline: Deadline
) -> list[StandbyDriver]:
    """The active driver, then the standbys. Empty if no driver of the flow was heard of lately.

    Whoever lives is heard within a second or so. So clocks decide only about those that are not.

    Args:
        there: the topics of the cluster.
        flow_key: key of the flow's progress.
        now_s: seconds since the epoch.

    Raises:
        PermissionDeniedError: heartbeats may not be read.
        ProgressConflictError: their topic has too few partitions.
    """
    if HEARTBEATS_TOPIC not in there:
        return []
    check_partitions(there[HEARTBEATS_TOPIC])
    records, end, _ = read_tail(cluster, flow_key, deadline)
    last = {heartbeat.driver: (heartbeat, at_ms) for heartbeat, at_ms in records}
    silent = {driver for driver, (heartbeat, _) in last.items() if heartbeat.role != ENDED}
    until = time.monotonic() + deadline.capped(_LISTEN_S)
    while silent and time.monotonic() < until:
        time.sleep(_TURN_S)
        records, end, _ = read_tail(cluster, flow_key, deadline, first=end)
        last |= {heartbeat.driver: (heartbeat, at_ms) for heartbeat, at_ms in records}
        silent -= {heartbeat.driver for heartbeat, _ in records}
        now_s = max((at_ms / 1000 for _, at_ms in records), default=now_s)  # the clock of the broker
    found = [
        StandbyDriver(
            each.role, each.host, each.pid, each.since_ms, _age_s(now_s, at_ms, each.driver in silent), each.warm
        )
        for each, at_ms in last.values()
        if each.role != ENDED
    ]
    heard = [each for each in found if each.age_s < _SILENT_S]
    # If no driver lives, the one that was active last is worth a line.
    return sorted(heard, key=lambda each: each.role) or [each for each in found if each.role == ACTIVE][-1:]


def _age_s(now_s: float, at_ms: int, is_silent: bool) -> float:
    age_s = now_s - at_ms / 1000
    # One that is not heard, and is said to have spoken in the future: the clock here is behind, its age is not known.
    return _SILENT_S if is_silent and age_s < 0 else max(0.0, age_s)


def standby_warnings(drivers: list[StandbyDriver]) -> list[str]:
    """What is wrong with them."""
    living = [each for each in drivers if each.age_s < _SILENT_S]
    active = [each for each in living if each.role == ACTIVE]
    if drivers and not living:
        return [f"its active driver has been silent for {drivers[0].age_s:.0f} s, and no standby has taken over"]
    if active and not any(each.role == STANDBY for each in living):
        return ["no standby waits: if the active driver dies, nobody takes over until it is started again"]
    return []
