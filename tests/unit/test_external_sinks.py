"""What the start of a flow with an external sink decides."""

from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import replace
from datetime import datetime, timezone
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from onceflow import ExternalSink, ProgressConflictError
from onceflow.client.deadline import Deadline
from onceflow.driver.batch.errors import in_short
from onceflow.driver.external.refused_rows import _letter, progress_row
from onceflow.driver.external.waiting import at_start
from onceflow.driver.start import external_run
from onceflow.errors import DeadlineExceededError, EnvironmentUnusableError, OptionError, ProcessorError, ProtocolError
from onceflow.external.sink import BatchAttempt, ProgressRow, RefusedRow, UnavailableError, next_generation
from onceflow.messages import TaskInfo
from onceflow.planning.external_start import of_row, plan_external
from onceflow.planning.source_starts import SourceTopic
from onceflow.protocol.names import Names
from onceflow.protocol.progress import Progress
from onceflow.task.external_task import ExternalOrder, write_external
from onceflow.task.step_outputs import OUTPUT_SCHEMA


def progress(batch: int, **offsets: int) -> Progress:
    ids = {topic: f"id-{topic}" for topic in offsets}
    return Progress("f", batch, {topic: {0: offset} for topic, offset in offsets.items()}, ids, 1)


def planned(kafka: Progress, row: Progress | None) -> Any:
    return plan_external(kafka, row, ["a", "b"], target="t", flow="f", identity="onceflow.f@c")


def test_where_a_flow_with_an_external_sink_starts() -> None:
    assert planned(progress(0, a=5), None).progress.offsets == {"a": {0: 5}}
    with pytest.raises(ProgressConflictError, match=r"(?s)3 batches, but t has no progress row.*'onceflow\.f@c'"):
        planned(progress(3, a=5), None)
    # The last driver died before Kafka's progress had followed.
    start = planned(progress(2, a=5, b=1), progress(3, a=9))
    assert (start.progress, start.follows, start.warning) == (progress(3, a=9, b=1), True, "")
    # A topic that the row does not know has the leader epochs that the start has found.
    known = replace(progress(2, a=5, b=1), epochs={"a": {0: (0, 1)}, "b": {0: (0, 3)}})
    row = replace(progress(3, a=9), epochs={"a": {0: (0, 2)}})
    assert planned(known, row).progress.epochs == {"a": {0: (0, 2)}, "b": {0: (0, 3)}}
    # Starts have moved Kafka's progress: expired records were skipped, or the flow was reset.
    start = planned(progress(3, a=12, b=0), progress(3, a=9))
    assert (start.progress, start.follows) == (progress(3, a=12, b=0), False)
    # An older state of the database was restored.
    start = planned(progress(5, a=20), progress(3, a=9))
    assert (start.progress, start.follows) == (progress(3, a=9), True)
    assert "an older state of t was restored" in start.warning


@pytest.mark.parametrize(
    "kafka, before, owes",
    [
        (replace(progress(2, a=5), external_commit="two"), "two", True),
        (replace(progress(2, a=7), external_commit="two"), "two", True),  # moved in time since
        (replace(progress(2, a=5), external_commit="two"), None, True),  # a row of an earlier build
        (progress(0, a=5), "two", False),  # reset, or lost
        (progress(0, a=5), None, False),
        (replace(progress(2, a=5), external_commit="other"), "two", False),
        (progress(2, a=5), "two", False),
        (replace(progress(1, a=5), external_commit="one"), "two", False),  # older progress was imported
    ],
)
def test_dead_letters_of_the_last_batch_are_written_only_if_that_was_left(
    kafka: Progress, before: str | None, owes: bool
) -> None:
    row = replace(progress(3, a=9), external_commit="three", external_before=before)
    start = planned(kafka, row)
    assert (start.progress, start.follows, start.owes_letters) == (row, True, owes)
    assert ("are not written once more" in start.warning) == (not owes)


def test_a_reset_after_the_first_batch() -> None:
    """The first start has given Kafka's progress a commit of its own, so it is not that of a flow that is new again."""
    row = replace(progress(1, a=9), external_commit="one", external_before="zero")
    assert planned(replace(progress(0, a=0), external_commit="zero"), row).owes_letters
    assert not planned(progress(0, a=0), row).owes_letters


