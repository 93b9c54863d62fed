"""One partition that a `LongPoll` follows: how far it has been read, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Followed:
    """One partition that is followed.

    Attributes:
        position: all committed records below this offset have been returned.
        leader_epoch: of the record before the position, or of a later leader whose log had it; -1: not known.
        last_stable_offset: of the last response; -1 before the first.
        answered_at: when its leader last answered without an error, on the monotonic clock; None: never.
        as_of_ms: the last response knew of everything that was committed before (epoch milliseconds). That is not when
            it was read: this process may have been stopped meanwhile, and the machine may have slept.
        known_at: up to when the last response knew what was committed, as of `passing_s`; None: there was none.
        paused: whether it is left out of requests.
    """

    topic: str
    partition: int
    position: int
    leader_epoch: int = -1
    last_stable_offset: int = -1
    answered_at: float | None = None
    known_at: float | None = None
    as_of_ms: int = 0
    paused: bool = False
    asked: bool = False  # a response is on its way, or has not been handed out
    attempt: int = 0
    not_before: float = 0.0
    unknown_since: float | None = None  # when a broker first answered that there is no such topic or partition

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"
