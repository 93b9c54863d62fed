"""Several standbys of one flow, on one clock and one log that are made up: who takes over, and when."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.client.deadline import Deadline
from onceflow.driver.standby import wait as waits
from onceflow.driver.standby.silence import BEAT_EVERY_S, DEAD_AFTER_S
from onceflow.driver.standby.wait import Wait
from onceflow.errors import DeadlineExceededError, UnknownTopicError
from onceflow.protocol.heartbeats import ACTIVE, ENDED, STANDBY, Heartbeat
from onceflow.protocol.names import Names

LOOK_S = 0.025


@dataclass
class World:
    """A clock, the log of heartbeats, and whose processes have ended.

    Attributes:
        meanwhile: called while somebody reads: others may act then.
        readable: whether reads are answered.
        lost: the next read finds that the topic is gone.
    """

    now: float = 100.0
    log: list[Heartbeat] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    meanwhile: Callable[[], None] = lambda: None
    readable: bool = True
    lost: bool = False

    def beat(self, driver: str, role: str = ACTIVE) -> int:
        self.log.append(Heartbeat("flow", driver, role, "host", 1, 1))
        return len(self.log) - 1


class Follower:
    def __init__(self, world: World, position: int) -> None:
        self.world, self.position = world, position
        self.read_until = self.answered_at = world.now

    def poll(self, timeout_s: float) -> Iterator[Heartbeat]:
        self.world.meanwhile()
        self.world.now += timeout_s
        if self.world.lost:
            self.world.lost = False
            raise UnknownTopicError("it is gone")
        if self.world.readable:
            self.read_until = self.answered_at = self.world.now
            new = self.world.log[self.position :]
            self.position = len(self.world.log)
            yield from new


@dataclass
class Pulse:
    world: World
    driver: str
    role: str = STANDBY
    warm: bool = False

    def say(self, role: str, deadline: Deadline) -> int:
        if not self.world.readable:
            raise DeadlineExceededError("no broker answers")
        self.role = role
        return self.world.beat(self.driver, role)

    def warmed(self) -> None:
        self.warm = True


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return made(monkeypatch)


def made(patch: pytest.MonkeyPatch) -> World:
    world = World()
    patch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: world.now))
    patch.setattr(waits, "read_tail", lambda *_: ([(each, 0) for each in world.log], len(world.log), True))
    patch.setattr(waits, "ensure_topic", lambda *_: None)
    patch.setattr(waits, "Follower", lambda _cluster, _flow, position, _deadline: Follower(world, position))
    patch.setattr(waits, "is_free", lambda driver: driver in world.gone)
    patch.setattr(waits, "Deadline", lambda seconds, what: Deadline(seconds, what, clock=lambda: world.now))
    return world


def standby(world: World, driver: str, rehearsal: Any = None, reads: str = "") -> tuple[Wait, Pulse]:
    pulse = Pulse(world, driver)
    pulse.say(STANDBY, Deadline(1, "test"))
    found: Any = pulse
    wait = Wait(
        None,  # type: ignore[arg-type]
        Names("flow"),
        driver,
        found,
        lambda: Deadline(1, "test"),
        lambda deadline: None,
        rehearsal,
        reads=reads,
    )
    return wait, pulse


def steps_until(world: World, waiting: dict[str, Wait], seconds: float, active: str | None = None) -> str | None:
    """Let all standbys look in turn, and a driver beat. Returns who takes over; None: nobody in this time."""
    end, beat_at = world.now + seconds, world.now
    while world.now < end:
        if active is not None and world.now >= beat_at:
            world.beat(active)
            beat_at += BEAT_EVERY_S
        for driver, wait in waiting.items():
            if wait.step():
                return driver
    return None


def test_the_first_one_takes_over_at_once(world: World) -> None:
    wait, pulse = standby(world, "a")
    assert wait.step()
    assert pulse.role == ACTIVE


@pytest.mark.parametrize(
    "active, own, warns", [("a", "b", True), ("a", "a", False), ("", "b", False), ("a", "", False)]
)
def test_a_standby_that_reads_another_topic_says_so(
    world: World, caplog: pytest.LogCaptureFixture, active: str, own: str, warns: bool
) -> None:
    """A wrong deployment of the second copy would show only when it takes over."""
    world.log.append(Heartbeat("flow", "active", ACTIVE, "host", 7, 1, reads=active))
    wait, _ = standby(world, "b", reads=own)
    for _ in range(3):
        assert not wait.step()
    said = [each for each in caplog.messages if "is it the same program?" in each]
    assert len(said) == warns
    assert all("reads topic b first" in each and "process 7 on host, reads a" in each for each in said)


def test_a_standby_waits_as_long_as_the_other_one_beats(world: World) -> None:
    world.beat("active")
    wait, pulse = standby(world, "a")
    assert steps_until(world, {"a": wait}, 60, active="active") is None
    assert pulse.role == STANDBY
    killed_at = world.now
    assert steps_until(world, {"a": wait}, 60) == "a"
    assert DEAD_AFTER_S - BEAT_EVERY_S < world.now - killed_at <= DEAD_AFTER_S + 0.2


@pytest.mark.parametrize("how", ["its lock is free", "it says that it has ended"])
def test_a_driver_that_has_ended_is_followed_within_two_looks(world: World, how: str) -> None:
    world.beat("active")
    wait, _ = standby(world, "a")
    assert steps_until(world, {"a": wait}, 1, active="active") is None
    if how == "its lock is free":
        world.gone.add("active")
    else:
        world.beat("active", ENDED)
    assert steps_until(world, {"a": wait}, 3 * LOOK_S) == "a"


def test_of_two_standbys_one_takes_over_and_then_the_other(world: World) -> None:
    world.beat("active")
    waiting = {name: standby(world, name)[0] for name in ("a", "b")}
    assert steps_until(world, waiting, 5, active="active") is None
    world.gone.add("active")
    first = steps_until(world, waiting, 1)
    assert first in waiting
    del waiting[first]
    assert steps_until(world, waiting, 30, active=first) is None
    world.gone.add(first)
    assert steps_until(world, waiting, 1) in waiting


def test_a_claim_that_was_not_the_first_is_withdrawn(world: World) -> None:
    wait, pulse = standby(world, "a")

    def other() -> None:
        world.meanwhile = lambda: None
        world.log.insert(len(world.log) - 1, Heartbeat("flow", "b", ACTIVE, "host", 1, 1))

    def when_claimed() -> None:
        if pulse.role == ACTIVE:
            other()

    world.meanwhile = when_claimed
    assert not wait.step()
    assert pulse.role == STANDBY


def test_a_broker_that_is_away_kills_nobody(world: World) -> None:
    world.beat("active")
    wait, _ = standby(world, "a")
    steps_until(world, {"a": wait}, 1, active="active")
    world.readable = False
    assert steps_until(world, {"a": wait}, 30) is None
    world.readable = True
    assert steps_until(world, {"a": wait}, 60, active="active") is None
    world.gone.add("active")
    world.readable = False
    assert steps_until(world, {"a": wait}, 10) is None, "it cannot claim the flow"
    world.readable = True
    assert steps_until(world, {"a": wait}, 5) == "a"


def test_a_topic_that_is_gone_is_followed_anew(world: World) -> None:
    world.beat("active")
    wait, _ = standby(world, "a")
    assert steps_until(world, {"a": wait}, 1.2, active="active") is None
    world.lost = True
    assert steps_until(world, {"a": wait}, 1.2) is None
    assert steps_until(world, {"a": wait}, 1.2) == "a"


def test_a_standby_is_warm_when_its_rehearsal_is_over(world: World) -> None:
    class Rehearsal:
        has_begun = is_over = False

        def begin(self) -> None:
            self.has_begun = True

        def end(self) -> None:
            self.is_over = True

    rehearsal = Rehearsal()
    world.beat("active")
    wait, pulse = standby(world, "a", rehearsal)
    assert steps_until(world, {"a": wait}, 1, active="active") is None
    assert rehearsal.has_begun
    assert not pulse.warm
    rehearsal.is_over = True
    assert steps_until(world, {"a": wait}, 1, active="active") is None
    assert pulse.warm


@given(st.integers(0, 10_000))
def test_whatever_the_order_one_takes_over(seed: int) -> None:
    """Three standbys act while others read, also in the middle of a claim. One of them takes over, and not two."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        world = made(patch)
        world.beat("active")
        waiting = {name: standby(world, name)[0] for name in "abc"}
        acting: set[str] = set()
        winners: list[str] = []

        def act(name: str) -> None:
            if name in acting or name in winners:
                return
            acting.add(name)
            if waiting[name].step():
                winners.append(name)
            acting.discard(name)

        def meanwhile() -> None:
            if winners:
                world.beat(winners[0])
            if rng.random() < 0.5:
                act(rng.choice("abc"))

        world.gone.add("active")
        world.meanwhile = meanwhile
        for _ in range(60):
            act(rng.choice("abc"))
        assert len(winners) == 1
