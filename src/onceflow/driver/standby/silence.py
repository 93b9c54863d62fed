"""Decides whether a standby takes over, from what it has observed. It knows neither sockets nor the time of day.

A driver is dead if that is certain (its lock is free, or its port refuses a connection), or if it has been silent for
``DEAD_AFTER_S`` while this process has read the topic of heartbeats all the time. All times are on the monotonic clock
of this process: clocks of different hosts are never compared.

Silence counts only as far as it was observed. If reads fail, or this process stands still, it counts from the next read
on: a broker that is down keeps both drivers from reading and writing, and nobody has died of that.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from onceflow.protocol.heartbeats import ACTIVE, Heartbeat

#: How often an active driver writes a heartbeat, in seconds.
BEAT_EVERY_S = 0.3
#: A driver that has been silent for so long is dead, in seconds.
DEAD_AFTER_S = 1.5
#: Between two answers that are this far apart, in seconds, nothing was observed. A broker without news answers sooner.
UNSEEN_S = 1.0


class Turn(enum.Enum):
    """Whether it is the turn of this driver."""

    WAITS = "waits"  # another driver is active
    TAKES_OVER = "takes over"  # there is none, or it is dead
    UNKNOWN = "unknown"  # the topic cannot be read, so silence means nothing


@dataclass(frozen=True)
class Decision:
    """What a standby does, and why.

    Args:
        active: the active driver that was heard last; None: there is none.
        why: for people.
    """

    turn: Turn
    active: Heartbeat | None
    why: str


@dataclass(frozen=True)
class _Known:
    """An active driver.

    Args:
        heard_at: when its last heartbeat was read.
        gone: why its process is known to have ended; "": it is not.
    """

    heartbeat: Heartbeat
    heard_at: float
    gone: str = ""


class Silence:
    """What a standby has observed of the other drivers of its flow.

    Args:
        driver: id of this one: its own heartbeats say nothing about others.
        now: monotonic seconds, as all times here.
        knows_past: whether everything was read that an active driver may have written before. If not, silence has to
            show that there is none.
    """

    def __init__(self, driver: str, now: float, *, knows_past: bool = True) -> None:
        self._driver = driver
        self._knows_past = knows_past
        self._known: dict[str, _Known] = {}
        self._read_until = self._answered_at = self._observed_since = now

    @property
    def actives(self) -> list[Heartbeat]:
        """The drivers that run the flow as far as is known, dead ones included."""
        return [each.heartbeat for each in self._known.values()]

    def heard(self, heartbeat: Heartbeat, now: float) -> None:
        """A heartbeat was read. It also takes back that the process has ended: it was another one that was gone."""
        if heartbeat.driver == self._driver:
            return
        self._known.pop(heartbeat.driver, None)  # the last one that was heard is the last one here
        if heartbeat.role == ACTIVE:
            self._known[heartbeat.driver] = _Known(heartbeat, now)

    def read(self, until: float, answered_at: float) -> None:
        """The topic was read: all heartbeats that were written up to a time are known.

        Args:
            answered_at: when the broker has answered last. It may know less than what was written up to then.
        """
        if answered_at - self._answered_at > UNSEEN_S:
            self._observed_since = answered_at
        self._answered_at = max(self._answered_at, answered_at)
        self._read_until = max(self._read_until, until)

    def unseen(self, now: float) -> None:
        """Nothing was observed up to now."""
        self._observed_since = self._read_until = self._answered_at = now

    def gone(self, driver: str, why: str) -> None:
        """The process of a driver has ended for certain."""
        if (known := self._known.get(driver)) is not None:
            self._known[driver] = replace(known, gone=why)

    def decide(self, now: float) -> Decision:
        """Whether this driver takes over now."""
        if not self._known:
            seen = self._knows_past or self._read_until - self._observed_since >= DEAD_AFTER_S
            return Decision(Turn.TAKES_OVER if seen else Turn.WAITS, None, "no driver is active")
        alive = [each for each in self._known.values() if not self._is_dead(each)]
        if alive:  # those that are dead were active before these; if one of them speaks again, it is known again
            self._known = {each.heartbeat.driver: each for each in alive}
        last = (alive or list(self._known.values()))[-1]
        who = last.heartbeat.process
        if not alive:
            return Decision(Turn.TAKES_OVER, last.heartbeat, f"{who} {self._why(last)}")
        if now - self._answered_at > DEAD_AFTER_S:
            return Decision(Turn.UNKNOWN, last.heartbeat, f"heartbeats of {who} cannot be read")
        return Decision(Turn.WAITS, last.heartbeat, f"{who} is active")

    def _silent_s(self, known: _Known) -> float:
        """For how long a driver was observed to be silent, in seconds."""
        return self._read_until - max(known.heard_at, self._observed_since)

    def _is_dead(self, known: _Known) -> bool:
        return bool(known.gone) or self._silent_s(known) >= DEAD_AFTER_S

    def _why(self, known: _Known) -> str:
        return known.gone or f"was silent for {self._silent_s(known):.1f} s"
