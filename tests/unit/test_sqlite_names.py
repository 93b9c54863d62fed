"""Names of tables and columns of a SQLite database may have any characters."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from onceflow import OptionError, SqliteSink
from onceflow.external.sink import BatchAttempt

#: What is special in SQL, in the driver, or in the sink itself.
SPECIAL = ["?", "?1", ":a", "@a", "$a", "%s", "excluded", "rowid", "select", "order", "new", "a b", "a.b",
           '"', '""', "'", "`", "[", "]", "--", "/*", ";", "\n", "{}", "main", "ä", "\U0001f600", ""]  # fmt: skip
NAMES = st.one_of(
    st.sampled_from(SPECIAL),
    st.lists(st.sampled_from(SPECIAL), min_size=2, max_size=3).map("".join),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5),
)


def sql_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@given(
    table=NAMES,
    names=st.lists(NAMES, min_size=3, max_size=3, unique_by=lambda name: name.casefold()),
    mode=st.sampled_from(["insert", "upsert", "delete-by-flag"]),
)
@example(table="excluded", names=["?", "excluded", ":a"], mode="upsert")
@example(table="?", names=["?1", "$a", "select"], mode="delete-by-flag")
@settings(max_examples=25, deadline=None)
def test_names_of_tables_and_columns_in_sqlite(table: str, names: list[str], mode: str) -> None:
    """All rows arrive, in the right columns, whatever the names are."""
    assume(not table.lower().startswith("sqlite_"))
    key, text, flag = names
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test.db"
        with closing(sqlite3.connect(path)) as database:
            database.execute(
                f"CREATE TABLE {sql_name(table)} ({sql_name(key)} INTEGER PRIMARY KEY, {sql_name(text)} TEXT)"
            )
        how: dict[str, Any] = {} if mode == "insert" else {"mode": mode, "key": key, "flag": flag}
        sink = SqliteSink(path, table, **how)
        fields = [(key, pa.int64()), (text, pa.string()), *([(flag, pa.bool_())] if mode == "delete-by-flag" else [])]
        schema = pa.schema(fields)
        sink.check(schema)
        for batch, values in enumerate([[(1, "a", False), (2, "b", False)], [(2, "c", False), (1, "d", True)]], 1):
            if mode == "insert":
                values = [(number + 10 * batch, *others) for number, *others in values]
            rows = [dict(zip(schema.names, row, strict=False)) for row in values]
            attempt = BatchAttempt("flow", sink.open("flow", None).generation, batch, 1)
            sink.begin(attempt)
            receipt = sink.write(attempt, "0", iter([pa.RecordBatch.from_pylist(rows, schema)]))
            sink.commit(attempt, [receipt], "{}")
        with closing(sqlite3.connect(path)) as database:
            select = f"SELECT {sql_name(key)}, {sql_name(text)} FROM {sql_name(table)} ORDER BY 1"
            found = dict(database.execute(select).fetchall())
    expected = {
        "insert": {11: "a", 12: "b", 21: "d", 22: "c"},
        "upsert": {1: "d", 2: "c"},
        "delete-by-flag": {2: "c"},
    }
    assert found == expected[mode]


@pytest.mark.parametrize("table", ["onceflow_progress", "OnceFlow_Progress"])
def test_the_progress_of_flows_is_no_table_for_rows(table: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="progress"):
        SqliteSink(tmp_path / "test.db", table)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_names_that_sqlite_cannot_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no name of a table"):
        SqliteSink(tmp_path / "test.db", name)


def test_a_flag_that_is_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="flag"):
        SqliteSink(tmp_path / "test.db", "t", mode="delete-by-flag", key=["id", "deleted"])
    with pytest.raises(OptionError, match="twice"):
        SqliteSink(tmp_path / "test.db", "t", mode="upsert", key=["id", "id"])
