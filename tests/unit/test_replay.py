"""The logic of `onceflow verify --replay`: the processor that a user names, the steps, and a replay without Kafka."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

import onceflow
from onceflow.admin.verify import replay
from onceflow.admin.verify.replay import (
    BATCHES_UNKNOWN,
    CALLS,
    CLOCK,
    HANDED_OVER,
    IDLE,
    LATE,
    NOT_IN_ORDER,
    Replay,
    Replayed,
)
from onceflow.admin.verify.replay_audit import dependences, from_progress
from onceflow.admin.verify.replay_outputs import ReplayOutputs
from onceflow.admin.verify.replay_steps import (
    Step,
    begun_at,
    check_export,
    current_life,
    first_start,
    steps,
    was_changed,
    went_back,
)
from onceflow.admin.verify.replayed_processor import load
from onceflow.admin.verify.report import Report
from onceflow.admin.verify.table_contents import Position, WrittenLater, differences, rows_of
from onceflow.admin.verify.tally import RecordComparison, key_hash
from onceflow.client.committed import Chunk
from onceflow.client.log_reader import LogRecord
from onceflow.errors import OptionError, ProcessorError
from onceflow.protocol import progress as records
from onceflow.protocol.partitioners import key_partitions
from onceflow.protocol.progress import LocalTable, Progress, TableProgress
from onceflow.protocol.versions import ForkOrigin, HandOver, Promotion
from onceflow.state.format import rows
from onceflow.task.state_run import StateRun
from onceflow_workshop.testing.columns import ReadsColumns

# ---- the processor ---------------------------------------------------------------------------------------

SERVICE = """
import onceflow
from onceflow import Processor

class Sums(Processor):
    def process(self, key, records, state):
        state.put(b"%d" % (int(state.get(b"0")) + len(records)))

class Limited(Processor):
    def __init__(self, limit):
        self.limit = limit
    def process(self, key, records, state):
        pass

class Fails(Processor):
    def __init__(self):
        raise KeyError("no settings")

class Asks(Processor):
    def __init__(self):
        self.ask = onceflow.concurrently(print)
    def process(self, key, records, state):
        pass

class Other:
    pass

def limited():
    return Limited(3)

def broken():
    return 7

