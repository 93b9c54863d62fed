"""What topics do not take: outputs and state are those of a bad record, and letters are shortened."""

from __future__ import annotations

import json
import math
import random
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onceflow import BadRecordError, OptionError, PermissionDeniedError, Record, serdes
from onceflow.calls.concurrently import concurrently
from onceflow.clock import clock_ms
from onceflow.driver.external.refused_rows import RefusedRows
from onceflow.driver.kafka import targets
from onceflow.external.sink import RefusedRow
from onceflow.messages import OutputTopic
from onceflow.protocol.batches import ProducerIdAndEpoch, encode_single
from onceflow.protocol.output_limits import OutputLimits, WriteLimits
from onceflow.protocol.progress import Progress
from onceflow.protocol.timestamps import ORIGINAL_TIMESTAMP, AcceptedTimes
from onceflow.state.api.deduplication import Deduplication
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.api.timers import Timer
from onceflow.state.engine import dead_letters
from onceflow.state.engine.output_collector import SCHEMA
from onceflow.state.engine.retry import KEY, Retry
from onceflow.state.format import exact_json
from onceflow.testing.processor_driver import ProcessorDriver

LIMIT = 10_000
TABLE = 20_000
RANDOM = bytes(range(256)) * 40  # zstd makes it small
NOISE = random.Random(3).randbytes(LIMIT)  # nothing makes it small


def limits_of(**of_topics: OutputLimits | None) -> WriteLimits:
    known = {"default": OutputLimits("out", LIMIT), "dead-letters": OutputLimits("failed", LIMIT), **of_topics}
    return WriteLimits(lambda topic: known.get(topic or "default"), known.get("rows"))


def driver_of(processor: Any, on_error: str = "dead-letter", **of_topics: OutputLimits | None) -> ProcessorDriver:
    return ProcessorDriver(processor, on_error=on_error, limits=limits_of(**of_topics))


def message(letter: Record) -> str:
    return (dict(letter.headers)["onceflow.error.message"] or b"").decode()


class Copies(Processor):
    """Writes what a record says: so many bytes, to a topic, with or without a key."""

    value = state = serdes.JSON

    def process(self, key: bytes, records: Any, state: Any) -> Any:
        for record in records:
            given = record.value
            state.put({"count": state.get({"count": 0})["count"] + 1})
            if "state" in given:
                state.map("m").put("x", "s" * given["state"])
                state.put({"count": 0, "large": "s" * given.get("then", given["state"])})
            headers = [("h", b"h" * given["headers"])] if "headers" in given else []
            out_key = None if given.get("keyless") else b"k" * given.get("key", 1)
            yield Record(out_key, b"v" * given.get("value", 1), given.get("topic"), headers)


class Called(Copies):
    """With another engine."""

    @staticmethod
    def none(value: Any) -> Any:
        return value

    ask = concurrently(none, limit=2)

    def process(self, key: bytes, records: Any, state: Any) -> Any:
        self.ask(1)
        yield from super().process(key, records, state)


TOO_LARGE = [{"value": LIMIT}, {"key": LIMIT}, {"headers": LIMIT}, {"state": TABLE},
             {"topic": "keyed", "keyless": True},
             {"topic": "tiny", "value": 2_000}, {"topic": "tiny", "headers": 2_000}]  # fmt: skip


@pytest.mark.parametrize("kind", [Copies, Called])
@pytest.mark.parametrize("bad", TOO_LARGE, ids=json.dumps)
def test_a_record_whose_outputs_or_state_cannot_be_written_is_bad(kind: Any, bad: dict[str, Any]) -> None:
    more = {"rows": OutputLimits("table", TABLE), "keyed": OutputLimits("keyed", LIMIT, compacted=True),
            "tiny": OutputLimits("tiny", 1_500)}  # fmt: skip
    driver = driver_of(kind(), **more)
    driver.send_many([(b"a", {"value": 5}), (b"a", bad), (b"a", {"value": 6}), (b"b", {"value": 7})])
    assert sorted(len(record.value) for record in driver.outputs) == [5, 6, 7]
    assert driver.state(b"a") == {"count": 2}, "what the bad record has changed is undone"
    assert driver.map(b"a", "m") == {}
    (letter,) = driver.dead_letters
    assert json.loads(letter.value or b"") == bad
    assert "bytes" in message(letter) or "need a key" in message(letter)
    with pytest.raises(BadRecordError) as caught:
        driver_of(kind(), "fail", **more).send(b"a", bad)
    assert caught.value.flow == "test"
    assert "offset 0" in caught.value.detail
    assert caught.value.next_step


