"""The partitions that this instance has: a thread opens and closes them as it is told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping

from onceflow.errors import OnceflowError
from onceflow.server.routes import Routes, TableRoutes
from onceflow.tables.share import Share

log = logging.getLogger("onceflow.server")

_RETRY_S = 1.0
_LOOK_S = 0.2


class HeldPartitions:
    """Makes shares follow the partitions that are wanted.

    Args:
        shares: open, by topic.
        looked: called about every 0.2 seconds, and after every change, by the thread of this object.
    """

    def __init__(self, shares: Mapping[str, Share], looked: Callable[[], None] = lambda: None) -> None:
        self._shares = shares
        self._looked = looked
        self._wanted: dict[str, Collection[int]] = {}
        self._changed = threading.Event()
        self._ended = threading.Event()
        self.problems: list[str] = []
        self._thread = threading.Thread(target=self._run, name="onceflow-holding", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def want(self, partitions: Mapping[str, Collection[int]]) -> None:
        """Follow exactly these partitions, soon. May be called by any thread."""
        self._wanted = dict(partitions)
        self._changed.set()

    def close(self) -> None:
        """End the thread, and close all shares. Their copies stay on disk."""
        self._ended.set()
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join()
        for share in self._shares.values():
            share.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            problems = []
            wanted = self._wanted
            for topic, partitions in wanted.items():
                try:
                    self._shares[topic].change(partitions)
                except Exception as error:  # any: without this thread nothing would be opened any more
                    what = error.what if isinstance(error, OnceflowError) else f"{type(error).__name__}: {error}"
                    log.warning("table %s: its partitions cannot be opened now: %s", topic, error)
                    problems.append(f"table {topic}: {what}")
                if self._ended.is_set():
                    return
            self.problems[:] = problems
            self._looked()
            self._changed.wait(_RETRY_S if problems else _LOOK_S)
            self._changed.clear()


class Alone:
    """The routes of the only instance: it has all partitions."""

    def __init__(self, shares: Mapping[str, Share], routes: Routes) -> None:
        self._holding = HeldPartitions(shares, self._look)
        self._shares = shares
        self._routes = routes

    @property
    def problems(self) -> list[str]:
        """What cannot be opened."""
        return self._holding.problems

    def start(self) -> None:
        self._take_all()
        self._holding.start()

    def _look(self) -> None:
        if any(len(self._routes.tables[topic].holders) < each.partitions_now for topic, each in self._shares.items()):
            self._take_all()

    def _take_all(self) -> None:
        everything = {topic: range(share.partitions_now) for topic, share in self._shares.items()}
        address = self._routes.address
        self._routes.tables = {
            topic: TableRoutes([[address]] * len(partitions)) for topic, partitions in everything.items()
        }
        self._holding.want(everything)

    def leave(self) -> None:
        """Tell other instances that this one ends: there are none."""

    def close(self) -> None:
        self._holding.close()
