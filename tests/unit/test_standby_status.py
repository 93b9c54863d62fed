"""Which drivers of a flow live, whatever the clock of this machine says; and how many stand by, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from onceflow.admin.status import standby_status
from onceflow.admin.status.standby_status import StandbyDriver, standby_drivers, standby_warnings
from onceflow.client.cluster import TopicInfo
from onceflow.client.deadline import Deadline
from onceflow.driver.standby import heartbeats
from onceflow.driver.standby.standbys import Standbys
from onceflow.errors import DeadlineExceededError, ProgressConflictError
from onceflow.protocol.heartbeats import ACTIVE, ENDED, HEARTBEATS_TOPIC, STANDBY, Heartbeat

THERE = {HEARTBEATS_TOPIC: TopicInfo(HEARTBEATS_TOPIC, "id", dict.fromkeys(range(8), 1), False)}


@dataclass
class World:
    """A log of heartbeats, whose times are those of the broker, and drivers that beat while somebody waits.

    Attributes:
        now: the broker's clock, in seconds.
        ahead_s: how far the clock of this machine is ahead of it.
        living: role of each driver that lives.
    """

    now: float = 1_700_000_000.0
    ahead_s: float = 0.0
    log: list[tuple[Heartbeat, int]] = field(default_factory=list)
    living: dict[str, str] = field(default_factory=dict)

    def beat(self, driver: str, role: str) -> None:
        self.log.append((Heartbeat("flow", driver, role, "host", 1, 1), int(self.now * 1000)))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for driver, role in self.living.items():
            if round(self.now * 10) % 8 == 0:
                self.beat(driver, role)

    def read_tail(self, *_: Any, first: int = 0) -> tuple[list[tuple[Heartbeat, int]], int, bool]:
        return self.log[first:], len(self.log), first == 0

    def drivers(self) -> list[StandbyDriver]:
        cluster: Any = None
        return standby_drivers(cluster, THERE, "flow", self.now + self.ahead_s, Deadline(60, "test"))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(standby_status, "read_tail", made.read_tail)
    monkeypatch.setattr(heartbeats, "read_tail", made.read_tail)
    clock = SimpleNamespace(sleep=made.sleep, monotonic=lambda: made.now)
    monkeypatch.setattr(standby_status, "time", clock)
    return made


@pytest.mark.parametrize("ahead_s", [0.0, 30.0, -30.0, 3600.0, -3600.0])
def test_drivers_that_live_are_heard_whatever_the_clock_says(world: World, ahead_s: float) -> None:
    world.ahead_s = ahead_s
    world.living = {"a": ACTIVE, "b": STANDBY}
    for driver, role in world.living.items():
        world.beat(driver, role)
    world.beat("ended", ENDED)
    found = world.drivers()
    assert [each.role for each in found] == [ACTIVE, STANDBY]
    assert max(each.age_s for each in found) < 1.0
    assert standby_warnings(found) == []


@pytest.mark.parametrize("ahead_s", [0.0, 30.0, -30.0, -3600.0])
def test_a_driver_that_died_is_silent_whatever_the_clock_says(world: World, ahead_s: float) -> None:
    world.ahead_s = ahead_s
    world.beat("a", ACTIVE)
    world.beat("b", STANDBY)
    world.now += 20.0
    began = world.now
    assert [each.role for each in world.drivers()] == [ACTIVE]
    assert "no standby has taken over" in standby_warnings(world.drivers())[0]
    world.living = {"b": ACTIVE}
    world.sleep(0.0)
    found = world.drivers()
    assert [each.role for each in found] == [ACTIVE]
    assert "no standby waits" in standby_warnings(found)[0]
    assert world.now - began < 10, "it does not listen for long"


def test_a_topic_with_too_few_partitions_is_named(world: World) -> None:
    few = {HEARTBEATS_TOPIC: TopicInfo(HEARTBEATS_TOPIC, "id", {0: 1}, False)}
    cluster: Any = None
    with pytest.raises(ProgressConflictError, match="has 1 partition, but needs 8"):
        standby_drivers(cluster, few, "flow", world.now, Deadline(60, "test"))
    assert standby_drivers(cluster, {}, "flow", world.now, Deadline(60, "test")) == []


def test_an_active_driver_counts_those_that_stand_by(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Heartbeat("flow", "own", ACTIVE, "host", 1, 1)
    cluster: Any = SimpleNamespace(close=lambda: None)
    standbys = Standbys(cluster, own, flow="flow")
    world.beat("dead", STANDBY)
    standbys.look()
    assert standbys.count is None, "it does not know who lives"
    for driver, role in (("own", ACTIVE), ("b", STANDBY), ("c", STANDBY), ("b", STANDBY), ("d", STANDBY), ("d", ENDED)):
        world.beat(driver, role)
    standbys.look()
    assert standbys.count == 2
    standbys.look()
    assert standbys.count == 0

    def refuses(*_: Any, **__: Any) -> Any:
        raise DeadlineExceededError("no answer")

    monkeypatch.setattr(heartbeats, "read_tail", refuses)
    with pytest.raises(DeadlineExceededError):
        standbys.look()
    assert standbys.count is None
    standbys.close()
