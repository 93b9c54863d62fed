"""Records that are rejected have no effect on event time: they move no watermark, and their partition is waited for as
if they had never come. Only records that have no event time tell that their partition has none, rejected or not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onceflow
from onceflow import BadRows, ColumnProcessor, Processor, Record, serdes, windows
from onceflow.protocol.output_limits import OutputLimits, WriteLimits
from onceflow.protocol.progress import Origin
from onceflow.state.api.deduplication import EVENT_TIME, Deduplication
from onceflow.state.engine.watermark import Watermark
from onceflow.state.stores.memory_store import MemoryStore
from onceflow_workshop.testing.engines import engine_of

pytestmark = pytest.mark.slow  # each kind of processor, again and again

NOW = 1_795_000_000_000
DAY = 86_400_000
FAR = NOW + DAY + 1
BYTES_OF_A_RECORD = 2_000

_names = itertools.count()


class One(NamedTuple):
    """A record. ``at``: its own event time, in the value or in a column; ``timestamp``: that of Kafka."""

    key: bytes | None
    value: bytes
    at: int | None
    timestamp: int
    partition: int = 0


class ByTimestamp(Processor):
    value = serdes.JSON
    output = serdes.BYTES
    allowed_lateness = 0.1

    def process(self, key: bytes, records: Sequence[Record], state: Any) -> Iterator[Record]:
        for record in records:
            if record.value["is"] == "refused":
                raise ValueError("refused")
            yield Record(key, b"")


class ByValue(ByTimestamp):
    def event_time(self, record: Record) -> Any:
        return record.value["at"]


class WithCalls(ByValue):
    """Its records are processed one by one, when their calls are done."""

    def __init__(self) -> None:
        self.ask = onceflow.concurrently(lambda key, what: what, retries=0)

    def process(self, key: bytes, records: Sequence[Record], state: Any) -> Iterator[Record]:
        for record in records:
            if self.ask(key, record.value["is"]) == "refused":
                raise ValueError("refused")
            yield Record(key, b"")


class Columns(ColumnProcessor):
    allowed_lateness = 0.1
    names_bad = False

    def event_time(self, records: pa.Table) -> Any:
        return [serdes.JSON.decode(value)["at"] for value in records["value"].to_pylist()]

    def process(self, records: pa.Table, states: pa.Table, context: Any) -> Any:
        refused = pc.match_substring(records["value"].cast(pa.string()), '"refused"').to_pylist()
        if self.names_bad and any(refused):
            raise BadRows({row: ValueError("refused") for row, is_so in enumerate(refused) if is_so})
        if any(refused):
            raise ValueError("refused")
        return None, None


class NamesBad(Columns):
    names_bad = True


def deduplication() -> Deduplication:
    return Deduplication(within_ms=100, id_name="id")


def value_of(what: str, at: Any) -> bytes:
    return serdes.JSON.encode({"is": what, "at": at})


def good(at: int | None, partition: int = 0) -> One:
    return One(b"k%d" % next(_names), value_of("good", at), at, -1 if at is None else at, partition)


def rejected(kind: str, at: int, partition: int) -> One:
    """A record that is rejected for this reason, and would have this event time otherwise."""
    key = b"k%d" % next(_names)
    values = {
        "no key": value_of("good", at),
        "far ahead": value_of("good", FAR),
        "refused": value_of("refused", at),
        "not decoded": b"{",
        "no number": value_of("good", "soon"),
        "too large": b" " * BYTES_OF_A_RECORD,
    }
    own = FAR if kind == "far ahead" else at
    return One(None if kind == "no key" else key, values[kind], own, own, partition)


STEPS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "timestamps": (ByTimestamp, ["no key", "far ahead", "refused", "not decoded"]),
    "values": (ByValue, ["no key", "far ahead", "refused", "not decoded", "no number"]),
    "calls": (WithCalls, ["no key", "far ahead", "refused", "not decoded", "no number"]),
    "columns": (Columns, ["no key", "far ahead", "refused", "not decoded", "no number"]),
    "bad rows": (NamesBad, ["no key", "far ahead", "refused", "not decoded"]),
    "ids": (deduplication, ["no key", "far ahead", "too large"]),
}


class Run:
    """A step with one partition in its table, behind a topic with two."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.now_s = 0.0
        self.folder = Path(f"/dev/null/rejected-{next(_names)}")
        self.store = MemoryStore.open(self.folder)
        self.make = make
        origins: list[Origin] = [("in", 0), ("in", 1)]
        self.watermark = Watermark(
            origins,
            lateness_ms=100,
            idle_s=30,
            value_ms=None,
            clock=lambda: self.now_s,
            wall_ms=lambda: NOW + round(self.now_s * 1000),
        )

    def batch(self, records: Sequence[One], arriving: Sequence[One]) -> tuple[list[bytes | None], int | None]:
        """Run a batch. Returns the keys of its late records, and the watermark behind it."""
        self.watermark.planned({("in", each.partition) for each in arriving})
        topic = OutputLimits("out", max_message_bytes=BYTES_OF_A_RECORD)
        run = engine_of(
            None,
            self.make(),
            self.store,
            now_ms=NOW,
            watermark_ms=self.watermark.advance(),
            on_error="dead-letter",
            dead_letter_topic="dead",
            late_topic="late",
            source_topic="in",
            limits=WriteLimits(lambda name: topic if name is None else None),
        )
        run.start()
        if records:
            run.feed(rows(records))
            run.settle()
        run.finish()
        made = run.outputs()
        self.store.write(run.local_changes(), index=True)
        late = [] if made is None else made.filter(pc.equal(made["topic"], "late"))["key"].to_pylist()
        value_ms = self.watermark.after(run.max_event_ms, run.untimed)
        self.watermark.on_commit(run.max_event_ms, value_ms, run.untimed)
        return late, value_ms

    def end(self) -> None:
        MemoryStore.remove(self.folder)


