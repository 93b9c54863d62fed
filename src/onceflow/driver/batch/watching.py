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
from onceflow.client.outage import Outage
from onceflow.client.settings import ClientSettings
from onceflow.errors import BrokerUnreachableError, DeadlineExceededError, OnceflowError
from onceflow.logs import log_context

log = logging.getLogger("onceflow")

#: In seconds: how often it checks, and how long a transaction may be open before a warning.
INTERVAL_S = 20.0
WARN_AFTER_S = 60.0
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
        self._outage = Outage(log, f"flow {flow}", "brokers answer again")
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"onceflow-watch-{flow}")
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. A check that is running is waited for only briefly, because a broker may not answer."""
        self._ending.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        log_context.add(flow=self._flow)  # the thread ends with this
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
        if not self._ending.is_set():
            silent_s = time.monotonic() - self._answered_at
            self._outage.warn(
                f"no broker of {self._settings.bootstrap_servers} has answered for {silent_s:.0f} s; nothing is lost, "
                f"it continues when one answers ({error.detail})"
            )

    def _answered(self) -> None:
        self._outage.end()
        self._answered_at = time.monotonic()
