"""kafka-python's event loop, with two defects corrected: it drops Ctrl-C, and can keep its lock after it.

It also needs fewer calls of the system for each request (`WatchedSockets`).

Python raises KeyboardInterrupt wherever the main thread is. If that is in one of the loop's own tasks, the loop logs
the exception, ends the task, and goes on: a command would run until its deadline. Here the loop raises it again, if
the handler of SIGINT is that of ``client.interrupts``.

It can also be raised when the loop has its lock, and is not yet or no longer in the ``try`` that releases it. Then
even ``close`` would fail.
"""

from __future__ import annotations

import math
import selectors
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kafka.net.selector import NetworkSelector

from onceflow.client import interrupts

_WAIT_S = 1.0


class WatchedSockets(selectors.BaseSelector):
    """A selector as ``selectors.DefaultSelector``, with the calls of the system put off until ``select``.

    kafka-python's loop unregisters a socket for every response, and registers it again at once. For every request it
    does the same with the other direction. So a small request costs four calls of the system, and more in which Python
    describes the socket for an error that nobody reads. Here the system learns only of what has changed when the loop
    waits.
    """

    def __init__(self) -> None:
        self._system = selectors.DefaultSelector()
        self._told: dict[Any, int] = {}  # events of the sockets that the system knows
        self._wanted: dict[Any, selectors.SelectorKey] = {}
        self._changed: set[Any] = set()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if fileobj in self._wanted:
            raise KeyError(fileobj)
        number = fileobj.fileno()
        if number < 0:
            raise ValueError(f"{fileobj!r} is closed")
        return self._set(selectors.SelectorKey(fileobj, number, events, data))

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        self._changed.add(fileobj)
        return self._wanted.pop(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._set(self._wanted[fileobj]._replace(events=events, data=data))

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._changed:
            self._tell()
        found = self._waited(timeout)
        wanted = ((self._wanted.get(told.fileobj), events) for told, events in found)
        return [(key, events & key.events) for key, events in wanted if key is not None]

    def _waited(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """A signal that comes just before the call of the system does not end it: Python sees it when the call returns.
        So Ctrl-C would be seen only at the end of a long wait. It is divided into short ones."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left_s = end - time.monotonic()
            found = self._system.select(max(0.0, min(left_s, _WAIT_S)))
            if found or left_s <= _WAIT_S:
                return found

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._wanted[fileobj]

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._wanted

    def close(self) -> None:
        self._system.close()
        self._wanted.clear()

    def _set(self, key: selectors.SelectorKey) -> selectors.SelectorKey:
        self._changed.add(
            key.fileobj
        )  # first: Ctrl-C may come in between, and then it is only looked at once too often
        self._wanted[key.fileobj] = key
        return key

    def _tell(self) -> None:
        # First what is not waited for any more: its number may belong to another socket by now.
        for fileobj in self._changed - self._wanted.keys():
            if self._told.pop(fileobj, 0):
                with suppress(KeyError):
                    self._system.unregister(fileobj)
        for fileobj in self._changed & self._wanted.keys():
            events, told = self._wanted[fileobj].events, self._told.get(fileobj)
            if told != events:
                # A socket that was closed in between has no events any more. Who waits for it has a deadline.
                with suppress(OSError, ValueError):
                    try:
                        (self._system.register if told is None else self._system.modify)(fileobj, events)
                    except KeyError:  # Ctrl-C came before this could be noted
                        (self._system.modify if told is None else self._system.register)(fileobj, events)
                    self._told[fileobj] = events
        self._changed.clear()


class EventLoop(NetworkSelector):  # type: ignore[misc]
    """The event loop of onceflow's connections."""

    _poll_owner: threading.Thread | None  # of kafka-python, which does not declare its type

    def __init__(self, **config: Any) -> None:
        super().__init__(selector=WatchedSockets, **config)

    @property
    def is_run_elsewhere(self) -> bool:
        """Whether another thread runs the loop at the moment."""
        return self._poll_lock.locked() and self._poll_owner is not threading.current_thread()

    def call_soon_threadsafe(self, callback: Any) -> Any:
        """As that of kafka-python, which also wakes up a loop in which nobody waits."""
        if self._exception:
            raise self._exception from None
        if self._closed:
            raise RuntimeError("NetworkSelector closed!")
        task = self.call_soon(callback)
        # Now the task is there: whoever takes the lock from here on finds it before he waits.
        if self.is_run_elsewhere:
            self.wakeup()
        return task

    def _poll_once(self, timeout: float | None = None) -> None:
        with interrupts.not_dropped():
            try:
                super()._poll_once(timeout)
            except KeyboardInterrupt:
                # No owner: the owner is set and taken back inside the lock.
                if self._poll_lock.locked() and self._poll_owner in (None, threading.current_thread()):
                    self._poll_owner = None
                    self._poll_lock.release()
                raise
