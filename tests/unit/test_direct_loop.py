"""The loop of the direct engine and its reader, over logs in memory: whoever reads, every record is in one batch, once.

The connections are replaced, the rest is as it is in production: the reader, what waits, who reads, what a batch takes.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from onceflow import (
    BatchAbortedError,
    DataLossError,
    EnvironmentUnusableError,
    FencedError,
    OnceflowError,
    UnknownTopicError,
)
from onceflow.client.settings import ClientSettings
from onceflow.direct import loop as loop_module
from onceflow.direct import source_reader
from onceflow.direct.arrivals import Limits
from onceflow.direct.backlog import Backlog
from onceflow.direct.pacing import BatchSize
from onceflow.direct.query import DirectQuery
from onceflow.direct.source_reader import SourceReader
from onceflow.driver.record.offset_log import SourceRange
from onceflow.logs import log_context
from onceflow.planning.options import BatchSummary
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.progress import HandOver
from onceflow.state.engine.watermark import Watermark

sys.path.insert(0, str(Path(__file__).parent))
try:
    from direct_logs import TOPIC, Logs, Written, loop_of, offsets_of, reader_of
finally:
    sys.path.pop(0)

__all__ = ["reader_of"]  # a fixture
EVERYTHING = Limits({}, 10**9, 10**12)


@pytest.fixture(autouse=True)
def _log_fields() -> Iterator[None]:
    """The loop runs in the thread of the test here, so what it adds to log lines has to end with the test."""
    with log_context.within():
        yield


# ---- the reader ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [40, 55], ids=["behind what was fetched", "beyond it"])
def test_after_tasks_the_driver_reads_on_from_where_they_have_ended(
    reader_of: Callable[..., SourceReader], taken: int
) -> None:
    logs = Logs({0: 50, 1: 5})
    reader = reader_of(logs, {0: 0, 1: 0})
    assert reader.fetch(0)
    logs.ends[0] = 60
    assert reader.look_ahead() == {TOPIC: {0: 60, 1: 5}}
    reader.arrivals.take_unread({TOPIC: {0: taken, 1: 5}})
    reader.go_on()
    assert reader.fetch(0)
    assert reader.arrivals.offsets == {TOPIC: 60 - taken}
    found = reader.arrivals.take(EVERYTHING)
    assert found.source == SourceRange({TOPIC: {0: taken, 1: 5}}, {TOPIC: {0: 60, 1: 5}})
    assert offsets_of(found.parts) == {0: list(range(taken, 60))}


def test_what_a_broker_has_said_before_tasks_took_over_counts_no_more(reader_of: Callable[..., SourceReader]) -> None:
    """One more such answer would otherwise mean that the topic has not existed for as long as tasks have read."""
    reader = reader_of(Logs({0: 50}), {0: 0})
    assert reader.fetch(0)
    each = reader._poll.followed[TOPIC, 0]
    each.attempt, each.unknown_since = 7, time.monotonic() - 60
    reader.go_on()
    each = reader._poll.followed[TOPIC, 0]
    assert (each.attempt, each.unknown_since) == (1, None)


def test_partitions_that_were_added_are_read_from_their_beginning(
    reader_of: Callable[..., SourceReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_reader, "_LOOK_EVERY_S", 0.0)
    logs = Logs({0: 2})
    reader = reader_of(logs, {0: 1})
    reader.fetch(0)
    reader.arrivals.take(EVERYTHING)
    logs.ends[1], logs.begins[1] = 9, 6
    assert reader.fetch(0)
    assert reader.arrivals.offsets == {TOPIC: 3}
    found = reader.arrivals.take(EVERYTHING)
    assert found.source == SourceRange({TOPIC: {0: 2, 1: 6}}, {TOPIC: {0: 2, 1: 9}})
    assert offsets_of(found.parts) == {1: [6, 7, 8]}
    logs.ends[2] = 3
    assert reader.look_ahead() == {TOPIC: {0: 2, 1: 9, 2: 3}}, "tasks are to read them, too"


def test_records_that_expire_while_it_reads(
    reader_of: Callable[..., SourceReader], caplog: pytest.LogCaptureFixture
) -> None:
    logs = Logs({0: 9}, {0: 4})
    with pytest.raises(DataLossError, match="offsets 1 to 3 have expired"):
        reader_of(logs, {0: 1}).fetch(0)
    reader = reader_of(logs, {0: 1}, fail_on_data_loss=False)
    reader.fetch(0)
    reader.fetch(0)
    found = reader.arrivals.take(EVERYTHING)
    assert found.source == SourceRange({TOPIC: {0: 1}}, {TOPIC: {0: 9}})
    assert offsets_of(found.parts) == {0: [4, 5, 6, 7, 8]}
    assert "offsets 1 to 3 have expired" in caplog.text


def test_what_is_behind_a_bound_does_not_wait_in_memory(reader_of: Callable[..., SourceReader]) -> None:
    """A run that ends reads one partition to its end while others still write to another one."""
    logs = Logs({0: 50, 1: 50})
    reader = reader_of(logs, {0: 0, 1: 0})
    assert more(reader) == {0, 1}
    reader.end_at({TOPIC: {0: 20, 1: 50}})
    for _ in range(3):
        reader.fetch(0)
        assert reader.arrivals.offsets == {TOPIC: 70}
        assert not reader.is_behind
    logs.ends[0] = 1000
    assert not reader.fetch(0)
    taken = reader.arrivals.take(EVERYTHING)
    assert taken.source.end == {TOPIC: {0: 20, 1: 50}}
    assert more(reader) == {0}
    reader.end_at(None)
    assert reader.fetch(0)
    assert offsets_of(reader.arrivals.take(EVERYTHING).parts) == {0: list(range(20, 1000))}
    assert more(reader) == set()


def test_records_that_expire_behind_a_bound_are_not_missed(reader_of: Callable[..., SourceReader]) -> None:
    reader = reader_of(Logs({0: 9}, {0: 4}), {0: 1})
    reader.end_at({TOPIC: {0: 1}})
    assert not reader.fetch(0)
    reader.end_at({TOPIC: {0: 3}})
    with pytest.raises(DataLossError, match="offsets 1 to 2 have expired"):
        reader.fetch(0)


def test_a_topic_of_which_a_batch_has_enough_is_not_fetched(reader_of: Callable[..., SourceReader]) -> None:
    logs = Logs({0: 500}, most=lambda: 30)
    reader = reader_of(logs, {0: 0}, most=50)
    for waiting in (30, 60, 60, 60):
        reader.fetch(0)
        assert reader.arrivals.offsets == {TOPIC: waiting}
    assert not reader.is_behind, "nothing can be fetched now"
    reader.arrivals.take(Limits({TOPIC: 50}, 10**9, 10**12))
    reader.fetch(0)
    assert reader.arrivals.offsets == {TOPIC: 40}
    assert reader.is_behind


def test_a_topic_that_was_created_again_is_refused(
    reader_of: Callable[..., SourceReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownTopicError, match="deleted and created again"):
        reader_of(Logs({0: 9}), {0: 5}, was="an older one")
    monkeypatch.setattr(source_reader, "_LOOK_EVERY_S", 0.0)
    logs = Logs({0: 9})
    reader = reader_of(logs, {0: 5})
    reader.fetch(0)
    logs.topic_id, logs.ends[1] = "a new one", 3
    for look in (lambda: reader.fetch(0), reader.look_ahead):
        with pytest.raises(UnknownTopicError, match="deleted and created again"):
            look()
    assert reader.arrivals.taken == {TOPIC: {0: 5}}, "partitions of the new one are not read"


def more(reader: SourceReader) -> set[int]:
    """Partitions that have records which no batch has taken."""
    return {partition for (_, partition), known in reader.caught_up().items() if known == -math.inf}


# ---- the loop --------------------------------------------------------------------------------------------


class Fickle:
    """In the place of `Backlog`: anybody may read the next batch."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.by_tasks = False

    def looked(self, left: int, *, now: float) -> None:
        self.by_tasks = left > 0 and self._rng.random() < 0.5

    def ran(self, records: int, seconds: float, *, now: float) -> None:
        self.by_tasks = self.by_tasks and self._rng.random() < 0.5

    def records_max(self) -> int:
        return self._rng.choice((20, 10**6))


