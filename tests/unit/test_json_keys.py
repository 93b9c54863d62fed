"""Keys that are JSON documents: found by their value, and passed on in the bytes in which they came."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow import ColumnProcessor, Processor, Record, serdes
from onceflow.errors import BadRecordError, OptionError
from onceflow.protocol.partitioners import key_partitions
from onceflow.state.api.joined_table import JoinedTable
from onceflow.state.format import rows
from onceflow.state.stores.base import Store
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.state.stores.rocksdb_store import RocksdbStore
from onceflow.state.stores.stored_rows import StoredRows
from onceflow.tables.lookups import Lookups
from onceflow.testing.processor_driver import ProcessorDriver
from onceflow_workshop.testing.engines import engine_of

A, BLANKS, ORDER = b'{"id":1,"shop":2}', b'{"id": 1, "shop": 2}', b'{"shop":2,"id":1}'
FORMS = [A, BLANKS, ORDER, b'\n{"id":1.0,"\\u0073hop":2}']
KEY = {"id": 1, "shop": 2}


class View(Lookups):
    """A table of these stores."""

    topic = "t"

    def __init__(self, stores: dict[int, Store], key: Any = serdes.JSON) -> None:
        super().__init__(key, serdes.BYTES)
        self._stores = stores

    def _readable(self) -> StoredRows:
        return StoredRows(lambda: contextlib.nullcontext(self._stores), partitions=len(self._stores))


def joined(
    stores: dict[int, Store], *, key: Any = serdes.JSON, own: int | None = None, partitions: int = 0
) -> JoinedTable:
    return JoinedTable(
        "t",
        lambda: contextlib.nullcontext(stores),
        partitions=partitions or len(stores),
        key=key,
        value=serdes.BYTES,
        now_ms=0,
        position="",
        own_partition=own,
    )


@pytest.fixture(params=[LmdbStore, MemoryStore, RocksdbStore], ids=["lmdb", "memory", "rocksdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with closing(request.param.open(tmp_path / "store")) as opened:
        yield opened
    request.param.remove(tmp_path / "store")


def put(store: Store, content: dict[bytes, bytes | None]) -> None:
    changes = {rows.value_key(key): None if value is None else rows.pack(value) for key, value in content.items()}
    assert store.write(changes, index=True)


@pytest.mark.parametrize("stored", FORMS)
@pytest.mark.parametrize("asked", FORMS)
def test_a_key_is_found_in_any_form(store: Store, stored: bytes, asked: bytes) -> None:
    put(store, {stored: b"S", b'{"id":1}': b"other", b"no json {": b"text"})
    key = serdes.JSON.decode(asked)
    view, table = View({0: store}), joined({0: store})
    assert (view.get(key), view[key], key in view) == (b"S", b"S", True)
    assert (table.get(key), key in table) == (b"S", True)
    assert table.values_of(pa.array([asked, None, b'{"id":2}', b"{"])).to_pylist() == [b"S", None, None, None]
    assert view.get({"id": 2}) is None
    assert view.count() == 3
    put(store, {stored: None})
    assert view.get(key) is None
    assert store.checksum_holds()
    assert next(store.scan(rows.JSON_INDEX, rows.after(rows.JSON_INDEX)), None) is None
    assert View({0: store}, serdes.STRING).get("no json {") == b"text"


@pytest.mark.parametrize("levels", [100, 254, 255, 300, 1023, 1024, 1025, 20_000])
def test_a_key_that_is_nested_deeply_is_kept(store: Store, levels: int) -> None:
    """The reader of JSON takes more levels than its writer. Such a key is found by its bytes alone."""
    deep = b"[ " * levels + b"]" * levels
    put(store, {deep: b"S", b"a": b"T"})
    view = View({0: store}, serdes.BYTES)
    assert (view.get(deep), view.get(b"a")) == (b"S", b"T")
    assert view._readable().find([deep, b"[" * levels + b"]" * levels])[0] == b"S"


class Counting(MemoryStore):
    """Counts how often it is read."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reads: list[str] = []

    def get_many(self, keys: Any) -> Any:
        self.reads.append("get_many")
        return super().get_many(keys)

    def scan(self, *arguments: Any, **named: Any) -> Any:
        self.reads.append("scan")
        return super().scan(*arguments, **named)


