"""Values whose schemas are in a registry, as JSON. The event loop never waits for the registry: threads ask it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING

import orjson

from onceflow.errors import OnceflowError
from onceflow.server.problems import Problem
from onceflow.state.format import exact_json

if TYPE_CHECKING:
    from onceflow.schema_registry.json_view import JsonView

_THREADS = 4
_MISSING_S = 10.0
_MOST = 10_000


class SchemaValues:
    """Shows values by the schemas that wrote them. Call `learn`, or `learn_now`, before `show`.

    Args:
        view: reads values. Its registry is asked once at a time: requests that come while it does not answer get 503.
        wait_s: how long a request waits for the registry.
    """

    def __init__(self, view: JsonView, wait_s: float = 5.0) -> None:
        self._view = view
        self._wait_s = wait_s
        self._threads = ThreadPoolExecutor(_THREADS, "onceflow-schemas")
        self._asked: dict[bytes, Future[None]] = {}
        # What is wrong with a schema, and until when that is believed; empty: it is known.
        self._known: dict[bytes, tuple[str, float]] = {}

    def show(self, raw: bytes) -> orjson.Fragment:
        """A value for JSON. Raises: ValueError: it has no schema that can be read, or does not fit it."""
        name = self._view.id_of(raw)
        problem, _ = self._known.get(name, ("its schema is not known yet", 0.0))
        if name and problem:
            raise ValueError(problem)
        return orjson.Fragment(exact_json.written(self._view.read(raw)[0], ensure_ascii=False).encode())

    async def learn(self, raws: Iterable[bytes | None]) -> None:
        """Ask for the schemas of values that are not known yet.

        Raises:
            Problem: 503, the registry does not answer.
        """
        asked = self._asking(raws)
        if asked:
            waiting = [asyncio.wrap_future(each) for each in asked]
            for each in waiting:
                each.add_done_callback(_take_exception)
            await asyncio.wait(waiting, timeout=self._wait_s)
            self._check(asked)

    def learn_now(self, raws: Iterable[bytes | None]) -> None:
        """As `learn`, outside of the event loop."""
        asked = self._asking(raws)
        wait(asked, timeout=self._wait_s)
        self._check(asked)

    def _check(self, asked: list[Future[None]]) -> None:
        next_step = "ask again, or ask with value_encoding=base64"
        if not all(each.done() for each in asked):
            detail = f"The schema registry {self._view.name} has not answered within {self._wait_s:g} s"
            raise Problem(503, detail, next_step=next_step)
        for each in asked:
            error = each.exception()
            if isinstance(error, OnceflowError):
                raise Problem(503, f"{error.what} ({error.detail})", next_step=next_step) from error
            if error is not None:
                raise error

    def _asking(self, raws: Iterable[bytes | None]) -> list[Future[None]]:
        """What is being asked for these values."""
        found: dict[bytes, Future[None]] = {}
        for raw in raws:
            if raw is None:
                continue
            name = self._view.id_of(raw)
            known = self._known.get(name)
            if not name or name in found or (known is not None and (not known[0] or known[1] > time.monotonic())):
                continue
            asked = self._asked.get(name)
            if asked is None:
                asked = self._asked[name] = self._threads.submit(self._ask, name, raw)
                asked.add_done_callback(partial(self._answered, name))
            found[name] = asked
        return [*found.values()]

    def _answered(self, name: bytes, _: Future[None]) -> None:
        self._asked.pop(name, None)

    def _ask(self, name: bytes, raw: bytes) -> None:
        """Have the view know the schema of a value. It runs in a thread."""
        try:
            self._view.learn(raw)
            found = ("", 0.0)
        except ValueError as error:
            found = (str(error), time.monotonic() + _MISSING_S)
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[name] = found


def _take_exception(done: asyncio.Future[None]) -> None:
    """Otherwise an error that nobody waits for any more would be logged."""
    if not done.cancelled():
        done.exception()