def test_two_batches_may_have_one_number() -> None:
    """The flow was reset, has written another database, and writes the first one again. Or this is another cluster that
    has the same id. What the row says is there, and nothing else."""
    row = replace(progress(3, a=9), external_commit="first")
    start = planned(replace(progress(3, a=20), external_commit="second"), row)
    assert (start.progress, start.follows, start.owes_letters) == (row, True, False)
    assert "is at batch 3, which is another one than that of progress in Kafka" in start.warning
    moved = replace(progress(3, a=20), external_commit="first")
    assert planned(moved, row).progress == moved
    for kafka, known in (moved, replace(row, external_commit="")), (progress(3, a=20), row):  # by earlier versions
        assert planned(kafka, known).progress == kafka


def test_an_error_names_the_row_that_decides() -> None:
    found = of_row(ProgressConflictError("Topic a was deleted", topic="a", detail="id was 1"), "t", "onceflow.f@c")
    assert isinstance(found, ProgressConflictError)
    assert found.topic == "a"
    assert "id was 1; this is what the progress row 'onceflow.f@c' of t says" in str(found)


# ---- in which order a start looks, decides and takes over --------------------------------------------


class Target(ExternalSink):
    """A system that is one progress row. It says what was done to it."""

    target = "t"
    local_only = True

    def __init__(self, row: ProgressRow | None, later: str | None = None) -> None:
        self.row = row
        self.later = later  # what a driver that works commits after the start has looked
        self.done: list[str] = []
        self.flows: set[str] = set()

    def progress_row(self, flow: str) -> ProgressRow | None:
        self.done.append("look")
        self.flows.add(flow)
        found = self.row
        if self.later is not None and self.row is not None:
            self.row = replace(self.row, progress=self.later)
        return found

    def open(self, flow: str, owner: str, generation: int | None) -> ProgressRow:
        self.done.append("open")
        self.flows.add(flow)
        progress = None if self.row is None else self.row.progress
        self.row = ProgressRow(next_generation("t", flow, self.row, owner, generation), owner, progress)
        return self.row

    def check(self, schema: Any) -> None: ...
    def begin(self, attempt: Any) -> None: ...
    def write(self, attempt: Any, task: str, batches: Any) -> bytes:
        return b""

    def commit(self, attempt: Any, receipts: Any, progress: str) -> None: ...
    def abort(self, attempt: Any) -> None: ...


def started(
    sink: Target, kafka: Progress, monkeypatch: pytest.MonkeyPatch, epoch_ends: Any = MappingProxyType({})
) -> tuple[Any, list[Progress]]:
    """Start flow ``f`` of a cluster ``c``, whose topic ``a`` has the offsets 0 to 100."""
    followed: list[Progress] = []
    monkeypatch.setattr(external_run, "commit_progress", lambda session, progress, *_: followed.append(progress))
    cluster = SimpleNamespace(cluster_id=lambda deadline: "c")
    source = SourceTopic("a", "id-a", {0: 0}, {0: 100}, epoch_ends)
    takeover = SimpleNamespace(
        flow="f", names=Names("f"), session=SimpleNamespace(cluster=cluster), sources={"a": source}
    )
    write = SimpleNamespace(sink=sink, dead_letter_topic=None)
    return external_run._take_over(write, takeover, kafka, Deadline(10, "a test")), followed  # type: ignore[arg-type]


def row_of(progress: Progress) -> ProgressRow:
    return ProgressRow(7, "somebody", progress_row(progress, OUTPUT_SCHEMA.empty_table()))


def test_a_start_looks_and_then_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Target(row_of(progress(3, a=9)))
    (owned, starts, _), followed = started(sink, progress(2, a=5), monkeypatch)
    assert sink.done == ["look", "open"]
    assert sink.flows == {"onceflow.f@c"}
    assert sink.row is not None
    assert (owned.generation, owned.owner, owned.identity) == (8, sink.row.owner, "onceflow.f@c")
    assert (starts, [each.batch_id for each in followed], owned.progress.batch_id) == ({"a": {0: 9}}, [3], 3)