def test_what_fits_is_written_and_only_the_last_row_of_a_call_counts() -> None:
    driver = driver_of(Copies(), rows=OutputLimits("table", TABLE))
    driver.send(b"a", {"value": LIMIT - 100})
    driver.send(b"a", {"state": TABLE - 2_000})
    driver.send(b"b", {"state": 10, "then": TABLE})
    assert [len(record.value) for record in driver.outputs] == [LIMIT - 100, 1]
    assert len(driver.dead_letters) == 1

    class Shrinks(Copies):
        def process(self, key: bytes, records: Any, state: Any) -> Any:
            state.put("s" * TABLE)
            state.put("small")

    driver = driver_of(Shrinks(), rows=OutputLimits("table", TABLE))
    driver.send(b"a", {})
    assert driver.state(b"a") == "small"


@pytest.mark.parametrize("where", ["map", "timer", "key"])
def test_a_row_that_is_too_large_because_of_its_key(where: str) -> None:
    class Keyed(Processor):
        key = value = state = serdes.STRING

        def process(self, key: str, records: Any, state: Any) -> Any:
            text = records[0].value
            if where == "map":
                state.map("m").put(text, "x")
            elif where == "timer":
                state.timers.register(text, 5, "processing")
            else:
                state.put("x")
            return [Record(None, b"done")]

        def on_timer(self, key: str, timer: Any, state: Any) -> None: ...

    driver = driver_of(Keyed(), rows=OutputLimits("table", TABLE), default=None)
    large = "s" * (TABLE - 100 if where == "key" else TABLE)
    driver.send(large.encode() * (2 if where == "key" else 1), large.encode())
    driver.send(b"a", b"small")
    assert len(driver.dead_letters) == len(driver.outputs) == 1


@pytest.mark.parametrize("compression, fits", [("none", False), ("zstd", True), ("gzip", True)])
def test_the_compressed_size_counts(compression: str, fits: bool) -> None:
    class Same(Processor):
        state = serdes.BYTES

        def process(self, key: bytes, records: Any, state: Any) -> Any:
            state.put(records[-1].value * 5)
            return [Record(key, records[-1].value * 2)]

    large = OutputLimits("out", LIMIT, compression=compression)
    for stored in ("producer", "zstd", "uncompressed"):
        plain = OutputLimits("out", LIMIT, stored=stored, compression=compression)
        driver = driver_of(Same(), default=plain, rows=large)
        driver.send(b"a", RANDOM)
        assert bool(driver.outputs) == (fits and stored != "uncompressed")
        assert len(driver.dead_letters) == 1 - len(driver.outputs)


def test_columns_that_cannot_be_written_are_those_of_bad_records() -> None:
    class Columns(ColumnProcessor):
        state_fields = {"text": "string"}  # noqa: RUF012

        def process(self, records: pa.Table, states: pa.Table, context: Any) -> Any:
            values = pc.cast(records["value"], pa.string())
            outputs = pa.table({
                "key": pc.if_else(pc.equal(values, "keyless"), None, records["key"]),
                "value": pc.if_else(pc.equal(values, "large"), "v" * LIMIT, values),
                "topic": pc.if_else(pc.equal(values, "keyless"), "keyed", pa.scalar(None, pa.string())),
            })  # fmt: skip
            new = pc.if_else(pc.equal(values, "state"), "s" * TABLE, values)
            last = (
                pa.table({"key": records["key"], "text": new})
                .group_by("key", use_threads=False)
                .aggregate([("text", "last")])
            )
            return outputs, last.rename_columns(["key", "text"])

    driver = driver_of(Columns(), keyed=OutputLimits("keyed", LIMIT, compacted=True), rows=OutputLimits("table", TABLE))
    driver.send_many([(b"a", "x"), (b"b", "large"), (b"c", "state"), (b"d", "keyless"), (b"e", "y")])
    assert sorted(record.value for record in driver.outputs) == [b"x", b"y"]
    assert sorted(letter.value or b"" for letter in driver.dead_letters) == [b"keyless", b"large", b"state"]