@pytest.mark.parametrize("seed", range(60))
def test_every_record_is_in_one_batch_whoever_reads(reader_of: Callable[..., SourceReader], seed: int) -> None:
    """With random responses, batches and hand-overs, while records arrive, also behind the end of the run."""
    rng = random.Random(seed)
    partitions = range(rng.randrange(1, 4))
    until = {partition: rng.randrange(50, 400) for partition in partitions}
    starts = {partition: rng.randrange(5) for partition in partitions}
    share = rng.choice((0.0, 0.3))
    aborted = {(p, n) for p in partitions for n in range(until[p]) if rng.random() < share}
    logs = Logs(dict(starts), aborted=aborted, most=lambda: rng.randrange(1, 60))
    arrivals = 0

    def arrive() -> None:
        nonlocal arrivals
        arrivals += 1
        assert arrivals < 5_000, "the run does not end"
        for partition, end in until.items():
            logs.ends[partition] = min(end + 40, logs.ends[partition] + rng.choice((0, 1, 30, 90)))

    logs.on_poll = arrive
    written = Written(logs, starts)
    written.before = lambda source: arrive()
    most = rng.randrange(20, 80)
    loop = loop_of(written, reader_of(logs, starts), rng.choice((0, 30, 60, 10**9)), most=most, until=until)
    if seed % 2:
        fickle: Any = Fickle(rng)
        loop._backlog = fickle
        loop._tasks_size = BatchSize(1.0, first=rng.randrange(10, 60), least=10, most=60)
        loop._size = BatchSize(1.0, first=rng.randrange(10, 60), least=10, most=60)
    if seed % 3 == 0:  # now and then, state of some partitions is being restored
        written.held_back = lambda: rng.choice((None, lambda partition: partition == 0, lambda partition: True))
    loop._run()
    assert loop.error is None
    assert written.progress.offsets == {TOPIC: until}
    assert written.records == {p: logs.records(p, starts[p], end) for p, end in until.items()}
    assert max(written.sizes) <= most