@pytest.mark.parametrize("indexed", [False, True])
def test_absent_keys_of_a_table_of_canonical_keys_are_not_searched_one_by_one(indexed: bool, tmp_path: Path) -> None:
    stores: dict[int, Any] = {at: Counting.open(tmp_path / str(at)) for at in range(3)}
    for at, store in stores.items():
        put(store, {b'{"id":%d}' % at: b"S", **({BLANKS: b"T"} if indexed and not at else {})})
        store.reads.clear()
    view = View(stores)
    keys = [b'{"id": %d}' % at for at in range(3, 50)]
    assert view._readable().find(keys) == [None] * len(keys)
    for at, store in stores.items():
        assert len([each for each in store.reads if each == "get_many"]) <= 4, "of all keys, and of all their forms"
        assert ("scan" in store.reads) == (indexed and not at)
    found = view._readable().find([*keys, b'{"id": 2}', A])
    assert found == [*[None] * len(keys), b"S", b"T" if indexed else None]
    for at in stores:
        Counting.remove(tmp_path / str(at))


def test_keys_of_bytes_and_text_are_compared_by_their_bytes(store: Store) -> None:
    put(store, {BLANKS: b"S"})
    for key in (serdes.STRING, serdes.BYTES):
        asked: Any = A.decode() if key is serdes.STRING else A
        assert View({0: store}, key).get(asked) is None
        assert joined({0: store}, key=key).get(asked) is None
    assert joined({0: store}, key=None).get(BLANKS) == b"S"


def test_the_same_bytes_come_first_and_more_than_one_other_form_is_an_error(store: Store) -> None:
    put(store, {A: b"1", BLANKS: b"2", b'{"shop": 2, "id": 1}': b"3"})
    view, table = View({0: store}), joined({0: store})
    assert view.get(KEY) == table.get(KEY) == b"1"
    other = {"shop": 2, "id": 1}
    for look in (view.get, table.get, view.__contains__):
        with pytest.raises(BadRecordError, match="3 keys have its value"):
            look(other)
    put(store, {A: None, BLANKS: None})
    assert view.get(other) == table.get(KEY) == b"3"


def test_a_key_in_another_form_may_be_in_another_partition(tmp_path: Path) -> None:
    stores: dict[int, Store] = {at: MemoryStore.open(tmp_path / str(at)) for at in range(4)}
    own, other = (int(key_partitions(pa.array([each], pa.binary()), 4)[0]) for each in (BLANKS, A))
    assert own != other
    put(stores[own], {BLANKS: b"S"})
    assert View(stores).get(KEY) == joined(stores).get(KEY) == b"S"
    for table in (View(stores), joined(stores)):
        with pytest.raises(
            (OptionError, ValueError), match=r"(?s)multi_get.*type dict cannot be a key of .*with get\(\)"
        ):
            table.multi_get(["a text", KEY])
    # Of a co-partitioned table a task has only one partition.
    assert joined({own: stores[own]}, own=own, partitions=4).get(KEY) == b"S"
    put(stores[own], {BLANKS: None})
    with pytest.raises(ValueError, match=f"is in partition {other}, but this task has partition {own}"):
        joined({own: stores[own]}, own=own, partitions=4).get(KEY)