def test_a_record_that_cannot_be_passed_on_does_not_count_as_seen() -> None:
    driver = driver_of(Deduplication(records=10), default=OutputLimits("out", LIMIT, compacted=True))
    driver.send_many([(b"a", b"x"), (b"b", b"v" * LIMIT), (b"b", b"y"), (b"a", b"x")])
    assert [record.value for record in driver.outputs] == [b"x", b"y"]
    (letter,) = driver.dead_letters
    assert "the record cannot be passed on: a record takes" in message(letter)


PARTS = st.none() | st.sampled_from([0, 1, 100, 2_000, 2_250, 2_251, 5_000, 9_900]).map(lambda size: NOISE[:size])
ROW = st.tuples(PARTS, PARTS, st.none() | st.lists(st.tuples(st.text(max_size=5), PARTS), max_size=3))


@given(st.lists(ROW, max_size=6), st.integers(0, 2))
def test_rows_that_need_no_closer_look_fit(given: list[tuple[Any, Any, Any]], skipped: int) -> None:
    limits = OutputLimits("out", LIMIT)
    listed = [None if each is None else [{"key": name, "value": value} for name, value in each] for *_, each in given]
    columns = [pa.array([each[0] for each in given], pa.binary()), pa.array([each[1] for each in given], pa.binary()),
               pa.array(listed, SCHEMA.field("headers").type)]  # fmt: skip
    doubtful = {skipped + at for at in limits.doubtful(*(each.slice(skipped) for each in columns)).tolist()}
    for at, (key, value, headers) in enumerate(given[skipped:], skipped):
        written = [*(headers or ()), (ORIGINAL_TIMESTAMP, b"1" * 20)]
        assert at in doubtful or limits.refusal(key, value, written) == ""
        sizes = sum(len(name.encode()) + len(each or b"") for name, each in headers or ())
        if max(len(key or b""), len(value or b""), sizes) <= 2_000:
            assert at not in doubtful


def test_a_timer_whose_outputs_are_too_large_becomes_a_letter() -> None:
    class Rings(Processor):
        def process(self, key: bytes, records: Any, state: Any) -> None:
            state.timers.register("ring", 5, "processing")

        def on_timer(self, key: bytes, timer: Any, state: Any) -> Any:
            yield Record(key, b"v" * LIMIT)

    driver = driver_of(Rings())
    driver.send(b"a", b"")
    driver.advance(1)
    (letter,) = driver.dead_letters
    assert json.loads(letter.value or b"")["timer"] == "ring"


# ---- letters -----------------------------------------------------------------------------------------------

HEADER = st.tuples(st.text(max_size=6), st.one_of(st.none(), st.integers(0, 9_000).map(lambda size: NOISE[:size])))
SIZES = st.one_of(st.none(), st.integers(0, 30_000))