@pytest.mark.parametrize("before", ["", "another", "t"])
def test_progress_names_the_system_before_the_first_batch(monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    """A driver that dies behind the commit of its first batch leaves rows there of which a collection has to know."""
    kafka = replace(progress(0, a=5), external=before)
    (owned, _, _), followed = started(Target(None), kafka, monkeypatch)
    assert [replace(each, external_commit="") for each in followed] == [replace(kafka, external="t")] * (before != "t")
    assert owned.progress.external == "t"
    assert bool(owned.progress.external_commit) == (before != "t")
    assert [each.external_commit for each in followed] == [owned.progress.external_commit] * (before != "t")


@pytest.mark.parametrize(
    "row, kafka, message",
    [
        (None, progress(3, a=9), "has no progress row"),
        (row_of(progress(3, a=101)), progress(2, a=5), r"(?s)ahead of a-0.*the progress row 'onceflow.f@c' of t says"),
        (
            row_of(replace(progress(3, a=9), topic_ids={"a": "other"})),
            progress(2, a=5),
            r"(?s)created again.*the progress row 'onceflow.f@c' of t says",
        ),
        (ProgressRow(7, "o", "garbage"), progress(2, a=5), "The progress row 'onceflow.f@c' of t cannot be read"),
        (row_of(replace(progress(3, a=9), flow="b")), progress(2, a=5), "'onceflow.f@c' of t cannot be read"),
    ],
)
def test_a_start_that_is_refused_takes_nothing_over(
    monkeypatch: pytest.MonkeyPatch, row: ProgressRow | None, kafka: Progress, message: str
) -> None:
    sink = Target(row)
    with pytest.raises((ProgressConflictError, ProtocolError), match=message):
        started(sink, kafka, monkeypatch)
    assert (sink.done, sink.row) == (["look"], row)


def test_a_batch_is_committed_while_a_start_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is the row as it is when the flow was taken over."""
    sink = Target(row_of(progress(3, a=9)), later=row_of(progress(4, a=20)).progress)
    (owned, starts, _), followed = started(sink, progress(2, a=5), monkeypatch)
    assert (starts, [each.batch_id for each in followed], owned.progress.batch_id) == ({"a": {0: 20}}, [4], 4)


def test_the_leader_changed_in_the_batch_that_only_the_row_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is compared with the epoch in the row, not with that in Kafka's progress."""
    asked: list[Any] = []

    def ends(cluster: Any, topic: str, epochs: Any, deadline: Any) -> dict[int, int]:
        asked.append((topic, dict(epochs)))
        return {0: 100}  # epoch 6 goes on; epoch 5 has ended at 40

    monkeypatch.setattr(external_run, "ends_of_epochs", ends)
    row = replace(progress(3, a=60), epochs={"a": {0: (60, 6)}})
    kafka = replace(progress(2, a=30), epochs={"a": {0: (30, 5)}})
    (_, starts, _), followed = started(Target(row_of(row)), kafka, monkeypatch, epoch_ends={0: 40})
    assert (starts, [each.batch_id for each in followed], asked) == ({"a": {0: 60}}, [3], [("a", {0: (60, 6)})])


def test_a_row_that_knows_no_epochs_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_run, "ends_of_epochs", lambda *_: {})
    kafka = replace(progress(2, a=30), epochs={"a": {0: (30, 5)}})
    (_, starts, _), _ = started(Target(row_of(progress(3, a=60))), kafka, monkeypatch, epoch_ends={0: 40})
    assert starts == {"a": {0: 60}}


@pytest.mark.parametrize(
    "problem, error, what, next_step",
    [
        (UnavailableError("locked by pid 7", "end pid 7"), DeadlineExceededError, "t cannot be used at the moment",
         "end pid 7. Then start the flow again: it continues where it is"),
        (UnavailableError("locked", "end pid 7 and start the flow again"), DeadlineExceededError,
         "t cannot be used at the moment", "end pid 7 and start the flow again"),
        (ConnectionError("refused"), DeadlineExceededError, "t cannot be reached",
         "start the flow again when it answers: it continues where it is"),
        (ValueError("wrong password"), EnvironmentUnusableError, "t cannot be used",
         "check the address, the login and the privileges of its user"),
    ],
)  # fmt: skip
def test_why_a_start_fails(problem: Exception, error: type[Exception], what: str, next_step: str) -> None:
    def call() -> None:
        raise pickle.loads(pickle.dumps(problem))

    with pytest.raises(error) as raised:
        at_start(call, Deadline(0.05, "the start"), "t", "f")
    found: Any = raised.value
    assert (found.what, found.next_step) == (what, next_step)
    assert str(problem) in found.detail


@pytest.mark.parametrize("looks", range(8))
def test_a_start_names_what_it_waits_for_whenever_its_time_ends(looks: int) -> None:
    """Also if the deadline passes between two looks at the clock."""
    ticks = itertools.count()

    def call() -> None:
        raise UnavailableError("locked by pid 7", "end pid 7")

    deadline = Deadline(looks, "the start", clock=lambda: float(next(ticks)), sleep=lambda _: None)
    with pytest.raises(DeadlineExceededError) as raised:
        at_start(call, deadline, "t", "f")
    found: Any = raised.value
    assert (found.what, found.detail.partition(" (")[0]) == (
        "t cannot be used at the moment",
        "UnavailableError: locked by pid 7",
    )


