"""One wait of a standby: it reads heartbeats, looks at the processes of other drivers, decides, and claims the flow."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.driver.standby.door import Caller, network, reaches
from onceflow.driver.standby.heartbeats import LOST, Follower, ensure_topic, read_tail
from onceflow.driver.standby.process_lock import is_free
from onceflow.driver.standby.pulse import Pulse
from onceflow.driver.standby.silence import DEAD_AFTER_S, Decision, Silence, Turn
from onceflow.errors import OnceflowError, PermissionDeniedError
from onceflow.protocol.heartbeats import ACTIVE, STANDBY, Heartbeat
from onceflow.protocol.names import Names

log = logging.getLogger("onceflow")

_LOOK_S = 0.025  # how often locks and doors are looked at
_CLAIM_S = 2.0
_KEEP_WARM_S = 60.0


class Rehearsed(Protocol):
    """A rehearsal of what follows in a start."""

    def begin(self) -> None:
        """Begin, unless it has begun."""
        ...

    def end(self) -> None:
        """Begin nothing more."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether all is done, or will not be."""
        ...


class Wait:
    """One wait. See `Standby.await_turn`."""

    def __init__(
        self,
        cluster: Cluster,
        names: Names,
        driver: str,
        pulse: Pulse,
        deadline: Callable[[], Deadline],
        warm: Callable[[Deadline], None],
        rehearsal: Rehearsed | None,
        *,
        reads: str = "",
    ) -> None:
        self._reads = reads
        self._rehearsal = rehearsal
        self._cluster = cluster
        self._names = names
        self._driver = driver
        self._pulse = pulse
        self._deadline = deadline
        self._warm = warm
        self._warmed_at = float("-inf")
        self._is_warm = False
        self._callers: dict[str, Caller] = {}
        self._told: tuple[Turn, str] | None = None
        now = time.monotonic()
        found, end, whole = read_tail(cluster, names.progress_key, deadline())
        knows_past = whole or any(each.role != STANDBY for each, _ in found)
        self._silence = Silence(driver, now, knows_past=knows_past)
        for each, _ in found:
            self._silence.heard(each, now)
        self._follower = Follower(cluster, names.progress_key, end, deadline())

    def run(self) -> None:
        """Returns when this driver has claimed the flow, and nobody before it."""
        try:
            while not self.step():
                pass
        finally:
            if self._rehearsal is not None:
                self._rehearsal.end()
            for caller in self._callers.values():
                caller.close()

    def step(self) -> bool:
        """Look once, and claim the flow if it is this driver's turn. Returns whether it has the flow."""
        decision = self._look()
        self._tell(decision)
        if decision.turn is Turn.TAKES_OVER and self._claims():
            _say(self._names.flow, f"takes over: {decision.why}")
            return True
        self._keep_warm()
        return False

    def _look(self) -> Decision:
        """Read what has come, look at the other drivers' processes, and decide."""
        try:
            for heartbeat in self._follower.poll(_LOOK_S):
                self._silence.heard(heartbeat, time.monotonic())
            self._silence.read(self._follower.read_until, self._follower.answered_at)
        except LOST as problem:
            log.warning("flow %s: heartbeats were lost, and are read anew: %s", self._names.flow, problem.what)
            self._follow_anew()
        actives = self._silence.actives
        for driver in self._callers.keys() - {each.driver for each in actives}:
            self._callers.pop(driver).close()
        for each in actives:
            if why := self._gone(each):
                self._silence.gone(each.driver, why)
        return self._silence.decide(time.monotonic())

    def _follow_anew(self) -> None:
        deadline = self._deadline()
        ensure_topic(self._cluster, deadline)
        _, end, _ = read_tail(self._cluster, self._names.progress_key, deadline)
        self._follower = Follower(self._cluster, self._names.progress_key, end, deadline)
        self._silence.unseen(time.monotonic())

    def _gone(self, other: Heartbeat) -> str:
        """Why the process of another driver has ended for certain; "": it is not certain."""
        if is_free(other.driver):
            return "has ended: its lock is free"
        caller = self._callers.get(other.driver)
        if caller is None and other.door and reaches(other.door, other.network):
            caller = Caller(other.door, other.driver, same_network=other.network == network())
            self._callers[other.driver] = caller
        if caller is not None and caller.is_gone(time.monotonic()):
            return "has ended: its port refuses connections"
        return ""

    def _claims(self) -> bool:
        """Claim the flow. False: another driver was first, or the one that seemed dead has spoken meanwhile."""
        deadline = Deadline(_CLAIM_S, f"claiming flow {self._names.flow}")
        try:
            offset = self._pulse.say(ACTIVE, deadline)
            while self._follower.position <= offset:
                if deadline.expired:
                    raise deadline.error("its claim could not be read")
                self._look()
        except PermissionDeniedError:
            raise
        except OnceflowError as problem:
            log.debug("flow %s: no claim: %s", self._names.flow, problem)
        else:
            if self._silence.decide(time.monotonic()).turn is Turn.TAKES_OVER and not deadline.expired:
                return True
        with suppress(OnceflowError):
            self._pulse.say(STANDBY, Deadline(_CLAIM_S, f"withdrawing the claim to flow {self._names.flow}"))
        return False

    def _keep_warm(self) -> None:
        if not self._is_warm and self._warmed_at > 0 and (self._rehearsal is None or self._rehearsal.is_over):
            self._is_warm = True
            self._pulse.warmed()
        now = time.monotonic()
        if now - self._warmed_at < _KEEP_WARM_S:
            return
        self._warmed_at = now
        if self._rehearsal is not None:
            self._rehearsal.begin()
        try:
            self._warm(Deadline(DEAD_AFTER_S, f"looking at the cluster of flow {self._names.flow}"))
        except OnceflowError as problem:
            log.debug("flow %s: not warm: %s", self._names.flow, problem)

    def _tell(self, decision: Decision) -> None:
        """Say what is waited for, when it changes."""
        told = decision.turn, decision.why
        if told == self._told or decision.turn is Turn.TAKES_OVER:
            return
        self._told = told
        active = decision.active
        if active is not None and active.reads and self._reads and active.reads != self._reads:
            log.warning(
                "flow %s: stands by, but this program reads topic %s first, and that of the active driver, %s, reads "
                "%s: is it the same program?",
                *(self._names.flow, self._reads, active.process, active.reads),
            )
        if decision.turn is Turn.UNKNOWN:
            log.warning("flow %s: stands by, but %s", self._names.flow, decision.why)
        elif decision.active is not None:
            _say(self._names.flow, f"stands by: {decision.why}")


def _say(flow: str, text: str) -> None:
    """Tell people: in the log, or if nobody would see it there, on stderr as `serve` does."""
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info("flow %s %s", flow, text)
    else:
        print(f"onceflow: flow {flow} {text}", file=sys.stderr, flush=True)
