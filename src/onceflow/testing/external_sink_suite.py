"""Tests that every external sink must pass. Subclass `ExternalSinkSuite` in a test module of pytest::

    class TestMySink(ExternalSinkSuite):
        @pytest.fixture
        def sink(self, tmp_path): ...

        def rows(self, sink): ...

        def backup(self, sink): ...

They need neither Kafka nor Spark: they call the sink as a driver and its tasks do, in this process and in others, which
are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import pyarrow as pa
import pytest

from onceflow.errors import BadRecordError, FencedError, OptionError, ProgressConflictError
from onceflow.external.sink import BatchAttempt, ExternalSink, ProgressRow, RefusedRow

#: The columns of the rows that are written. ``id`` is different in all rows of a flow.
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
_ROWS = 40  # of a batch
_CLUSTER = "MkU3OEVBNTcwNTJENDM2Qg"
#: The identity of the flow of most tests, see `ExternalSink`.
FLOW = f"onceflow.suite@{_CLUSTER}"
# Flows of the same name: with a prefix, on another cluster, and with the longest names that there are.
_OTHERS = (f"a.{FLOW}", "onceflow.suite@abcdefghijklmnopqrstuv", f"{'p' * 99}.onceflow.{'n' * 200}@{_CLUSTER}")
_CHILD_S = 60.0


def copied(sink: ExternalSink) -> ExternalSink:
    """The sink as it comes to another process."""
    found: ExternalSink = pickle.loads(pickle.dumps(sink))
    return found


class Writer:
    """What a driver and two tasks do.

    Args:
        flow: its identity.
        first: of the numbers of the rows, so that the rows of two flows differ.
        owner: of the driver; None: a new one.
    """

    def __init__(self, sink: ExternalSink, flow: str = FLOW, first: int = 0, owner: str | None = None) -> None:
        self.sink = copied(sink)  # each driver has its own
        self.flow = flow
        self.first = first
        self.owner = owner or uuid.uuid4().hex
        self.generation = 0
        self.batch = 0  # the last one that was committed
        self._attempts: Counter[int] = Counter()

    def open(self, generation: int | None = None) -> Writer:
        opened = self.sink.open(self.flow, self.owner, generation)
        assert opened.generation > (generation or 0)
        assert opened.owner == self.owner
        assert opened == self.sink.progress_row(self.flow)
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
        attempt = BatchAttempt(self.flow, self.owner, self.generation, batch, self._attempts[batch])
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

    @abstractmethod
    def backup(self, sink: ExternalSink) -> Callable[[], Any]:
        """Keep a copy of the target with its progress rows. Returns a function that restores it."""
        raise NotImplementedError(f"{type(self).__name__} does not define backup()")

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

    def test_looking_changes_nothing(self, sink: ExternalSink) -> None:
        """A start reads the progress row, and may be refused then: the driver that has the flow goes on."""
        sink.check(SCHEMA)
        assert copied(sink).progress_row(FLOW) is None
        writer = Writer(sink).open()
        attempt, receipts = writer.staged()
        for _ in range(2):
            seen = copied(sink).progress_row(FLOW)
            assert seen == ProgressRow(writer.generation, writer.owner, None)
        writer.commit(attempt, receipts)
        seen = copied(sink).progress_row(FLOW)
        assert seen == ProgressRow(writer.generation, writer.owner, json.dumps({"batch": 1}))
        assert copied(sink).progress_row(_OTHERS[0]) is None
        writer.commit(*writer.staged())
        assert Writer(sink).open().batch == 2

    @pytest.mark.parametrize("committed", [True, False])
    def test_the_answers_of_takeovers_are_lost(self, sink: ExternalSink, committed: bool) -> None:
        """The driver wants to find out how a commit ended, and does not get the answer, again and again."""
        writer = Writer(sink).open()
        attempt, receipts = writer.staged()
        if committed:
            writer.commit(attempt, receipts)
        writer.batch = 0
        generations = [writer.generation]
        for _ in range(3):
            writer.open(attempt.generation)
            generations.append(writer.generation)
        assert generations == sorted({*generations})
        assert (writer.batch, self.seen(sink)) == ((1, writer.rows(attempt)) if committed else (0, []))
        with pytest.raises(FencedError):
            writer.sink.commit(attempt, receipts, "{}")
        again, receipts = writer.staged()
        writer.commit(again, receipts)
        assert self.seen(sink) == [*(writer.rows(attempt) if committed else []), *writer.rows(again)]

    def test_a_restored_backup_is_not_continued(self, sink: ExternalSink) -> None:
        """While the driver runs. Its next batch would leave a gap. A new start continues where the copy is."""
        writer = Writer(sink).open()
        first, receipts = writer.staged()
        writer.commit(first, receipts)
        restore = self.backup(sink)
        writer.commit(*writer.staged())
        restore()
        with pytest.raises(ProgressConflictError):
            writer.commit(*writer.staged())
        assert self.seen(sink) == writer.rows(first)
        again = Writer(sink).open()
        assert again.batch == 1
        second, receipts = again.staged()
        again.commit(second, receipts)
        assert self.seen(sink) == again.rows(first) + again.rows(second)

    # ---- rows that are not taken ---------------------------------------------------------------------

    def test_rows_are_seen_with_the_progress_that_their_dead_letters_have(self, sink: ExternalSink) -> None:
        """`commit_accepted` is called in place of ``commit``. Here all rows are taken: it does the same."""
        writer = _setting_aside(sink).open()
        attempt, receipts = writer.staged()
        asked: list[Any] = []

        def progress(refused: Sequence[RefusedRow]) -> str:
            asked.append(list(refused))
            return json.dumps({"batch": attempt.batch})

        writer.sink.commit_accepted(attempt, receipts, progress)
        assert asked[-1] == []
        assert self.seen(sink) == writer.rows(attempt)
        assert Writer(sink).open().batch == 1

    def test_the_flow_ends_because_of_its_dead_letters(self, sink: ExternalSink) -> None:
        """There are too many: nothing may be committed. Another attempt can be."""
        writer = _setting_aside(sink).open()
        attempt, receipts = writer.staged()

        def progress(refused: Sequence[RefusedRow]) -> str:
            raise BadRecordError("too many dead letters", next_step="look at them")

        with pytest.raises(BadRecordError, match="too many dead letters"):
            writer.sink.commit_accepted(attempt, receipts, progress)
        writer.sink.abort(attempt)
        assert self.seen(sink) == []
        seen = copied(sink).progress_row(FLOW)
        assert seen == ProgressRow(writer.generation, writer.owner, None)
        again, receipts = writer.staged()
        writer.sink.commit_accepted(again, receipts, lambda refused: json.dumps({"batch": again.batch}))
        assert self.seen(sink) == writer.rows(again)

    def test_an_older_driver_with_dead_letters_is_fenced(self, sink: ExternalSink) -> None:
        old = _setting_aside(sink).open()
        attempt, receipts = old.staged()
        Writer(sink).open()
        with pytest.raises(FencedError):
            old.sink.commit_accepted(attempt, receipts, lambda refused: "{}")
        assert self.seen(sink) == []

    # ---- two drivers ---------------------------------------------------------------------------------

    def test_an_older_driver_is_fenced(self, sink: ExternalSink) -> None:
        old = Writer(sink).open()
        left, receipts = old.staged()
        new = Writer(sink).open()
        with pytest.raises(FencedError):
            old.commit(left, receipts)
        for _ in range(2):
            with pytest.raises(FencedError):
                old.open(left.generation)
        assert self.seen(sink) == []
        attempt, receipts = new.staged()
        new.commit(attempt, receipts)
        assert self.seen(sink) == new.rows(attempt)

    def test_flows_of_one_name_do_not_meet(self, sink: ExternalSink) -> None:
        """They have different prefixes, or are on different clusters."""
        flows = (FLOW, *_OTHERS)
        writers = [Writer(sink, flow, first=n * 1_000_000).open() for n, flow in enumerate(flows)]
        staged = [writer.staged() for writer in writers]
        for writer, (attempt, receipts) in reversed([*zip(writers, staged, strict=True)]):
            writer.commit(attempt, receipts)
        expected = [row for writer, (attempt, _) in zip(writers, staged, strict=True) for row in writer.rows(attempt)]
        assert self.seen(sink) == expected
        assert [Writer(sink, flow).open().batch for flow in flows] == [1] * len(flows)

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
        with _drivers(sink) as killed:
            for _ in range(self.rounds):
                said = killed(chance.randrange(1, 4), chance.random() * 0.03)
                writer = Writer(sink).open()
                assert committed + said <= writer.batch <= committed + said + 1
                committed = writer.batch
                seen = self.seen(sink)
                assert [row["id"] for row in seen] == list(range(_ROWS, (committed + 1) * _ROWS))
                by_batch = {(row["id"] // _ROWS, row["text"]) for row in seen}
                assert len(by_batch) == committed, "rows of one batch come from several attempts"

    def test_a_takeover_is_killed_at_any_moment(self, sink: ExternalSink) -> None:
        """The same owner takes the flow over once more, as if the answer was lost, and others cannot."""
        chance = random.Random(8)
        writer, other = Writer(sink).open(), Writer(sink)
        with _drivers(sink) as killed:
            for _ in range(self.rounds):
                attempt, receipts = writer.staged()
                killed(chance.randrange(0, 3), chance.random() * 0.03, writer)
                with pytest.raises((FencedError, ProgressConflictError)):
                    other.open(attempt.generation)
                writer.open(attempt.generation)
                assert writer.batch == attempt.batch - 1
                with pytest.raises(FencedError):
                    writer.sink.commit(attempt, receipts, "{}")
                writer.commit(*writer.staged())
        assert [row["id"] for row in self.seen(sink)] == list(range(_ROWS, (self.rounds + 1) * _ROWS))


def _setting_aside(sink: ExternalSink) -> Writer:
    """A writer whose rows become dead letters if they are not taken."""
    writer = Writer(sink)
    try:
        writer.sink.set_aside()
    except OptionError as error:
        pytest.skip(str(error))  # the sink cannot tell which rows are not taken
    writer.sink.check(SCHEMA)
    return writer


def _try_to_commit(writer: Writer, attempt: BatchAttempt, receipts: list[bytes], failed: list[Exception]) -> None:
    try:
        writer.commit(attempt, receipts)
    except Exception as error:  # also of the database: what was staged may be gone
        failed.append(error)


@contextlib.contextmanager
def _drivers(sink: ExternalSink) -> Iterator[Callable[..., int]]:
    """Yields a function that runs a driver that commits batches, and kills it. It takes how many commits it waits for,
    and how many seconds more; it returns how many commits the driver has reported. With a `Writer` as the third
    argument, the driver takes the flow over as its owner, again and again, from its generation, and commits nothing.

    The drivers are forks of one process that has imported everything, so that each begins at once.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = "from onceflow.testing.external_sink_suite import drive; drive()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        orders, reports = process.stdin, process.stdout

        def order(text: bytes) -> None:
            orders.write(text)
            orders.flush()

        def commits(most: int) -> int:
            """How many commits are reported from now on, up to so many."""
            count = 0
            while count < most and reports.readline().strip().isdigit():
                count += 1
            return count

        def killed(after_commits: int, after_s: float, writer: Writer | None = None) -> int:
            given_up = threading.Timer(_CHILD_S, os.killpg, (process.pid, signal.SIGKILL))
            given_up.start()
            try:
                order(b"begin\n" if writer is None else f"{writer.owner} {writer.generation}\n".encode())
                assert commits(after_commits) == after_commits, "the driver has ended by itself"
                time.sleep(after_s)
                order(b"kill\n")
                return after_commits + commits(sys.maxsize)
            finally:
                given_up.cancel()

        order(pickle.dumps(sink))
        yield killed


def drive() -> None:
    """The process whose forks are killed. Its standard input has the sink, and then two lines for each driver: one for
    its begin, one for its end."""
    sink = pickle.load(sys.stdin.buffer)
    while line := sys.stdin.buffer.readline().decode():
        pid = os.fork()
        if pid == 0:
            _commit_batches(sink, line.split())
        sys.stdin.buffer.readline()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.write(1, b"killed\n")


def _commit_batches(sink: ExternalSink, line: list[str]) -> NoReturn:
    """What a fork does: it takes the flow over, and commits one batch after the other. If it is given an owner and a
    generation, it only takes the flow over."""
    try:
        if len(line) == 2:
            writer = Writer(sink, owner=line[0])
            while True:
                writer.open(int(line[1]))
                os.write(1, b"%d\n" % writer.generation)
        writer = Writer(sink).open()
        for attempt, receipts in _endless(writer):
            writer.commit(attempt, receipts)
            os.write(1, b"%d\n" % attempt.batch)
    except BaseException:
        traceback.print_exc()
        os.write(1, b"failed\n")
    os._exit(1)


def _endless(writer: Writer) -> Iterator[tuple[BatchAttempt, list[bytes]]]:
    while True:
        yield writer.staged()