ready = Limited(5)
number = 7
"""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "sums_service.py"
    path.write_text(SERVICE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return path


@pytest.mark.parametrize("name", ["Sums", "limited", "ready"])
def test_a_processor_by_its_name(service: Path, name: str) -> None:
    assert isinstance(load(f"{service}:{name}"), onceflow.Processor)
    assert isinstance(load(f"sums_service:{name}"), onceflow.Processor)


@pytest.mark.parametrize(
    "text, what",
    [
        ("sums_service", "names no processor"),
        (":Sums", "names no processor"),
        ("no_such_module:Sums", "there is no module no_such_module"),
        ("no_such_file.py:Sums", "there is no file no_such_file.py"),
        ("sums_service:Sum", "has no Sum; it has Sums"),
        ("sums_service:Limited", "needs arguments: limit"),
        (
            "sums_service:Fails",
            r"calling sums_service:Fails failed: KeyError: 'no settings' \(raised in __init__, sums_",
        ),
        ("sums_service:Other", "the class is no onceflow.Processor"),
        ("sums_service:broken", "is 7, and no processor"),
        ("sums_service:number", "is 7, and no processor"),
        ("sums_service:Asks", "calls other services"),
        ("onceflow:Processor", r"does not define process\(\)"),
        (
            "broken_service.py:Sums",
            r"importing broken_service.py failed: NameError.*raised in <module>, broken_service",
        ),
        ("needy_service:Sums", "importing needy_service failed: ModuleNotFoundError: .*no_such_package"),
        ("exits.py:Sums", "importing exits.py failed: SystemExit"),
    ],
)
def test_a_processor_that_cannot_be_replayed(service: Path, text: str, what: str) -> None:
    (service.parent / "broken_service.py").write_text("undefined_name\n")
    (service.parent / "needy_service.py").write_text("import no_such_package\n")
    (service.parent / "exits.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(OptionError, match=what) as raised:
        load(text)
    assert raised.value.next_step


# ---- steps -----------------------------------------------------------------------------------------------


def at(batch: int, offsets: dict[str, dict[int, int]], watermark_ms: int | None = None) -> Progress:
    return Progress("f", batch, offsets, {}, batch * 10, tables={"t": TableProgress(watermark_ms=watermark_ms)})


def brief(found: Iterator[Step]) -> list[tuple[Any, Any, bool]]:
    return [(step.start, step.end, step.is_batch) for step in found]


def test_batches_are_steps() -> None:
    life = [at(0, {"s": {0: 4}}), at(1, {"s": {0: 9}}, 70), at(2, {"s": {0: 9}}, 80), at(3, {"s": {0: 12, 1: 5}}, 90)]
    found = list(steps(first_start(life), None, life, "t"))
    assert brief(iter(found)) == [
        ({"s": {0: 4}}, {"s": {0: 9}}, True),
        ({"s": {0: 9}}, {"s": {0: 9}}, True),  # a batch in which timers have fired
        ({"s": {0: 9, 1: 0}}, {"s": {0: 12, 1: 5}}, True),
    ]
    assert [(step.watermark_ms, step.watermark_after_ms) for step in found] == [(None, 70), (70, 80), (80, 90)]


def test_batches_whose_records_are_gone() -> None:
    life = [at(5, {"s": {0: 50}}), at(6, {"s": {0: 60}}), at(9, {"s": {0: 90}})]
    assert first_start(life) == {}
    assert brief(steps({}, None, life, "t")) == [
        ({"s": {0: 0}}, {"s": {0: 50}}, False),
        ({"s": {0: 50}}, {"s": {0: 60}}, True),
        ({"s": {0: 60}}, {"s": {0: 90}}, False),
    ]


def test_a_topic_that_was_added_and_a_move() -> None:
    life = [
        at(0, {"s": {0: 0}}),
        at(1, {"s": {0: 10}}),
        at(1, {"s": {0: 10}, "u": {0: 7}}),
        at(2, {"s": {0: 11}, "u": {0: 8}}),
    ]
    assert first_start(life) == {"s": {0: 0}, "u": {0: 7}}
    assert brief(steps(first_start(life), None, life, "t"))[1] == (
        {"s": {0: 10}, "u": {0: 7}},
        {"s": {0: 11}, "u": {0: 8}},
        True,
    )
    assert not went_back(life)
    ahead = [*life[:2], at(1, {"s": {0: 30}}), at(2, {"s": {0: 40}})]
    assert brief(steps({}, None, ahead, "t"))[1] == ({"s": {0: 30}}, {"s": {0: 40}}, True)
    assert not went_back(ahead)
    assert went_back([*life[:2], at(1, {"s": {0: 3}})])


def test_where_a_flow_has_begun_is_said_for_single_partitions() -> None:
    life = [at(0, {"s": {0: 5, 1: 7}, "t": {0: 1}}), at(1, {"s": {0: 9, 1: 9}, "t": {0: 2}})]
    assert begun_at(life, {"s": {0: 6}}) == {"s": {0: 6, 1: 7}, "t": {0: 1}}
    assert begun_at(life[1:], {"s": {0: 6}}) == {"s": {0: 6}}
    assert begun_at(life, None) == first_start(life)


def test_an_export_that_does_not_fit() -> None:
    """Its offsets say nothing about other topics, or about partitions that the rows have left."""
    now = replace(at(3, {"s": {0: 9}}), changelogs={"t": {0: 4, 1: 4}}, topic_ids={"t": "id", "s": "other"})
    check_export(replace(now, changelogs={"t": {0: 1, 1: 1}, "u": {}}, topic_ids={"t": "id"}), now, "t", "f")
    for wrong, text in (
        (replace(now, flow="g"), "it is of flow g"),
        (replace(now, changelogs={"t": {0: 1}}), "repartitioned"),
        (replace(now, topic_ids={"t": "earlier"}), "created"),
        (replace(now, changelogs={}), "no changelog"),
    ):
        with pytest.raises(OptionError, match=text):
            check_export(wrong, now, "t", "f")


def test_where_a_replay_begins() -> None:
    """A flow may have adopted rows, may have got its table later, and may be a fork."""
    bare = replace(at(0, {"s": {0: 4}}), tables={})
    empty, full = ({"t": {0: end}} for end in (0, 7))
    first = replace(at(0, {"s": {0: 4}}), changelogs=empty)
    assert from_progress([bare, first, at(1, {"s": {0: 9}})], "t", None).state is None
    adopted = replace(first, changelogs=full)
    found = from_progress([bare, adopted, at(1, {"s": {0: 9}})], "t", None)
    assert (found.offsets, found.before, found.state) == ({"s": {0: 4}}, None, adopted)
    without, added = replace(at(3, {"s": {0: 30}}), tables={}), replace(at(3, {"s": {0: 30}}), changelogs=empty)
    found = from_progress([bare, without, added, at(4, {"s": {0: 40}})], "t", None)
    assert (found.offsets, found.before, found.state) == ({"s": {0: 30}}, added, None)
    assert brief(steps(found.offsets, found.before, found.life, "t")) == [({"s": {0: 30}}, {"s": {0: 40}}, True)]
    gone = from_progress([at(7, {"s": {0: 70}})], "t", {"s": {0: 5}})
    assert (gone.offsets, gone.before, gone.state) == ({"s": {0: 5}}, None, None)
    forked = replace(adopted, forked=ForkOrigin("g", 12, 1))
    assert from_progress([forked, at(1, {"s": {0: 9}})], "t", None).state == forked
    # Windows keep everything in the companion topic, and nothing in the topic of the table.
    windows = replace(forked, changelogs={**empty, "t-internal": {0: 7}})
    assert from_progress([windows, at(1, {"s": {0: 9}})], "t", None).state == windows
    nothing = replace(forked, changelogs={**empty, "t-internal": {0: 0}, "u": {0: 7}, "u-internal": {0: 7}})
    assert from_progress([nothing, at(1, {"s": {0: 9}})], "t", None).state is None
    with pytest.raises(OptionError, match=r"its state from g \(onceflow fork\)") as raised:
        from_progress([replace(forked, batch_id=7)], "t", None)
    assert "--since" in raised.value.next_step


def test_a_replay_after_a_promotion() -> None:
    """It begins with the new version's tables. What it yields for records of the hand-over was not written by it."""
    old = [replace(at(5, {"s": {0: 90}}), tables={"o": TableProgress()}), replace(at(6, {"s": {0: 100}}), tables={})]
    timers = {"t": {"event": 70}}
    promoted = replace(
        at(6, {"s": {0: 60}}, 50),
        changelogs={"t": {0: 7}},
        promoted=Promotion("g", 1),
        handover=HandOver({"s": {0: 100}}, timers),
    )
    after = [
        replace(at(7, {"s": {0: 100}}, 60), promoted=promoted.promoted, handover=promoted.handover),
        replace(at(8, {"s": {0: 100}}, 70), promoted=promoted.promoted),
        replace(at(9, {"s": {0: 120}}, 80), promoted=promoted.promoted),
    ]
    for life in ([*old, promoted, *after], [promoted, *after]):
        found = from_progress(life, "t", None)
        assert (found.offsets, found.before, found.state) == (promoted.offsets, promoted, promoted)
        assert not went_back(found.life)
        assert not was_changed(found.life, "t")
        listed = list(steps(found.offsets, found.before, found.life, "t"))
        assert [(step.start["s"][0], step.end["s"][0], step.without_outputs, step.timers_until) for step in listed] == [
            (60, 100, True, {"event": 70}),
            (100, 100, True, {"event": 70}),
            (100, 120, False, None),
        ]
        assert [step.is_batch for step in listed] == [True, True, True]
    at_zero = replace(promoted, batch_id=0)
    found = from_progress([replace(old[1], batch_id=0), at_zero, replace(after[0], batch_id=1)], "t", None)
    assert (found.offsets, found.before, found.state) == (promoted.offsets, at_zero, at_zero)
    with pytest.raises(OptionError, match=r"its state from g \(onceflow promote\)") as raised:
        from_progress(after[1:], "t", None)
    assert "--since" in raised.value.next_step


