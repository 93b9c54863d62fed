"""Random batches against plain dicts: state, maps, lists, timers, time to live, dead letters and aborted batches."""

from __future__ import annotations

import copy
import heapq
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.state.api.processor import Processor
from onceflow.state.api.record import Record
from onceflow.state.api.serdes import JSON
from onceflow.state.engine.record_engine import Engine
from onceflow.state.format import rows
from onceflow.state.stores.memory_store import MemoryStore
from onceflow_workshop.testing.engines import engine_of

KEYS = [b"a", b"a\0", b"\0" * 600, b"b" * 600, b"b" * 600 + b"c", b""]
NAMES = ["x", "x\0", "y"]
NEVER = 1 << 62


class Scripted(Processor):
    """Does what the values of its records say, and yields what it sees."""

    value = state = output = JSON

    def process(self, key: bytes, records: Any, state: Any) -> Any:
        for record in records:
            for what, *arguments in record.value:
                self.do(state, what, *arguments)
            yield Record(key, self.seen(state))

    def on_timer(self, key: bytes, timer: Any, state: Any) -> Any:
        if timer.name == "y":  # comes again, and cancels another
            state.timers.register("y", timer.at_ms + 7, timer.clock)
            state.timers.cancel("x")
        state.list("fired").append([timer.name, timer.at_ms, timer.clock])
        yield Record(key, [timer.name, timer.at_ms, self.seen(state)])

    def do(self, state: Any, what: str, *arguments: Any) -> None:
        if what == "put":
            state.put(arguments[0], ttl=arguments[1])
        elif what == "delete":
            state.delete()
        elif what == "map put":
            state.map(arguments[0]).put(arguments[1], arguments[2], ttl=arguments[3])
        elif what == "map delete":
            state.map(arguments[0]).delete(arguments[1])
        elif what == "clear":
            state.map(arguments[0]).clear()
        elif what == "append":
            state.list("fired").append(arguments[0])
        elif what == "register":
            state.timers.register(*arguments)
        elif what == "cancel":
            state.timers.cancel(arguments[0])
        else:
            raise RuntimeError("as it was told")

    def seen(self, state: Any) -> Any:
        maps = {name: [[key.decode(), value] for key, value in state.map(name).items()] for name in NAMES}
        timers = [state.timers.get(name) and [*state.timers.get(name)] for name in NAMES]
        keys = [[key.decode(), value] for key, value in state.range()]
        return [state.get(), maps, [*state.list("fired")], timers, keys]


@dataclass
class Model:
    """The same, in dicts."""

    now_ms: int = 0
    values: dict[bytes, tuple[Any, int]] = field(default_factory=dict)
    maps: dict[tuple[bytes, str, str], tuple[Any, int]] = field(default_factory=dict)
    lists: dict[bytes, list[Any]] = field(default_factory=dict)
    timers: dict[tuple[bytes, str], tuple[int, str]] = field(default_factory=dict)

    def do(self, key: bytes, what: str, *arguments: Any) -> None:
        if what == "put":
            self.values[key] = (arguments[0], self.expires(arguments[1]))
        elif what == "delete":
            self.values.pop(key, None)
        elif what == "map put":
            self.maps[key, arguments[0], arguments[1]] = (arguments[2], self.expires(arguments[3]))
        elif what == "map delete":
            self.maps.pop((key, arguments[0], arguments[1]), None)
        elif what == "clear":
            for entry in [entry for entry in self.maps if entry[:2] == (key, arguments[0])]:
                del self.maps[entry]
        elif what == "append":
            self.lists.setdefault(key, []).append(arguments[0])
        elif what == "register":
            self.timers[key, arguments[0]] = (arguments[1], arguments[2])
        elif what == "cancel":
            self.timers.pop((key, arguments[0]), None)
        else:
            raise RuntimeError

    def expires(self, ttl: float | None) -> int:
        return NEVER if ttl is None else self.now_ms + int(ttl * 1000)

    def start(self, watermark_ms: int) -> list[Any]:
        for rows_of in (self.values, self.maps):
            for key in [key for key, (_, expires) in rows_of.items() if expires <= self.now_ms]:
                del rows_of[key]  # type: ignore[attr-defined]
        until = {"event": watermark_ms, "processing": self.now_ms}
        due = [(at, key, name, clock) for (key, name), (at, clock) in self.timers.items() if at <= until[clock]]
        heapq.heapify(due)
        yielded = []
        while due:
            at, key, name, clock = heapq.heappop(due)
            if self.timers.get((key, name)) == (at, clock):
                del self.timers[key, name]
                if name == "y":
                    self.timers[key, "y"] = (at + 7, clock)
                    self.timers.pop((key, "x"), None)
                self.lists.setdefault(key, []).append([name, at, clock])
                yielded.append((key, [name, at, self.seen(key)]))
        return yielded

    def feed(self, records: list[tuple[bytes, Any]]) -> list[Any]:
        yielded = []
        for key in dict.fromkeys(key for key, _ in records):
            for steps in [steps for other, steps in records if other == key]:
                before = copy.deepcopy(self.__dict__)
                try:
                    for step in steps:
                        self.do(key, *step)
                    yielded.append((key, self.seen(key)))
                except RuntimeError:
                    self.__dict__.update(before)
        return yielded

    def seen(self, key: bytes) -> Any:
        maps = {
            name: sorted([entry, value] for (k, m, entry), (value, _) in self.maps.items() if (k, m) == (key, name))
            for name in NAMES
        }
        timers = [[name, *self.timers[key, name]] if (key, name) in self.timers else None for name in NAMES]
        keys = [[other.decode(), value] for other, (value, _) in sorted(self.values.items())]
        return [self.values.get(key, (None,))[0], maps, [*self.lists.get(key, [])], timers, keys]

    def next_timers(self) -> dict[str, int | None]:
        times: dict[str, list[int]] = {"event": [], "processing": []}
        for at, clock in self.timers.values():
            times[clock].append(at)
        for rows_of in (self.values.values(), self.maps.values()):
            times["processing"] += [expires for _, expires in rows_of if expires < NEVER]
        return {clock: min(found, default=None) for clock, found in times.items()}