@given(
    key=SIZES,
    value=SIZES,
    headers=st.lists(HEADER, max_size=6),
    text=st.integers(0, 3_000),
    limit=st.integers(dead_letters.LETTER_BYTES_MIN, 12_000),
    compression=st.sampled_from(["none", "zstd"]),
)
@example(key=None, value=9_950, headers=[], text=10, limit=10_000, compression="none")
@example(key=30_000, value=30_000, headers=[("h", NOISE[:9_000])], text=3_000, limit=8_000, compression="none")
@settings(max_examples=150, deadline=None)
def test_every_letter_fits_and_says_what_was_cut(
    key: int | None, value: int | None, headers: Any, text: int, limit: int, compression: str
) -> None:
    def noise(size: int | None) -> bytes | None:
        return None if size is None else (NOISE * 4)[:size]

    record = Record(noise(key), noise(value), "t" * 200, headers, 7, 2**31 - 1, 2**63 - 1)
    letter = dead_letters.dead_letter(record, "failed", ValueError("ä\U0001f600" * text))
    limits = OutputLimits("failed", limit, compression=compression)
    found = dead_letters.fitted(letter, limits)
    assert limits.refusal(found.key or b"", found.value, list(found.headers)) == ""
    batch = encode_single(found.key, found.value, list(found.headers), timestamp_ms=7, base_sequence=0,
                          identity=ProducerIdAndEpoch(1, 1))  # fmt: skip
    if compression == "none":
        assert batch.nbytes <= limit
    names = [name for name, _ in found.headers]
    for name in ("class", "message", "topic", "partition", "offset"):
        assert f"onceflow.error.{name}" in names
    assert (found.topic, found.timestamp_ms) == ("failed", 7)
    assert (found.value or b"") == (letter.value or b"")[: len(found.value or b"")]
    assert (found.key or b"") == (letter.key or b"")[: len(found.key or b"")]
    assert (found.key is None, found.value is None) == (key is None, value is None)
    cut = json.loads(dict(found.headers).get("onceflow.shortened") or b"{}")
    assert ("value" in cut) == (found.value != letter.value)
    assert ("key" in cut) == (found.key != letter.key)
    assert cut.get("value", value) == value
    own = [header for header in found.headers if not header[0].startswith("onceflow.")]
    if own != [header for header in headers if not header[0].startswith("onceflow.")]:
        assert "headers" in cut
    assert bool(dead_letters.why_not_retried(found.headers)) == bool(cut)
    if limits.refusal(letter.key or b"", letter.value, [*letter.headers, (ORIGINAL_TIMESTAMP, bytes(20))]) == "":
        assert found is letter
    refused = [*found.headers, (ORIGINAL_TIMESTAMP, str(7).encode())]
    assert limits.refusal(found.key or b"", found.value, refused) == "", "also if the topic refuses the timestamp"


NAMES = st.one_of(
    st.sampled_from(sorted(dead_letters.ABOUT)),
    st.integers(0, 99).map("onceflow.other.{}".format),
    st.text(max_size=300),
)
CONTENT = st.none() | st.sampled_from([b"", NOISE[:20], NOISE[:500], NOISE[:2_000], NOISE * 3])


