"""``CallEngine``: runs a ``Processor`` that calls other services, see ``onceflow.concurrently``.

Each record is processed by itself. When its call has no result yet, its changes are undone and it waits, and so do
later records of its key. The records of other keys go on. When the call is done, the record is processed again from its
beginning, and the call returns at once. Changes and outputs of a record are kept only when it has run to its end. So
the state never has half of a record, and outputs of a key are in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pyarrow as pa

from onceflow.calls.concurrently import calls_of
from onceflow.calls.journal import Journal, OneByOne, Suspended
from onceflow.calls.runner import CallRunner
from onceflow.errors import ProcessorError
from onceflow.state.api import user_errors
from onceflow.state.api.handle import State
from onceflow.state.api.processor import Processor
from onceflow.state.api.record import Record
from onceflow.state.engine.base import NOT_OF_A_RECORD
from onceflow.state.engine.record_engine import Engine, end_generator


class _Waiting:
    """A record in the queue of its key.

    Args:
        record: with key and value in bytes; decoded anew for every run, because user code may change what it gets.
        reject: notes that it is rejected.
    """

    __slots__ = ("journal", "record", "reject")

    def __init__(self, record: Record, journal: Journal, reject: Callable[[], None]) -> None:
        self.record = record
        self.journal = journal
        self.reject = reject


class CallEngine(Engine):
    """See `Engine`.

    Args:
        runner: makes the calls of all partitions of a task; None: the engine has one of its own.
    """

    def __init__(self, processor: Processor, *arguments: Any, runner: CallRunner | None = None, **options: Any) -> None:
        super().__init__(processor, *arguments, **options)
        self._runner = runner or CallRunner()
        self._owns_runner = runner is None
        self._goes_ahead = all(calls.order is None for calls in calls_of(processor))
        self._queues: dict[bytes, deque[_Waiting]] = {}
        self._records_done = 0
        # Event times of records of which some may yet be rejected, see `_note_processed`.
        self._times: list[tuple[pa.RecordBatch, Any, set[int], set[int]]] = []

    def start(self) -> None:
        """See `Engine.start`.

        Raises:
            DeadlineExceededError, BatchAbortedError: the calls of timers take too long; the flow is being stopped.
        """
        with self._one_by_one():
            super().start()

    def finish(self) -> None:
        """See `BaseEngine.finish`."""
        with self._one_by_one():
            super().finish()

    @contextmanager
    def _one_by_one(self) -> Iterator[None]:
        calls = OneByOne(self._runner)
        try:
            with calls.used():
                yield
        except ProcessorError:
            if calls.problem is None:
                raise
        finally:
            self._close()
        if calls.problem is not None:  # no timer has caused it
            raise self._located(calls.problem)

    def feed(self, rows: pa.RecordBatch) -> None:
        """See `BaseEngine.feed`. Afterwards, records may wait for their calls."""
        try:
            super().feed(rows)
        except BaseException:
            self._close()
            raise

    def settle(self) -> None:
        """Process all records that wait. The calls of other engines with the same runner are waited for, too.

        Raises:
            ProcessorError: a record could not be processed, and on_error is ``fail``.
            DeadlineExceededError: the calls take too long.
        """
        try:
            self._runner.settle()
            if self._scope.fatal is not None:
                raise self._located(self._scope.fatal)
            for times in self._times:
                self._note_times(*times)
            self._times.clear()
        finally:
            self._close()

    def _note_processed(self, batch: pa.RecordBatch, times: Any, rejected: set[int], unread: set[int]) -> None:
        """See `Engine`. The records may still wait."""
        self._times.append((batch, times, rejected, unread))

    def _close(self) -> None:
        if self._owns_runner:
            self._runner.close()

    def _process(
        self,
        batch: pa.RecordBatch,
        keys: Sequence[Any],
        raw_keys: Sequence[bytes],
        records: list[Record],
        ends: list[int],
        where: Sequence[int],
        rejected: set[int],
    ) -> None:
        raw = self._raw(batch)
        start = 0
        for raw_key, end in zip(raw_keys, ends, strict=True):
            if end == start:
                continue
            queue = self._queues.setdefault(raw_key, deque())
            for at in where[start:end]:
                journal = Journal(self._runner, partial(self._wake, raw_key, raw[at]), self._seen)
                queue.append(_Waiting(raw[at], journal, partial(rejected.add, at)))
            self._advance(raw_key)
            if self._goes_ahead:
                for waiting in list(self._queues.get(raw_key, ()))[1:]:
                    self._look_ahead(raw_key, waiting)
            start = end

    def _wake(self, raw_key: bytes, record: Record) -> None:
        queue = self._queues.get(raw_key)
        if queue and queue[0].record is record:
            self._advance(raw_key)

    def _seen(self) -> int | None:
        """See `Journal`."""
        return self._records_done if self._scope.scanned else None

    def _advance(self, raw_key: bytes) -> None:
        """Process the records of a key until one has to wait."""
        queue = self._queues[raw_key]
        while queue:
            if not self._is_done(queue[0], raw_key):
                return
            self._records_done += 1
            queue.popleft().journal.settled()
        del self._queues[raw_key]

    def _is_done(self, waiting: _Waiting, raw_key: bytes) -> bool:
        """Process a record. False: it waits for a call, and nothing of it is kept."""
        overlay, collector, journal = self._overlay, self._collector, waiting.journal
        overlay.savepoint()
        mark = collector.mark()
        result = None
        problem: Exception | None = None
        self._scope.scanned = False
        with journal.replay():
            try:
                record = self._decoded_again(waiting.record, raw_key)
                result = self.processor.process(record.key, [record], State(self._scope, raw_key))
                if result is not None:
                    collector.extend(result, record.key, raw_key)
                self._check_rows()
            except Suspended:
                pass
            except Exception as error:
                problem = error
                user_errors.handed_over(error, self.processor.process, result)
            if problem is not None or journal.waits:
                with suppress(Suspended):  # its clean-up makes a call
                    end_generator(result)
        if problem is None and not journal.waits:
            return True
        overlay.roll_back()
        collector.truncate(mark)
        if journal.waits:  # also if user code has made another error of it
            return False
        assert problem is not None
        if isinstance(problem, NOT_OF_A_RECORD):
            raise problem
        with journal.recall():  # it may be looked for the cause
            self._reject_processed(waiting.record, raw_key, problem)
        waiting.reject()
        return True

    def _look_ahead(self, raw_key: bytes, waiting: _Waiting) -> None:
        """Find the first call that a record will probably make, and start it. Nothing else of this run is kept."""
        overlay, collector = self._overlay, self._collector
        overlay.savepoint()
        mark = collector.mark()
        result = None
        self._scope.scanned = False
        with waiting.journal.replay(ahead=True):
            with suppress(Suspended, Exception):  # what fails now may succeed in its turn
                record = self._decoded_again(waiting.record, raw_key)
                result = self.processor.process(record.key, [record], State(self._scope, raw_key))
                if result is not None:
                    collector.extend(result, record.key, raw_key)
            with suppress(Suspended):
                end_generator(result)
        overlay.roll_back()
        collector.truncate(mark)