def test_partitions_go_on_while_the_state_of_others_is_being_restored(reader_of: Callable[..., SourceReader]) -> None:
    logs = Logs({0: 50, 1: 50, 2: 50})
    written = Written(logs, {0: 0, 1: 0, 2: 0})
    restored = False

    def held_back() -> Callable[[int], bool] | None:
        nonlocal restored
        restored = restored or len(written.records[0]) + len(written.records[2]) == 100
        return None if restored else lambda partition: partition == 1

    def before(source: SourceRange) -> None:
        assert restored or source.end[TOPIC][1] == source.start[TOPIC][1]

    written.held_back, written.before = held_back, before
    loop_of(written, reader_of(logs, {0: 0, 1: 0, 2: 0}), 0, most=20, until={0: 50, 1: 50, 2: 50})._run()
    assert written.records == {p: list(range(50)) for p in range(3)}


def test_the_driver_and_tasks_take_turns(reader_of: Callable[..., SourceReader]) -> None:
    """Tasks read while more than 20 records are left, and until no more than 10 are. The driver had fetched 50."""
    logs = Logs({0: 50})
    reader = reader_of(logs, {0: 0})
    written = Written(logs, {0: 0})

    def more(source: SourceRange) -> None:
        if source.end == {TOPIC: {0: 50}}:
            logs.ends[0] = 75

    written.before = more
    loop_of(written, reader, 20, most=20, until={0: 75})._run()
    assert written.records == {0: list(range(75))}
    assert written.ways == ["RangeRows", "RangeRows", "FetchedRows", "RangeRows", "FetchedRows"]
    assert written.sizes == [20, 20, 10, 20, 5]


@pytest.mark.parametrize("rows_max", [0, 10**9], ids=["tasks", "driver"])
def test_nothing_follows_a_batch_that_has_failed(reader_of: Callable[..., SourceReader], rows_max: int) -> None:
    logs = Logs({0: 50})
    written = Written(logs, {0: 0})
    error = BatchAbortedError("no", next_step="none")

    def fail(source: SourceRange) -> None:
        if source.start != {TOPIC: {0: 0}}:
            raise error

    written.before = fail
    loop = loop_of(written, reader_of(logs, {0: 0}), rows_max, most=20, until={0: 50})
    loop._run()
    assert (loop.error, written.failure) == (error, error)
    assert written.sizes == [20]


@pytest.mark.parametrize("error", [BatchAbortedError("no", next_step="none"), FencedError("no", next_step="none")])
def test_only_an_abort_is_no_error_of_a_query_that_is_stopped(
    reader_of: Callable[..., SourceReader], error: OnceflowError
) -> None:
    logs = Logs({0: 50})
    written = Written(logs, {0: 0})

    def fail(source: SourceRange) -> None:
        written.stopping = True
        raise error

    written.before = fail
    loop = loop_of(written, reader_of(logs, {0: 0}), 0, most=20, until={0: 50})
    loop._run()
    assert loop.error is (None if isinstance(error, BatchAbortedError) else error)
    assert not written.sizes


def test_a_query_ends_when_spark_is_stopped(reader_of: Callable[..., SourceReader]) -> None:
    """As every other query of the session."""
    logs = Logs({0: 50})
    written = Written(logs, {0: 0})
    loop = loop_of(written, reader_of(logs, {0: 0}), 0, most=20, until={0: 50})

    def stop(source: SourceRange) -> None:
        loop._spark.sparkContext._jsc = None

    written.before = stop
    loop._run()
    assert isinstance(loop.error, EnvironmentUnusableError)
    assert written.sizes == [20], "the batch that runs is finished"


@pytest.mark.parametrize("of_batch", [False, True])
def test_an_error_of_the_system_while_a_query_is_stopped(
    reader_of: Callable[..., SourceReader], of_batch: bool
) -> None:
    """It is an error if the batch has failed by it, and not if the stop has broken a connection."""
    logs, error = Logs({0: 50}), OSError("no space left on device")
    written = Written(logs, {0: 0})

    def fail(source: SourceRange) -> None:
        written.stopping = True
        written.failure = error if of_batch else None
        raise error

    written.before = fail
    loop = loop_of(written, reader_of(logs, {0: 0}), 0, most=20, until={0: 50})
    loop._run()
    assert loop.error is written.failure