@given(
    many=st.lists(st.tuples(NAMES, CONTENT, st.sampled_from([1, 1, 30, 1_000])), max_size=12),
    size=st.integers(0, 12_000),
    again=st.booleans(),
    stored=st.sampled_from(["producer", "gzip", "lz4", "snappy", "zstd", "uncompressed"]),
    limit=st.sampled_from([dead_letters.LETTER_BYTES_MIN, 10_000, 1_048_588]),
)
@example(many=[("onceflow.foreign", NOISE[:500], 30)], size=5, again=False, stored="producer", limit=8_000)
@example(many=[(each, NOISE, 1) for each in sorted(dead_letters.ABOUT)], size=5, again=True, stored="gzip", limit=8_000)
@settings(max_examples=60, deadline=None)
@pytest.mark.slow
def test_a_letter_fits_whatever_headers_its_record_has(
    many: list[tuple[str, bytes | None, int]], size: int, again: bool, stored: str, limit: int
) -> None:
    headers = [(name, content) for name, content, times in many for _ in range(times)]
    record = Record(b"k", (NOISE * 200)[: size * limit // 8_000], "t" * 249, headers, 7, 2**31 - 1, 2**63 - 1)
    limits = OutputLimits("failed", limit, stored=stored)
    letter = dead_letters.fitted(dead_letters.dead_letter(record, "failed", ValueError("ä\U0001f600" * 900)), limits)
    if again:
        record = Record(letter.key, letter.value, "u" * 249, letter.headers, 7, 1, 1)
        letter = dead_letters.fitted(dead_letters.duplicate(record, "failed", NOISE * 2, 5), limits)
    written = [*letter.headers, (ORIGINAL_TIMESTAMP, b"1" * 20)]
    assert limits.refusal(letter.key, letter.value, written) == ""
    found = dict(letter.headers)
    assert found["onceflow.error.class"] == (b"DuplicateRecord" if again else b"ValueError")
    assert found["onceflow.error.topic"] == (b"u" if again else b"t") * 249
    assert found["onceflow.error.offset"] == (b"1" if again else b"%d" % (2**63 - 1))


FAR_MS = 3_600_000 * 24 * 365


class Old(Processor):
    """Yields records with times and values of these lengths."""

    def process(self, key: bytes, records: Any, state: Any) -> Any:
        for record in records:
            yield Record(key, NOISE[: int(record.value)], timestamp_ms=record.timestamp_ms)


class OldColumns(ColumnProcessor):
    def process(self, records: Any, states: Any, context: Any) -> Any:
        values = [NOISE[: int(each)] for each in records["value"].to_pylist()]
        return pa.table({"key": records["key"], "value": values, "timestamp_ms": records["timestamp_ms"]}), None


@pytest.mark.parametrize("kind", [Old, OldColumns])
def test_an_output_that_only_fits_without_the_header_of_its_refused_time_is_a_bad_one(kind: Any) -> None:
    """Within the bytes of that header, the topic takes the record with another time."""
    now_ms = clock_ms()
    times = AcceptedTimes(after_ms=3_600_000)
    plain = OutputLimits("out", LIMIT)
    limits = OutputLimits("out", LIMIT, times=times)
    most = max(size for size in range(LIMIT - 200, LIMIT) if not plain.refusal(b"k", NOISE[:size]))
    for size in range(most - 80, most + 1):
        driver = driver_of(kind(), default=limits)
        for at_ms in (now_ms - FAR_MS, now_ms + FAR_MS):
            driver.send(b"k", b"%d" % size, timestamp_ms=at_ms)
        fits = not plain.refusal(b"k", NOISE[:size], [(ORIGINAL_TIMESTAMP, str(now_ms + FAR_MS).encode())])
        written = [record.timestamp_ms for record in driver.outputs]
        assert written == ([now_ms - FAR_MS, now_ms + FAR_MS] if fits else [now_ms - FAR_MS])
        assert len(driver.dead_letters) == (not fits)
        for letter in driver.dead_letters:
            assert "out" in message(letter)


@pytest.mark.parametrize("refused", [False, True])
def test_a_record_that_is_passed_on_counts_only_if_it_fits_with_its_time(refused: bool) -> None:
    plain = OutputLimits("out", LIMIT)
    most = max(size for size in range(LIMIT - 200, LIMIT) if not plain.refusal(b"k", NOISE[:size]))
    limits = OutputLimits("out", LIMIT, times=AcceptedTimes(before_ms=3_600_000))
    driver = driver_of(Deduplication(records=5), default=limits)
    driver.send(b"k", NOISE[:most], timestamp_ms=5 if refused else clock_ms())
    assert (len(driver.outputs), len(driver.dead_letters)) == ((0, 1) if refused else (1, 0))


def test_a_letter_that_is_parked_fits_also_with_the_header_of_a_refused_time() -> None:
    parked = OutputLimits("parked", LIMIT, times=AcceptedTimes(before_ms=3_600_000))
    for size in range(LIMIT - 500, LIMIT, 10):
        driver = driver_of(Retry(retry_topic="retry", parked_topic="parked"), "fail", parked=parked)
        more = [("onceflow.error.class", b"X"), ("onceflow.shortened", b"{}"), ("onceflow.timestamp", b"")]
        (found,) = driver.send("failed/0/3", NOISE[:size], headers=more, timestamp_ms=5)
        written = [*found.headers, (ORIGINAL_TIMESTAMP, b"5")]
        assert parked.refusal(b"failed/0/3", found.value, written) == ""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def _deep(levels: int) -> Any:
    value: Any = Decimal("NaN")
    for _ in range(levels):
        value = [value]
    return value


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.decimals() | st.binary(max_size=9)
    | st.text(st.characters(exclude_categories=[]), max_size=9)
    | st.sampled_from([10**400, Decimal("1E+500"), Decimal("sNaN"), 2j])
    | st.builds(Odd) | st.builds(_deep, st.sampled_from([30, 5_000])) | st.builds(pow, st.just(10), st.just(5_000))
)  # fmt: skip
states = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner)
        | st.dictionaries(NAMES | st.integers() | st.decimals(allow_nan=False) | st.none(), inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=4), states, max_size=4), st.text(st.characters(exclude_categories=[])))
