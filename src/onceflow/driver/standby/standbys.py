"""How many standbys an active driver hears: for its metrics only, nothing depends on it."""

from __future__ import annotations

import logging
import threading

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.driver.standby import heartbeats
from onceflow.logs import log_context
from onceflow.protocol.heartbeats import STANDBY, Heartbeat

log = logging.getLogger("onceflow")

#: How often the heartbeats since the last time are read, in seconds. A standby writes one each second.
EVERY_S = 5.0
_READ_S = 5.0


class Standbys:
    """Counts the standbys of a flow in a thread of its own: the one that writes heartbeats must never wait.

    Args:
        cluster: connections for this object alone.
        own: a heartbeat of this driver.

    Attributes:
        count: how many drivers have stood by at the last look; None: not known.
    """

    def __init__(self, cluster: Cluster, own: Heartbeat, *, flow: str) -> None:
        self.count: int | None = None
        self._cluster = cluster
        self._own = own
        self._position: int | None = None  # of the next heartbeat
        self._flow = flow
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"onceflow-standbys-{flow}")

    def start(self) -> None:
        """Begin to count."""
        self._thread.start()

    def close(self) -> None:
        """Count no longer."""
        self._over.set()
        self._cluster.close()

    def look(self) -> None:
        """Count those that were heard since the last look. The first one only finds out where to begin.

        Raises:
            OnceflowError: heartbeats cannot be read.
        """
        begin, self._position, self.count = self._position, None, None
        deadline = Deadline(_READ_S, "reading heartbeats")
        found, self._position, _ = heartbeats.read_tail(self._cluster, self._own.flow, deadline, first=begin)
        if begin is not None:
            roles = {each.driver: each.role for each, _ in found if each.driver != self._own.driver}
            self.count = sum(role == STANDBY for role in roles.values())

    def _run(self) -> None:
        log_context.add(flow=self._flow)
        while True:
            try:
                self.look()
            except Exception as problem:  # whatever it is, it may pass; until then, the number is not known
                log.debug("flow %s: standbys cannot be counted", self._flow, exc_info=problem)
            if self._over.wait(EVERY_S):
                return
