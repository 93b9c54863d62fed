"""What user code gets of a table that its flow joins with."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from onceflow import ColumnProcessor, Processor, Record, serdes
from onceflow.errors import BadRecordError, ProcessorError
from onceflow.protocol.partitioners import key_partitions
from onceflow.state.format import rows
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.state.stores.stored_rows import StoredRows
from onceflow.task.join_task import JoinTask
from onceflow.testing.joined_tables import joined_table
from onceflow.testing.processor_driver import ProcessorDriver


def test_lookups() -> None:
    table = joined_table("t", {"a": 1, b"b": {"x": 2}, "ab": None}, 0)
    assert (table.get("a"), table.get(b"a"), table.get("no"), table.get("no", 7)) == (1, 1, None, 7)
    assert table.multi_get(["b", "no", "a"]) == {"b": {"x": 2}, "a": 1}
    with pytest.raises(TypeError, match=r"multi_get\(\) of table 't' takes a list of keys, got str: 'ab'"):
        table.multi_get("ab")
    assert "a" in table
    assert list(table.range("a", "b")) == [(b"a", 1), (b"ab", None)]
    assert [key for key, _ in table.prefix("a", reverse=True)] == [b"ab", b"a"]
    with pytest.raises(TypeError, match="keys of table 't' are bytes or str, got int: give it a key serde"):
        table.get(7)
    assert joined_table("t", {7: 1}, 0).get(7) == 1


def test_a_column_of_keys() -> None:
    table = joined_table("t", {"a": b"1", "b": b"2"}, 0)
    for keys in (pa.array(["b", "x", None, "a", "b"]), pa.chunked_array([["b", "x"], [None, "a", "b"]])):
        assert table.values_of(keys).to_pylist() == [b"2", None, None, b"1", b"2"]
    assert table.values_of(pa.array([], pa.string())).to_pylist() == []


class Converting(Processor):
    key = serdes.STRING
    value = output = serdes.JSON

    def process(self, key: str, records: Any, state: Any) -> Any:
        for record in records:
            yield Record(key, state.table("rates").get(record.value))


class Columns(ColumnProcessor):
    def process(self, records: pa.Table, states: pa.Table, context: Any) -> Any:
        return pa.table({"key": records["key"], "value": context.tables["rates"].values_of(records["value"])}), None


def test_processors_see_the_tables_of_a_test() -> None:
    driver = ProcessorDriver(Converting(), tables={"rates": {"EUR": 2}})
    assert driver.send("k", "EUR")[0].value == 2
    driver.tables["rates"] = {"EUR": 3}
    assert driver.send("k", "EUR")[0].value == 3
    columns = ProcessorDriver(Columns(), tables={"rates": {"EUR": b"2"}})
    assert columns.send("k", b"EUR")[0].value == b"2"
    with pytest.raises(ProcessorError, match=r"table 'rates' is not in tables= of Flow.process; it has none"):
        ProcessorDriver(Converting()).send("k", "EUR")


def test_a_key_in_two_partitions_has_one_value(tmp_path: Path) -> None:
    """As after partitions were added: the old row is where the key was before."""
    keys = [b"key-%d" % n for n in range(20)]
    stores = {}
    for partition in range(3):
        stores[partition] = MemoryStore.open(tmp_path / str(partition))
        stores[partition].write({rows.value_key(key): b"\0" + b"%d" % partition for key in keys})
    found = StoredRows(lambda: contextlib.nullcontext(stores), partitions=3)
    expected = [b"%d" % partition for partition in key_partitions(pa.array(keys), 3)]
    assert found.get_many(keys) == expected
    assert [found.get(key) for key in keys] == expected


@pytest.mark.parametrize(
    "kind, value, wanted, fits",
    [
        ("double", 1.5, pa.int32(), False),
        ("double", 2.0, pa.int32(), True),
        ("float", 0.5, pa.int64(), False),
        ("double", 1e300, pa.float32(), False),
        ("double", 0.5, pa.float32(), True),
        ("double", float("nan"), pa.int64(), False),
        ("int64", 2**53 + 1, pa.float64(), False),
        ("int64", 2**40, pa.int32(), False),
        ("uint64", 2**64 - 1, pa.int64(), False),
        ("string", "5", pa.int64(), False),
        ("bool", True, pa.int64(), False),
    ],
)
def test_a_field_of_a_struct_is_the_number_that_it_was_or_an_error(
    kind: str, value: Any, wanted: Any, fits: bool
) -> None:
    """In the columns of ``Flow.join_table``."""
    serde, fields = serdes.struct(n=kind), pa.schema([("n", wanted)])
    order: Any = SimpleNamespace(
        spec=SimpleNamespace(topic="t", value=serde), fields=fields, raw=False, on="k", flow="flow", corrupt=None
    )
    raws = pa.array([serde.encode({"n": value}), None, serde.encode({})])
    if fits:
        (column,) = JoinTask(order)._columns(raws, pa.array(["a", "b", "c"]))
        assert (column.type, column.to_pylist()) == (wanted, [value, None, None])
    else:
        with pytest.raises(BadRecordError, match="cannot be read as n"):
            JoinTask(order)._columns(raws, pa.array(["a", "b", "c"]))