def test_rows_that_a_command_has_changed() -> None:
    first = replace(at(3, {"s": {0: 9}}), changelogs={"t": {0: 4}}, topic_ids={"t": "id"})
    emptied = replace(first, changelogs={"t": {0: 6}})
    assert was_changed([first, emptied], "t")
    assert not was_changed([first, emptied], "other")
    assert not was_changed([first, replace(emptied, batch_id=4)], "t")
    assert not was_changed([first, first], "t")
    assert not was_changed([first, replace(emptied, changelogs={"t": {0: 2, 1: 4}})], "t"), "repartitioned"
    assert not was_changed([first, replace(emptied, topic_ids={"t": "new"})], "t"), "repartitioned into a new topic"
    local = [replace(first, tables={"t": TableProgress(local=LocalTable(each, 1, {}))}) for each in "ab"]
    assert was_changed(local, "t")
    assert not was_changed([local[0], local[0]], "t")


def test_only_what_is_after_a_reset_counts() -> None:
    history = [
        LogRecord(0, *records.encode(at(1, {"s": {0: 5}})), 0, 7, 0),
        LogRecord(1, b"f", None, 0, 7, 0),
        LogRecord(2, *records.encode(at(0, {"s": {0: 0}})), 0, 7, 0),
    ]
    assert [each.batch_id for each in current_life(history)] == [0]


