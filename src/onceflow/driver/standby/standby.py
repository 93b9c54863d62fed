"""A driver that waits until it is its turn, and is active from then on.

1. It says that it stands by, and reads what others have said before.
2. It waits until no other driver is active: `silence.py` decides. Meanwhile its session and its connections are warm.
3. It claims the flow: it writes that it is active. Of several standbys, the one whose claim is first in the topic wins:
   each reads up to its own claim, and withdraws it if another one was before it.
4. It returns, and `Takeover` fences. A claim protects nothing: it only spares needless take-overs.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.clock import clock_ms
from onceflow.driver.standby.door import Door, network
from onceflow.driver.standby.heartbeats import ensure_topic
from onceflow.driver.standby.process_lock import ProcessLock, remove_left
from onceflow.driver.standby.pulse import Pulse
from onceflow.driver.standby.standbys import Standbys
from onceflow.driver.standby.wait import Rehearsed, Wait
from onceflow.errors import FencedError
from onceflow.protocol.heartbeats import STANDBY, Heartbeat
from onceflow.protocol.names import Names


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

    def await_turn(
        self,
        deadline: Callable[[], Deadline],
        warm: Callable[[Deadline], None],
        rehearsal: Rehearsed | None = None,
        *,
        reads: str = "",
    ) -> None:
        """Wait until no other driver is active. This one is active then, and says so until it is closed.

        It waits for as long as it takes. Ctrl-C ends it at once.

        Args:
            deadline: makes one for the requests of a start.
            warm: connects to what a start needs; called again and again.
            rehearsal: begun if it has to wait.
            reads: the topic that this program reads first; "": not known.

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
            held = _Held(self._names, self._settings, self._options, self.driver, reads, deadline())
            # Heartbeats end with this object, also if nobody closes it.
            self._finalizer = weakref.finalize(self, held.close)
            Wait(cluster, self._names, self.driver, held.pulse, deadline, warm, rehearsal, reads=reads).run()
            held.standbys.start()
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

    @property
    def others(self) -> int | None:
        """How many other drivers stand by, seen every few seconds; None: not known."""
        return None if self._held is None else self._held.standbys.count

    def close(self) -> None:
        """This driver has ended: another one may take over at once."""
        self._finalizer()


class _Held:
    """By which others know that this driver lives: its lock, its door and its heartbeats."""

    def __init__(
        self,
        names: Names,
        settings: ClientSettings,
        options: StandbyOptions,
        driver: str,
        reads: str,
        deadline: Deadline,
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
            reads=reads,
        )
        self.pulse = Pulse(cluster, first, flow=flow)
        self.standbys = Standbys(Cluster(settings, refused_s=None), first, flow=flow)
        try:
            cluster.connect(deadline)
            self.pulse.say(STANDBY, deadline)
            self.pulse.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.pulse.close()
        self.standbys.close()
        self.door.close()
        self.lock.release()
