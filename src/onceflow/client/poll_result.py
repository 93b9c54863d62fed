"""What came of the requests of a `LongPoll`."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from kafka.errors import RequestTimedOutError

from onceflow.client.followed import Followed
from onceflow.clock import clock_ms

REQUEST_TIMEOUT_MS = 30_000


class PollResult(NamedTuple):
    """The response to a request, or why there is none.

    Attributes:
        asked: the partitions in the request.
        asked_ms, asked_at: when it was sent, in epoch milliseconds and on the monotonic clock.
        wait_ms: how long the broker may wait for records.
    """

    asked: list[Followed]
    asked_ms: int
    asked_at: float
    wait_ms: int
    response: Any
    error: BaseException | None

    def as_of(self) -> tuple[int, float]:
        """At least up to when the response knows what was committed: epoch milliseconds, and on the monotonic clock.

        A broker answers at any time after the request. Only if it has nothing to return it waits for as long as it may.
        """
        waited = not self.response.throttle_time_ms and not any(
            answer.error_code or answer.records for topic in self.response.responses for answer in topic.partitions
        )
        wait_ms = self.wait_ms if waited else 0
        return min(clock_ms(), self.asked_ms + wait_ms), min(time.monotonic(), self.asked_at + wait_ms / 1000)

    def was_not_read(self, away_s: float) -> bool:
        """Whether the request has timed out while nobody read what the broker may have answered.

        Args:
            away_s: for how long the caller has not polled before. kafka-python reads a part of what has come, and then
                looks at the time.
        """
        return isinstance(self.error, RequestTimedOutError) and away_s >= REQUEST_TIMEOUT_MS / 2000


class Arrived:
    """A future for ``NetworkSelector.poll(future=...)``: done when any response has arrived."""

    is_done = False