# ---- a replay --------------------------------------------------------------------------------------------


class Counts(onceflow.Processor):
    value = onceflow.serdes.JSON
    state = onceflow.serdes.JSON
    output = onceflow.serdes.JSON

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        for record in records:
            state.put(state.get(0) + record.value)
            yield onceflow.Record(key, {"n": record.value, "sum": state.get()})


class Fading(Counts):
    ttl = "1 hour"


class Ringing(Counts):
    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        state.timers.register("bell", state.now_ms + 10**9, clock="processing")
        yield from super().process(key, records, state)

    def on_timer(self, key: bytes, timer: Any, state: Any) -> None: ...


class Withdrawn(Counts):
    """A timer is cancelled when the next record of the key comes. In the flow, it may have fired before."""

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        for record in records:
            state.timers.register("idle", 0, clock="processing")
            state.timers.cancel("idle")
            yield onceflow.Record(key, record.value)

    def on_timer(self, key: bytes, timer: Any, state: Any) -> None: ...


class Fleeting(Counts):
    """A value is deleted when the next record of the key comes. In the flow, it may have expired before."""

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        for record in records:
            state.put(record.value, ttl="1 hour")
            yield onceflow.Record(key, state.get())
            state.delete()


class Forgotten(Counts):
    """An entry of a map is deleted again."""

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        seen = state.map("seen")
        for record in records:
            seen.put("last", record.value, ttl=60)
            yield onceflow.Record(key, seen.get("last"))
            seen.delete("last")


class Dated(Counts):
    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        for record in records:
            yield onceflow.Record(key, {"n": record.value, "at": state.now_ms})


class Undated(Counts):
    """The timer is of event time, and the row does not expire."""

    allowed_lateness = "0 seconds"

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        state.timers.register("t", 1 << 40)
        state.put(1, ttl="never")
        return iter(())

    def on_timer(self, key: bytes, timer: Any, state: Any) -> None: ...


class Timed(Counts):
    """Each record sets a timer one second of event time later."""

    allowed_lateness = "0 seconds"

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        for record in records:
            state.timers.register(str(record.value), record.timestamp_ms + 1000)
        yield from super().process(key, records, state)

    def on_timer(self, key: bytes, timer: Any, state: Any) -> Iterator[onceflow.Record]:
        yield onceflow.Record(key, {"timer": timer.name})


