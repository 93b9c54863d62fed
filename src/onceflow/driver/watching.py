"""Warnings of what prevents a running flow from reading: brokers that do not answer, and transactions of other
producers that stay open on its sources.

Spark runs no batch while there is nothing to read, so the sink cannot notice this. A thread checks regularly, over a
connection of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from onceflow.client.brokers import StableOffsets, held_back
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.errors import BrokerUnreachableError, DeadlineExceededError, OnceflowError

log = logging.getLogger("onceflow")

#: In seconds: how often it checks, how long a transaction may be open before a warning, and the time between two
#: warnings that no broker answers.
INTERVAL_S = 20.0
WARN_AFTER_S = 60.0
WARN_AGAIN_S = 60.0
_LOOK_S = 10.0
_END_S = 2.0


class Watch:
    """Runs from its creation to ``stop``.

    Args:
        partitions: of the sources. over: whether the flow has ended by itself.
    """

    def __init__(
        self,
        settings: ClientSettings,
        partitions: Mapping[str, Sequence[int]],
        *,
        flow: str,
        over: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._partitions = partitions
        self._flow = flow
        self._over = over
        self._answered_at = time.monotonic()
        self._warned_at: float | None = None  # that no broker answers; None: one does
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"onceflow-watch-{flow}")
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. A check that is running is waited for only briefly, because a broker may not answer."""
        self._ending.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        stable = StableOffsets(WARN_AFTER_S)
        cluster: Cluster | None = None
        try:
            while not self._ending.wait(INTERVAL_S) and not self._over():
                try:
                    cluster = cluster or Cluster(self._settings, refused_s=None)
                    deadline = Deadline(_LOOK_S, f"looking at the sources of flow {self._flow}")
                    for warning in held_back(cluster, stable, self._partitions, deadline):
                        log.warning("flow %s: %s", self._flow, warning)
                except (BrokerUnreachableError, DeadlineExceededError) as error:
                    self._unanswered(error)
                    continue
                except OnceflowError as error:
                    log.debug("flow %s: could not look at its sources: %s", self._flow, error)
                self._answered()
        finally:
            if cluster is not None:
                cluster.close()

    def _unanswered(self, error: OnceflowError) -> None:
        """No broker has answered: log it, but not at every check."""
        now = time.monotonic()
        if self._ending.is_set() or (self._warned_at is not None and now - self._warned_at < WARN_AGAIN_S):
            return
        self._warned_at = now
        log.warning(
            "flow %s: no broker of %s has answered for %.0f s; nothing is lost, it continues when one answers (%s)",
            self._flow,
            self._settings.bootstrap_servers,
            now - self._answered_at,
            error.detail,
        )

    def _answered(self) -> None:
        if self._warned_at is not None:
            log.warning("flow %s: brokers answer again", self._flow)
        self._warned_at, self._answered_at = None, time.monotonic()
