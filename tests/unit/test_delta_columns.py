"""Which columns of rows are written to a table of Delta Lake, and that tables are not taken for changed ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema

from onceflow import DeltaSink, SchemaError
from onceflow.external.delta_rows import facts_of
from onceflow.external.sink import BatchAttempt, RefusedRow

sys.path.insert(0, str(Path(__file__).parent))
try:
    from delta_tables import kept
finally:
    sys.path.pop(0)

LONGS = pa.schema([("day", pa.string()), ("n", pa.int64())])


def prepared(sink: DeltaSink, schema: pa.Schema) -> BatchAttempt:
    sink.check(schema)
    opened = sink.open("f", "o", None)
    attempt = BatchAttempt("f", "o", opened.generation, opened.generation, 1)
    sink.begin(attempt)
    return attempt


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("names", [["day"], ["day", "n"]])
def test_rows_of_partition_columns_alone_are_refused(tmp_path: Path, names: list[str], exists: bool) -> None:
    """Files have the other columns. One without any column has no rows: they would be lost."""
    rows = pa.schema([field for field in LONGS if field.name in names])
    if exists:
        by = names
        DeltaTable.create(tmp_path, LONGS, partition_by=by)
    sink = DeltaSink(tmp_path, partition_by=() if exists else names)
    with pytest.raises(SchemaError, match=r"(?s)only columns by which it is partitioned.*select another column"):
        sink.check(rows)


@pytest.mark.parametrize("sets_aside", [True, False])
def test_rows_without_a_column_of_the_table_are_refused(tmp_path: Path, sets_aside: bool) -> None:
    DeltaTable.create(tmp_path, pa.schema([("k", pa.string()), ("v", pa.string())]))
    sink = DeltaSink(tmp_path)
    if sets_aside:
        sink.set_aside()
    with pytest.raises(SchemaError, match="have no columns of the table" if sets_aside else "does not fit the table"):
        sink.check(pa.schema([("key", pa.binary()), ("value", pa.binary()), ("offset", pa.int64())]))


@pytest.mark.parametrize("name", ["Value", "VALUE", "Key", "Partition", "timestamptype"])
def test_a_column_that_differs_in_case_alone_is_no_column_of_the_record(tmp_path: Path, name: str) -> None:
    """It would be null in every row."""
    DeltaTable.create(tmp_path, pa.schema([("id", pa.int64()), (name, pa.string())]))
    sink = DeltaSink(tmp_path)
    sink.set_aside()
    (own,) = [each for each in ("value", "key", "partition", "timestampType") if each.casefold() == name.casefold()]
    with pytest.raises(SchemaError, match=rf"(?s)The rows have {own}, and the table in .* has {name}.*alias"):
        sink.check(pa.schema([("id", pa.int64()), (own, pa.string())]))
    sink.check(pa.schema([("id", pa.int64()), (name, pa.string())]))


def test_metadata_in_any_order_is_the_same_table(tmp_path: Path) -> None:
    """deltalake keeps it in a map without an order, so each load has another one."""
    metadata = {f"key {n}": "x" for n in range(5)}
    inner = {"type": "struct", "fields": [{"name": "a", "type": "long", "nullable": True, "metadata": metadata}]}
    fields = [
        {"name": "id", "type": "long", "nullable": True, "metadata": metadata},
        {"name": "s", "type": inner, "nullable": True, "metadata": metadata},
    ]
    DeltaTable.create(tmp_path, Schema.from_json(json.dumps({"type": "struct", "fields": fields})))
    assert len({facts_of(DeltaTable(tmp_path), "t").schema for _ in range(20)}) == 1
    sink, refused = DeltaSink(tmp_path), list[RefusedRow]()
    schema = pa.schema([("id", pa.int64())])
    attempt: Any = prepared(sink, schema)
    for batch in range(1, 6):
        attempt = BatchAttempt("f", "o", attempt.generation, batch, 1)
        sink.begin(attempt)
        receipt = sink.write(attempt, "0", iter([pa.RecordBatch.from_pylist([{"id": batch}], schema)]))
        sink.commit_accepted(attempt, [receipt], kept(refused))
    assert refused == []
    assert sorted(DeltaTable(tmp_path).to_pyarrow_table()["id"].to_pylist()) == [1, 2, 3, 4, 5]
