"""What the routes of a server share: its tables, and whether it is being stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onceflow.client.settings import ClientSettings
from onceflow.server.formats import Format
from onceflow.server.local import LocalTable
from onceflow.server.options import Limits
from onceflow.server.peer_auth import PeerSecrets
from onceflow.server.problems import Problem, unavailable
from onceflow.server.routed import RoutedTable
from onceflow.server.routes import Routes
from onceflow.server.streams import Lease
from onceflow.tables.lag import Progress
from onceflow.tables.share import Share


@dataclass
class Served:
    """One table."""

    topic: str
    share: Share
    local: LocalTable
    routed: RoutedTable
    format: Format

    def document(self, routes: Routes) -> dict[str, Any]:
        """What ``/tables`` says about it."""
        known = routes.tables.get(self.topic)
        partitions = []
        for partition in range(self.share.partitions if known is None else len(known.holders)):
            found: dict[str, Any] = {"partition": partition}
            found["instances"] = [] if known is None else list(known.holders[partition])
            progress = self.share.progress(partition)
            found["position"] = None if progress is None else progress.position
            found["lag"] = None if progress is None else {"records": progress.lag.records, "ms": progress.lag.ms}
            found["restoring"] = progress is not None and not progress.restored
            partitions.append(found)
        placement = "unknown" if known is None else "default" if self.routed.placed else "other"
        failure = self.share.failure
        return {
            "table": self.topic,
            "key": self.format.keys.name,
            "value": self.format.values.name,
            "partitions": partitions,
            "placement": placement,
            "ignored": self.share.ignored,
            "failure": None if failure is None else failure.what,
        }

    def waits_for(self, routes: Routes, *, trusted: bool) -> list[str]:
        """Why the instance is not ready to answer from this table; empty: it is.

        Args:
            trusted: whether errors may be told, with paths and names of this machine.
        """
        if (failure := self.share.failure) is not None:
            problem = f"{failure.what}; {unavailable(failure).next_step}" if trusted else "it cannot be read"
            return [f"table {self.topic}: {problem}"]
        known = routes.tables.get(self.topic)
        if known is None:
            return [f"table {self.topic}: its partitions are not known yet"]
        found = []
        for partition, holders in enumerate(known.holders):
            if routes.address in holders and (what := _lacks(self.share.progress(partition), trusted=trusted)):
                found.append(f"table {self.topic}: partition {partition} {what}")
        return found


def _lacks(progress: Progress | None, *, trusted: bool) -> str:
    """What keeps a partition from being up to date; empty: nothing."""
    if progress is None:
        return "is opened"
    if (problem := progress.problem) is not None:
        return "cannot be written" + (f": {problem.what}; {unavailable(problem).next_step}" if trusted else "")
    if progress.emptied:
        return f"was damaged and is read from Kafka again, now at offset {progress.position}"
    return "" if progress.restored else f"is restored, now at offset {progress.position}"


@dataclass
class Service:
    """Everything that is served.

    Args:
        problems: returns what keeps this instance from having its partitions.
        secrets: by which other instances are recognised; None: there are none.
    """

    tables: dict[str, Served]
    routes: Routes
    limits: Limits
    settings: ClientSettings
    problems: Callable[[], list[str]]
    secrets: PeerSecrets | None = None
    stopping: bool = False
    streams: int = 0

    def table(self, name: str) -> Served:
        """A table that can be read.

        Raises:
            Problem: 404, it is not served here; 503, it is not known yet where its partitions are.
        """
        found = self.tables.get(name)
        if found is None:
            raise Problem(404, f"There is no table {name[:249]!r}", next_step="GET /tables lists them")
        if name not in self.routes.tables:
            raise Problem(503, f"It is not known yet where the partitions of table {name} are", next_step="ask again")
        return found

    def begin_stream(self) -> Lease:
        """Room for one more stream.

        Raises:
            Problem: 503, there is none, or the server is being stopped.
        """
        if self.streams >= self.limits.streams:
            raise Problem(503, f"There are {self.streams} streams already", next_step="ask again later")
        if self.stopping:
            raise Problem(503, "The server is being stopped", next_step="ask again")
        self.streams += 1
        return Lease(self._stream_ended)

    def _stream_ended(self) -> None:
        self.streams -= 1

    def waits_for(self, *, trusted: bool = True) -> list[str]:
        """What is missing until the server is ready.

        Args:
            trusted: whether the one who asks may know more than which partitions are missing.
        """
        if self.stopping:
            return ["the server is being stopped"]
        problems = self.problems()
        if problems and not trusted:
            problems = ["this instance has problems, which its log and requests with a token show"]
        of_tables = (table.waits_for(self.routes, trusted=trusted) for table in self.tables.values())
        return [*problems, *(each for found in of_tables for each in found)]
