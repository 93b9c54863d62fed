"""The sink for a document store that docs/external.md shows, against the contract of all sinks.

MongoDB is in no package, so the collections are made of rows of SQLite: each call changes each document atomically, and
nothing more, as without transactions. Processes share them, and they outlive a killed one.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from onceflow import FencedError, SchemaError
from onceflow.testing.external_sink_suite import SCHEMA, ExternalSinkSuite, Writer

PAGE = Path(__file__).parents[2] / "docs" / "external.md"


def shown() -> Any:
    """The code of the page as a module."""
    (code,) = re.findall(r"^```python\n(import uuid\n.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    module = ModuleType("mongo_sink")
    exec(code, vars(module))  # noqa: S102
    return module


page = shown()


def matches(document: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a document has what a filter of MongoDB asks for, as far as the page needs it."""
    operators = {"$in": lambda value, given: value in given, "$lt": lambda value, given: value < given}
    for name, given in wanted.items():
        if name == "$or":
            if not any(matches(document, each) for each in given):
                return False
        elif isinstance(given, dict):
            if not all(operators[operator](document.get(name), value) for operator, value in given.items()):
                return False
        elif document.get(name) != given:
            return False
    return True


def changed(document: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    added = {name: document.get(name, 0) + by for name, by in change.get("$inc", {}).items()}
    return {**document, **change.get("$set", {}), **added}


class Collection:
    """A collection of pymongo, as far as the page needs it."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name

    def _run(self, statement: str, *values: Any) -> list[Any]:
        with closing(sqlite3.connect(self.path, timeout=60, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = OFF")  # a process is killed here, not the machine
            connection.execute(f"CREATE TABLE IF NOT EXISTS {self.name} (id TEXT PRIMARY KEY, document TEXT)")
            return connection.execute(statement.format(self.name), values).fetchall()

    def _found(self, wanted: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
        rows = [(key, text, json.loads(text)) for key, text in self._run("SELECT id, document FROM {}")]
        return [row for row in rows if matches(row[2], wanted)]

    def find(self, wanted: dict[str, Any]) -> list[dict[str, Any]]:
        return [document for _, _, document in self._found(wanted)]

    def find_one(self, wanted: dict[str, Any]) -> dict[str, Any] | None:
        return next(iter(self.find(wanted)), None)

    def insert_many(self, documents: list[dict[str, Any]]) -> None:
        for document in documents:  # one by one: the page does not rely on all of them
            self._run("INSERT INTO {} VALUES (lower(hex(randomblob(12))), ?)", json.dumps(document))

    def find_one_and_update(
        self, wanted: dict[str, Any], change: dict[str, Any], *, upsert: bool, return_document: bool
    ) -> dict[str, Any] | None:
        assert return_document, "the document after the change"
        while True:
            found = self._found(wanted)
            if not found and not upsert:
                return None
            if not found:
                new = changed({"_id": wanted["_id"]}, change)
                added = self._run("INSERT OR IGNORE INTO {} VALUES (?, ?) RETURNING id", new["_id"], json.dumps(new))
            else:
                key, text, document = found[0]
                new = changed(document, change)
                added = self._swapped(key, text, new)
            if added:
                return new

    def _swapped(self, key: str, old: str, new: dict[str, Any]) -> list[Any]:
        """Compare and set."""
        statement = "UPDATE {} SET document = ? WHERE id = ? AND document = ? RETURNING id"
        return self._run(statement, json.dumps(new), key, old)

    def update_one(self, wanted: dict[str, Any], change: dict[str, Any]) -> Any:
        found = self.find_one_and_update(wanted, change, upsert=False, return_document=True)
        return SimpleNamespace(matched_count=int(found is not None))

    def update_many(self, wanted: dict[str, Any], change: dict[str, Any]) -> None:
        for key, text, document in self._found(wanted):
            self._swapped(key, text, changed(document, change))

    def delete_many(self, wanted: dict[str, Any]) -> None:
        for key, _, _ in self._found(wanted):
            self._run("DELETE FROM {} WHERE id = ?", key)


class Documents(page.MongoSink):  # type: ignore[misc, name-defined]
    def __init__(self, path: Path) -> None:
        super().__init__("mongodb://nowhere", "bank")
        self.path = path

    def database(self) -> Any:
        return SimpleNamespace(flows=Collection(self.path, "flows"), ledger=Collection(self.path, "ledger"))


class TestDocuments(ExternalSinkSuite):
    rounds = 5

    @pytest.fixture
    def sink(self, tmp_path: Path) -> Documents:
        return Documents(tmp_path / "documents.db")

    def rows(self, sink: Any) -> list[dict[str, Any]]:
        return list(page.committed(sink.database()))

    def backup(self, sink: Any) -> Callable[[], Any]:
        saved = sink.path.read_bytes()
        return lambda: sink.path.write_bytes(saved)


def test_rows_are_shown_by_the_next_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver dies between the change of the document and the rows."""
    sink = Documents(tmp_path / "documents.db")
    writer = Writer(sink).open()
    writer.commit(*writer.staged())
    attempt, receipts = writer.staged()

    def dies(parts: Any) -> None:
        raise ConnectionError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(writer.sink, "show", dies)
        with pytest.raises(ConnectionError):
            writer.commit(attempt, receipts)
    expected = [row["id"] for row in page.committed(sink.database())]
    assert sorted(expected) == list(range(40, 120))
    assert len(sink.database().ledger.find({"shown": True})) == 40
    writer.staged()
    assert Writer(sink).open().batch == 2
    assert [row["id"] for row in page.committed(sink.database())] == expected
    assert len(sink.database().ledger.find({})) == len(sink.database().ledger.find({"shown": True})) == 80


def test_a_reader_meets_a_commit(tmp_path: Path) -> None:
    """Rows of the next batch are shown while it reads: it sees nothing of them."""
    sink = Documents(tmp_path / "documents.db")
    writer = Writer(sink).open()
    writer.commit(*writer.staged())
    database = sink.database()
    before = database.flows.find({})
    writer.commit(*writer.staged())
    assert len(page.committed(database)) == 80
    database.flows.find = lambda wanted: before
    assert sorted(row["id"] for row in page.committed(database)) == list(range(40, 80))


def test_what_it_tells(tmp_path: Path) -> None:
    sink = Documents(tmp_path / "documents.db")
    sink.check(SCHEMA)
    with pytest.raises(SchemaError, match="no type for column amount"):
        sink.check(pa.schema([("amount", pa.decimal128(12, 2))]))
    first = sink.open("f", "one", None).generation
    sink.open("f", "two", None)
    with pytest.raises(FencedError, match="this driver has generation 1, the last one is 2, by another driver"):
        sink.open("f", "one", first)
