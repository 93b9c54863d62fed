"""What a processor may rely on as time goes by: time to live, timers on both clocks, late records."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from onceflow.errors import OptionError, ProcessorError
from onceflow.protocol.progress import TimerId
from onceflow.state.api.record import Record
from onceflow.state.format import rows
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.testing.processor_driver import ProcessorDriver

sys.path.insert(0, str(Path(__file__).parent))
try:
    from text_processor import Text, batch, commit, engine
finally:
    sys.path.pop(0)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    yield MemoryStore.open(tmp_path)
    MemoryStore.remove(tmp_path)


# ---- time to live ------------------------------------------------------------------------------------


def test_rows_expire_for_readers_at_once_and_are_deleted_by_the_next_batch(store: Any) -> None:
    def run_it(key: str, records: Any, state: Any) -> Any:
        yield Record(key, repr((state.get(), dict(state.map("m").items()), len(state.list("l")), list(state.range()))))
        if records[0].value == "put":
            state.put("v", ttl="10 seconds")
            state.map("m").put("e", "never", ttl="never")
            state.map("m").put("s", "short", ttl=5)
            state.list("l").append("x", ttl=20)

    processor = Text(run_it, ttl="1 hour")
    run = engine(processor, store)
    run.feed(batch((b"k", b"put")))
    assert run.next_timer_ms == {"event": None, "processing": 5_000}
    commit(run, store)
    run = engine(processor, store, now_ms=10_000)
    run.start()
    assert run.counts["expired"] == 2
    assert run.next_timer_ms["processing"] == 20_000
    run.feed(batch((b"k", b"look")))
    assert run.outputs()["value"].to_pylist() == [repr((None, {b"e": "never"}, 1, [])).encode()]  # type: ignore[index]
    assert {row for _, row in run.changes()} == {None}
    commit(run, store)
    assert [key for key, _ in store.scan(b"X", b"Y")] == [
        rows.expiry_index(20_000, rows.map_key(b"k", b"\xffl", bytes(8)))
    ]


def test_expiry_is_bounded_per_batch_and_hidden_meanwhile(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceflow.state.engine.base.EXPIRED_PER_BATCH", 3)
    seen = []
    processor = Text(lambda key, records, state: seen.append(state.get()) or state.put("v"), ttl=1)
    run = engine(processor, store)
    run.feed(batch(*((b"%d" % i, b"") for i in range(5))))
    commit(run, store)
    run = engine(processor, store, now_ms=1000)
    run.start()
    assert run.counts["expired"] == 3
    assert run.next_timer_ms["processing"] == 1000
    run.feed(batch((b"4", b"")))
    assert seen[-1] is None


def test_default_ttl_can_be_given_and_bad_ones_are_refused(store: Any) -> None:
    run = engine(Text(lambda key, records, state: state.put(1), ttl="1 day"), store, default_ttl_ms=50)
    run.feed(batch((b"k", b"")))
    assert run.next_timer_ms["processing"] == 50
    for attribute in ({"ttl": "soon"}, {"ttl": 0}, {"allowed_lateness": "-1 s"}):
        with pytest.raises(OptionError, match=next(iter(attribute))):
            engine(Text(**attribute), store, late_topic="late")
    with pytest.raises(ProcessorError, match="not positive"):
        ProcessorDriver(Text(lambda key, records, state: state.put(1, ttl=0))).send("k", "1")


# ---- timers ------------------------------------------------------------------------------------------


def timers_of(fired: list[Any], *, again: bool = False) -> Text:
    """Registers "<name> <clock> <ms>", cancels "<name>"; notes what fires."""

    def run_it(key: str, records: Any, state: Any) -> None:
        for record in records:
            name, *rest = record.value.split()
            if rest:
                state.timers.register(name, int(rest[1]), clock=rest[0])
                assert state.timers.get(name) == (name, int(rest[1]), rest[0])
            else:
                state.timers.cancel(name)
                assert state.timers.get(name) is None

    def on_timer(key: str, timer: Any, state: Any) -> Any:
        assert state.timers.get(timer.name) is None
        fired.append((key, *timer))
        if again and len(fired) < 4:
            state.timers.register(timer.name, timer.at_ms + 10, timer.clock)
        return [Record(key, timer.name)]

    return Text(run_it, on_timer, allowed_lateness=0)


def test_timers_fire_once_in_order_of_time_on_both_clocks() -> None:
    fired: list[Any] = []
    driver = ProcessorDriver(timers_of(fired))
    driver.send_many([("a", "x processing 300"), ("b", "y event 200"), ("a", "z processing 100"), ("c", "w event 900")])
    assert [(key, timer.name) for key, timer in driver.timers] == [("a", "z"), ("b", "y"), ("a", "x"), ("c", "w")]
    driver.watermark_ms = 200
    assert driver.advance(0.3) == [Record("a", "z"), Record("b", "y"), Record("a", "x")]
    assert fired == [("a", "z", 100, "processing"), ("b", "y", 200, "event"), ("a", "x", 300, "processing")]
    driver.advance(1)
    assert len(fired) == 3
    assert driver.counts["timers_fired"] == 3
    assert driver.timers == [("c", ("w", 900, "event"))]


def test_timers_are_replaced_by_name_cancelled_and_registered_again_while_firing() -> None:
    fired: list[Any] = []
    driver = ProcessorDriver(timers_of(fired, again=True))
    driver.send_many([("a", "x event 50"), ("a", "x processing 100"), ("a", "y processing 5"), ("a", "y")])
    driver.send_many([("b", "x processing 60"), ("c", "x processing 60")])
    driver.send("b", "x")
    driver.watermark_ms = 1000
    driver.advance(0.115)
    times = [("c", 60), ("a", 100), ("c", 70), ("a", 110), ("c", 80)]
    assert fired == [(key, "x", at, "processing") for key, at in times]
    assert driver.timers == []


def test_timers_are_bounded_per_batch_and_the_earliest_come_first(store: Any) -> None:
    fired: list[Any] = []
    processor = timers_of(fired)
    run = engine(processor, store)
    both = [(b"a", b"p%d processing %d" % (at, at)) for at in range(0, 100, 10)]
    both += [(b"b", b"e%d event %d" % (at, at)) for at in range(5, 100, 10)]
    run.feed(batch(*both, (b"c", b"later event 1000"), (b"d", b"gone processing 42")))
    commit(run, store)
    for batches in range(1, 8):
        run = engine(processor, store, now_ms=100, watermark_ms=100, max_timers_per_batch=3)
        run.start()
        run.feed(batch((b"d", b"gone")) if batches == 1 else batch())
        assert len(fired) == min(20, 3 * batches)
        assert run.counts["timers_fired"] == min(3, 20 - 3 * (batches - 1))
        assert run.timers_left == (batches < 7)
        left = sorted(set(range(0, 100, 5)) - {timer[2] for timer in fired})
        events, others = [at for at in left if at % 10], [at for at in left if not at % 10]
        assert run.next_timer_ms == {"event": min([*events, 1000]), "processing": min(others, default=None)}
        commit(run, store)
    assert [timer[2] for timer in fired] == [*range(0, 100, 5)]
    assert len(run.changes()) == 2


def test_exactly_as_many_timers_as_a_batch_may_fire_leave_none(store: Any) -> None:
    fired: list[Any] = []
    run = engine(timers_of(fired, again=True), store)
    run.feed(batch((b"a", b"x processing 1"), (b"b", b"x processing 2")))
    commit(run, store)
    for bound in (2, None):  # what they register anew is not left over
        run = engine(timers_of(fired, again=True), store, now_ms=100, max_timers_per_batch=bound)
        run.start()
        assert (run.counts["timers_fired"], run.timers_left) == (2, False)
        commit(run, store)


def test_timers_of_an_earlier_version_fire_up_to_its_time_and_no_others(store: Any) -> None:
    """After a promotion: also those that such timers register, but not those that it has left."""
    fired: list[Any] = []

    def on_timer(key: str, timer: Any, state: Any) -> None:
        fired.append((key, timer.at_ms))
        state.timers.register(timer.name, timer.at_ms + 10, timer.clock)

    run = engine(timers_of([]), store)
    run.feed(
        batch(
            (b"a", b"x event 10"),
            (b"b", b"y event 15"),
            (b"c", b"x processing 5"),
            (b"d", b"x event 41"),
            (b"e", b"y event 16"),
        )
    )
    commit(run, store)
    kept = frozenset(
        {
            TimerId(b"b".hex(), "y", "event", 15),
            TimerId(b"a".hex(), "x", "event", 30),
            TimerId(b"e".hex(), "y", "event", 12),
        }
    )
    for fires in ([("a", 10)], [("a", 20)], []):
        fired.clear()
        options: dict[str, Any] = {"timers_until": {"event": 40}, "unfired": kept, "max_timers_per_batch": 1}
        run = engine(Text(on_timer=on_timer), store, now_ms=100, watermark_ms=40, **options)
        run.start()
        run.finish()
        assert fired == fires
        assert run.timers_left == (fires == [("a", 10)])
        commit(run, store)
    run = engine(Text(on_timer=on_timer), store, now_ms=100, watermark_ms=40)
    run.start()
    assert fired == [("c", 5), ("b", 15), ("e", 16), ("a", 30)]


@pytest.mark.slow
def test_a_driver_fires_all_that_is_due_however_few_a_batch_may_fire() -> None:
    fired: list[Any] = []
    driver = ProcessorDriver(timers_of(fired), partitions=2, max_timers_per_batch=2)
    driver.send_many([(f"key-{n}", f"t processing {n}") for n in range(1, 1_201)])
    assert len(driver.advance(0.1)) == 100  # whatever is imported then has been imported
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)  # there are more batches than calls fit in
    try:
        assert len(driver.advance(6)) == 1_100
    finally:
        sys.setrecursionlimit(limit)
    assert len(fired) == 1_200
    assert driver.timers == []
    for partition in range(2):
        times = [at for key, _, at, _ in fired if driver._partition_of(key.encode()) == partition]
        assert times == sorted(times)


def test_an_earlier_timer_may_cancel_or_move_a_later_one(store: Any) -> None:
    fired = []

    def run_it(key: str, records: Any, state: Any) -> None:
        for at in (1, 2, 3):
            state.timers.register(f"t{at}", at, "processing")

    def on_timer(key: str, timer: Any, state: Any) -> None:
        fired.append(timer.name)
        if timer.name == "t1":
            state.timers.cancel("t2")
            state.timers.register("t3", 4, "processing")

    run = engine(Text(run_it), store)
    run.feed(batch((b"k", b"")))
    commit(run, store)
    run = engine(Text(run_it, on_timer), store, now_ms=10)
    run.start()
    assert fired == ["t1"]
    assert run.next_timer_ms == {"event": None, "processing": 4}
    commit(run, store)
    assert [rows.timer_index_parts(key)[1:] for key, _ in store.scan(b"T", b"U")] == [(4, b"k", b"t3")]


def test_next_timer_counts_unchanged_and_rewritten_timers(store: Any) -> None:
    register = Text(lambda key, records, state: state.timers.register("t", int(records[0].value)), allowed_lateness=0)
    for at, expected in ((500, 500), (500, 500), (300, 300), (700, 700)):
        run = engine(register, store)
        run.feed(batch((b"k", b"%d" % at)))
        assert run.next_timer_ms == {"event": expected, "processing": None}
        commit(run, store)
        assert engine(register, store).next_timer_ms == {"event": expected, "processing": None}


def test_timers_of_impossible_times_names_and_clocks_are_refused() -> None:
    def run_it(key: str, records: Any, state: Any) -> None:
        for arguments in (("t", 1 << 63), ("t", 1, "wall")):
            with pytest.raises(ValueError, match=r"milliseconds|clock"):
                state.timers.register(*arguments)
        for at in (1.5, True, "5", None):
            with pytest.raises(TypeError):
                state.timers.register("t", at)
        state.timers.register("last" * 600, (1 << 63) - 1)

    driver = ProcessorDriver(Text(run_it, allowed_lateness=0))
    driver.send("k", "1")
    driver.watermark_ms = (1 << 63) - 2
    driver.run()
    assert len(driver.timers) == 1


# ---- event time --------------------------------------------------------------------------------------


class Timed(Text):
    """Event time is the record's value."""

    def event_time(self, record: Record) -> int | None:
        return int(record.value) if record.value else None