class Looks(Processor):
    """Looks up the key of its records, and the key in another order of its fields."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def process(self, key: Any, records: list[Record], state: Any) -> Iterator[Record]:
        table = state.table("t")
        asked = [key, dict(reversed(key.items()))] if type(key) is dict else [key]
        for each in asked:
            yield Record(None, table.get(each) or b"none")
            assert (each in table) == (table.get(each) is not None)
            if type(each) is str:
                assert table.multi_get([each, each]).keys() <= {each}

    def on_timer(self, key: Any, timer: Any, state: Any) -> Iterator[Record]:
        yield Record(None, state.table("t").get(key) or b"none")


class LooksInColumns(ColumnProcessor):
    """As `Looks`, of documents that are written again."""

    def process(self, records: pa.Table, states: pa.Table, context: Any) -> Any:
        keys = pa.array([serdes.JSON.encode(serdes.JSON.decode(each)) for each in records["key"].to_pylist()])
        found = [context.tables["t"].values_of(keys), pa.array([context.tables["t"].get(serdes.JSON.decode(each))
                 for each in keys.to_pylist()], pa.binary())]  # fmt: skip
        return pa.table({"key": records["key"], "value": pc.fill_null(pc.coalesce(*found), b"none")}), None


OWN = serdes.Serde(lambda value: json.dumps(value, sort_keys=True).encode(), json.loads, "own")
RAW_KEYS = [BLANKS, FORMS[3], b' "a"', b"[1e41]", b"[1%s.0]" % (b"0" * 41)]


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("raw", RAW_KEYS)
@pytest.mark.parametrize("kind", ["json", "own", "columns"])
def test_a_record_looks_up_its_own_key_in_whatever_bytes_it_came(
    kind: str, raw: bytes, exists: bool, tmp_path: Path
) -> None:
    """Of a co-partitioned table. It is in this partition, even if the serde writes a key of another one."""
    processor: Any = LooksInColumns() if kind == "columns" else Looks(serdes.JSON if kind == "json" else OWN)
    serde = OWN if kind == "own" else serdes.JSON
    for partitions in (1, 2, 5):
        own = int(key_partitions(pa.array([raw], pa.binary()), partitions)[0])
        store, rows_of = MemoryStore.open(tmp_path / f"s{partitions}"), MemoryStore.open(tmp_path / f"t{partitions}")
        MemoryStore.remove(tmp_path / f"s{partitions}")
        MemoryStore.remove(tmp_path / f"t{partitions}")
        store.write({rows.timer_key(raw, b"t"): rows.pack(rows.timer_payload(b"p", 1))}, index=True)
        put(rows_of, {b"another": b"x", **({raw: b"S"} if exists else {})})
        table = joined({own: rows_of}, key=serde, own=own, partitions=partitions)
        engine = engine_of(None, processor, store, partition=own, now_ms=5, tables={"t": table})
        engine.start()
        engine.feed(pa.RecordBatch.from_pydict({"key": [raw], "value": [b"1"]}))
        engine.finish()
        outputs = engine.outputs()
        assert outputs is not None
        assert set(outputs["value"].to_pylist()) == {b"S" if exists else b"none"}
        if partitions == 1:
            continue
        other = next(each for each in (b'"%d"' % n for n in range(99))
                     if key_partitions(pa.array([each], pa.binary()), partitions)[0] != own)  # fmt: skip
        with pytest.raises(ValueError, match="is in partition"):
            table.beside(lambda key=raw: [key]).get(json.loads(other))


def test_keys_of_records_are_read_once_for_all_keys_that_are_not_found(tmp_path: Path) -> None:
    """Not once for each: a batch with many keys that the table does not have would take minutes."""
    read = []

    def loads(raw: bytes) -> Any:
        read.append(raw)
        return json.loads(raw)

    serde = serdes.Serde(OWN.encode, loads, "own")
    store = MemoryStore.open(tmp_path / "t")
    MemoryStore.remove(tmp_path / "t")
    records = [b'{"n":%d}' % n for n in range(100)]
    table = joined({0: store}, key=serde, own=0, partitions=1).beside(lambda: records)
    assert [table.get({"n": n}) for n in range(100)] == [None] * 100
    assert len(read) <= 2 * len(records)


documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 1 << 70)
    | st.sampled_from([1.0, 0.5, -2e30])
    | st.text('aé\\"\n ', max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abé", max_size=2), inner, max_size=3),
    max_leaves=5,
).filter(lambda value: isinstance(value, (dict, list, str)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(documents, st.sampled_from([None, 0, 1]), st.booleans(), st.booleans()), max_size=8))
@pytest.mark.parametrize("opener", [LmdbStore, MemoryStore])
def test_lookups_compare_values(opener: type[Store], written: list[tuple[Any, int | None, bool, bool]]) -> None:
    want: dict[bytes, bytes] = {}
    with tempfile.TemporaryDirectory() as folder, closing(opener.open(Path(folder))) as store:
        for value, indent, in_ascii, deleted in written:
            raw = json.dumps(value, indent=indent, ensure_ascii=in_ascii).encode()
            put(store, {raw: None if deleted else raw})
            want[raw] = b"" if deleted else raw
        want = {raw: value for raw, value in want.items() if value}
        view = View({0: store})
        for value, *_ in written:
            same = [raw for raw in want if decimals(raw) == decimals(json.dumps(value).encode())]
            raw = serdes.JSON.encode(value)
            if raw in want or len(same) < 2:
                assert view.get(value) == want.get(raw, same[0] if same else None)
            else:
                with pytest.raises(BadRecordError):
                    view.get(value)
        assert view.count() == len(want)
        assert store.checksum_holds()
        opener.remove(Path(folder))


def decimals(raw: bytes) -> Any:
    """Comparable also where Python finds that True is 1."""
    value = json.loads(raw, parse_float=Decimal, parse_int=Decimal)
    return json.dumps(value, sort_keys=True, default=lambda number: ["number", str(number.normalize())])


# ---- outputs -----------------------------------------------------------------------------------------


class Own(Processor):
    key = value = serdes.JSON

    def process(self, key: Any, records: list[Record], state: Any) -> Iterator[Record]:
        yield Record(key, b"own")
        yield Record(serdes.JSON.decode(serdes.JSON.encode(key)), b"equal")
        if isinstance(key, dict):
            key["changed"] = 7
            yield Record(key, b"changed")
        yield Record([key, 1], b"other")

    def on_timer(self, key: Any, timer: Any, state: Any) -> Iterator[Record]:
        yield Record(key, b"timer")


@pytest.mark.parametrize(
    "raw", [*FORMS, b" 1", b"1.50", b'"\\u0061"', b"[1, 2]", b"18446744073709551616 ", b"null", b" null"]
)
def test_a_processor_yields_its_own_key_in_the_bytes_in_which_it_came(raw: bytes, tmp_path: Path) -> None:
    store = MemoryStore.open(tmp_path)
    MemoryStore.remove(tmp_path)
    timer = rows.pack(rows.timer_payload(b"p", 1))
    store.write({rows.timer_key(raw, b"t"): timer}, index=True)
    engine = engine_of(None, Own(), store, now_ms=5)
    engine.start()
    engine.feed(pa.RecordBatch.from_pydict({"key": [raw, raw], "value": [b"1", b"2"]}))
    engine.finish()
    found = engine.outputs()
    assert found is not None
    key = serdes.JSON.decode(raw)
    changed = {**key, "changed": 7} if isinstance(key, dict) else key
    assert list(zip(found["value"].to_pylist(), found["key"].to_pylist(), strict=True)) == [
        (b"timer", raw),
        (b"own", raw),
        (b"equal", raw),
        *([(b"changed", serdes.JSON.encode(changed))] if changed != key else []),
        (b"other", serdes.JSON.encode([changed, 1])),
    ]


# ---- keys that Python takes for equal ----------------------------------------------------------------


def test_keys_that_are_one_key_of_a_dict_are_not_looked_up_together(store: Store) -> None:
    """A dict of their values would have the value of one of them for all."""
    put(store, {b"1": b"number", b"true": b"boolean", b"0": b"zero", b'"1"': b"text", b"7.0": b"7", b"7": b"7"})
    view, table = View({0: store}), joined({0: store})
    for keys in ([1, True], [1, "1", True], [False, 0], [True, 2, 1.0]):
        with pytest.raises(OptionError, match="two keys of the table, but one key of a dict"):
            view.multi_get(keys)
        with pytest.raises(ValueError, match="two keys of the table, but one key of a dict"):
            table.multi_get(keys)
    for keys in ([1, "1"], [7, 7.0], [1, 1], [2, 2.0, 1]):
        expected = {key: view.get(key) for key in keys if view.get(key) is not None}
        assert view.multi_get(keys) == table.multi_get(keys) == expected


@given(
    st.dictionaries(st.sampled_from(["a", "ab", 'a"', "ä", "b", "\n"]), st.just(b"v")), st.sampled_from(["", "a", 'a"'])
)
def test_text_keys_of_json_are_found_by_their_beginning(content: dict[str, bytes], prefix: str) -> None:
    with tempfile.TemporaryDirectory() as folder, closing(MemoryStore.open(Path(folder))) as store:
        put(store, {serdes.JSON.encode(key): value for key, value in content.items()})
        put(store, {b"1": b"number", b'{"a":1}': b"document"})
        assert dict(View({0: store}).prefix(prefix)) == {k: v for k, v in content.items() if k.startswith(prefix)}
        MemoryStore.remove(Path(folder))


class Entries(Processor):
    """Puts an entry, and says what is found for another key."""

    key, value, output = serdes.STRING, serdes.JSON, serdes.JSON
    state = serdes.JSON

    def process(self, key: str, records: list[Record], state: Any) -> Iterator[Record]:
        for record in records:
            one, other = record.value
            entries = state.map("m", key=serdes.JSON)
            entries.put(one, "found")
            yield Record(key, [entries.get(other), other in entries, len(list(entries.items()))])


@pytest.mark.parametrize(
    "one, other, same",
    [
        ('{"a":1,"b":2}', '{"b":2,"a":1}', True),
        ("1", "1.0", True),
        ("-0.0", "0", True),
        ("1e16", "10000000000000000.000000000", True),
        ("0.50", "0.5", True),
        ('[{"a":1,"b":[0.25]}]', '[{"b":[25e-2],"a":1.0}]', True),
        ("1", "true", False),
        ("1", '"1"', False),
        ("0", "false", False),
        ("[1,2]", "[2,1]", False),
        ("9007199254740993", "9007199254740992.0", False),
    ],
)
def test_entries_of_maps_whose_keys_are_json_are_found_by_value(one: str, other: str, same: bool) -> None:
    driver = ProcessorDriver(Entries())
    (record,) = driver.send("k", f"[{one},{other}]".encode())
    assert record.value == ["found" if same else None, same, 1]


def test_ranges_of_numbers_of_a_map_go_by_their_text() -> None:
    class Ranges(Entries):
        def process(self, key: str, records: list[Record], state: Any) -> Iterator[Record]:
            entries = state.map("m", key=serdes.JSON)
            for number in records[0].value:
                entries.put(number, 1)
            yield Record(key, [entry for entry, _ in entries.items(0.5, 2)])

    (record,) = ProcessorDriver(Ranges()).send("k", [0.25, 0.5, 1, 1.5, 2.0, 2.5])
    assert record.value == [0.5, 1, 1.5]