@example({"count": Decimal("1.50"), "mean": math.nan, "sum": 10**400}, "windows")
@settings(max_examples=150, deadline=None)
def test_the_letter_of_a_timer_can_always_be_written(about: dict[str, Any], name: str) -> None:
    for error in (ValueError("\ud800"), Unspeakable()):
        timer = Timer(name, 5, "event")
        letter = dead_letters.timer_letter(b"k", timer, "failed", "t-0", error, about)
        found = json.loads(letter.value or b"", parse_constant=lambda each: pytest.fail(f"{each} is no JSON"))
        assert found.keys() == {"timer", "clock", "at_ms", *about}
        record = dead_letters.dead_letter(Record(b"k", b"v"), "failed", error)
        for each in (letter, record):
            fitted = dead_letters.fitted(each, OutputLimits("failed", dead_letters.LETTER_BYTES_MIN))
            assert OutputLimits("failed", 8_000).refusal(fitted.key, fitted.value, list(fitted.headers)) == ""
    for field, value in about.items():
        if type(value) is Decimal and value.is_finite() and abs(value) < 10**300:
            assert exact_json.number(str(value)) == exact_json.loads(letter.value or b"").get(field)


def test_letters_late_records_and_duplicates_are_fitted_by_every_engine() -> None:
    class Late(Processor):
        allowed_lateness = 0

        def process(self, key: bytes, records: Any, state: Any) -> Any:
            if len(records[0].value) > 50:
                raise ValueError("too long")
            return []

    driver = driver_of(Late(), late=OutputLimits("late", LIMIT))
    driver.send(b"a", b"now", timestamp_ms=1_000)
    driver.send(b"a", NOISE, timestamp_ms=1_000)
    driver.send(b"a", NOISE, timestamp_ms=5)
    driver.run()
    for (letter,) in (driver.dead_letters, driver.late):
        assert json.loads(dict(letter.headers)["onceflow.shortened"] or b"") == {"value": LIMIT}
        assert len(letter.value or b"") > LIMIT - 5_000
    twice = driver_of(Deduplication(records=5, duplicates_topic="twice"), twice=OutputLimits("twice", LIMIT))
    twice.send_many([(b"a", b"first"), (b"a", NOISE[: LIMIT - 100])])
    (duplicate,) = [record for record in twice.outputs if record.topic == "twice"]
    assert b"value" in (dict(duplicate.headers)["onceflow.shortened"] or b"")


def test_a_row_that_another_system_refuses_has_a_letter_that_fits() -> None:
    refused = RefusedRows("failed", None, {"failed": OutputTopic(1, LIMIT)}, target="ledger", flow="f")
    rows = [RefusedRow({"text": "x" * length}, "UniqueViolation", "no", {"key": b"k"}) for length in (5, 3 * LIMIT)]
    refused.set(Progress("f", 1, {"in": {0: 1}}, {"in": "id"}, 0), rows, 2)
    small, large = refused.letters.to_pylist()
    assert json.loads(small["value"]) == {"text": "x" * 5}
    headers = {each["key"]: each["value"] for each in large["headers"]}
    assert list(json.loads(headers["onceflow.shortened"])) == ["value"]
    assert len(large["value"]) < LIMIT


