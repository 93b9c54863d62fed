"""What a processor may rely on: order, state, maps, lists, ranges, versions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.errors import ProcessorError, SchemaError
from onceflow.protocol.names import OwnTopics
from onceflow.state.api.processor import Processor
from onceflow.state.api.record import Record
from onceflow.state.api.serdes import BYTES, JSON, LONG, STRING
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.testing.processor_driver import ProcessorDriver

sys.path.insert(0, str(Path(__file__).parent))
try:
    from text_processor import Text, batch, engine
finally:
    sys.path.pop(0)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    yield MemoryStore.open(tmp_path)
    MemoryStore.remove(tmp_path)


# ---- records -----------------------------------------------------------------------------------------


def test_records_come_key_by_key_in_order_with_all_that_is_known() -> None:
    calls = []
    driver = ProcessorDriver(Text(lambda key, records, state: calls.append((key, records))))
    driver.send_many(
        [
            Record("a", "1", headers=[("h", b"x"), ("n", None)], timestamp_ms=5),
            Record("b", "2", timestamp_ms=6),
            Record("a", None, topic="other", partition=3, timestamp_ms=7),
        ]
    )
    assert calls == [
        (
            "a",
            [Record("a", "1", "input", (("h", b"x"), ("n", None)), 5, 0, 0), Record("a", None, "other", (), 7, 3, 0)],
        ),
        ("b", [Record("b", "2", "input", (), 6, 0, 1)]),
    ]


def test_many_keys_keep_the_order_of_each(store: Any) -> None:
    seen: dict[bytes, list[int]] = {}

    class Collect(Processor):
        def process(self, key: bytes, records: Any, state: Any) -> None:
            seen.setdefault(key, []).extend(int(record.value) for record in records)

    run = engine(Collect(), store)
    pairs = [(b"%d" % (i * 7919 % 701), b"%d" % i) for i in range(5000)]
    run.feed(batch(*pairs[:3000]))
    run.feed(batch(*pairs[3000:]))
    assert seen == {b"%d" % k: [i for i in range(5000) if i * 7919 % 701 == k] for k in range(701)}
    assert run.counts["records"] == 5000


def test_sliced_and_other_column_types_are_taken(store: Any) -> None:
    calls: list[Any] = []
    run = engine(Text(lambda key, records, state: calls.extend(records)), store, source_topic="deposits")
    rows_given = pa.record_batch(
        {
            "key": pa.array(["x", "a", "b"], pa.large_string()),
            "value": pa.array(["x", "1", None]).dictionary_encode(),
            "timestamp": pa.array([0, 1_500_000, None], pa.timestamp("us", "UTC")),
            "partition": pa.array([0, 1, 2], pa.int64()),
            "unknown": pa.array([1, 2, 3]),
        }
    )
    run.feed(rows_given.slice(1))
    assert calls == [Record("a", "1", "deposits", (), 1500, 1), Record("b", None, "deposits", (), None, 2)]
    run.feed(batch())
    with pytest.raises(SchemaError):
        run.feed(pa.record_batch({"value": pa.array([b"1"])}))
    with pytest.raises(SchemaError, match="int64"):
        run.feed(pa.record_batch({"key": pa.array([1]), "value": pa.array([b"1"])}))


def test_a_record_that_was_read_goes_where_its_topic_says_when_that_was_changed(store: Any) -> None:
    """With or without an offset: a query may drop the column."""

    def run_it(key: str, records: Any, state: Any) -> Any:
        yield records[0]
        records[0].topic = "alerts"
        yield records[0]
        yield Record(key, "made", topic="alerts", offset=3)

    for columns in ({}, {"offset": pa.array([9])}, {"topic": pa.array(["in"])}):
        run = engine(Text(run_it), store, source_topic="in", own_topics=OwnTopics(frozenset({"in"})))
        run.feed(batch((b"k", b"1"), **columns))
        out = run.outputs()
        assert out is not None
        assert out.column("topic").to_pylist() == [None, "alerts", "alerts"]


def test_outputs_have_five_columns_and_are_handed_over_once(store: Any) -> None:
    def run_it(key: str, records: Any, state: Any) -> Any:
        yield Record(key, "v")
        yield Record(None, None, topic="other", headers={"h": "text", "n": None}, timestamp_ms=3)
        yield Record(b"raw", b"bytes")
        yield records[0]  # what is passed on does not go back to its own topic

    run = engine(Text(run_it), store, source_topic="in")
    run.feed(batch((b"k", b"1"), offset=pa.array([9]), timestamp=pa.array([4])))
    out = run.outputs()
    assert out is not None
    assert out.to_pydict() == {
        "key": [b"k", None, b"raw", b"k"],
        "value": [b"v", None, b"bytes", b"1"],
        "topic": [None, "other", None, None],
        "headers": [None, [{"key": "h", "value": b"text"}, {"key": "n", "value": None}], None, None],
        "timestamp": [None, 3, None, 4],
    }
    assert run.outputs() is None


def test_open_and_close_frame_a_batch_and_self_is_forgotten() -> None:
    calls = []

    class Opened(Processor):
        seen = 0

        def open(self, partition: int) -> None:
            calls.append(f"open {partition}")

        def process(self, key: bytes, records: Any, state: Any) -> None:
            self.seen += 1
            calls.append(f"process {self.seen}")

        def close(self) -> None:
            calls.append("close")

    driver = ProcessorDriver(Opened())
    driver.send(b"a")
    driver.send(b"a")
    assert calls == ["open 0", "process 1", "close"] * 2


# ---- state -------------------------------------------------------------------------------------------


def test_state_is_seen_at_once_and_kept() -> None:
    def run_it(key: str, records: Any, state: Any) -> Any:
        before = state.get("none")
        state.put(records[-1].value)
        assert state.get() == records[-1].value
        yield Record(key, before)

    driver = ProcessorDriver(Text(run_it), partitions=3)
    assert [record.value for record in driver.send_many([("a", "1"), ("b", "2"), ("a", "3")])] == ["none", "none"]
    assert [record.value for record in driver.send("a", "4")] == ["3"]
    assert driver.states == {"a": "4", "b": "2"}


def test_put_values_are_copies_and_none_is_refused() -> None:
    def run_it(key: str, records: Any, state: Any) -> None:
        value = {"n": 1}
        state.put(value)
        value["n"] = 2
        state.get()["n"] = 3
        assert state.get() == {"n": 1}
        for put in (state.put, state.list("l").append, lambda value: state.map("m").put("k", value)):
            with pytest.raises(ValueError, match="delete"):
                put(None)

    ProcessorDriver(Text(run_it)).send("a", "1")


@pytest.mark.parametrize(
    "before, steps, expected",
    [
        (None, ["put 1"], {b"vk": b"\x001"}),
        (None, ["put 1", "delete"], {}),
        (None, ["delete"], {}),
        (b"\x001", ["delete"], {b"vk": None}),
        (b"\x001", ["put 1"], {}),
        (b"\x001", ["put 2", "put 1"], {}),
        (b"\x001", ["delete", "put 2"], {b"vk": b"\x002"}),
        (b"\x001", ["get", "put 2"], {b"vk": b"\x002"}),
        (b"\x001", [], {}),
    ],
)
def test_changes_are_only_what_differs(store: Any, before: Any, steps: list[str], expected: Any) -> None:
    def run_it(key: str, records: Any, state: Any) -> None:
        for step in steps:
            name, *arguments = step.split()
            getattr(state, name)(*map(int, arguments))

    if before is not None:
        store.write([(b"vk", before)])
    run = engine(Text(run_it), store)
    run.feed(batch((b"k", b"")))
    assert dict(run.changes()) == expected


def test_maps_over_store_and_overlay() -> None:
    def fill(key: str, records: Any, state: Any) -> None:
        entries = state.map("m")
        for name in ("a", "b", "c", "d"):
            entries.put(name, f"old {name}")
        state.map("other").put("a", "other")

    def change(key: str, records: Any, state: Any) -> None:
        entries = state.map("m")
        entries.delete("b")
        entries.put("c", "new c")
        entries.put("bb", "new bb")
        assert list(entries.items()) == [(b"a", "old a"), (b"bb", "new bb"), (b"c", "new c"), (b"d", "old d")]
        assert list(entries.items(reverse=True)) == list(entries.items())[::-1]
        assert [name for name, _ in entries.items("b", "d")] == [b"bb", b"c"]
        assert [name for name, _ in entries.items(b"bc", reverse=True)] == [b"d", b"c"]
        assert [name for name, _ in entries.prefix("b")] == [b"bb"]
        assert "a" in entries
        assert "b" not in entries
        assert (entries.get("b", 0), entries.get(b"c"), state.map("m2").get("a")) == (0, "new c", None)
        for name, _ in entries.items():  # the map may change under its iterator
            entries.delete(name)
        assert list(entries.items()) == []
        entries.put("z", 1)

    driver = ProcessorDriver(Text(fill))
    driver.send("k", "1")
    driver.send("k2", "1")
    driver.processor = Text(change)
    driver.send("k", "1")
    assert driver.map("k", "m", key=STRING) == {"z": 1}
    assert driver.map("k", "other") == {b"a": "other"}
    assert len(driver.map("k2", "m")) == 4


def test_maps_with_serdes_and_names_that_contain_each_other() -> None:
    def run_it(key: str, records: Any, state: Any) -> None:
        state.map("m", key=LONG, value=BYTES).put(7, b"x")
        state.map("m\0").put("", "empty entry key")
        state.map("").put("m", "empty name")
        with pytest.raises(TypeError, match="key serde"):
            state.map("m").put(7, "x")

    driver = ProcessorDriver(Text(run_it))
    for key in ("k", "k\0", "", "\0\1"):
        driver.send(key, "1")
    for key in ("k", "k\0", "", "\0\1"):
        assert driver.map(key, "m", key=LONG, value=BYTES) == {7: b"x"}
        assert driver.map(key, "m\0") == {b"": "empty entry key"}
        assert driver.map(key, "") == {b"m": "empty name"}


def test_lists_and_clear() -> None:
    def run_it(key: str, records: Any, state: Any) -> None:
        items = state.list("l")
        for record in records:
            if record.value == "clear":
                items.clear()
                state.map("l").clear()
            else:
                items.append(record.value)
                state.list("l").extend([1, 2])
        state.map("l").put("not", "in the list")
        assert len(items) == len(list(items.items())) == len([*state.list("l")])
        assert bool(items) == (len(items) > 0)

    driver = ProcessorDriver(Text(run_it))
    driver.send_many([("k", "a"), ("k", "b")])
    driver.send("k", "c")
    assert driver.list("k", "l") == ["a", 1, 2, "b", 1, 2, "c", 1, 2]
    driver.send_many([("k", "clear"), ("k", "d")])
    assert driver.list("k", "l") == ["d", 1, 2]
    driver.send("k", "clear")
    assert driver.list("k", "l") == []
    assert driver.map("k", "l") == {b"not": "in the list"}


@settings(max_examples=50)
@given(st.lists(st.lists(st.sampled_from(["kept", "kept with serde", "new", "new with serde", "clear"]), max_size=8)))
def test_handles_of_one_list(batches: list[list[str]]) -> None:
    """Whatever handle appends, and whenever it was made, the list has all items."""

    def run_it(key: str, records: Any, state: Any) -> None:
        kept = {"kept": state.list("l"), "kept with serde": state.list("l", value=JSON)}
        for n, way in enumerate(json.loads(records[0].value)):
            if way == "clear":
                state.list("l", value=JSON).clear()
            else:
                made = state.list("l", **({"value": JSON} if "serde" in way else {}))
                made = kept.get(way, made)
                made.append([way, n])

    driver, expected = ProcessorDriver(Text(run_it)), list[Any]()
    for ways in batches:
        driver.send("k", json.dumps(ways))
        for n, way in enumerate(ways):
            expected = [] if way == "clear" else [*expected, [way, n]]
        assert driver.list("k", "l", value=JSON) == driver.list("k", "l") == expected


def test_ranges_over_the_keys_of_the_partition() -> None:
    found: Any = None

    def run_it(key: str, records: Any, state: Any) -> None:
        nonlocal found
        if records[0].value == "delete":
            state.delete()
        elif records[0].value != "look":
            state.put(records[0].value)
        found = state

    driver = ProcessorDriver(Text(run_it))
    driver.send_many([("a", "1"), ("ab", "2"), ("b", "3"), ("c", "4")])
    driver.send_many([("ab", "delete"), ("aa", "5"), ("d", "6"), ("z", "look")])
    assert list(found.range()) == [("a", "1"), ("aa", "5"), ("b", "3"), ("c", "4"), ("d", "6")]
    assert list(found.range("aa", "c")) == [("aa", "5"), ("b", "3")]
    assert list(found.range("b", reverse=True)) == [("d", "6"), ("c", "4"), ("b", "3")]
    assert list(found.prefix("a")) == [("a", "1"), ("aa", "5")]


# ---- versions ----------------------------------------------------------------------------------------


def test_older_rows_are_migrated_as_they_are_read_and_put_as_the_new_version(store: Any) -> None:
    def fill(key: str, records: Any, state: Any) -> None:
        state.put(1)
        state.map("m").put("e", 2)
        state.list("l").append(3)

    seen: list[Any] = []

    def look(key: str, records: Any, state: Any) -> None:
        seen.append((state.get(), list(state.range()), state.map("m").get("e"), [*state.list("l")]))
        if records[0].value == "put":
            state.put(state.get())

    class Two(Text):
        version = 2

        def migrate(self, payload: bytes, from_version: int, name: str | None) -> Any:
            return [from_version, name, payload.decode()]

    class Three(Text):
        version = 3

        def migrate(self, payload: bytes, from_version: int) -> Any:
            return f"{from_version} {payload.decode()}"

    driver = ProcessorDriver(Text(fill))
    driver.send("k", "")
    driver.processor = Two(look)
    driver.send("k", "put")
    assert seen.pop() == ([0, None, "1"], [("k", [0, None, "1"])], [0, "m", "2"], [[0, "l", "3"]])
    driver.send("k", "look")
    assert seen.pop()[0] == [0, None, "1"]
    driver.processor = Three(look)
    driver.send("k", "look")
    value = '2 [0,null,"1"]'
    assert seen.pop() == (value, [("k", value)], "0 2", ["0 3"])


@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize("version, match", [(1, "version 2 of the processor, this is version 1"), (3, "no migrate")])
def test_rows_that_cannot_be_read_fail_the_batch_even_with_dead_letters(caught: bool, version: int, match: str) -> None:
    def look(key: str, records: Any, state: Any) -> None:
        try:
            state.get()
        except ProcessorError:
            if not caught:
                raise

    driver = ProcessorDriver(Text(lambda key, records, state: state.put(1), version=2), on_error="dead-letter")
    driver.send("k", "")
    driver.processor = Text(look, version=version)
    with pytest.raises(ProcessorError, match=match):
        driver.send_many([("k", "1"), ("k", "2")])
    assert driver.dead_letters == []