@pytest.mark.parametrize("own", [False, True])
def test_late_records_go_to_their_topic_with_the_cause(own: bool) -> None:
    seen: list[Any] = []
    processor = (Timed if own else Text)(
        lambda key, records, state: seen.extend(record.value for record in records), allowed_lateness="1 second"
    )
    driver = ProcessorDriver(processor)

    def send(*times: int) -> None:
        records = [Record("k", str(at), timestamp_ms=at, headers=[("h", b"1")]) for at in times]
        driver.send_many(records)

    send(5000, 3000)  # without a watermark nothing is late
    assert driver.watermark_ms == 4000
    send(3999, 4000, 9_000_000)
    assert seen == ["5000", "3000", "4000", "9000000"]
    assert driver.late == [
        Record(
            b"k",
            b"3999",
            "late",
            (
                ("h", b"1"),
                ("onceflow.error.class", b"LateRecord"),
                ("onceflow.error.message", b"event time 3999 is before the watermark 4000 (milliseconds)"),
                ("onceflow.error.topic", b"input"),
                ("onceflow.error.partition", b"0"),
                ("onceflow.error.offset", b"2"),
                ("onceflow.origin.topic", b"input"),
                ("onceflow.origin.partition", b"0"),
                ("onceflow.origin.offset", b"2"),
            ),
            3999,
        )
    ]
    assert {name: count for name, count in driver.counts.items() if count} == {"records": 5, "late": 1, "aside": 1}
    send(1)
    assert len(driver.late) == 2