class Log(ReadsColumns):
    """Source records in memory, read as `CommittedReader` reads them; values are their offsets."""

    def __init__(self, keys: dict[int, list[bytes]]) -> None:
        self._keys = keys

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
        for offset in range(start, end, 100):
            stop = min(end, offset + 100)
            numbers = np.arange(offset, stop)
            values = [json.dumps(n).encode() for n in range(offset, stop)]
            keys = self._keys[partition][offset:stop]
            yield Chunk(list(keys), values, {}, stop, [numbers * 10], [numbers])


def placed(count: int, partitions: int) -> dict[int, list[bytes]]:
    keys = [b"key-%d" % n for n in range(60)]
    where = key_partitions(pa.array(keys), partitions)
    mine = {p: [key for key, at in zip(keys, where, strict=True) if at == p] for p in range(partitions)}
    return {p: [mine[p][n % len(mine[p])] for n in range(count)] for p in range(partitions)}


class Run:
    """A replay of one topic with two partitions, and what it yields."""

    def __init__(self, folder: Path, processor: Any, keys: dict[int, list[bytes]], name: str = "state") -> None:
        self.outputs: list[tuple[bytes, bytes]] = []
        self.replay = Replay(
            Replayed("f", processor, "t", 3, ["s"]),
            Log(keys),  # type: ignore[arg-type]
            folder / name,
            emit=self._emit,
            tell=lambda done: None,
        )

    def _emit(self, batch: pa.RecordBatch, partition: int) -> None:
        self.outputs += zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True)

    def rows(self) -> dict[bytes, bytes]:
        stores = self.replay.stores()
        found = {key: row for store in stores.values() for key, row in rows_of(store)}
        for store in stores.values():
            store.close()
        return found


def step(start: int, end: int, watermark_ms: int | None = None, after: int | None = None, batch: bool = True) -> Step:
    return Step({"s": {0: start, 1: start}}, {"s": {0: end, 1: end}}, watermark_ms, after, 1000, batch)


def expected(keys: dict[int, list[bytes]], end: int) -> tuple[list[tuple[bytes, bytes]], dict[bytes, bytes]]:
    sums: dict[bytes, int] = {}
    outputs = []
    for listed in keys.values():
        for n, key in enumerate(listed[:end]):
            sums[key] = sums.get(key, 0) + n
            outputs.append((key, b'{"n":%d,"sum":%d}' % (n, sums[key])))
    return sorted(outputs), {rows.value_key(key): rows.pack(b"%d" % total) for key, total in sums.items()}


@pytest.mark.parametrize("cuts", [[0, 700], [0, 1, 300, 300, 700]], ids=["one part", "batches"])
def test_a_replay_is_what_the_flow_has_written(tmp_path: Path, cuts: list[int]) -> None:
    keys = placed(700, 2)
    run = Run(tmp_path, Counts(), keys)
    for start, end in pairwise(cuts):
        run.replay.run(step(start, end, batch=len(cuts) > 2))
    outputs, state = expected(keys, 700)
    assert sorted(run.outputs) == outputs
    assert run.rows() == state
    assert (run.replay.records, run.replay.reasons) == (1400, [])


def test_a_replay_from_a_given_state(tmp_path: Path) -> None:
    keys = placed(400, 2)
    first = Run(tmp_path, Counts(), keys)
    first.replay.run(step(0, 150))
    second = Run(tmp_path, Counts(), keys, "later")
    for partition, store in first.replay.stores().items():
        second.replay.seed(partition, rows_of(store))
        store.close()
    second.replay.run(step(150, 400))
    assert sorted(first.outputs + second.outputs) == expected(keys, 400)[0]
    assert second.rows() == expected(keys, 400)[1]


def test_a_given_state_with_processing_time(tmp_path: Path) -> None:
    """Its timers fire, and its rows expire, at times that a replay does not know."""
    for name, row in (
        ("timer", (rows.timer_key(b"key-1", b"bell"), rows.pack(rows.timer_payload(b"p", 0)))),
        ("expiry", (rows.value_key(b"key-1"), rows.pack(b"1", 5))),
        ("event time", (rows.timer_key(b"key-1", b"bell"), rows.pack(rows.timer_payload(b"e", 0)))),
    ):
        run = Run(tmp_path, Counts(), placed(10, 2), name.replace(" ", "-"))
        run.replay.seed(0, iter([row]))
        assert run.replay.reasons == ([] if name == "event time" else [CLOCK]), name


