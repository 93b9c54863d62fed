"""The heartbeats of one driver, written in a thread of its own.

A driver that was silent for so long that its standby may have taken over looks before it speaks again: it was stopped,
or was cut off from the brokers. If another driver is active by now, this one ends. Kafka has fenced it anyway, but it
would notice only with its next batch.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.clock import clock_ms
from onceflow.driver.standby import heartbeats
from onceflow.driver.standby.silence import BEAT_EVERY_S, DEAD_AFTER_S
from onceflow.errors import FencedError, OnceflowError, UnknownTopicError
from onceflow.logs import log_context
from onceflow.protocol.heartbeats import ACTIVE, ENDED, Heartbeat

log = logging.getLogger("onceflow")

#: How often a standby says that it is there, in seconds: for people only.
STANDBY_EVERY_S = 1.0
_WRITE_S, _LAST_S = 1.0, 1.0
_WARN_EVERY_S = 60.0


class Pulse:
    """Writes what this driver is, again and again, until it is closed.

    Args:
        cluster: connections for this object alone.
        first: its first heartbeat.
    """

    def __init__(self, cluster: Cluster, first: Heartbeat, *, flow: str) -> None:
        self._cluster = cluster
        self._flow = flow
        self._now = first
        self._lock = threading.Lock()
        self._wakes = threading.Event()
        self._over = False
        self._written_at = 0.0
        self._offset = -1
        self._warned_at = float("-inf")
        self._taken_over: FencedError | None = None
        self._calls: list[Callable[[FencedError], None]] = []
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"onceflow-heartbeats-{flow}")

    def start(self) -> None:
        """Begin to repeat what was written."""
        self._thread.start()

    def say(self, role: str, deadline: Deadline) -> int:
        """Write a heartbeat with this role now, and repeat it from now on. Returns its offset.

        Raises:
            OnceflowError: it was not acknowledged.
        """
        with self._lock:
            self._now = replace(self._now, role=role, since_ms=clock_ms())
            offset = self._write(deadline)
        self._wakes.set()
        return offset

    def warmed(self) -> None:
        """Say with the next heartbeats that this driver is warm."""
        with self._lock:
            self._now = replace(self._now, warm=True)

    def when_taken_over(self, call: Callable[[FencedError], None]) -> None:
        """Call this, in any thread, when another driver is found to be active."""
        with self._lock:
            self._calls.append(call)
            found = self._taken_over
        if found is not None:
            call(found)

    def close(self) -> None:
        """Say that this driver has ended, if the brokers answer soon. Only the first call has an effect."""
        with self._lock:
            was_over, self._over = self._over, True
            if not was_over:
                self._last_words()
        self._wakes.set()
        self._cluster.close()

    def _last_words(self) -> None:
        self._now = replace(self._now, role=ENDED, since_ms=clock_ms())
        with contextlib.suppress(OnceflowError, RuntimeError):
            self._write(Deadline(_LAST_S, "saying that this driver has ended"))

    def _write(self, deadline: Deadline) -> int:
        self._offset = heartbeats.write(self._cluster, self._now, deadline)
        self._written_at = time.monotonic()
        return self._offset

    def _run(self) -> None:
        log_context.add(flow=self._flow)
        while True:
            every_s = BEAT_EVERY_S if self._now.role == ACTIVE else STANDBY_EVERY_S
            if self._wakes.wait(max(0.0, self._written_at + every_s - time.monotonic())):
                self._wakes.clear()
            with self._lock:
                if self._over:
                    return
                found = self._beat()
            if found is not None:
                for call in self._calls:
                    call(found)
                return

    def _beat(self) -> FencedError | None:
        """Write a heartbeat if it is due. What goes wrong may pass. Returns whether another driver is active."""
        now = time.monotonic()
        every_s = BEAT_EVERY_S if self._now.role == ACTIVE else STANDBY_EVERY_S
        if now - self._written_at < every_s:
            return None
        deadline = Deadline(_WRITE_S, "writing a heartbeat")
        try:
            if self._now.role == ACTIVE and now - self._written_at > DEAD_AFTER_S:
                other = self._other(deadline)
                if other is not None:
                    return self._ends(other, now - self._written_at)
            self._write(deadline)
        except Exception as problem:  # whatever it is: a thread that ends would be taken for a driver that has died
            log.debug("flow %s: no heartbeat", self._flow, exc_info=problem)
            if isinstance(problem, UnknownTopicError):  # somebody has deleted it
                with contextlib.suppress(OnceflowError):
                    heartbeats.ensure_topic(self._cluster, Deadline(_WRITE_S, "creating the topic of heartbeats"))
            if self._now.role == ACTIVE and now - self._warned_at > _WARN_EVERY_S:
                self._warned_at = now
                log.warning(
                    "flow %s: heartbeats cannot be written, so a standby may take over: %s", self._flow, problem
                )
            time.sleep(BEAT_EVERY_S / 3)
        return None

    def _other(self, deadline: Deadline) -> Heartbeat | None:
        """A driver that is active since this one was heard last."""
        found, _, _ = heartbeats.read_tail(self._cluster, self._now.flow, deadline, first=self._offset + 1)
        last = {each.driver: each for each, _ in found if each.driver != self._now.driver}
        return next((each for each in last.values() if each.role == ACTIVE), None)

    def _ends(self, other: Heartbeat, silent_s: float) -> FencedError:
        self._over = True
        self._last_words()
        self._taken_over = FencedError(
            f"The standby of flow {self._flow!r} has taken over while this driver was silent",
            flow=self._flow,
            detail=f"no heartbeat for {silent_s:.1f} s: this process was stopped, or was cut off from the brokers; "
            f"{other.process} is active now",
            next_step="start this driver again, as its supervisor does: it becomes the standby",
        )
        return self._taken_over