def test_a_loop_that_waits_ends_when_a_standby_has_taken_over(reader_of: Callable[..., SourceReader]) -> None:
    """It would notice only with its next records."""
    logs = Logs({0: 10})
    written = Written(logs, {0: 0})
    loop = loop_of(written, reader_of(logs, {0: 0}), 10**9, most=100, until={}, ends=False)
    taken_over = FencedError("the standby is active")

    def poll() -> None:
        if written.records == {0: list(range(10))}:
            written.taken_over = taken_over

    logs.on_poll = poll
    loop._run()
    assert loop.error is taken_over
    assert written.sizes == [10]


def test_what_is_behind_the_end_of_a_run_does_not_count_for_who_reads(reader_of: Callable[..., SourceReader]) -> None:
    """Otherwise tasks would take over for it, find nothing that they may read, give back, take over, and so on."""
    logs = Logs({0: 50})
    written = Written(logs, {0: 0})
    loop = loop_of(written, reader_of(logs, {0: 0}), 20, most=100, until={0: 10})
    polls = iter(range(100))
    logs.on_poll = lambda: None if next(polls, None) is not None else loop.stop()
    loop._run()
    assert written.records == {0: list(range(10))}
    assert written.ways == ["FetchedRows"]


@pytest.mark.parametrize("rows_max", [0, 20, 10**9], ids=["tasks", "both", "driver"])
def test_a_partition_that_was_added_since_the_end_of_a_run_was_fixed_is_left_alone(
    reader_of: Callable[..., SourceReader], rows_max: int
) -> None:
    logs = Logs({0: 50, 1: 30})
    written = Written(logs, {0: 0, 1: 0})
    loop_of(written, reader_of(logs, {0: 0, 1: 0}), rows_max, most=25, until={0: 50})._run()
    assert written.records == {0: list(range(50)), 1: []}


@pytest.mark.parametrize("rows_max", [0, 20, 10**9], ids=["tasks", "both", "driver"])
def test_the_first_batch_after_a_promotion_ends_where_the_earlier_version_has(
    reader_of: Callable[..., SourceReader], rows_max: int
) -> None:
    logs = Logs({0: 50, 1: 50})
    written = Written(logs, {0: 0, 1: 10})
    written.progress = replace(written.progress, handover=HandOver(offsets={TOPIC: {0: 7, 1: 5}}, timers={}))
    ends: list[Any] = []

    def done(source: SourceRange) -> None:
        ends.append(source.end)
        written.progress = replace(written.progress, handover=None)

    written.before = done
    loop_of(written, reader_of(logs, {0: 0, 1: 10}), rows_max, most=100, until={0: 50, 1: 50})._run()
    assert ends == [{TOPIC: {0: 7, 1: 10}}, {TOPIC: {0: 50, 1: 50}}]
    assert written.records == {0: list(range(50)), 1: list(range(10, 50))}


@pytest.mark.parametrize("rows_max", [0, 10**9], ids=["tasks", "driver"])
def test_a_batch_knows_which_partitions_have_more(reader_of: Callable[..., SourceReader], rows_max: int) -> None:
    """They are not idle, however long they wait for their turn."""
    logs = Logs({0: 50, 1: 10, 2: 0})
    written = Written(logs, {0: 0, 1: 0, 2: 0})
    reader = reader_of(logs, {0: 0, 1: 0, 2: 0})
    loop_of(written, reader, rows_max, most=25, until={0: 50, 1: 10, 2: 0})._run()
    assert written.records == {0: list(range(50)), 1: list(range(10)), 2: []}
    assert written.more == [{0, 1}, {0, 1}, set()]


@pytest.mark.parametrize("most", [15, 10**6], ids=["small batches", "large batches"])
def test_a_live_partition_at_the_end_of_its_run_costs_no_memory(
    reader_of: Callable[..., SourceReader], most: int
) -> None:
    logs = Logs({0: 10, 1: 400}, most=lambda: 20)
    written = Written(logs, {0: 0, 1: 0})
    reader = reader_of(logs, {0: 0, 1: 0}, most=most)
    waiting = []

    def arrive(source: SourceRange) -> None:
        logs.ends[0] += 10_000
        waiting.append(reader.arrivals.offsets[TOPIC])

    written.before = arrive
    loop_of(written, reader, 10**9, most=most, until={0: 10, 1: 400})._run()
    assert written.records == {0: list(range(10)), 1: list(range(400))}
    assert max(waiting) <= 30


