"""Tests that every external sink must pass. Subclass `ExternalSinkSuite` in a test module of pytest::

    class TestMySink(ExternalSinkSuite):
        @pytest.fixture
        def sink(self, tmp_path): ...

        def rows(self, sink): ...

They need neither Kafka nor Spark: they call the sink as a driver and its tasks do, in this process and in others, which
are killed.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from onceflow.errors import FencedError
from onceflow.external.sink import BatchAttempt, ExternalSink

#: The columns of the rows that are written. ``id`` is different in all rows of a flow.
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
_ROWS = 40  # of a batch
_CHILD_S = 60.0


def copied(sink: ExternalSink) -> ExternalSink:
    """The sink as it comes to another process."""
    found: ExternalSink = pickle.loads(pickle.dumps(sink))
    return found


class Writer:
    """What a driver and two tasks do.

    Args:
        first: of the numbers of the rows, so that the rows of two flows differ.
    """

    def __init__(self, sink: ExternalSink, flow: str = "suite", first: int = 0) -> None:
        self.sink = copied(sink)  # each driver has its own
        self.flow = flow
        self.first = first
        self.generation = 0
        self.batch = 0  # the last one that was committed
        self._attempts: Counter[int] = Counter()

    def open(self, generation: int | None = None) -> Writer:
        opened = self.sink.open(self.flow, generation)
        assert opened.generation > (generation or 0)
        self.generation = opened.generation
        self.batch = 0 if opened.progress is None else json.loads(opened.progress)["batch"]
        return self

    def rows(self, attempt: BatchAttempt) -> list[dict[str, Any]]:
        begin = self.first + attempt.batch * _ROWS
        return [{"id": n, "text": f"{self.flow} {attempt}"} for n in range(begin, begin + _ROWS)]

    def staged(self, *, of_tasks: int = 2) -> tuple[BatchAttempt, list[bytes]]:
        """The next batch, written by some tasks, and not committed."""
        batch = self.batch + 1
        self._attempts[batch] += 1
        attempt = BatchAttempt(self.flow, self.generation, batch, self._attempts[batch])
        self.sink.begin(attempt)
        rows = self.rows(attempt)
        return attempt, [self.task(attempt, str(n), rows[n::of_tasks]) for n in range(of_tasks)]

    def task(self, attempt: BatchAttempt, task: str, rows: list[dict[str, Any]]) -> bytes:
        halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        batches = [pa.RecordBatch.from_pylist(half, SCHEMA) for half in halves if half]
        return copied(self.sink).write(attempt, task, iter(batches))

    def commit(self, attempt: BatchAttempt, receipts: Iterable[bytes]) -> None:
        self.sink.commit(attempt, list(receipts), json.dumps({"batch": attempt.batch}))
        self.batch = attempt.batch


class ExternalSinkSuite:
    """The tests. Each gets an empty target."""

    #: How often a process is killed, or a commit and a takeover meet.
    rounds = 12

    @pytest.fixture
    @abstractmethod
    def sink(self) -> ExternalSink:
        """A sink that inserts rows with the columns of ``SCHEMA``, with nothing in its target."""

    @abstractmethod
    def rows(self, sink: ExternalSink) -> list[dict[str, Any]]:
        """What a reader of the target sees, in any order."""

    def seen(self, sink: ExternalSink) -> list[dict[str, Any]]:
        return sorted(self.rows(sink), key=lambda row: int(row["id"]))

    # ---- one driver ----------------------------------------------------------------------------------

    def test_rows_are_seen_with_the_progress_and_not_before(self, sink: ExternalSink) -> None:
        sink.check(SCHEMA)
        writer = Writer(sink).open()
        assert (writer.batch, self.seen(sink)) == (0, [])
        expected: list[dict[str, Any]] = []
        for _ in range(3):
            attempt, receipts = writer.staged()
            assert self.seen(sink) == expected
            writer.commit(attempt, receipts)
            expected += writer.rows(attempt)
            assert self.seen(sink) == expected
        assert Writer(sink).open().batch == 3
        assert self.seen(sink) == expected

    def test_only_rows_with_a_receipt_are_committed(self, sink: ExternalSink) -> None:
        writer = Writer(sink).open()
        writer.staged()  # an attempt that fails, and is not even aborted
        aborted, _ = writer.staged()
        sink.abort(aborted)
        attempt, receipts = writer.staged()
        writer.task(attempt, "again", writer.rows(attempt))  # a task that ran twice
        writer.commit(attempt, receipts)
        assert self.seen(sink) == writer.rows(attempt)

    def test_batches_and_tasks_without_rows(self, sink: ExternalSink) -> None:
        writer = Writer(sink).open()
        attempt, _ = writer.staged()
        writer.commit(attempt, [])
        attempt, _ = writer.staged()
        writer.commit(attempt, [writer.task(attempt, "empty", [])])
        assert (Writer(sink).open().batch, self.seen(sink)) == (2, [])

    def test_an_answer_is_lost(self, sink: ExternalSink) -> None:
        """The driver does not know whether it was committed, and finds out."""
        writer = Writer(sink).open()
        attempt, receipts = writer.staged()
        writer.commit(attempt, receipts)
        writer.batch = 0
        writer.open(attempt.generation)
        assert (writer.batch, self.seen(sink)) == (1, writer.rows(attempt))
        lost, receipts = writer.staged()
        writer.open(lost.generation)
        assert writer.batch == 1
        with pytest.raises(FencedError):
            writer.commit(lost, receipts)
        again, receipts = writer.staged()
        writer.commit(again, receipts)
        assert self.seen(sink) == writer.rows(attempt) + writer.rows(again)

    # ---- two drivers ---------------------------------------------------------------------------------

    def test_an_older_driver_is_fenced(self, sink: ExternalSink) -> None:
        old = Writer(sink).open()
        left, receipts = old.staged()
        new = Writer(sink).open()
        with pytest.raises(FencedError):
            old.commit(left, receipts)
        with pytest.raises(FencedError):
            sink.open("suite", left.generation)
        assert self.seen(sink) == []
        attempt, receipts = new.staged()
        new.commit(attempt, receipts)
        assert self.seen(sink) == new.rows(attempt)

    def test_two_flows_do_not_meet(self, sink: ExternalSink) -> None:
        one, two = Writer(sink, "one").open(), Writer(sink, "two", first=1_000_000).open()
        first, second = one.staged(), two.staged()
        Writer(sink, "two", first=1_000_000)
        two.commit(*second)
        one.commit(*first)
        assert self.seen(sink) == one.rows(first[0]) + two.rows(second[0])
        assert (Writer(sink, "one").open().batch, Writer(sink, "two").open().batch) == (1, 1)

    def test_a_commit_meets_a_takeover(self, sink: ExternalSink) -> None:
        """Either the new driver knows of the commit, or nothing of it is seen."""
        expected: list[dict[str, Any]] = []
        writer = Writer(sink).open()
        for turn in range(self.rounds):
            attempt, receipts = writer.staged()
            failed: list[Exception] = []
            committing = threading.Thread(target=_try_to_commit, args=(writer, attempt, receipts, failed))
            committing.start()
            time.sleep(turn % 6 / 1000)
            new = Writer(sink).open()
            committing.join(_CHILD_S)
            assert new.batch == attempt.batch - bool(failed)
            expected += [] if failed else writer.rows(attempt)
            assert self.seen(sink) == expected
            writer = new

    # ---- killed --------------------------------------------------------------------------------------

    def test_processes_are_killed_at_any_moment(self, sink: ExternalSink) -> None:
        chance = random.Random(7)
        committed = 0
        for _ in range(self.rounds):
            said = _killed(sink, after_lines=chance.randrange(1, 4), after_s=chance.random() * 0.03)
            writer = Writer(sink).open()
            assert committed + said <= writer.batch <= committed + said + 1
            committed = writer.batch
            seen = self.seen(sink)
            assert [row["id"] for row in seen] == list(range(_ROWS, (committed + 1) * _ROWS))
            by_batch = {(row["id"] // _ROWS, row["text"]) for row in seen}
            assert len(by_batch) == committed, "rows of one batch come from several attempts"


def _try_to_commit(writer: Writer, attempt: BatchAttempt, receipts: list[bytes], failed: list[Exception]) -> None:
    try:
        writer.commit(attempt, receipts)
    except Exception as error:  # also of the database: what was staged may be gone
        failed.append(error)


def _killed(sink: ExternalSink, *, after_lines: int, after_s: float) -> int:
    """Run a driver that commits batches, kill it, and return how many it has said were committed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = "from onceflow.testing.external_sink_suite import drive; drive()"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pickle.dump(sink, process.stdin)
        process.stdin.close()
        given_up = threading.Timer(_CHILD_S, process.kill)
        given_up.start()
        try:
            said = [process.stdout.readline() for _ in range(after_lines)]
            assert all(said), "the driver has ended by itself"
            time.sleep(after_s)
        finally:
            given_up.cancel()
            process.kill()
        return len(said) + len(process.stdout.read().splitlines())


def drive() -> None:
    """The process that is killed: it takes the flow over, and commits one batch after the other."""
    writer = Writer(pickle.load(sys.stdin.buffer)).open()
    for attempt, receipts in _endless(writer):
        writer.commit(attempt, receipts)
        os.write(1, b"%d\n" % attempt.batch)


def _endless(writer: Writer) -> Iterator[tuple[BatchAttempt, list[bytes]]]:
    while True:
        yield writer.staged()
