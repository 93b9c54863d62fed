"""A driver that waits until it is its turn, and is active from then on.

1. It says that it stands by, and reads what others have said before.
2. It waits until no other driver is active: `silence.py` decides. Meanwhile its session and its connections are warm.
3. It claims the flow: it writes that it is active. Of several standbys, the one whose claim is first in the topic wins:
   each reads up to its own claim, and withdraws it if another one was before it.
4. It returns, and `Takeover` fences. A claim protects nothing: it only spares needless take-overs.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.clock import clock_ms
from onceflow.driver.standby.door import Caller, Door, network, reaches
from onceflow.driver.standby.heartbeats import LOST, Follower, ensure_topic, read_tail
from onceflow.driver.standby.process_lock import ProcessLock, is_free, remove_left
from onceflow.driver.standby.pulse import Pulse
from onceflow.driver.standby.silence import DEAD_AFTER_S, Decision, Silence, Turn
from onceflow.errors import FencedError, OnceflowError, PermissionDeniedError
from onceflow.protocol.heartbeats import ACTIVE, STANDBY, Heartbeat
from onceflow.protocol.names import Names

log = logging.getLogger("onceflow")

_LOOK_S = 0.025  # how often locks and doors are looked at
_CLAIM_S = 2.0
_KEEP_WARM_S = 60.0


@dataclass(frozen=True)
class StandbyOptions:
    """What ``Flow`` was given.

    Args:
        host: address on which this driver lets others know that its process lives.
    """

    host: str


class Standby:
    """This driver, as one of several that run the same flow, one at a time.

    Args:
        refused_s: how long the first connection waits while all bootstrap servers refuse, in seconds.
    """

    def __init__(self, names: Names, settings: ClientSettings, options: StandbyOptions, *, refused_s: float) -> None:
        self._names = names
        self._settings = settings
        self._options = options
        self._refused_s = refused_s
        self.driver = uuid4().hex
        self._held: _Held | None = None
        self._finalizer: Callable[[], object] = lambda: None

    def await_turn(self, deadline: Callable[[], Deadline], warm: Callable[[Deadline], None]) -> None:
        """Wait until no other driver is active. This one is active then, and says so until it is closed.

        It waits for as long as it takes. Ctrl-C ends it at once.

        Args:
            deadline: makes one for the requests of a start.
            warm: connects to what a start needs; called again and again.

        Raises:
            OptionError: this machine has no such address as was given.
            PermissionDeniedError: heartbeats may not be written or read.
            BrokerUnreachableError: no broker answers.
        """
        if self._held is not None:
            return
        cluster = Cluster(self._settings, refused_s=self._refused_s)
        try:
            ensure_topic(cluster, deadline())
            held = _Held(self._names, self._settings, self._options, self.driver, deadline())
            # Heartbeats end with this object, also if nobody closes it.
            self._finalizer = weakref.finalize(self, held.close)
            _Wait(cluster, self._names, self.driver, held.pulse, deadline, warm).run()
            self._held = held
        except BaseException:
            self._finalizer()
            raise
        finally:
            cluster.close()

    def when_taken_over(self, call: Callable[[FencedError], None]) -> None:
        """Call this, in any thread, if another driver is found to be active in place of this one."""
        if self._held is not None:
            self._held.pulse.when_taken_over(call)

    def close(self) -> None:
        """This driver has ended: another one may take over at once."""
        self._finalizer()


class _Held:
    """By which others know that this driver lives: its lock, its door and its heartbeats."""

    def __init__(
        self, names: Names, settings: ClientSettings, options: StandbyOptions, driver: str, deadline: Deadline
    ) -> None:
        flow = names.flow
        self.door = Door(options.host, driver, flow=flow)
        remove_left()
        self.lock = ProcessLock(driver)
        cluster = Cluster(settings, refused_s=None)
        first = Heartbeat(
            names.progress_key,
            driver,
            STANDBY,
            socket.gethostname(),
            os.getpid(),
            clock_ms(),
            network(),
            self.door.address,
        )
        self.pulse = Pulse(cluster, first, flow=flow)
        try:
            cluster.connect(deadline)
            self.pulse.say(STANDBY, deadline)
            self.pulse.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.pulse.close()
        self.door.close()
        self.lock.release()


class _Wait:
    """One wait. See `Standby.await_turn`."""

    def __init__(
        self,
        cluster: Cluster,
        names: Names,
        driver: str,
        pulse: Pulse,
        deadline: Callable[[], Deadline],
        warm: Callable[[Deadline], None],
    ) -> None:
        self._cluster = cluster
        self._names = names
        self._driver = driver
        self._pulse = pulse
        self._deadline = deadline
        self._warm = warm
        self._warmed_at = float("-inf")
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
            while True:
                decision = self._look()
                self._tell(decision)
                if decision.turn is Turn.TAKES_OVER and self._claims():
                    _say(self._names.flow, f"takes over: {decision.why}")
                    return
                self._keep_warm()
        finally:
            for caller in self._callers.values():
                caller.close()

    def _look(self) -> Decision:
        """Read what has come, look at the other drivers' processes, and decide."""
        try:
            for heartbeat in self._follower.poll(_LOOK_S):
                self._silence.heard(heartbeat, time.monotonic())
            self._silence.read(self._follower.read_until)
        except LOST as problem:
            log.warning("flow %s: heartbeats were lost, and are read anew: %s", self._names.flow, problem.what)
            self._follow_anew()
        for each in self._silence.actives:
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
        now = time.monotonic()
        if now - self._warmed_at < _KEEP_WARM_S:
            return
        self._warmed_at = now
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