def test_the_letter_of_a_row_is_json_whatever_its_numbers_are() -> None:
    refused = RefusedRows("failed", None, {"failed": OutputTopic(1, LIMIT)}, target="ledger", flow="f")
    row = {"a": float("nan"), "b": [float("inf"), 1.5, {"c": float("-inf")}], "d": 2**70, "e": None}
    refused.set(Progress("f", 1, {"in": {0: 1}}, {"in": "id"}, 0), [RefusedRow(row, "CheckViolation", "no", {})], 1)
    (letter,) = refused.letters.to_pylist()

    def no_json(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(letter["value"], parse_constant=no_json)
    assert found == {"a": "NaN", "b": ["Infinity", 1.5, {"c": "-Infinity"}], "d": 2**70, "e": None}


def test_a_letter_that_was_shortened_is_parked_at_once() -> None:
    driver = ProcessorDriver(Retry(retry_topic="retry", parked_topic="parked"))
    more = [("onceflow.error.class", b"TimeoutError"), ("onceflow.shortened", b'{"value": 5}'), (KEY, b"ada")]
    (found,) = driver.send("orders/0/3", b"v", headers=more)
    assert found.topic == "parked"


@pytest.mark.parametrize("size", [LIMIT - 100, LIMIT - 1_400, 3 * LIMIT])
def test_a_letter_that_is_parked_fits_there_too(size: int) -> None:
    """Also the largest one that its own topic took: it gets further headers."""
    record = Record(b"k" * 400, (NOISE * 4)[:size], "t" * 200, [], 7, 2, 3)
    letter = dead_letters.fitted(
        dead_letters.dead_letter(record, "failed", KeyError("x")), OutputLimits("failed", LIMIT)
    )
    parked = OutputLimits("parked", LIMIT, compacted=True)
    retry = Retry(retry_topic="r" * 249, parked_topic="parked", permanent={KeyError})
    driver = driver_of(retry, "fail", parked=parked)
    (found,) = driver.send("failed/0/3", letter.value, headers=[*letter.headers, (KEY, letter.key)])
    assert (found.topic, found.key.rpartition("/")[0]) == ("parked", "failed/0/3")
    assert parked.refusal(found.key.encode(), found.value, list(found.headers)) == ""
    assert letter.value is not None
    assert letter.value.startswith(found.value)


def test_a_letter_that_is_too_large_to_wait_is_parked() -> None:
    driver = driver_of(Retry(retry_topic="retry", parked_topic="parked"), "fail", rows=OutputLimits("waiting", LIMIT),
                       parked=OutputLimits("parked", 2 * LIMIT))  # fmt: skip
    headers = [("onceflow.error.class", b"TimeoutError")]
    assert driver.send("orders/0/1", NOISE[: LIMIT - 500], headers=headers) == []
    (found,) = driver.send("orders/0/2", NOISE, headers=headers)
    assert (found.topic, found.value) == ("parked", NOISE)
    assert [key for key, _ in driver.timers] == ["orders/0/1"]
    assert list(driver.states) == ["orders/0/1"]
    (other,) = driver.send("orders/0/1", NOISE, headers=headers)
    assert (other.topic, other.value) == ("parked", NOISE)
    assert [key for key, _ in driver.timers] == ["orders/0/1"]
    assert [record.value for record in driver.advance(3600)] == [NOISE[: LIMIT - 500]]
    assert (driver.timers, driver.states) == ([], {})


# ---- at the start ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target, operations, error, said", [
    (OutputTopic(1, 100_000), ["READ", "WRITE"], None, ""),
    (OutputTopic(1, 100_000), None, None, ""),
    (OutputTopic(1, 100_000, compacted=True), None, OptionError, "the dead letter topic failed, which is compacted"),
    (OutputTopic(1, 7_999), None, OptionError, "which takes at most 7999 bytes"),
    (OutputTopic(1, 100_000), ["READ"], PermissionDeniedError, "may not write to the dead letter topic failed"),
])  # fmt: skip
def test_topics_that_cannot_take_letters_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, target: OutputTopic, operations: Any, error: Any, said: str
) -> None:
    answer = type("Answer", (), {"name": "failed", "authorized_operations": operations})
    monkeypatch.setattr(targets.allowed, "describe_topics", lambda *_: [answer])
    monkeypatch.setattr(targets.allowed, "operations", lambda found: found)

    def check() -> None:
        targets.check_side_topics_writable(None, {"failed": "dead letter"}, {"failed": target}, None, flow="f")  # type: ignore[arg-type]

    if error is None:
        check()
        return
    with pytest.raises(error, match=said) as caught:
        check()
    assert (caught.value.flow, caught.value.topic) == ("f", "failed")
    assert caught.value.next_step