def test_what_a_replay_cannot_know(tmp_path: Path) -> None:
    keys = placed(100, 2)
    swapped, twice = {0: keys[1], 1: keys[0]}, {0: keys[0], 1: [keys[0][0], *keys[1]]}
    for number, (processor, given, how, reasons) in enumerate(
        [
            (Counts(), swapped, step(0, 100), []),  # by another partitioner
            (Counts(), twice, step(0, 100), []),  # what is not known is said by key
            (Fading(), keys, step(0, 100), [CLOCK]),
            (Ringing(), keys, step(0, 100), [CLOCK]),
            (Withdrawn(), keys, step(0, 100, batch=False), [CLOCK]),
            (Fleeting(), keys, step(0, 100, batch=False), [CLOCK]),
            (Forgotten(), keys, step(0, 100, batch=False), [CLOCK]),
            (Dated(), keys, step(0, 100), [CLOCK]),
            (Undated(), keys, step(0, 100), []),
            (Timed(), keys, step(0, 100, batch=False), [BATCHES_UNKNOWN]),
            (Timed(), keys, step(0, 100, None, 990), []),
            (Timed(), keys, replace(step(0, 100, None, 990), timers_until={"event": 5}), [HANDED_OVER]),
            (Timed(), keys, replace(step(0, 100, None, 990), timers_until={}), []),
            (Timed(), keys, step(0, 100, None, 991), [IDLE]),
        ]
    ):
        run = Run(tmp_path, processor, given, str(number))
        run.replay.run(how)
        assert run.replay.reasons == reasons, number
        assert run.replay.spread == ({key_hash(keys[0][0])} if given is twice else set()), number


