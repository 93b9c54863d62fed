"""The driver's part of ``Flow.enrich``: errors of its tasks, and the dead letters that count."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import onceflow
from onceflow.driver.batch.errors import raised_error
from onceflow.driver.batch.retries import Attempt
from onceflow.driver.step.row_calls import RowCalls
from onceflow.errors import (
    DeadLetterLimitError,
    DeadlineExceededError,
    OnceflowError,
    ProcessorError,
    StorageUnavailableError,
)
from onceflow.planning.options import BatchSummary
from onceflow.protocol.output_limits import OutputLimits
from onceflow.task import call_rows
from onceflow.task.call_rows import CallOrder, CallReport, CallReports, CallRows

SPARK = """An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "/opt/lib/python3.11/site-packages/onceflow/task/call_rows.py", line 61, in __call__
    outcomes = _Round(self.order, runner).outcomes(records)
onceflow.errors.{error}
\tat org.apache.spark.api.python.BasePythonRunner
"""


@pytest.mark.parametrize(
    "error",
    [
        DeadlineExceededError("Too slow", detail="one task: 4 calls", next_step="lower max_records_per_batch"),
        ProcessorError("score failed: [a], b", flow="f", topic="in", detail="in-0, offset 3", next_step="correct it"),
        ProcessorError("score failed", flow="f", detail="a record", next_step="correct it"),
        ProcessorError("first line\nsecond line", topic="in", detail="one\ntwo", next_step="correct it"),
    ],
)
def test_errors_of_tasks_keep_their_class(error: OnceflowError) -> None:
    found = raised_error(SPARK.format(error=f"{type(error).__name__}: {error}"))
    assert type(found) is type(error)
    assert found is not None
    assert (found.what, found.topic, found.detail) == (error.what, error.topic, error.detail)
    assert found.next_step == error.next_step


@pytest.mark.parametrize("error", ["FencedError: x\n  detail: d\n  next step: n", "OnceflowError: x"])
def test_other_errors_are_left_as_they_are(error: str) -> None:
    assert raised_error(SPARK.format(error=error)) is None
    assert raised_error("Job aborted due to stage failure") is None


def test_only_reports_of_this_attempt_count() -> None:
    reports: Any = SimpleNamespace(value={})
    calls = onceflow.concurrently(len)
    order = CallOrder(calls, "out", "failed", None, None, "flow", reports, max_dead_letters=4)
    properties: dict[str, str] = {}
    session = SimpleNamespace(sparkContext=SimpleNamespace(setLocalProperty=properties.__setitem__))
    df: Any = SimpleNamespace(sparkSession=session)
    rows, source = RowCalls([order], 60), Any
    limits = OutputLimits("out", 5000, compression="zstd")

    def limits_of(topics: Any) -> dict[str, OutputLimits]:
        assert set(topics) == {"out", "failed"}
        return {"out": limits}

    summary = BatchSummary(7, 10, attempts=2, records=10)
    rows.begin(df, Attempt(7, source, summary), limits_of)  # type: ignore[arg-type]
    told = json.loads(properties["onceflow.calls"])
    assert (told["attempt"], [OutputLimits.of(each) for each in told["limits"]]) == ("7/2", [limits])
    two = CallReport(5, 2, {"ValueError": (2, "in-0, offset 3")})
    one = CallReport(5, 1)
    reports.value = {("7/2", 0, 0): [two], ("7/1", 1, 0): [CallReport(5, 5)], ("7/2", 0, 1): [two]}
    param = CallReports()
    for _ in range(2):  # a task that reads two partitions
        reports.value = param.addInPlace(reports.value, {("7/2", 1, 0): [one]})
    rows.check()
    rows.on_commit(summary)
    assert (summary.records, summary.dead_letters) == (6, 4)
    # A batch without outputs: an earlier version has written and counted its dead letters.
    rows.begin(df, Attempt(8, source, BatchSummary(8, 10, attempts=1), without_outputs=True), limits_of)  # type: ignore[arg-type]
    reports.value = {("8/1", 0, 0): [CallReport(5, 5)]}
    rows.check()
    rows.on_commit(summary)
    assert summary.dead_letters == 4
    rows.begin(df, Attempt(8, source, BatchSummary(8, 10, attempts=1)), limits_of)  # type: ignore[arg-type]
    reports.value = {("8/1", 0, 0): [CallReport(5, 1)]}
    with pytest.raises(DeadLetterLimitError, match="5 of 20 records"):
        rows.check()


class Stores:
    """A serde whose store can be away."""

    away = False

    def encode(self, value: Any) -> bytes:
        return self.encode_bytes(str(value).encode())

    def encode_bytes(self, raw: bytes) -> bytes:
        return b"stored " + raw

    def decode(self, raw: bytes) -> str:
        if self.away:
            raise StorageUnavailableError("the store does not answer", next_step="look at it")
        return raw.decode()


def enriched(stores: Stores) -> Any:
    def ask(record: onceflow.Record) -> str:
        if record.value == "bad":
            raise ValueError("refused")
        return f"{record.value} asked"

    order = CallOrder(onceflow.concurrently(ask), "out", "failed", stores, stores, "flow")
    rows = pa.record_batch({"key": [b"a", b"b"], "value": [b"good", b"bad"], "topic": ["in", "in"]})
    return next(iter(CallRows(order)(iter([rows]))))


def test_a_dead_letter_has_the_value_that_was_read() -> None:
    found = enriched(Stores())
    assert found.column("topic").to_pylist() == ["out", "failed"]
    assert found.column("value").to_pylist() == [b"stored good asked", b"bad"]


def test_nothing_is_reported_if_nobody_has_begun_an_attempt() -> None:
    """An external sink has no use for reports, and they would be kept for ever."""
    reports: Any = SimpleNamespace(add=lambda report: pytest.fail(f"a report: {report}"))
    stores = Stores()
    order = CallOrder(onceflow.concurrently(lambda record: record.value), "out", None, stores, stores, "flow", reports)
    rows = pa.record_batch({"key": [b"a"], "value": [b"v"]})
    (made,) = CallRows(order)(iter([rows]))
    assert made.column("value").to_pylist() == [b"stored v"]


def test_a_store_that_is_away_makes_no_dead_letters() -> None:
    stores = Stores()
    stores.away = True
    with pytest.raises(StorageUnavailableError) as caught:
        enriched(stores)
    assert type(raised_error(SPARK.format(error=f"StorageUnavailableError: {caught.value}"))) is StorageUnavailableError


def test_a_result_that_its_topic_does_not_take_is_a_dead_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"out": OutputLimits("out", 10_000), "failed": OutputLimits("failed", 9_000)}
    moment = call_rows._Moment("7/1", 0, 0, None, limits)
    monkeypatch.setattr(call_rows._Moment, "now", lambda: moment)
    order = CallOrder(onceflow.concurrently(lambda record: record.value * 2), "out", "failed", None, None, "flow")
    order = replace(order, value=onceflow.serdes.BYTES, output=onceflow.serdes.BYTES)
    rows = pa.record_batch({"key": [b"a", b"b", b"c"], "value": [b"v", b"v" * 6_000, b"v" * 9_500]})
    found = next(iter(CallRows(order)(iter([rows]))))
    assert found.column("topic").to_pylist() == ["out", "failed", "failed"]
    values = found.column("value").to_pylist()
    assert values[:2] == [b"vv", b"v" * 6_000]
    assert 5_000 < len(values[2]) < 9_000
    headers = [{each["key"]: each["value"] for each in listed} for listed in found.column("headers").to_pylist()[1:]]
    assert b"more than the limit of 10000 of topic out" in headers[0]["onceflow.error.message"]
    assert json.loads(headers[1]["onceflow.shortened"]) == {"value": 9_500}
    with pytest.raises(ProcessorError, match="an output cannot be written"):
        next(iter(CallRows(replace(order, dead_letter_topic=None))(iter([rows]))))


def test_an_empty_list_that_may_be_a_value_is_not_taken_for_no_records() -> None:
    """A record whose result is a list without elements would vanish."""
    json_, bytes_ = onceflow.serdes.JSON, onceflow.serdes.BYTES
    results: dict[str, Any] = {"none": None, "empty": [], "full": ["x"], "record": onceflow.Record(b"k", [])}
    order = CallOrder(
        onceflow.concurrently(lambda record: results[record.value]), "out", "failed", json_, json_, "flow"
    )
    rows = pa.record_batch({"key": [b"k"] * 4, "value": [json.dumps(name).encode() for name in results]})
    found = next(iter(CallRows(order)(iter([rows]))))
    assert found.column("value").to_pylist() == [b'"empty"', b'["x"]', b"[]"]
    assert found.column("topic").to_pylist() == ["failed", "out", "out"]
    with pytest.raises(ProcessorError, match="return None if nothing is to be written"):
        next(iter(CallRows(replace(order, dead_letter_topic=None))(iter([rows]))))
    of_bytes = replace(order, output=bytes_, dead_letter_topic=None)  # no list can be a value of these
    assert list(CallRows(of_bytes)(iter([rows.slice(1, 1)]))) == []
