"""Answers that last: how many there are at once, and what each of them holds until its end."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.responses import StreamingResponse


class Lease:
    """One of the streams that a server may have at once.

    It is taken before anything is waited for: otherwise many requests that come together would all find room. It ends
    with the answer, also if that is never begun, or if nobody keeps the lease any more.

    Args:
        ended: is called when it has ended.
    """

    def __init__(self, ended: Callable[[], object]) -> None:
        self._ends = [ended]
        self._finalizer = weakref.finalize(self, _end, self._ends)
        self._finalizer.atexit = False

    def at_end(self, call: Callable[[], object]) -> None:
        """Call this when the stream ends. It must not refer to the lease."""
        self._ends.append(call)

    def close(self) -> None:
        """The stream has ended. Later calls do nothing."""
        self._finalizer()


def _end(calls: list[Callable[[], object]]) -> None:
    for call in reversed(calls):
        call()


class LeasedStream(StreamingResponse):
    """A stream whose lease ends with it, however it ends."""

    def __init__(self, lease: Lease, content: AsyncIterator[bytes], headers: Mapping[str, str], media: str) -> None:
        super().__init__(content, 200, headers, media)
        self._lease = lease

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._lease.close()
