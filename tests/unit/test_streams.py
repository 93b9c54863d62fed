"""The limit of streams of the query server: it holds for requests that come together, and each stream ends once."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from onceflow.errors import BrokerUnreachableError
from onceflow.server import changes, ranges
from onceflow.server.options import Limits
from onceflow.server.problems import Problem
from onceflow.server.service import Service

SERVED: Any = SimpleNamespace(topic="t", share=SimpleNamespace(topic_id="id"))


class SlowTail:
    """It takes a while to find the topic."""

    open = 0
    fails = False

    def __init__(self, *_: Any) -> None:
        time.sleep(0.1)
        if SlowTail.fails:
            raise BrokerUnreachableError("no broker", next_step="wait")
        SlowTail.open += 1

    def read(self) -> list[Any]:
        time.sleep(0.01)
        return []

    def position(self) -> str:
        return "0"

    def close(self) -> None:
        SlowTail.open -= 1


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(changes, "Tail", SlowTail)
    SlowTail.open, SlowTail.fails = 0, False
    before = threading.active_count()
    yield
    deadline = time.monotonic() + 5
    while SlowTail.open or threading.active_count() > before:
        assert time.monotonic() < deadline, (SlowTail.open, threading.enumerate())
        time.sleep(0.01)


def service(streams: int = 3) -> Service:
    return Service({}, SimpleNamespace(), Limits(streams=streams), SimpleNamespace(), list)  # type: ignore[arg-type]


async def follow(server: Service) -> Any:
    return await changes.changes_of(server, SERVED, None, b"", SimpleNamespace())  # type: ignore[arg-type]


async def answered(response: Any, *, gone: bool = False) -> None:
    """Run the response until the client leaves, which it does at once or after the first part."""
    sent = asyncio.Event()

    async def receive() -> dict[str, str]:
        if not gone:
            await sent.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.set()
            await asyncio.sleep(0)

    await response({"type": "http", "asgi": {"spec_version": "2.0"}}, receive, send)


def test_requests_that_come_together() -> None:
    """All of them found room, because none had been counted yet."""

    async def run() -> list[Any]:
        server = service(3)
        found = await asyncio.gather(*(follow(server) for _ in range(20)), return_exceptions=True)
        streams = [each for each in found if not isinstance(each, BaseException)]
        refused = [each for each in found if isinstance(each, Problem)]
        assert (len(streams), len(refused), server.streams) == (3, 17, 3)
        assert all(each.status == 503 for each in refused)
        for each in streams:
            await answered(each)
        assert server.streams == 0
        return found

    asyncio.run(run())


@pytest.mark.parametrize("gone", [False, True], ids=["after a part", "before it"])
def test_a_client_that_leaves(gone: bool) -> None:
    async def run() -> None:
        server = service()
        await answered(await follow(server), gone=gone)
        assert server.streams == 0

    asyncio.run(run())


def test_an_answer_that_is_never_begun() -> None:
    async def run() -> None:
        server = service()
        response = await follow(server)
        assert server.streams == 1
        response.body_iterator = None
        del response
        gc.collect()
        assert server.streams == 0

    asyncio.run(run())


def test_a_topic_that_cannot_be_looked_up() -> None:
    async def run() -> None:
        server = service()
        SlowTail.fails = True
        with pytest.raises(Problem):
            await follow(server)
        assert server.streams == 0

    asyncio.run(run())


def test_a_request_that_is_given_up_while_the_topic_is_looked_up() -> None:
    """What follows the topic is closed when it is there."""

    async def run() -> None:
        server = service()
        request = asyncio.create_task(follow(server))
        await asyncio.sleep(0.05)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert server.streams == 0

    asyncio.run(run())


def test_ranges_count_before_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(*_: Any) -> Any:
        await asyncio.sleep(0.05)
        raise Problem(503, "a partition is restored", next_step="ask again")

    monkeypatch.setattr(ranges, "_read", read)

    async def run() -> None:
        server = service(2)
        wanted: Any = SimpleNamespace(limit=None)
        found = await asyncio.gather(
            *(ranges.as_lines(server, SERVED, wanted) for _ in range(9)), return_exceptions=True
        )
        assert sum("streams already" in str(each) for each in found) == 7
        assert server.streams == 0

    asyncio.run(run())