names, entries, numbers = st.sampled_from(NAMES), st.sampled_from(["", "e", "f"]), st.integers(0, 3)
ttls = st.sampled_from([None, 0.005, 0.02, 0.03])
clocks = st.sampled_from(["event", "processing"])
steps = st.one_of(
    st.tuples(st.just("put"), numbers, ttls),
    st.tuples(st.just("delete")),
    st.tuples(st.just("map put"), names, entries, numbers, ttls),
    st.tuples(st.just("map delete"), names, entries),
    st.tuples(st.just("clear"), names),
    st.tuples(st.just("append"), numbers),
    st.tuples(st.just("register"), names, st.integers(-5, 60), clocks),
    st.tuples(st.just("cancel"), names),
    st.tuples(st.just("fail")),
)
records = st.tuples(st.sampled_from(KEYS), st.lists(steps, max_size=3))
batches = st.tuples(
    st.lists(st.lists(records, max_size=6), max_size=2),  # Arrow batches
    st.sampled_from([0, 1, 5, 20]),  # milliseconds until it
    st.sampled_from([0, 3, 10]),  # how far the watermark moves
    st.sampled_from([True, True, True, False]),  # whether it is committed
)


@pytest.mark.parametrize("examples", [60, pytest.param(250, marks=pytest.mark.long)])
def test_batches_do_what_dicts_do(examples: int) -> None:
    @settings(deadline=None, max_examples=examples)
    @given(st.lists(batches, min_size=1, max_size=6))
    def check(script: list[Any]) -> None:
        folder = Path(f"/model-{uuid.uuid4().hex}")
        store = MemoryStore.open(folder)
        model, watermark_ms = Model(), 0
        try:
            for number, (arrow_batches, wait_ms, step_ms, committed) in enumerate(script):
                model.now_ms += wait_ms
                watermark_ms += step_ms
                before = copy.deepcopy(model)
                engine = engine_of(
                    Engine,
                    Scripted(),
                    store,
                    batch=number,
                    now_ms=model.now_ms,
                    watermark_ms=watermark_ms,
                    on_error="dead-letter",
                    dead_letter_topic="dead",
                )
                engine.start()
                expected = model.start(watermark_ms)
                for given_records in arrow_batches:
                    engine.feed(
                        pa.record_batch(
                            {
                                "key": pa.array([key for key, _ in given_records], pa.binary()),
                                "value": pa.array([JSON.encode(each) for _, each in given_records], pa.binary()),
                            }
                        )
                    )
                    expected += model.feed(given_records)
                engine.finish()
                out = engine.outputs()
                yielded = [] if out is None else [row for row in out.to_pylist() if row["topic"] is None]
                assert [(row["key"], JSON.decode(row["value"])) for row in yielded] == [
                    (key, JSON.decode(JSON.encode(value))) for key, value in expected
                ]
                assert engine.next_timer_ms == model.next_timers()
                changes = engine.changes()
                assert all(store.get(key) != row for key, row in changes)
                if committed:
                    store.write(list(rows.with_index(changes, store.get)))
                    check_rows(store, model)
                else:
                    model = before
        finally:
            MemoryStore.remove(folder)

    check()


def check_rows(store: MemoryStore, model: Model) -> None:
    """Rows are those of the model, and index rows those that follow from them."""
    found = {key: row for key, row in store.scan(b"") if key[:1] in b"vmt"}
    wanted = {rows.value_key(key): packed(JSON.encode(value), at) for key, (value, at) in model.values.items()}
    for (key, name, entry), (value, at) in model.maps.items():
        wanted[rows.map_key(key, name.encode(), entry.encode())] = packed(JSON.encode(value), at)
    for key, items in model.lists.items():
        for i, item in enumerate(items):
            wanted[rows.map_key(key, b"\xff" + b"fired", i.to_bytes(8, "big"))] = rows.pack(JSON.encode(item))
    for (key, name), (at, clock) in model.timers.items():
        wanted[rows.timer_key(key, name.encode())] = rows.pack(rows.timer_payload(clock[:1].encode(), at))
    assert found == wanted
    index = {key for key, _ in store.scan(b"") if key[:1] in b"TX"}
    assert index == {key for key, _ in rows.with_index(found.items(), lambda _: None) if key[:1] in b"TX"}


def packed(payload: bytes, expires_ms: int) -> bytes:
    return rows.pack(payload, None if expires_ms == NEVER else expires_ms)