class Careless(ExternalSink):
    """Its methods do what ``does`` says."""

    target = "there"

    def __init__(self, does: Any) -> None:
        self.does = does

    def write(self, attempt: BatchAttempt, task: str, batches: Any) -> bytes:
        return self.does()  # type: ignore[no-any-return]

    check = progress_row = open = begin = commit = abort = write  # type: ignore[assignment]


@pytest.mark.parametrize("returned", [None, "receipt", 7, [b"x"]])
def test_a_sink_has_to_return_a_receipt(returned: Any) -> None:
    """Otherwise its commit does not find the rows."""
    order = ExternalOrder(Careless(lambda: returned), "f", BatchAttempt("f@c", "o", 1, 4, 1))
    (report,) = write_external(order, TaskInfo("driver", 0, 0, 0), []).written
    assert isinstance(report.error, OptionError)
    assert f"Careless.write returned {type(returned).__name__}, not bytes" in str(report.error)
    assert (report.error.flow, report.error.batch) == ("f", 4)


def test_a_row_that_cannot_be_made_is_no_error_of_the_sink() -> None:
    """A driver of a database makes an error of its own of what its source raises."""

    class Wrapping(Careless):
        def write(self, attempt: BatchAttempt, task: str, batches: Any) -> bytes:
            try:
                return b"%d" % sum(batch.num_rows for batch in batches)
            except Exception as problem:
                raise ValueError(f"COPY failed: {problem}") from None

    def rows(problem: Exception) -> Any:
        yield pa.record_batch({"a": [1]})
        raise problem

    order = ExternalOrder(Wrapping(lambda: b""), "f", BatchAttempt("f@c", "o", 1, 4, 1))
    info = TaskInfo("driver", 0, 0, 0)
    (report,) = write_external(order, info, rows(ProcessorError("bad row", next_step="none"))).written
    assert isinstance(report.error, ProcessorError)
    with pytest.raises(ArithmeticError):
        write_external(order, info, rows(ArithmeticError("overflow")))


def test_an_error_of_a_sink_has_class_and_place() -> None:
    """``KeyError('rows')`` alone was told as 'rows'."""

    def fails() -> None:
        raise KeyError("rows")

    with pytest.raises(KeyError) as caught:
        Careless(fails).write(BatchAttempt("f@c", "o", 1, 4, 1), "0", [])
    told = in_short(caught.value)
    assert told.startswith("KeyError: 'rows' (raised in fails, test_external_sinks.py:")


@pytest.mark.parametrize("topic, attempt, origin", [("sports", b"4", b"orders"), ("orders-retry", b"4", b"orders")])
def test_a_table_may_have_a_column_topic_of_its_own(topic: str, attempt: bytes, origin: bytes) -> None:
    """It is no place of a record unless the flow reads a topic of this name."""
    headers = {
        "onceflow.origin.topic": b"orders",
        "onceflow.origin.partition": b"0",
        "onceflow.origin.offset": b"7",
        "onceflow.attempt": b"3",
        "onceflow.retry.topic": b"orders-retry",
    }
    record = {"headers": [{"key": name, "value": content} for name, content in headers.items()], "value": b"v"}
    row = RefusedRow({"topic": topic, "partition": 0, "offset": 9}, "UniqueViolation", "twice", record)
    found = dict(_letter(row, "dead", ["orders", "orders-retry"]).headers)
    assert (found["onceflow.attempt"], found["onceflow.origin.topic"]) == (attempt, origin)


@pytest.mark.parametrize("key, expected", [(b"ada", b"ada"), ("ada", None), (7, None), (None, None)])
def test_a_table_may_have_the_key_of_the_record(key: Any, expected: bytes | None) -> None:
    """A letter without it would come back with a null key, in another partition. What is no key of Kafka's is none."""
    at = datetime(2026, 1, 2, tzinfo=timezone.utc)
    row = RefusedRow({"key": key, "timestamp": at, "amount": 1}, "CheckViolation", "no", {"value": b"v"})
    found = _letter(row, "dead", [])
    assert (found.key, found.value, found.timestamp_ms) == (expected, b"v", 1_767_312_000_000)
    whole = _letter(RefusedRow({"key": key, "amount": 1}, "CheckViolation", "no", {}), "dead", [])
    assert whole.key is None
    assert json.loads(whole.value or b"")["amount"] == 1