def test_tasks_wait_for_brokers_that_are_away(reader_of: Callable[..., SourceReader]) -> None:
    logs = Logs({0: 50})
    written = Written(logs, {0: 0})
    loop = loop_of(written, reader_of(logs, {0: 0}), 0, most=25, until={0: 50})
    polls = []

    def poll() -> None:
        polls.append(logs.unreachable)
        logs.unreachable = logs.unreachable and len(polls) < 6

    def away(source: SourceRange) -> None:
        logs.unreachable = source.start[TOPIC] == {0: 0}

    logs.on_poll, written.before = poll, away
    loop._run()
    assert loop.error is None
    assert written.records == {0: list(range(50))}
    assert written.ways == ["RangeRows", "RangeRows"]
    assert polls.count(True) >= 2, "the driver tries to read meanwhile"


def test_tasks_read_on_while_one_leader_does_not_answer(
    reader_of: Callable[..., SourceReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata may still name it, because it hangs. It is asked again after a while."""
    monkeypatch.setattr(source_reader, "_AWAY_S", 0.2)
    logs = Logs({0: 50, 1: 50})
    written = Written(logs, {0: 0, 1: 0})
    loop = loop_of(written, reader_of(logs, {0: 0, 1: 0}), 0, most=25, until={0: 50, 1: 50})
    logs.silent, read = {1}, []

    def batch(source: SourceRange) -> None:
        read.append({partition for _, partition, start, end in source.ranges() if end > start})
        if source.end[TOPIC][0] == 50:
            logs.silent = set()

    written.before = batch
    loop._run()
    assert loop.error is None
    assert written.records == {0: list(range(50)), 1: list(range(50))}
    assert read == [{0}, {0}, {1}, {1}]


def test_the_first_batches_of_tasks_are_small(reader_of: Callable[..., SourceReader]) -> None:
    """Nobody knows yet what a record costs. If they took longer than a transaction may, no attempt would succeed."""
    logs = Logs({0: 60_000, 1: 60_000})
    written = Written(logs, {0: 0, 1: 0})
    loop = loop_of(written, reader_of(logs, {0: 0, 1: 0}), 0, most=10**6, until=logs.ends)
    loop._run()
    assert loop.error is None
    assert written.sizes[0] == 4_000
    assert len(written.sizes) <= 4


def test_all_that_is_available_is_written_not_only_taken(
    reader_of: Callable[..., SourceReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With at-most-once, progress moves before the batch is written."""
    written = Written(logs := Logs({0: 50}), {0: 0})
    monkeypatch.setattr(DirectQuery, "_source_ends", lambda _: {TOPIC: {0: 50}})
    batches: Any = written
    loop = loop_of(written, reader_of(logs, {0: 0}), 0, most=50, until={0: 50})
    query = DirectQuery(loop, batches, lambda _: "", ClientSettings("nowhere:1"))
    written.progress = replace(written.progress, batch_id=0, offsets={TOPIC: {0: 50}})
    waiting = threading.Thread(target=query.processAllAvailable, daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "the batch is still being written"
    written.history.append(BatchSummary(0, 0))
    waiting.join(30)
    assert not waiting.is_alive()


@pytest.mark.parametrize("aborted", [False, True], ids=["records", "offsets alone"])
@pytest.mark.parametrize("response", [7, 25, 1000])
def test_with_a_backlog_nothing_waits_for_the_trigger(
    reader_of: Callable[..., SourceReader], response: int, aborted: bool
) -> None:
    """Also if the topic has more than a batch may take of it, in one response or in several."""
    logs = Logs({0: 300}, most=lambda: response)
    logs.aborted = {(0, n) for n in range(290)} if aborted else set()
    written = Written(logs, {0: 0})
    reader = reader_of(logs, {0: 0}, most=10)
    loop = loop_of(written, reader, 10**9, most=10, until={0: 300}, trigger_s=3600.0, ends=False)

    def done(source: SourceRange) -> None:
        if source.end == {TOPIC: {0: 300}}:
            loop.stop()

    def waited(seconds: float) -> None:
        raise AssertionError("it waits for the trigger")

    written.before, loop._wait = done, waited  # type: ignore[method-assign]
    loop._run()
    assert loop.error is None
    assert written.progress.offsets == {TOPIC: {0: 300}}
    assert written.records == {0: logs.records(0, 0, 300)}
    assert max(written.sizes) == 10


def test_how_long_it_is_known_that_partitions_are_silent(reader_of: Callable[..., SourceReader]) -> None:
    logs = Logs({0: 50, 1: 0, 2: 0, 3: 9})
    reader = reader_of(logs, {0: 0, 1: 0, 2: 0, 3: 9}, most=10)
    reader.fetch(0)
    heard = {place: each.known_at for place, each in reader._poll.followed.items()}
    assert reader.caught_up() == {**heard, (TOPIC, 0): -math.inf}
    logs.leaderless = {2}
    reader.end_at({TOPIC: {0: 50, 1: 5, 2: 5, 3: 9}})
    reader.fetch(0)
    caught_up = reader.caught_up()
    assert [caught_up[TOPIC, n] for n in (0, 3)] == [-math.inf, math.inf]
    assert [caught_up[TOPIC, n] for n in (1, 2)] == [heard[TOPIC, n] for n in (1, 2)], "nobody has answered since"
    logs.leaderless = {0}
    reader.look_ahead()
    reader.go_on()
    reader.fetch(0)
    assert reader.caught_up()[TOPIC, 0] == -math.inf, "records are left in it, although nobody can read them now"


@pytest.mark.parametrize("rows_max", [0, 20, 10**9], ids=["tasks", "both", "driver"])
def test_partitions_are_read_while_others_have_no_leader(reader_of: Callable[..., SourceReader], rows_max: int) -> None:
    logs = Logs({0: 50, 1: 50})
    reader = reader_of(logs, {0: 0, 1: 0})
    logs.leaderless = {1}
    written = Written(logs, {0: 0, 1: 0})
    loop = loop_of(written, reader, rows_max, most=25, until={0: 50, 1: 50})

    def back(source: SourceRange) -> None:
        if source.end[TOPIC] == {0: 50, 1: 0}:
            logs.leaderless = set()

    written.before = back
    loop._run()
    assert loop.error is None
    assert written.records == {0: list(range(50)), 1: list(range(50))}
    assert written.sizes[:2] == [25, 25]


class WithEventTime(Written):
    """The event time of a record is when it is read."""

    def __init__(self, logs: Logs, starts: dict[int, int], clock: Callable[[], float]) -> None:
        super().__init__(logs, starts)
        places = [(TOPIC, partition) for partition in starts]
        self._clock = clock
        self.watermark = Watermark(places, lateness_ms=0, idle_s=30, value_ms=None, clock=clock)
        self.seen: list[int | None] = []

    def wants_batch(self, source: SourceRange, caught_up: Mapping[TopicPartition, float]) -> bool:
        self.watermark.planned(source.news(), caught_up)
        self.watermark.advance()
        return source.max_rows > 0

    def __call__(
        self, rows: Any, source: SourceRange, *, backlog: bool, caught_up: Mapping[TopicPartition, float]
    ) -> None:
        self.watermark.planned(source.news(), caught_up)
        latest = dict.fromkeys(source.news(), int(self._clock() * 1000))
        self.seen.append(self.watermark.after(latest))
        self.watermark.on_commit(latest, self.seen[-1])
        super().__call__(rows, source, backlog=backlog, caught_up=caught_up)


@pytest.mark.parametrize("rows_max", [0, 10**9], ids=["tasks", "driver"])
def test_a_partition_that_is_silent_does_not_hold_event_time_back_whatever_the_trigger(
    reader_of: Callable[..., SourceReader], monkeypatch: pytest.MonkeyPatch, rows_max: int
) -> None:
    """Between batches, nobody is asked for records."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    logs = Logs({0: 1, 1: 1, 2: 0})
    written = WithEventTime(logs, {0: 0, 1: 0, 2: 0}, lambda: now[0])
    loop = loop_of(
        written, reader_of(logs, {0: 0, 1: 0, 2: 0}), rows_max, most=25, until={}, trigger_s=10.0, ends=False
    )

    def wait(seconds: float) -> None:
        now[0] += seconds

    def one_more(source: SourceRange) -> None:
        logs.ends[0] += 1
        if now[0] > 100:
            loop.stop()

    loop._wait, written.before = wait, one_more  # type: ignore[method-assign]
    loop._run()
    assert loop.error is None
    assert len(written.seen) >= 9
    assert written.seen[:3] == [None] * 3, "the others are waited for"
    assert written.seen[-1] == int(now[0] * 1000), "and then no more"


class Counting:
    """In the place of `Backlog`: notes which batches tell how fast the reader is."""

    def __init__(self, by_tasks: bool, most: int) -> None:
        self.by_tasks = by_tasks
        self._most = most
        self.sizes: list[int] = []

    def looked(self, left: int, *, now: float) -> None: ...

    def records_max(self) -> int:
        return self._most

    def ran(self, records: int, seconds: float, *, now: float) -> None:
        self.sizes.append(records)


@pytest.mark.parametrize("by_tasks, limit", [(False, "count"), (False, "bytes"), (True, "count"), (True, "time")])
def test_a_batch_that_is_as_large_as_it_may_tells_how_fast_its_reader_is(
    reader_of: Callable[..., SourceReader], monkeypatch: pytest.MonkeyPatch, by_tasks: bool, limit: str
) -> None:
    """Whatever limits it. A record has 10 bytes here."""
    monkeypatch.setattr(loop_module, "BATCH_BYTES", 200 if limit == "bytes" else 10**9)
    logs, most = Logs({0: 105}, most=lambda: 20), 20 if limit == "count" else 10**6
    written = Written(logs, {0: 0})
    loop = loop_of(written, reader_of(logs, {0: 0}, most=most), 10**9, most=most, until={0: 105})
    counting: Any = Counting(by_tasks, 20 if limit == "time" else 10**6)
    loop._backlog = counting
    loop._run()
    assert written.sizes == [20] * 5 + [5]
    assert counting.sizes == [20] * 5


def test_the_report_of_a_batch_is_not_that_of_the_timers_behind_it(reader_of: Callable[..., SourceReader]) -> None:
    logs, reports = Logs({0: 30}), Mock()
    written = Written(logs, {0: 0})
    loop = loop_of(written, reader_of(logs, {0: 0}), 10**9, most=20, until={0: 30})
    loop._reports = reports
    loop._run()
    assert [call.args[0].read for call in reports.committed.call_args_list] == [{TOPIC: 20}, {TOPIC: 10}]


def test_a_query_that_reads_a_backlog_does_not_wait(reader_of: Callable[..., SourceReader]) -> None:
    logs = Logs({0: 30})
    batches: Any = Written(logs, {0: 0})
    loop = loop_of(batches, reader_of(logs, {0: 0}), 10**9, most=20, until={0: 30})
    query = DirectQuery(loop, batches, lambda _: "", ClientSettings("nowhere:1"))
    loop.waiting = True
    assert query.lag == {TOPIC: {0: 30}}, "known before anything is fetched"
    assert not query.waits
    loop.lag = {TOPIC: {0: 0}}
    assert query.waits


@pytest.mark.parametrize("rows_max", [100, None], ids=["by a bound", "by what batches cost"])
def test_a_backlog_of_which_nothing_can_be_read_does_not_stop_the_others(
    reader_of: Callable[..., SourceReader], rows_max: int | None
) -> None:
    """A leader is away. Its partition has more than the driver reads by itself."""
    logs = Logs({0: 5, 1: 5_000})
    written, reader = Written(logs, {0: 0, 1: 0}), reader_of(logs, {0: 0, 1: 0})
    logs.leaderless = {1}
    loop = loop_of(written, reader, 10**9, most=1_000, until={}, ends=False)
    loop._backlog = Backlog("copy", rows_max)
    if rows_max is None:
        for _ in range(5):
            loop._backlog.ran(10, 1.0, now=0.0)
    polls = iter(range(200))

    def poll() -> None:
        if next(polls, None) is None:
            loop.stop()

    def some_more(source: SourceRange) -> None:
        logs.ends[0] += 5

    logs.on_poll, written.before = poll, some_more
    loop._run()
    assert loop.error is None
    assert len(written.records[0]) >= 100
    assert written.records[1] == []
    assert set(written.ways) == {"FetchedRows"}


def test_a_query_that_never_begins_ends(reader_of: Callable[..., SourceReader]) -> None:
    batches: Any = Written(logs := Logs({0: 50}), {0: 0})
    loop = loop_of(batches, reader_of(logs, {0: 0}), 0, most=50, until={0: 50})
    query, ended = DirectQuery(loop, batches, lambda _: "", ClientSettings("nowhere:1")), []
    query.when_ended(lambda: ended.append(True))
    assert query.isActive
    query.stop()
    assert not query.isActive
    assert query.awaitTermination(None)
    query.begin()
    assert ended == [True]
    assert batches.ways == []


def test_brokers_are_heard_also_while_enough_waits_for_batches(
    reader_of: Callable[..., SourceReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other topics and partitions may have records, new ones may have been added, and others are known to be silent."""
    now, polls = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    logs = Logs({0: 100})
    written = Written(logs, {0: 0})
    loop = loop_of(written, reader_of(logs, {0: 0}, most=10), 10**9, most=10, until={0: 100})

    def a_second(source: SourceRange) -> None:
        now[0] += 1

    logs.on_poll, written.before = lambda: polls.append(now[0]), a_second
    loop._run()
    assert written.sizes == [10] * 10
    assert len(set(polls)) >= 9


# ---- what the time of a batch is spent on, and what is done meanwhile ------------------------------------------


class Reports:
    """In the place of `ProgressReports`: how long batches took, and how long their records were fetched."""

    def __init__(self) -> None:
        self.seconds: list[tuple[float, float]] = []

    def committed(self, summary: Any, *_: Any, duration_s: float, fetch_s: float, **__: Any) -> None:
        self.seconds.append((duration_s, fetch_s))


@pytest.mark.parametrize("most", [10, 10**6], ids=["a backlog", "no backlog"])
def test_the_steps_are_all_of_the_time(reader_of: Callable[..., SourceReader], most: int) -> None:
    logs = Logs({0: 50})
    written, reports = Written(logs, {0: 0}), Reports()
    loop = loop_of(written, reader_of(logs, {0: 0}), 10**9, most=most, until={0: 50})
    prepared: Any = reports
    loop.prepare(prepared, lambda: None)
    loop._run()
    assert loop.error is None
    summaries = written.history[::2]
    assert len(summaries) == len(reports.seconds) == (1 if most > 50 else 5)
    for summary, (duration_s, fetch_s) in zip(summaries, reports.seconds, strict=True):
        assert list(summary.seconds) == ["fetch", "write", "end", "other"]
        assert sum(summary.seconds.values()) == pytest.approx(duration_s)
        assert summary.seconds["fetch"] == fetch_s > 0
    # Copies are settled when nothing waits for the next batch.
    assert written.settled == [summaries[-1].batch]


def test_records_arrive_while_a_batch_is_committed(reader_of: Callable[..., SourceReader]) -> None:
    logs = Logs({0: 50}, most=lambda: 10)
    written = Written(logs, {0: 0})
    reader = reader_of(logs, {0: 0})
    loop = loop_of(written, reader, 10**9, most=10**6, until={0: 50})
    loop._size = BatchSize(1.0, first=10, least=10, most=10)
    waiting: list[int] = []
    original = reader.take_arrived

    def taken() -> None:
        before = reader.arrivals.offsets[TOPIC]
        original()
        waiting.append(reader.arrivals.offsets[TOPIC] - before)

    reader.take_arrived = taken  # type: ignore[method-assign]
    loop._run()
    assert loop.error is None
    assert written.records == {0: list(range(50))}
    assert waiting
    assert max(waiting) == 10


def test_a_problem_with_the_next_records_leaves_the_outcome_alone(reader_of: Callable[..., SourceReader]) -> None:
    logs = Logs({0: 50})
    written = Written(logs, {0: 0})
    reader = reader_of(logs, {0: 0})
    loop = loop_of(written, reader, 10**9, most=10, until={0: 50})

    def lost() -> None:
        raise DataLossError("records have expired", next_step="none")

    reader.take_arrived = lost  # type: ignore[method-assign]
    loop._run()
    assert isinstance(loop.error, DataLossError)
    assert written.records == {0: list(range(10))}, "the batch has ended before"


# ---- in the thread of the caller -------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 3, 10**9])
def test_what_is_there_is_one_batch_however_it_arrives(reader_of: Callable[..., SourceReader], at_once: int) -> None:
    logs = Logs({0: 20, 1: 7})
    logs.most = lambda: at_once
    written = Written(logs, {0: 0, 1: 0})
    loop = loop_of(written, reader_of(logs, {0: 0, 1: 0}), 10**9, most=100, until={}, ends=False)
    loop.run_through()
    assert written.sizes == [27]
    loop.run_through()  # there is nothing more
    logs.ends[1] = 9
    loop.run_through()
    assert written.sizes == [27, 2]
    assert written.records == {0: list(range(20)), 1: list(range(9))}


def test_limits_of_a_batch_hold(reader_of: Callable[..., SourceReader]) -> None:
    logs = Logs({0: 50})
    written = Written(logs, {0: 0})
    loop_of(written, reader_of(logs, {0: 0}, most=20), 10**9, most=20, until={}, ends=False).run_through()
    assert written.sizes == [20, 20, 10]


def test_an_answer_from_before_does_not_end_it(reader_of: Callable[..., SourceReader]) -> None:
    """The response to a request that was sent earlier says that there is nothing more."""
    logs = Logs({0: 5})
    written = Written(logs, {0: 0})
    reader = reader_of(logs, {0: 0})
    loop = loop_of(written, reader, 10**9, most=100, until={}, ends=False)
    loop.run_through()
    logs.ends[0] = 6
    old = [5, 5]

    def on_poll() -> None:
        logs.ends[0] = old.pop() if old else 6

    logs.on_poll = on_poll
    loop.run_through()
    assert written.sizes == [5, 1]


def test_a_batch_that_fails_ends_it(reader_of: Callable[..., SourceReader]) -> None:
    logs = Logs({0: 5})
    written = Written(logs, {0: 0})
    error = BatchAbortedError("no", next_step="none")

    def fail(source: SourceRange) -> None:
        raise error

    written.before = fail
    loop = loop_of(written, reader_of(logs, {0: 0}), 10**9, most=100, until={}, ends=False)
    ended: list[bool] = []
    loop.prepare(Mock(), lambda: ended.append(True))
    loop.run_through()
    assert (loop.error, written.failure, ended) == (error, error, [True])


def test_timers_that_are_always_due_end_with_an_error(
    reader_of: Callable[..., SourceReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "_BATCHES_MAX", 20)
    logs = Logs({0: 0})
    written = Written(logs, {0: 0})
    monkeypatch.setattr(written, "wants_batch", lambda source, caught_up: True)
    loop = loop_of(written, reader_of(logs, {0: 0}), 10**9, most=100, until={}, ends=False)
    loop.run_through()
    assert "more to do after 20 batches" in str(loop.error)
