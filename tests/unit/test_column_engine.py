"""The engine of column processors: tables in, tables out, the same rules as record by record."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.errors import ProcessorError
from onceflow.state.api.processor import BadRows, ColumnProcessor
from onceflow.state.api.serdes import struct
from onceflow.state.engine.column_engine import ColumnEngine
from onceflow.state.format import rows
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.testing.processor_driver import ProcessorDriver
from onceflow_workshop.testing.engines import engine_of

FIELDS = {"total": "int64", "last": "string"}
STRUCT = struct(**FIELDS)


class Columns(ColumnProcessor):
    """Runs a function given to it."""

    state_fields: Any = FIELDS

    def __init__(self, run: Any = None, **attributes: Any) -> None:
        self._run = run or sums
        for name, value in attributes.items():
            setattr(self, name, value)

    def process(self, records: Any, states: Any, context: Any) -> Any:
        return self._run(records, states, context)


def sums(records: Any, states: Any, context: Any = None) -> Any:
    """Adds the values up; a value that is no number is an error. Yields the totals."""
    total = states["total"].fill_null(0).to_numpy().copy()
    last = states["last"].to_pylist()
    for at, value in zip(records["state"].to_pylist(), records["value"].to_pylist(), strict=True):
        total[at] += int(value)
        last[at] = value.decode()
    new = pa.table({"key": states["key"], "total": total, "last": pa.array(last, pa.string())})
    return pa.table({"key": states["key"], "value": new["last"]}), new


@pytest.fixture
def store(tmp_path: Path) -> Any:
    yield MemoryStore.open(tmp_path)
    MemoryStore.remove(tmp_path)


def engine(processor: Any, store: Any, *, now_ms: int = 0, **options: Any) -> ColumnEngine:
    return engine_of(ColumnEngine, processor, store, partition=2, now_ms=now_ms, **options)


def batch(*pairs: tuple[Any, Any], **columns: Any) -> pa.RecordBatch:
    given_columns = {
        "key": pa.array([key for key, _ in pairs], pa.binary()),
        "value": pa.array([value for _, value in pairs], pa.binary()),
        **columns,
    }
    return pa.RecordBatch.from_arrays(list(given_columns.values()), names=list(given_columns))


def row(total: int | None, last: str | None, **parts: Any) -> bytes:
    return rows.pack(STRUCT.encode({"total": total, "last": last}), **parts)


# ---- what user code sees -----------------------------------------------------------------------------


def test_records_and_states_as_user_code_sees_them(store: Any) -> None:
    seen: list[Any] = []
    store.write([(b"vb", row(7, None))])
    run = engine(Columns(lambda *given_args: seen.append(given_args)), store, now_ms=5, watermark_ms=3)
    run.feed(
        batch(
            (b"a", b"1"),
            (b"b", None),
            (b"a", b"3"),
            topic=pa.array(["t"] * 3),
            partition=pa.array([1, 1, 2]),
            offset=pa.array([4, 5, 6]),
            timestamp=pa.array([10, None, 30]),
        )
    )
    ((records, states, context),) = seen
    assert records.to_pydict() == {
        "key": [b"a", b"b", b"a"],
        "value": [b"1", None, b"3"],
        "topic": ["t"] * 3,
        "partition": [1, 1, 2],
        "offset": [4, 5, 6],
        "timestamp_ms": [10, None, 30],
        "state": [0, 1, 0],
    }
    assert records.schema.field("state").type == pa.int32()
    assert states.to_pydict() == {
        "key": [b"a", b"b"],
        "total": [None, 7],
        "last": [None, None],
        "exists": [False, True],
    }
    assert (context.partition, context.now_ms, context.watermark_ms) == (2, 5, 3)
    assert run.changes() == []
    assert run.outputs() is None


def test_later_arrow_batches_see_earlier_changes_and_only_differences_are_written(store: Any) -> None:
    store.write([(b"va", row(1, "x")), (b"vb", row(5, "0"))])
    run = engine(Columns(), store)
    run.start()
    run.feed(batch((b"a", b"1"), (b"c", b"3"), (b"a", b"1")))
    run.feed(batch((b"c", b"4"), (b"b", b"0")))
    run.finish()
    assert dict(run.changes()) == {b"va": row(3, "1"), b"vc": row(7, "4")}
    assert run.outputs().to_pydict() == {  # type: ignore[union-attr]
        "key": [b"a", b"c", b"c", b"b"],
        "value": [b"1", b"3", b"4", b"0"],
        "topic": [None] * 4,
        "headers": [None] * 4,
        "timestamp": [None] * 4,
    }
    assert run.counts["records"] == 5
    assert run.next_timer_ms == {"event": None, "processing": None}


@pytest.mark.parametrize("examples", [20, pytest.param(50, marks=pytest.mark.long)])
def test_sums_are_those_of_a_dict(examples: int) -> None:
    @settings(deadline=None, max_examples=examples)
    @given(
        st.lists(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"\0", b"", b"cc"]), st.integers(-9, 9)), min_size=1)),
        st.sampled_from([0, 3]),
        st.sampled_from([None, "1 hour"]),
        st.sampled_from([{"total": "int64", "last": "string"}, {"last": "string", "total": "int32"}]),
    )
    def check(batches: Any, version: int, ttl: str | None, fields: dict[str, str]) -> None:
        driver = ProcessorDriver(Columns(version=version, ttl=ttl, state_fields=fields))
        expected: dict[bytes, Any] = {}
        for pairs in batches:
            driver.send_many([(key, str(number)) for key, number in pairs])
            for key, number in pairs:
                expected[key] = {"total": expected.get(key, {"total": 0})["total"] + number, "last": str(number)}
            assert driver.states == expected

    check()


class Exported:
    """A data frame of a library that is only known by the Arrow interface; text is large, as Polars has it."""

    def __init__(self, table: pa.Table) -> None:
        large = [
            pa.large_string() if kind == pa.string() else pa.large_binary() if kind == pa.binary() else kind
            for kind in table.schema.types
        ]
        self._table = table.cast(pa.schema(zip(table.column_names, large, strict=True)))

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize(
    "convert", [lambda table: table.to_pandas(), Exported, lambda table: table.combine_chunks().to_batches()[0]]
)
def test_tables_of_other_libraries(convert: Any) -> None:
    def run(records: Any, states: Any, context: Any) -> Any:
        return tuple(map(convert, sums(records, states)))

    driver = ProcessorDriver(Columns(run))
    driver.send_many([("a", "1"), ("b", "2"), ("a", "3")])
    assert driver.states == {b"a": {"total": 4, "last": "3"}, b"b": {"total": 2, "last": "2"}}
    assert [record.value for record in driver.outputs] == [b"3", b"2"]


def test_outputs_may_have_topics_headers_and_times(store: Any) -> None:
    def run(records: Any, states: Any, context: Any) -> Any:
        return {
            "key": ["k", None],
            "value": [b"v", None],
            "topic": [None, "other"],
            "headers": [None, [{"key": "h", "value": b"x"}]],
            "timestamp_ms": pa.array([5, None], pa.timestamp("ms")),
        }, None

    run_it = engine(Columns(lambda *given_args: (pa.table(run(*given_args)[0]), None)), store)
    run_it.feed(batch((b"a", b"1")))
    assert run_it.outputs().to_pydict() == {  # type: ignore[union-attr]
        "key": [b"k", None],
        "value": [b"v", None],
        "topic": [None, "other"],
        "headers": [None, [{"key": "h", "value": b"x"}]],
        "timestamp": [5, None],
    }


NAMES = pa.struct([("key", pa.string()), ("value", pa.binary())])
OTHERS = pa.struct([("key", pa.string()), ("content", pa.binary())])
OF_MAP = pa.map_(pa.string(), pa.binary())


@pytest.mark.parametrize("topic", [None, "aside"])
@pytest.mark.parametrize("good", [
    pa.array([[{"key": "h", "value": b"x"}]], pa.list_(NAMES)),
    pa.array([[{"value": "x", "key": b"h"}]]),
    pa.array([[{"key": "h", "value": b"x"}]], pa.large_list(NAMES)),
    pa.array([[{"key": "h", "value": b"x"}]], pa.list_(NAMES, 1)),
    pa.array([[("h", b"x")]], OF_MAP),
])  # fmt: skip
@pytest.mark.parametrize("bad", [
    pa.array([[{"key": "h", "content": b"x"}]]),
    pa.array([[{"name": "h", "value": b"x"}]]),
    pa.array([[{"key": "h", "value": b"x", "more": 1}]]),
    pa.array([[{"key": "h"}]]),
    pa.array([[{"key": "h", "content": b"x"}]]).cast(pa.large_list(OTHERS)),
    pa.array([[{"key": "h", "value": b"x"}, {"key": None, "value": b"1"}]], pa.list_(NAMES)),
    pa.array([[None]], pa.list_(NAMES)),
])  # fmt: skip
def test_headers_are_kept_or_their_record_is_bad(topic: str | None, good: pa.Array, bad: pa.Array) -> None:
    def run(records: Any, states: Any, context: Any) -> Any:
        (kind,) = set(records["value"].to_pylist())  # those of both cannot be in one table
        headers = {b"good": good, b"bad": bad, b"none": pa.nulls(1)}[kind].take(pa.array([0] * len(records)))
        topics = pa.array([topic] * len(records), pa.string())
        return pa.table({"key": records["key"], "value": records["value"], "topic": topics, "headers": headers}), None

    driver = ProcessorDriver(Columns(run), on_error="dead-letter")
    driver.send_many([(b"a", value) for value in (b"good", b"bad", b"none", b"good")])
    assert [record.headers for record in driver.outputs] == [(("h", b"x"),), (), (("h", b"x"),)]
    assert [letter.value for letter in driver.dead_letters] == [b"bad"]


# ---- new states --------------------------------------------------------------------------------------


def test_some_states_some_deleted_in_any_order(store: Any) -> None:
    def run(records: Any, states: Any, context: Any) -> Any:
        keys = ["c", "a", "d"]
        new = pa.table({"key": keys, "total": [3, 1, 9], "last": pa.nulls(3), "deleted": [None, True, True]})
        return None, new

    store.write([(b"va", row(1, "x"))])
    run_it = engine(Columns(run), store)
    run_it.feed(batch(*((key, b"1") for key in (b"a", b"b", b"c", b"d"))))
    assert dict(run_it.changes()) == {b"va": None, b"vc": row(3, None)}


@pytest.mark.parametrize(
    "new, match",
    [
        ({"key": ["k"], "total": [1]}, "missing {'last'}"),
        ({"key": ["k"], "total": [1], "last": ["x"], "delete": [True]}, "unknown {'delete'}"),
        ({"key": ["other"], "total": [1], "last": ["x"]}, "key b'other', which none of the records has"),
        ({"key": ["k", "k"], "total": [1, 2], "last": ["x", "y"]}, "a key twice"),
        ({"key": ["k"], "total": [1.5], "last": ["x"]}, "state field total is int64"),
        ({"key": ["k"], "total": ["one"], "last": ["x"]}, "state field total is int64"),
        ({"key": [1], "total": [1], "last": ["x"]}, "column key has type int64"),
    ],
)
def test_new_states_that_cannot_be(store: Any, new: dict[str, Any], match: str) -> None:
    run = engine(Columns(lambda *_: (None, pa.table(new))), store)
    with pytest.raises(ProcessorError, match=match):
        run.feed(batch((b"k", b"1")))
    assert run.changes() == []


@pytest.mark.parametrize(
    "result, match",
    [
        (pa.table({"key": ["k"]}), "a tuple of outputs and new states is expected, got Table"),
        (([{"key": b"k"}], None), "outputs are a table of pyarrow, pandas or Polars, got list"),
        ((pa.table({"key": ["k"]}), None), "key and value are needed"),
        ((pa.table({"key": ["k"], "value": ["v"], "partition": [1]}), None), "outputs have the columns"),
        ((pa.table({"key": ["k"], "value": [1]}), None), "column value has type int64"),
    ],
)
def test_results_that_cannot_be(store: Any, result: Any, match: str) -> None:
    with pytest.raises(ProcessorError, match=match):
        engine(Columns(lambda *_: result), store).feed(batch((b"k", b"1")))


def test_field_names_that_are_taken(store: Any) -> None:
    with pytest.raises(ValueError, match="exists"):
        engine(Columns(state_fields={"exists": "bool"}), store)


def test_state_as_bytes(store: Any) -> None:
    def run(records: Any, states: Any, context: Any) -> Any:
        values = [(old or b"") + b"+" for old in states["value"].to_pylist()]
        return None, pa.table({"key": states["key"], "value": values, "deleted": [len(each) > 2 for each in values]})

    driver = ProcessorDriver(Columns(run, state_fields=None))
    driver.send("a", "")
    driver.send_many([("a", ""), ("b", "")])
    assert driver.states == {b"a": b"++", b"b": b"+"}
    driver.send("a", "")
    assert driver.states == {b"b": b"+"}
    driver.processor = Columns(lambda r, s, c: (None, s.select(["key", "value", "exists"])), state_fields=None)
    with pytest.raises(ProcessorError, match="the value null"):
        driver.send("new", "")


# ---- time to live, versions, lateness ----------------------------------------------------------------


def test_rows_expire(store: Any) -> None:
    processor = Columns(ttl="10 seconds")
    for now_ms, expected in ((0, 1), (9_999, 2), (20_000, 1)):
        run = engine(processor, store, now_ms=now_ms)
        run.feed(batch((b"k", b"1"), (b"new%d" % now_ms, b"1")))  # without start(): nothing is deleted before
        assert dict(run.changes())[b"vk"] == row(expected, "1", expires_ms=now_ms + 10_000)
        store.write(run.changes(), index=True)
    run = engine(processor, store, now_ms=25_000)
    run.start()
    assert run.counts["expired"] == 2
    assert run.next_timer_ms["processing"] == 30_000


@pytest.mark.parametrize("version", [0, 2])
def test_rows_with_and_without_expiry_and_version(store: Any, version: int) -> None:
    store.write(
        [
            (b"va", row(1, "a", version=version)),
            (b"vb", row(2, "bb", version=version, expires_ms=1)),
            (b"vc", row(3, "", version=version, expires_ms=99)),
            (b"vd", row(None, "d" * 300, version=version)),
        ]
    )
    for keys in ("abcde", "a", "bc", "ad", "ea"):
        seen: list[Any] = []
        processor = Columns(lambda _, states, __, seen=seen: seen.append(states), version=version, ttl="1 s")
        engine(processor, store, now_ms=5).feed(batch(*((key.encode(), b"") for key in keys)))
        found = {each["key"].decode(): (each["total"], each["last"], each["exists"]) for each in seen[0].to_pylist()}
        all_of_them = {
            "a": (1, "a", True),
            "b": (None, None, False),
            "c": (3, "", True),
            "d": (None, "d" * 300, True),
            "e": (None, None, False),
        }
        assert found == {key: all_of_them[key] for key in keys}


def test_older_rows_are_migrated_and_newer_ones_refused(store: Any) -> None:
    class Two(Columns):
        version = 2

        def migrate(self, payload: bytes, from_version: int) -> Any:
            return {"total": int(payload), "last": f"of {from_version}"}

    store.write([(b"va", rows.pack(b"7")), (b"vb", rows.pack(b"8", version=1)), (b"vc", row(9, "x", version=2))])
    run = engine(Two(lambda _, states, __: (None, states)), store)
    run.feed(batch((b"a", b""), (b"b", b""), (b"c", b"")))
    assert dict(run.changes()) == {b"va": row(7, "of 0", version=2), b"vb": row(8, "of 1", version=2)}
    for version, match in ((1, "version 2 of the processor, this is version 1"), (3, "no migrate")):
        run = engine(Columns(version=version), store, on_error="dead-letter", dead_letter_topic="dead")
        with pytest.raises(ProcessorError, match=match):
            run.feed(batch((b"c", b"1"), (b"d", b"1")))
    with pytest.raises(ProcessorError, match="define migrate"):
        engine(Columns(version=2, state_fields={"other": "int8"}), store).feed(batch((b"c", b"1")))


@pytest.mark.parametrize("own", [False, True])
def test_late_records(own: bool) -> None:
    class Own(Columns):
        def event_time(self, records: Any) -> Any:
            return np.array([int(value) for value in records["value"].to_pylist()])

    driver = ProcessorDriver((Own if own else Columns)(allowed_lateness="1 s"))
    driver.send_many([("k", "5000")])
    driver.now_ms = 4000
    driver.send_many([("k", "3999" if own else "1")])
    driver.now_ms = 3999
    driver.send_many([("late", "3999"), ("late", "2")])
    assert driver.watermark_ms == (4000 if own else 3000)
    assert [letter.key for letter in driver.late] == ([b"k", b"late", b"late"] if own else [])


# ---- bad records -------------------------------------------------------------------------------------


def test_bad_records_are_found_by_halves() -> None:
    calls = []

    def run(records: Any, states: Any, context: Any) -> Any:
        calls.append(records.num_rows)
        return sums(records, states)

    driver = ProcessorDriver(Columns(run), on_error="dead-letter")
    values = ["bad" if i in (0, 17, 18, 99) else str(i) for i in range(100)]
    driver.send_many([(f"key-{i % 7}", value) for i, value in enumerate(values)])
    assert sorted(letter.value for letter in driver.dead_letters) == [b"bad"] * 4
    assert [dict(letter.headers)["onceflow.error.offset"] for letter in driver.dead_letters] == [
        b"0",
        b"17",
        b"18",
        b"99",
    ]
    assert sum(state["total"] for state in driver.states.values()) == sum(i for i in range(100) if values[i] != "bad")
    assert {name: count for name, count in driver.counts.items() if count} == {
        "records": 100,
        "dead_letters": 4,
        "aside": 4,
    }
    assert len(calls) < 60


class Choosy(Columns):
    """Rejects what is no number, all at once or one after the other."""

    at_once = True
    calls = 0

    def process(self, records: Any, states: Any, context: Any) -> Any:
        type(self).calls += 1
        bad = [i for i, value in enumerate(records["value"].to_pylist()) if not value.isdigit()]
        if bad:
            raise BadRows({i: ValueError(f"row {i} is bad") for i in bad[: None if self.at_once else 1]})
        return sums(records, states)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.slow
def test_rejected_records_leave_the_others(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choosy, "calls", 0)
    driver = ProcessorDriver(Choosy(at_once=at_once), on_error="dead-letter")
    values = ["bad" if i % 3 else str(i) for i in range(1800)]  # more to reject than calls fit into one another
    driver.send_many([(f"key-{i % 7}", value) for i, value in enumerate(values)])
    headers = [dict(letter.headers) for letter in driver.dead_letters]
    assert [each["onceflow.error.offset"] for each in headers] == [b"%d" % i for i in range(1800) if i % 3]
    assert {each["onceflow.error.class"] for each in headers} == {b"ValueError"}
    assert headers[0]["onceflow.error.message"] == b"row 1 is bad"
    assert sum(state["total"] for state in driver.states.values()) == sum(range(0, 1800, 3))
    assert driver.counts["dead_letters"] == 1200
    assert Choosy.calls == (2 if at_once else 1201)


def test_all_records_may_be_rejected() -> None:
    driver = ProcessorDriver(Choosy(), on_error="dead-letter")
    assert driver.send_many([("a", "bad"), ("b", "bad")]) == []
    assert len(driver.dead_letters) == 2
    assert driver.states == {}


def test_rejected_rows_are_those_that_were_in_time() -> None:
    """And late records are put aside once, however often the others are processed."""

    class Timed(Choosy):
        def event_time(self, records: Any) -> Any:
            return records["timestamp_ms"]

    driver = ProcessorDriver(Timed(allowed_lateness="1 s"), on_error="dead-letter")
    driver.send("a", "1", timestamp_ms=10_000)
    for value, at_ms in (("2", 1), ("bad", 2), ("bad", 10_000), ("3", 10_001), ("4", 3), ("worse", 10_002)):
        driver.send("a", value, timestamp_ms=at_ms, run=False)
    driver.run()
    assert [letter.value for letter in driver.dead_letters] == [b"bad", b"worse"]
    assert [letter.value for letter in driver.late] == [b"2", b"bad", b"4"]
    assert driver.states == {b"a": {"total": 4, "last": "3"}}
    assert (driver.counts["late"], driver.counts["dead_letters"]) == (3, 2)


def test_a_rejected_record_fails_the_batch_by_default(store: Any) -> None:
    run = engine(Choosy(), store, source_topic="deposits")
    with pytest.raises(ProcessorError, match="ValueError: row 1 is bad") as raised:
        run.feed(batch((b"a", b"1"), (b"b", b"bad"), (b"c", b"2"), offset=pa.array([7, 8, 9])))
    assert raised.value.detail.startswith("offset 8, key b'b', table t-2")


@pytest.mark.parametrize("causes", [{}, {2: ValueError("x")}, {-1: ValueError("x")}])
def test_rows_that_there_are_not_cannot_be_rejected(store: Any, causes: dict[int, Exception]) -> None:
    def run(records: Any, states: Any, context: Any) -> Any:
        raise BadRows(causes)

    with pytest.raises(ProcessorError, match="BadRows names"):
        engine(Columns(run), store).feed(batch((b"a", b"1"), (b"b", b"2")))


def test_bad_rows_can_be_pickled() -> None:
    bad = pickle.loads(pickle.dumps(BadRows({3: ValueError("too much")})))
    assert str(bad) == "1 record; row 3: too much"
    assert list(bad.causes) == [3]


def test_a_bad_record_fails_the_batch_by_default(store: Any) -> None:
    run = engine(Columns(), store, source_topic="deposits")
    with pytest.raises(ProcessorError, match="ValueError: invalid literal") as raised:
        run.feed(batch((b"a", b"1"), (b"b", b"bad"), (b"c", b"2"), offset=pa.array([7, 8, 9])))
    assert raised.value.topic == "deposits"
    assert raised.value.detail.startswith("offset 8, key b'b', table t-2, raised in sums")


def test_records_that_only_fail_together(store: Any) -> None:
    def run(records: Any, states: Any, context: Any) -> Any:
        if records.num_rows > 2:
            raise RuntimeError("too many")
        return sums(records, states)

    three = batch((b"a", b"1"), (b"b", b"2"), (b"a", b"3"))
    with pytest.raises(ProcessorError, match="3 records could not be processed together"):
        engine(Columns(run), store).feed(three)
    run_it = engine(Columns(run), store, on_error="dead-letter", dead_letter_topic="dead")
    run_it.feed(three)
    assert dict(run_it.changes()) == {b"va": row(4, "3"), b"vb": row(2, "2")}


def test_keys_that_state_cannot_have() -> None:
    driver = ProcessorDriver(Columns(), on_error="dead-letter")
    driver.send_many([(None, "1"), ("k", "2"), (b"k" * 5000, "3")])
    assert driver.states == {b"k": {"total": 2, "last": "2"}, b"k" * 5000: {"total": 3, "last": "3"}}
    assert [letter.value for letter in driver.dead_letters] == [b"1"]