@pytest.mark.parametrize("many", [1, 1_000_000])
def test_keys_in_several_partitions(tmp_path: Path, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are known by name; and if there are too many keys for that, all of them are in doubt."""
    monkeypatch.setattr(replay, "_MAX_KEYS", many)
    keys = placed(100, 2)
    run = Run(tmp_path, Counts(), {0: [*keys[0], keys[1][3]], 1: keys[1]}, str(many))
    run.replay.run(step(0, 101))
    assert (run.replay.reasons, run.replay.spread) == (
        ([NOT_IN_ORDER], set()) if many == 1 else ([], {key_hash(keys[1][3])})
    )


def test_outputs_that_keep_their_keys(tmp_path: Path) -> None:
    """Of others, nobody knows from which key they follow."""
    keys = placed(200, 2)
    for change, kept in [
        (lambda key: key, True),
        (lambda key: b"total", False),
        (lambda key: None, False),
        (lambda key: key if key != keys[1][7] else keys[0][0], False),
    ]:
        with (
            RecordComparison(tmp_path) as tally,
            ReplayOutputs(tally, ["o"], "o", "dead", tmp_path, "f", 2) as outputs,
        ):
            outputs.yielded(yielded("dead"), 1)
            assert not outputs.keeps_keys
            for partition, found in keys.items():
                for key in found:
                    batch = yielded()
                    changed = pa.array([change(key)], pa.binary())  # type: ignore[no-untyped-call]
                    outputs.yielded(batch.set_column(0, batch.schema.field(0), changed), partition)
            assert outputs.keeps_keys == kept


class Totals(Counts):
    """One output for each call."""

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        *_, last = super().process(key, records, state)
        yield last


class Failing(Counts):
    """Every seventh record fails. Its letter tells where in onceflow's code it was called."""

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        for record in records:
            if record.offset % 7 == 3:
                raise ValueError("bad")
            yield from super().process(key, [record], state)


class Calls(Counts):
    """State that depends on the number of calls."""

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> None:
        state.put(state.get(0) + 1)


class Columns(onceflow.ColumnProcessor):
    """Counts records of a key; at a time, if it asks for that."""

    state_fields: ClassVar[dict[str, str]] = {"count": "int64", "at": "int64"}
    asks = False

    def process(self, records: Any, states: Any, context: Any) -> tuple[Any, Any]:
        sums = np.zeros(states.num_rows, np.int64)
        np.add.at(sums, records["state"].to_numpy(), 1)
        count = pa.array(sums + states["count"].fill_null(0).to_numpy())
        at = np.full(len(sums), context.now_ms if self.asks else 0)
        return None, pa.table({"key": states["key"], "count": count, "at": at})


class TimedColumns(Columns):
    asks = True


@pytest.mark.parametrize(
    "processor, depends",
    [
        (Counts(), []),
        (Totals(), [CALLS]),
        (Calls(), [CALLS]),
        (Failing(), []),
        (Fading(), []),
        (Columns(), []),
        (TimedColumns(), [CLOCK]),
    ],
)
def test_what_results_depend_on(tmp_path: Path, processor: Any, depends: list[str]) -> None:
    what, log = Replayed("f", processor, "t", 3, ["s"], "letters"), Log(placed(120, 2))  # four of each key
    assert list(dependences(what, log, {}, {"s": {0: 120, 1: 120}}, tmp_path)) == depends  # type: ignore[arg-type]


def test_timers_of_event_time_fire_as_in_the_flow(tmp_path: Path) -> None:
    keys = placed(300, 2)
    run = Run(tmp_path, Timed(), keys)
    run.replay.run(step(0, 200, None, 1990))
    assert len(run.outputs) == 400, "no timer is due before the watermark is known"
    run.replay.run(step(200, 200, 1990, 1990))
    fired = [json.loads(value)["timer"] for _, value in run.outputs if b"timer" in value]
    assert sorted(map(int, fired)) == sorted([*range(100), *range(100)]), "those up to the watermark"


def test_small_batches_open_the_partitions_of_their_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most have few records and no timers that are due. Each partition that is opened takes milliseconds."""
    opened: list[list[int]] = []
    open_partitions = StateRun.open

    def watched(self: StateRun, partitions: Any) -> None:
        opened.append(list(partitions))
        open_partitions(self, opened[-1])

    monkeypatch.setattr(StateRun, "open", watched)
    keys = placed(40, 2)
    run = Run(tmp_path, Counts(), keys)
    for n in range(40):
        run.replay.run(step(n, n + 1))
    assert opened == [[0, 1, 2], *[[]] * 39]
    outputs, state = expected(keys, 40)
    assert (sorted(run.outputs), run.rows()) == (outputs, state)

    opened.clear()
    timed = Run(tmp_path, Timed(), placed(10, 2), "timed")
    timed.replay.run(step(0, 10, None, 1000))
    timed.replay.run(step(10, 10, 999, 1000))
    timed.replay.run(step(10, 10, 1000, 1000))
    assert opened[:2] == [[0, 1, 2], []], "nothing is due"
    assert len(opened[2]) >= 1, "the timers of the first records"
    assert sum(b"timer" in value for _, value in timed.outputs) == 2


def test_a_processor_that_raises(tmp_path: Path) -> None:
    class Raises(Counts):
        def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
            raise ZeroDivisionError("by nothing")

    run = Run(tmp_path, Raises(), placed(5, 2))
    with pytest.raises(ProcessorError, match=r"The replay ends: .*ZeroDivisionError: by nothing") as raised:
        run.replay.run(step(0, 5))
    assert raised.value.batch is None
    assert "--dead-letter" in raised.value.next_step


# ---- comparison ------------------------------------------------------------------------------------------


def test_rows_that_differ() -> None:
    left = iter([(b"a", b"1"), (b"b", b"2"), (b"d", b"4")])
    right = iter([(b"b", b"3"), (b"c", b"3"), (b"d", b"4"), (b"e", b"5")])
    assert list(differences(left, right)) == [
        (b"a", b"1", None),
        (b"b", b"2", b"3"),
        (b"c", None, b"3"),
        (b"e", None, b"5"),
    ]


def yielded(topic: str | None = None, headers: Any = None) -> pa.RecordBatch:
    from onceflow.state.engine.output_collector import SCHEMA

    return pa.RecordBatch.from_arrays(
        [pa.array([each], kind.type) for each, kind in zip([b"k", b"v", topic, headers, None], SCHEMA, strict=True)],
        schema=SCHEMA,
    )


def test_outputs_are_compared_by_topic_key_value_and_headers(tmp_path: Path) -> None:
    header = [{"key": "h", "value": b"1"}]
    with (
        RecordComparison(tmp_path) as tally,
        ReplayOutputs(tally, ["o", "p"], "o", "dead", tmp_path, "f", 1) as outputs,
    ):
        for batch in (yielded(), yielded("p"), yielded("o", header), yielded("dead", header)):
            outputs.yielded(batch, 0)
        chunk = Chunk([b"k", b"k", b"k"], [b"v", b"v", b"w"], {1: [("h", b"1")]}, 3, [], [np.arange(3)])
        outputs.there(chunk, "o", 0, letter=False)
        outputs.there(replace(chunk, keys=[b"k"], values=[b"v"], places=[np.arange(1)]), "dead", 0, letter=True)
        report = Report(5)
        for each in outputs.differences():
            outputs.report(each, report, Log({0: [b"k"] * 3}))  # type: ignore[arg-type]
    assert report.counts == {"lost": 1, "foreign": 1}, "what is for p is not there, w was not yielded"
    assert any(
        "key k, value v: a replay yields it 1 time, it is there 0 times" in each.text for each in report.examples
    )


@pytest.mark.parametrize("header, counts", [
    (("onceflow.shortened", b'{"value": 9}'), True), (("onceflow.error.class", b"BadRecordError"), True),
    (("onceflow.error.class", b"ValueError"), False),
])  # fmt: skip
def test_letters_that_depend_on_what_topics_take_are_noticed(tmp_path: Path, header: Any, counts: bool) -> None:
    with RecordComparison(tmp_path) as tally, ReplayOutputs(tally, ["o"], "o", "dead", tmp_path, "f", 1) as outputs:
        chunk = Chunk([b"k", b"k"], [b"v", b"v"], {1: [header]}, 2, [], [np.arange(2)])
        outputs.there(chunk, "o", 0, letter=False)
        assert not outputs.sizes_counted
        outputs.there(chunk, "dead", 0, letter=True)
        assert outputs.sizes_counted == counts


@pytest.mark.parametrize("topic, default", [(None, None), ("other", "o"), (None, "other")])
def test_a_topic_that_is_not_known(tmp_path: Path, topic: str | None, default: str | None) -> None:
    with (
        RecordComparison(tmp_path) as tally,
        ReplayOutputs(tally, ["o"], default, None, tmp_path, "f", 1) as outputs,
        pytest.raises(OptionError, match=r"not known where|not among the outputs") as raised,
    ):
        outputs.yielded(yielded(topic), 0)
    assert "--output" in raised.value.next_step


def test_late_records_are_not_those_of_a_topic_named_late(tmp_path: Path) -> None:
    with RecordComparison(tmp_path) as tally, ReplayOutputs(tally, ["late"], None, None, tmp_path, "f", 1) as outputs:
        outputs.yielded(yielded("late"), 0)
        outputs.yielded(yielded(LATE), 0)
        outputs.there(Chunk([b"k"], [b"v"], {}, 1, [], [np.arange(1)]), "late", 0, letter=False)
        assert (list(outputs.differences()), outputs.left_out) == ([], 1)


def test_an_empty_key_that_was_written_later() -> None:
    """Its row at an earlier position may be gone."""

    class Later(Log):
        def end(self, topic: str, partition: int) -> int:
            return 3 if topic == "t" else 0

    later = WrittenLater(Later({0: [b"a", b"", b"b"]}), Position("t", 0, 1, 0))  # type: ignore[arg-type]
    assert b"" in later
    assert b"b" in later
    assert b"a" not in later
