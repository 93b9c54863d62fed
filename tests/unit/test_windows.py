"""Windows: their results are those of an independent computation over all records that did not go to the late topic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onceflow
from onceflow import Record, serdes, windows
from onceflow.errors import OptionError, ProcessorError, ProgressConflictError
from onceflow.planning.process import StepOptions, check_options
from onceflow.planning.table_plan import plan_local_table
from onceflow.protocol.progress import Progress
from onceflow.state.engine.shapes import declared_fields
from onceflow.state.windows import panes, sessions
from onceflow.testing.processor_driver import ProcessorDriver

Result = tuple[Any, int, int, list[int]]
Sent = tuple[bytes, int]  # key and time; the value is the number of the record

# Far ahead, so that every window is closed.
END = 10_000_000


class Numbers(windows.WindowProcessor):
    """The numbers of the records in a window. It changes what it gets, as users do."""

    value = serdes.JSON
    window = windows.Tumbling("1 ms")

    def __init__(self, kind: Any, lateness_ms: int = 0, emit: Any = "close") -> None:
        self.window, self.allowed_lateness, self.emit = kind, lateness_ms / 1000, emit

    def initial(self) -> list[int]:
        return []

    def add(self, accumulator: list[int], record: Record) -> list[int]:
        accumulator.append(record.value)
        return accumulator

    def merge(self, left: list[int], right: list[int]) -> list[int]:
        left.extend(right)
        return left

    def result(self, key: Any, window: windows.Window, accumulator: list[int]) -> Record:
        found = Record(key, {**window._asdict(), "numbers": sorted(accumulator)})
        accumulator.clear()
        return found

    def replaced(self, key: Any, window: windows.Window) -> Iterator[Record]:
        yield Record(key, {**window._asdict(), "numbers": None})


def result_of(record: Record) -> Result:
    return record.key, record.value["start_ms"], record.value["end_ms"], record.value["numbers"]


# ---- an independent computation --------------------------------------------------------------------------


def aligned(times: dict[int, int], size: int, every: int, shift: int) -> Iterator[tuple[int, int, list[int]]]:
    """Every window that there could be, one after the other."""
    if times:
        first = min(times.values()) - size - every
        for start in range(first, max(times.values()) + 1):
            if (start - shift) % every == 0:
                inside = [number for number, at in times.items() if start <= at < start + size]
                if inside:
                    yield start, start + size, inside


def sliding(times: dict[int, int], size: int) -> Iterator[tuple[int, int, list[int]]]:
    """A window is moved on by a millisecond; whenever it holds other records than before, it counts."""
    before: list[int] = []
    for start in range(min(times.values()) - size, max(times.values()) + 1) if times else ():
        inside = [number for number, at in times.items() if start <= at <= start + size]
        if inside and inside != before:
            yield start, start + size + 1, inside
        before = inside


def by_session(times: dict[int, int], gap: int) -> Iterator[tuple[int, int, list[int]]]:
    """Records in the order of time; a session ends where the next one is further away than the gap."""
    inside: list[int] = []
    for number, at in sorted(times.items(), key=lambda each: each[1]):
        if inside and at - times[inside[-1]] > gap:
            yield times[inside[0]], times[inside[-1]] + gap, sorted(inside)
            inside = []
        inside.append(number)
    if inside:
        yield times[inside[0]], times[inside[-1]] + gap, sorted(inside)


def expected(kind: Any, records: Iterable[tuple[int, Sent]]) -> list[Result]:
    by_key: dict[bytes, dict[int, int]] = defaultdict(dict)
    for number, (key, at) in records:
        by_key[key][number] = at
    found = []
    for key, times in by_key.items():
        if isinstance(kind, windows.Session):
            of_key = by_session(times, kind.gap_ms)
        elif isinstance(kind, windows.Sliding):
            of_key = sliding(times, kind.size_ms)
        else:
            of_key = aligned(times, kind.size_ms, kind.every_ms, kind._shift_ms)
        found += [(key, start, end, sorted(inside)) for start, end, inside in of_key]
    return sorted(found)


def run(kind: Any, batches: list[list[Sent]], lateness_ms: int, emit: str = "close") -> tuple[Any, dict[int, Sent]]:
    """Send records, in these batches, and at last one of another key that closes all windows."""
    driver = ProcessorDriver(Numbers(kind, lateness_ms, emit), partitions=2)
    sent: dict[int, Sent] = {}
    for batch in batches:
        numbered = list(enumerate(batch, len(sent)))
        sent.update(numbered)
        driver.send_many([Record(key, number, timestamp_ms=at) for number, (key, at) in numbered])
    driver.send(b"end", -1, timestamp_ms=END)
    driver.run()
    return driver, sent


SIZE = st.integers(1, 30)
KINDS = st.one_of(
    st.builds(lambda size, shift: windows.Tumbling(size / 1000, start_time=shift / 1000), SIZE, st.integers(0, 40)),
    st.builds(
        lambda size, every, shift: windows.Hopping(
            max(size, every) / 1000, every=min(size, every) / 1000, start_time=shift / 1000
        ),
        SIZE,
        SIZE,
        st.integers(0, 40),
    ),
    SIZE.map(lambda size: windows.Sliding(size / 1000)),
    SIZE.map(lambda gap: windows.Session(gap / 1000)),
)
BATCHES = st.lists(st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.integers(0, 250)), max_size=8), max_size=8)


@pytest.mark.parametrize("examples", [30, pytest.param(100, marks=pytest.mark.long)])
def test_results_are_those_of_all_records_that_are_not_late(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(KINDS, BATCHES, st.integers(0, 60), st.sampled_from([1, 2, 1000]))
    def check(kind: Any, batches: list[list[Sent]], lateness_ms: int, at_once: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(panes, "CLOSED_AT_ONCE", at_once)
            patch.setattr(sessions, "CLOSED_AT_ONCE", at_once)
            driver, sent = run(kind, batches, lateness_ms)
        late = {int(record.value) for record in driver.late}
        in_time = [(number, record) for number, record in sent.items() if number not in late]
        found = [result_of(record) for record in driver.outputs if record.key != b"end"]
        assert sorted(found) == expected(kind, in_time)
        # Nothing is late that belongs to open windows only: a record that is not older than the watermark never is.
        met = watermarks(batches, lateness_ms)
        assert all(sent[number][1] < met[number] for number in late)
        # Nothing is left but what belongs to the last record.
        assert {key for key, _ in driver.timers} <= {b"end"}
        assert driver.map(b"a", "windows") == driver.map(b"b", "windows") == {}

    check()


def watermarks(batches: list[list[Sent]], lateness_ms: int) -> dict[int, int]:
    """The watermark that each record has met."""
    found: dict[int, int] = {}
    latest = -(1 << 60)
    number = 0
    for batch in batches:
        for _ in batch:
            found[number] = latest - lateness_ms
            number += 1
        latest = max([latest, *(at for _, at in batch)])
    return found


@pytest.mark.parametrize("examples", [20, pytest.param(60, marks=pytest.mark.long)])
def test_the_last_update_of_a_window_is_its_result(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(KINDS, BATCHES)
    def check(kind: Any, batches: list[list[Sent]]) -> None:
        driver, sent = run(kind, batches, 1000, "update")
        assert driver.late == []
        last: dict[tuple[Any, int, int], Any] = {}
        for key, start, end, numbers in map(result_of, driver.outputs):
            last[key, start, end] = numbers
        found = [(*bounds, numbers) for bounds, numbers in last.items() if bounds[0] != b"end" and numbers is not None]
        assert sorted(found) == expected(kind, sent.items())
        assert driver.map(b"a", "windows") == driver.map(b"b", "windows") == {}

    check()


# ---- examples ----------------------------------------------------------------------------------------------


class Sales(windows.WindowProcessor):
    key = serdes.STRING
    value = serdes.JSON
    window = windows.Tumbling("1 minute")
    allowed_lateness = "10 seconds"
    aggregates = {  # noqa: RUF012
        "count": windows.Count(),
        "priced": windows.Count("price"),
        "sum": windows.Sum("price"),
        "least": windows.Min("price"),
        "most": windows.Max(lambda record: record.value.get("price")),
        "mean": windows.Mean("price"),
    }


class Changed(Sales):
    """With other attributes than those of the class."""

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


def sale(second: float, price: Any = 1, key: str = "a") -> Record:
    return Record(key, {"price": price}, timestamp_ms=round(second * 1000))


def test_aggregates_leave_out_nulls_as_in_sql() -> None:
    driver = ProcessorDriver(Sales())
    driver.send_many([sale(1, 5), sale(2, 2), sale(59.999, None), sale(60, None), sale(61, None)])
    driver.send_many([sale(500)])
    driver.run()
    assert [record.value for record in driver.outputs] == [
        {"start_ms": 0, "end_ms": 60_000, "count": 3, "priced": 2, "sum": 7, "least": 2, "most": 5, "mean": 3.5},
        {
            "start_ms": 60_000,
            "end_ms": 120_000,
            "count": 2,
            "priced": 0,
            **dict.fromkeys(["sum", "least", "most", "mean"]),
        },
    ]
    assert {record.key for record in driver.outputs} == {"a"}


def test_a_record_is_late_when_one_of_its_windows_is_closed() -> None:
    """And in no other case: one that is older than the watermark counts while its window is open."""
    driver = ProcessorDriver(Sales())
    driver.send_many([sale(95)])
    assert driver.watermark_ms == 85_000
    driver.send_many([sale(60), sale(59.999)])
    assert [record.timestamp_ms for record in driver.late] == [59_999]
    assert dict(driver.late[0].headers)["onceflow.error.class"] == b"LateRecord"
    driver.send_many([sale(130)])
    assert [record.value["count"] for record in driver.outputs] == [2]

    hopping = ProcessorDriver(Changed(window=windows.Hopping("1 minute", every="20 seconds")))
    hopping.send_many([sale(95)])
    hopping.send_many([sale(80), sale(79.999)])  # the watermark is at 85, the window from 20 to 80 is closed
    assert [record.timestamp_ms for record in hopping.late] == [79_999]


def test_windows_of_one_key_close_together_and_those_of_others_stay() -> None:
    driver = ProcessorDriver(Changed(window=windows.Session("30 seconds")))
    driver.send_many([sale(0), sale(30), sale(61), sale(69, key="b")])
    assert [(key, timer.at_ms) for key, timer in driver.timers] == [("a", 60_001), ("b", 99_001)]
    driver.send_many([sale(101.002, key="b")])  # the watermark is at 91.002
    assert [(each.key, each.value["start_ms"], each.value["end_ms"]) for each in driver.outputs] == [
        ("a", 0, 60_000),
        ("a", 61_000, 91_000),
    ]
    assert driver.counts["timers_fired"] == 1
    assert [key for key, _ in driver.timers] == ["b"]


def test_updates_of_sessions_say_which_ones_they_replace() -> None:
    driver = ProcessorDriver(Numbers(windows.Session(0.01), 1000, "update"))
    for number, at in enumerate((0, 18, 20, 9)):
        driver.send(b"a", number, timestamp_ms=at)
    assert [result_of(record)[1:] for record in driver.outputs] == [
        (0, 10, [0]),
        (18, 28, [1]),
        (18, 28, None),
        (18, 30, [1, 2]),
        (0, 10, None),
        (18, 30, None),
        (0, 30, [0, 1, 2, 3]),
    ]


def test_a_result_may_be_one_record_many_or_none() -> None:
    class Many(Numbers):
        def result(self, key: Any, window: windows.Window, accumulator: list[int]) -> Any:
            return None if window.start_ms == 0 else [Record(key, number) for number in accumulator]

    driver = ProcessorDriver(Many(windows.Tumbling(1)))
    for number, at in enumerate((0, 1000, 1500, 9000)):
        driver.send(b"a", number, timestamp_ms=at)
    assert driver.run() == []
    assert [record.value for record in driver.outputs] == [1, 2]


def test_an_aggregate_of_ones_own() -> None:
    class Last(windows.Aggregate):
        def add(self, part: Any, record: Record) -> Any:
            return self.merge(part, [record.timestamp_ms, self._value(record)])

        def merge(self, left: Any, right: Any) -> Any:
            return max(each for each in (left, right) if each is not None)

        def result(self, part: Any) -> Any:
            return part[1]

    driver = ProcessorDriver(Changed(aggregates={"last": Last("price")}, window=windows.Hopping(60, every=30)))
    driver.send_many([sale(50, 1), sale(20, 2), sale(300)])
    driver.run()
    assert [record.value["last"] for record in driver.outputs] == [2, 1, 1]


# ---- what can go wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, cause",
    [
        ({"price": "5"}, "price is '5', not a finite number"),
        ({"price": True}, "price is True, not a finite number"),
        ([], "it is list: declare a serde"),
        (b"no JSON", "not JSON"),
    ],
)
def test_a_bad_record_changes_no_window(value: Any, cause: str) -> None:
    only = {"sum": windows.Sum("price")}
    driver = ProcessorDriver(Changed(aggregates=only), on_error="dead-letter")
    driver.send_many([sale(1), Record("a", value, timestamp_ms=2000), sale(3), sale(300)])
    driver.run()
    assert [record.value["sum"] for record in driver.outputs] == [2]
    (letter,) = driver.dead_letters
    assert cause in (dict(letter.headers)["onceflow.error.message"] or b"").decode()


def test_a_record_needs_an_event_time_that_a_window_can_have() -> None:
    class Own(Sales):
        def event_time(self, record: Record) -> int | None:
            found: int | None = record.value["price"]
            return found

    driver = ProcessorDriver(Own(), on_error="dead-letter")
    driver.send_many([sale(0, None), sale(0, 2**62 + 1), sale(0, 2**63 - 1), sale(0, -(2**62) - 1), sale(0, -1)])
    causes = [(dict(each.headers)["onceflow.error.message"] or b"").decode() for each in driver.dead_letters]
    assert [cause.partition(" for")[0].partition(",")[0] for cause in causes] == [
        *(f"event time {at} is no time in milliseconds since 1970" for at in (2**62 + 1, 2**63 - 1)),
        *["the record has no event time"] * 3,
    ]


def test_add_has_to_return_the_accumulator() -> None:
    class Forgetful(Numbers):
        def add(self, accumulator: list[int], record: Record) -> Any:
            accumulator.append(record.value)

    with pytest.raises(ProcessorError, match=r"Forgetful.add\(\) has returned None"):
        ProcessorDriver(Forgetful(windows.Tumbling(1))).send(b"a", 1)


def test_a_timer_of_ones_own_needs_an_on_timer_of_ones_own() -> None:
    class Waking(Numbers):
        def process(self, key: Any, records: Any, state: Any) -> Iterator[Record]:
            state.timers.register("mine", records[0].timestamp_ms + 1)
            yield from super().process(key, records, state)

    driver = ProcessorDriver(Waking(windows.Tumbling(1)))
    with pytest.raises(ProcessorError, match="does not define on_timer"):
        driver.send_many([Record(b"a", 1, timestamp_ms=0), Record(b"a", 1, timestamp_ms=10)])


@pytest.mark.parametrize(
    "declared, said",
    [
        ({"window": None}, "window is None"),
        ({"window": "1 minute"}, "window is '1 minute'"),
        ({"emit": "end"}, "emit is 'end'"),
        ({"allowed_lateness": None}, "allowed_lateness is None"),
        ({"aggregates": {"count": windows.Count}}, "'count' is <class"),
        ({"aggregates": {}}, "add, result not defined"),
        ({"aggregates": {}, "window": windows.Session(1)}, "add, result, merge not defined"),
    ],
)
def test_declarations_are_checked_before_anything_runs(declared: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        ProcessorDriver(Changed(**declared)).send("a", {})
    options = StepOptions("t", None, "fail", None, "late", None, "lmdb", None, False, "30 seconds")
    with pytest.raises(OptionError, match=said) as caught:
        check_options(options, Changed(**declared), flow="f", sources=["s"], tables=[])
    assert caught.value.flow == "f"
    check_options(options, Sales(), flow="f", sources=["s"], tables=[])
    with pytest.raises(OptionError, match="Sales: it has windows, but late_topic= is missing"):
        check_options(replace(options, late_topic=None), Sales(), flow="f", sources=["s"], tables=[])


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: windows.Tumbling("1 fortnight"), "not a duration"),
        (lambda: windows.Tumbling(0), "size=0 is too short"),
        (lambda: windows.Hopping("1 minute", every="2 minutes"), "is longer than size"),
        (lambda: windows.Session("0.1 ms"), "too short"),
        (lambda: windows.Sum(5), "name of a field"),  # type: ignore[arg-type]
    ],
)
def test_windows_that_cannot_be(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


OPTIONS = StepOptions("t", None, "fail", None, "late", None, "lmdb", None, False, "30 seconds")
CHOICE: dict[str, Any] = {
    "count": windows.Count(),
    "sum": windows.Sum("price"),
    "of": windows.Sum("tax"),
    "most": windows.Max("price"),
    "last": windows.Max("price", text=True),
    "made": windows.Sum(lambda record: 1),
}
DECLARED = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(sorted(CHOICE))), min_size=1, max_size=3).map(
    dict
)


@given(before=DECLARED, after=DECLARED, version=st.sampled_from([1, 2]))
@settings(deadline=None)
def test_other_aggregates_than_those_of_the_open_windows_are_refused_at_the_start(
    before: dict[str, str], after: dict[str, str], version: int
) -> None:
    """The parts of a window are kept in the order of the aggregates: others would take them for their own."""
    old = Changed(aggregates={name: CHOICE[kind] for name, kind in before.items()}, version=1)
    new = Changed(aggregates={name: CHOICE[kind] for name, kind in after.items()}, version=version)
    _, progress = plan_local_table(OPTIONS, old, 1, Progress("f", 0, {}, {}, 0))
    if version > 1 or list(before.items()) == list(after.items()):
        assert plan_local_table(OPTIONS, new, 1, progress)[1] is progress
    else:
        with pytest.raises(ProgressConflictError, match="raise the processor's `version`") as refused:
            plan_local_table(OPTIONS, new, 1, progress)
        assert str(declared_fields(new)) in str(refused.value)
        assert str(declared_fields(old)) in str(refused.value)
    with pytest.raises(ProgressConflictError, match="declare the windows as they were"):
        plan_local_table(OPTIONS, Changed(window=windows.Session(1), version=version), 1, progress)


def test_progress_of_earlier_versions_says_nothing_of_aggregates() -> None:
    _, progress = plan_local_table(OPTIONS, Sales(), 1, Progress("f", 0, {}, {}, 0))
    plain = repr(Sales.window)
    older = replace(progress, tables={"t": replace(progress.tables["t"], fields=plain)})
    for aggregates in ({"count": windows.Count()}, Sales.aggregates):
        assert plan_local_table(OPTIONS, Changed(aggregates=aggregates), 1, older)[1] is older
    assert declared_fields(Changed(aggregates=CHOICE)) == (
        "aggregates(count=Count(), sum=Sum('price'), of=Sum('tax'), most=Max('price'), last=Max('price', text), "
        f"made=Sum(function)) of {plain}"
    )
    assert declared_fields(Numbers(windows.Tumbling(60))) == repr(windows.Tumbling(60))


def test_a_migration_gets_accumulators() -> None:
    class Newer(Numbers):
        version = 2

        def migrate(self, payload: bytes, from_version: int) -> Any:
            return [*serdes.JSON.decode(payload), -from_version - 1]

    for kind in (windows.Tumbling(10), windows.Session(10)):
        driver = ProcessorDriver(Numbers(kind))
        driver.send(b"a", 1, timestamp_ms=0)
        driver.processor = Newer(kind)
        driver.send(b"a", 2, timestamp_ms=1)
        driver.send(b"a", 3, timestamp_ms=100_000)
        driver.run()
        assert result_of(driver.outputs[0])[3] == [-1, 1, 2]


def test_what_is_late_is_the_processors_to_say() -> None:
    class Patient(onceflow.Processor):
        allowed_lateness = 0

        def late_before_ms(self, watermark_ms: int) -> Any:
            return "soon" if watermark_ms > 1000 else watermark_ms - 10

        def process(self, key: Any, records: Any, state: Any) -> Any:
            return [Record(key, b"%d" % record.timestamp_ms) for record in records]

    driver = ProcessorDriver(Patient())
    for at in (100, 90, 89):
        driver.send(b"a", b"", timestamp_ms=at)
    assert ([record.value for record in driver.outputs], len(driver.late)) == ([b"100", b"90"], 1)
    driver.send(b"a", b"", timestamp_ms=1001)
    with pytest.raises(ProcessorError, match=r"Patient.late_before_ms\(\) failed: TypeError"):
        driver.send(b"a", b"", timestamp_ms=1002)


@pytest.mark.parametrize("kind", [windows.Tumbling(1), windows.Session(0.5)], ids=repr)
def test_many_windows_close_in_bounded_batches_that_follow_at_once(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr(panes, "CLOSED_AT_ONCE", 2)
    monkeypatch.setattr(sessions, "CLOSED_AT_ONCE", 2)
    driver = ProcessorDriver(Numbers(kind))
    batches: list[tuple[int, bool]] = []
    batch = driver._batch

    def counted() -> Any:
        results, due, left = batch()
        batches.append((len(results), left))
        return results, due, left

    monkeypatch.setattr(driver, "_batch", counted)
    driver.send_many([Record(b"a", number, timestamp_ms=1000 * number) for number in range(6)])
    # The flow waits for its clock, unless a batch says that something is left.
    assert batches == [(0, False), (2, True), (2, True), (1, False)]


@pytest.mark.parametrize("aggregate", [windows.Sum("amount"), windows.Mean("amount")])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_record_with_which_a_sum_might_overflow_is_bad_and_the_others_are_summed(
    aggregate: Any, at_once: bool
) -> None:
    class Total(windows.WindowProcessor):
        key, value = serdes.STRING, serdes.JSON
        window = windows.Tumbling("1 minute")
        aggregates = {"total": aggregate}  # noqa: RUF012

    driver = ProcessorDriver(Total(), on_error="dead-letter")
    for number, amount in enumerate((1e308, 1e308, -1e308, 6)):
        driver.send("a", {"amount": amount}, timestamp_ms=number, run=not at_once)
    driver.send("a", {"amount": 1}, timestamp_ms=70_000)
    driver.run()
    assert [record.value["total"] for record in driver.outputs] == [6]
    assert len(driver.dead_letters) == 3


@pytest.mark.parametrize("aggregate", [windows.Min, windows.Max])
def test_what_json_cannot_keep_is_neither_least_nor_most(aggregate: Any) -> None:
    class Extreme(windows.WindowProcessor):
        key, value = serdes.STRING, serdes.JSON
        window = windows.Tumbling("1 minute")
        aggregates = {"extreme": aggregate(lambda record: float(record.value))}  # noqa: RUF012

    driver = ProcessorDriver(Extreme(), on_error="dead-letter")
    for number, value in enumerate(("inf", "5", "nan", "-inf")):
        driver.send("a", value, timestamp_ms=number)
    driver.send("a", "1", timestamp_ms=70_000)
    driver.run()
    assert [record.value["extreme"] for record in driver.outputs] == [5.0]
    assert len(driver.dead_letters) == 3