def test_event_times_are_reported_by_source_partition(store: Any) -> None:
    for processor in (Text(allowed_lateness=1), Timed(allowed_lateness=1)):
        run = engine(processor, store, late_topic="late", source_topic="z")
        times = [5, 9, 7, None]
        run.feed(
            batch(
                *((b"k", b"" if at is None else b"%d" % at) for at in times),
                topic=pa.array(["x", "x", "y", None]),
                partition=pa.array([1, 1, 2, 3]),
                timestamp=pa.array(times),
            )
        )
        assert run.max_event_ms == {("x", 1): 9, ("y", 2): 7}
        run.feed(batch((b"k", b"3"), timestamp=pa.array([3])))
        earlier = {"topic": pa.array(["x"]), "partition": pa.array([1]), "timestamp": pa.array([8])}
        run.feed(batch((b"k", b"8"), **earlier))
        assert run.max_event_ms == {("x", 1): 9, ("y", 2): 7, ("z", 0): 3}
    with pytest.raises(OptionError, match="late"):
        engine(Text(allowed_lateness=1), store, late_topic=None)


def test_a_timer_in_event_time_needs_event_time() -> None:
    """Without allowed_lateness there is no watermark: it would never fire, and nobody would be told."""

    def register(key: str, records: Any, state: Any) -> None:
        state.timers.register("t", 5)

    class Untimed(Text):
        allowed_lateness = None

    driver = ProcessorDriver(Untimed(register), on_error="fail")
    with pytest.raises(ProcessorError, match="allowed_lateness") as caught:
        driver.send("k", "1")
    assert "clock='processing'" in str(caught.value)
    driver = ProcessorDriver(Untimed(register), on_error="dead-letter")
    with pytest.raises(ProcessorError, match="allowed_lateness"):  # no record is at fault
        driver.send("k", "1")
