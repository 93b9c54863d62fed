"""What came of the requests of a `LongPoll`."""

from __future__ import annotations

from typing import Any, NamedTuple

from onceflow.client.followed import Followed
from onceflow.clock import clock_ms


class PollResult(NamedTuple):
    """The response to a request, or why there is none.

    Attributes:
        asked: the partitions in the request. asked_ms: when it was sent, epoch milliseconds.
        wait_ms: how long the broker may wait for records.
    """

    asked: list[Followed]
    asked_ms: int
    wait_ms: int
    response: Any
    error: BaseException | None

    def as_of_ms(self) -> int:
        """At least up to when the response knows what was committed, epoch milliseconds.

        A broker answers at any time after the request. Only if it has nothing to return it waits for as long as it may.
        """
        waited = not self.response.throttle_time_ms and not any(
            answer.error_code or answer.records for topic in self.response.responses for answer in topic.partitions
        )
        return min(clock_ms(), self.asked_ms + self.wait_ms) if waited else self.asked_ms


class Arrived:
    """A future for ``NetworkSelector.poll(future=...)``: done when any response has arrived."""

    is_done = False