def rows(records: Sequence[One]) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "key": pa.array([each.key for each in records], pa.binary()),
            "value": pa.array([each.value for each in records], pa.binary()),
            "timestamp": pa.array([each.timestamp for each in records], pa.int64()),
            "partition": pa.array([each.partition for each in records], pa.int32()),
            EVENT_TIME: pa.array([each.at for each in records], pa.int64()),
        }
    )


TIMES = st.integers(NOW - 1000, NOW)
PARTITIONS = st.integers(0, 1)


@pytest.mark.parametrize("name", STEPS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_rejected_record_changes_neither_what_is_late_nor_the_watermark(name: str, data: st.DataObject) -> None:
    make, kinds = STEPS[name]
    accepted = st.builds(good, TIMES if name == "ids" else TIMES | st.none(), PARTITIONS)
    # Late records are not rejected: they are not processed. So these are later than any watermark of the others.
    wrong = st.builds(rejected, st.sampled_from(kinds), st.integers(NOW - 100, NOW + 1000), PARTITIONS)
    step = st.tuples(
        st.sampled_from([0.0, 1.0, 29.0, 31.0]),
        st.lists(st.tuples(st.just(False), accepted) | st.tuples(st.just(True), wrong), max_size=4),
    )
    history = data.draw(st.lists(step, min_size=1, max_size=5))
    runs = Run(make), Run(make)
    try:
        for seconds, batch in history:
            arriving = [record for _, record in batch]
            kept = [record for is_rejected, record in batch if not is_rejected]
            assert runs[0].batch(arriving, arriving) == runs[1].batch(kept, arriving)
            for run in runs:
                run.now_s += seconds
    finally:
        for run in runs:
            run.end()


@pytest.mark.parametrize("name, kind", [(name, kind) for name, (_, kinds) in STEPS.items() for kind in kinds])
def test_a_partition_whose_first_record_is_rejected_is_waited_for(name: str, kind: str) -> None:
    run = Run(STEPS[name][0])
    try:
        for records in ([good(NOW, 0), rejected(kind, NOW, 1)], [good(NOW, 0)], [good(NOW - 900, 1)]):
            late, watermark_ms = run.batch(records, records)
            assert late == []
        assert watermark_ms == NOW - 1000
    finally:
        run.end()


class Windows(windows.WindowProcessor):
    window = windows.Tumbling("1 minute")
    aggregates = MappingProxyType({"n": windows.Count()})
    allowed_lateness = 0.1
    output = serdes.JSON


@pytest.mark.parametrize("make", [ByTimestamp, ByValue, WithCalls, Columns, deduplication, Windows])
def test_a_partition_whose_records_have_no_time_is_not_waited_for(make: Callable[[], Any]) -> None:
    """Nothing says that the partition will ever have event times. Windows and deduplication reject such records."""
    run = Run(make)
    try:
        records = [good(NOW, 0), good(None, 1)]
        assert run.batch(records, records) == ([], NOW - 100)
    finally:
        run.end()


REFUSED = One(b"refused", value_of("refused", None), None, -1, 1)


@pytest.mark.parametrize("make", [ByTimestamp, ByValue, WithCalls, Columns, NamesBad])
@settings(deadline=None, max_examples=20)
@given(others=st.lists(st.builds(good, TIMES, st.just(0)), min_size=1, max_size=5), data=st.data())
def test_that_records_without_a_time_are_rejected_too_makes_no_difference(
    make: Callable[[], Any], others: list[One], data: st.DataObject
) -> None:
    run = Run(make)
    try:
        records = data.draw(st.permutations([*others, REFUSED, REFUSED]))
        assert run.batch(records, records) == ([], max(each.timestamp for each in others) - 100)
    finally:
        run.end()


def test_columns_without_any_event_time() -> None:
    class Never(ColumnProcessor):
        allowed_lateness = 0.1

        def event_time(self, records: pa.Table) -> Any:
            return None

        def process(self, records: pa.Table, states: pa.Table, context: Any) -> Any:
            return None, None

    run = Run(Never)
    try:
        run.watermark.on_commit({("in", 0): NOW}, None)
        records = [good(NOW, 1)]
        assert run.batch(records, records) == ([], NOW - 100)
    finally:
        run.end()
