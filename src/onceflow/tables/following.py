"""The thread behind a `Table`: restores the copies of a topic's partitions, then applies what is committed to it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.committed import Chunk, CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.followed import Followed
from onceflow.client.long_poll import LongPoll
from onceflow.client.outage import Outage
from onceflow.client.settings import ClientSettings
from onceflow.clock import clock_ms
from onceflow.errors import (
    BrokerUnreachableError,
    DeadlineExceededError,
    EnvironmentUnusableError,
    OnceflowError,
    UnknownTopicError,
    counted,
)
from onceflow.state.local.format import Columns
from onceflow.state.local.move_marks import Mark, marks_of
from onceflow.state.local.watched_source import WatchedSource
from onceflow.state.stores.base import StoreCorruptError
from onceflow.state.stores.stored_rows import Stores
from onceflow.tables.copies import Copy, RawChange
from onceflow.tables.lag import Lag, Progress, Restore

log = logging.getLogger("onceflow.tables")

_ATTEMPT_S, _PAUSE_S = 10.0, 0.5  # while a broker does not answer: how long one attempt may take
_POLL_S = 0.5
_METADATA_S = 3.0
_PROGRESS_S, _LOOK_S = 5.0, 0.5
_STOP_S = 5.0
_REPAIR_S = 30.0  # how long a lookup waits for a copy that is read again


def not_repaired(topic: str, restore: Restore, problem: OnceflowError | None, waited_s: float) -> DeadlineExceededError:
    """A lookup has waited in vain for a copy that is read again."""
    detail = f"read {restore.done} of {counted(restore.total, 'offset')} after {waited_s:g} s of waiting"
    return DeadlineExceededError(
        f"Table {topic} is being read again from Kafka, because its local copy was damaged",
        topic=topic,
        detail=detail if problem is None else f"{detail}; {problem.what}",
        next_step="ask again later; Table(..., wait=False) answers from what is here meanwhile",
    )


def not_moved(topic: str, waited_s: float) -> DeadlineExceededError:
    """A lookup has waited in vain for rows that are being moved."""
    return DeadlineExceededError(
        f"Rows of table {topic} were moved to other partitions, and have not arrived there yet",
        topic=topic,
        detail=f"waited for {waited_s:g} s: a broker that leads some of the partitions may be down",
        next_step="ask again later; Table(..., wait=False) answers from what is here meanwhile",
    )


def replaced_while_read(topic: str, damage: StoreCorruptError) -> OnceflowError:
    """A lookup has found a copy that is damaged, or was closed."""
    return OnceflowError(
        f"The local copy of table {topic} was replaced while it was read, or is damaged",
        topic=topic,
        detail=damage.what,
        next_step="ask again; if that fails, too, close the table and open it again, which verifies the copy",
    )


def cannot_be_followed(topic: str, error: BaseException) -> OnceflowError:
    """The thread has ended with an error that is not one of onceflow."""
    failure = OnceflowError(
        f"Table {topic} cannot be followed any more",
        topic=topic,
        detail=f"{type(error).__name__}: {error}",
        next_step="if this is an error of your on_change function, mend it; otherwise report this to onceflow",
    )
    failure.__cause__ = error
    return failure


def has_more_partitions(topic: str, now: int, before: int) -> UnknownTopicError:
    """The topic got partitions that are not followed."""
    return UnknownTopicError(
        f"Topic {topic} has {counted(now, 'partition')} now, it had {before}",
        topic=topic,
        next_step="open the table again: it follows all partitions then. Keys may have moved to other ones",
    )


class Follower:
    """Keeps copies up to what is committed, from `start` to `stop`.

    Args:
        info: the topic as it was found. copies: of the partitions to follow, open.
        all_partitions: whether the table is to have all partitions of the topic.
    """

    def __init__(
        self, settings: ClientSettings, info: TopicInfo, copies: Mapping[int, Copy], *, all_partitions: bool
    ) -> None:
        self._settings = settings
        self._info = info
        self._copies = dict(copies)
        self._all_partitions = all_partitions
        self._listeners: list[Callable[[RawChange], None]] = []
        self._ends: dict[int, int] = {}  # last stable offsets, as last heard of
        self._targets: dict[int, int] = {}  # last stable offsets at the start
        self.targets_ms = 0  # when they were asked for, epoch milliseconds
        self._begins = {partition: copy.position for partition, copy in copies.items()}
        self._read: dict[int, int] = {}  # up to where a restore has read; it writes much later
        self.partitions_now = info.partitions  # as last seen
        self._followed = self._look_now = False
        self._stopping = threading.Event()
        self._ended = True  # the thread; it has not begun
        self._then: Callable[[], None] | None = None
        self._moved = threading.Condition()
        self._told_at = self._looked_at = self._polled_at = time.monotonic()
        self._outage = Outage(log, f"table {info.name}", "it is updated again")
        self.failure: OnceflowError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"onceflow-table-{info.name}")

    @property
    def topic(self) -> str:
        return self._info.name

    @property
    def topic_id(self) -> str:
        return self._info.topic_id

    @property
    def partitions(self) -> int:
        """How many partitions the topic has."""
        return self._info.partitions

    @property
    def partitions_here(self) -> Collection[int]:
        """The partitions that are followed."""
        return self._copies.keys()

    @property
    def stopping(self) -> bool:
        """Whether the thread is to end, or has ended because it was told to."""
        return self._stopping.is_set()

    @property
    def targets(self) -> Mapping[int, int]:
        """The last stable offsets at the start, by partition."""
        return self._targets

    @property
    def ignored(self) -> int:
        return sum(copy.ignored for copy in self._copies.values())

    def start(self, ends: Mapping[int, int], ends_ms: int, *, of_now: bool = True) -> None:
        """Begin to follow.

        Args:
            ends: the last stable offsets; the table is restored when it has reached them.
            ends_ms: when they were asked for, epoch milliseconds.
            of_now: whether that was just now. Otherwise another object has begun with them, and more may be committed.
        """
        self._targets = dict(ends)
        self.targets_ms = ends_ms
        for partition, copy in self._copies.items() if of_now else ():
            self._ends[partition] = ends[partition]
            if copy.position == ends[partition]:
                copy.still_current(ends_ms)
        self._ended = False
        self._thread.start()

    def stop(self, then: Callable[[], None] = lambda: None) -> None:
        """End the thread, close the copies, and call a function. What the copies contain stays.

        A thread that cannot end soon, because it waits for a broker or because a listener calls this, does the rest
        itself when it ends. Until then its copies may be written, so nobody else must open them.
        """
        with self._moved:
            self._then = then
            ended = self._ended
        if ended:
            self._close()
        elif threading.current_thread() is self._thread:
            self._stopping.set()
        elif not self.halt(_STOP_S):
            log.warning(
                "table %s: it is still waiting for a broker or for the disk; the local copy stays locked until that "
                "is over",
                self.topic,
            )

    def halt(self, timeout_s: float) -> bool:
        """End the thread, but leave the copies open. Returns whether it has ended within these seconds."""
        self._stopping.set()
        with self._moved:
            self._moved.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @contextmanager
    def stores(self, *, complete: bool) -> Iterator[Stores]:
        """The stores for reading.

        Args:
            complete: wait for copies that are read again, because they were damaged, and for rows that are being moved
                to other partitions.

        Raises:
            OnceflowError: the error that has stopped the thread; or a copy was replaced while it was read.
            DeadlineExceededError: a copy was not read again in time.
        """
        self.check()
        stores = self._stores()
        while complete and self._lacks_rows():  # asked afterwards: otherwise these are not the stores of such copies
            if not self.wait(lambda: not self._lacks_rows(), _REPAIR_S):
                if not any(copy.emptied for copy in self._copies.values()):
                    raise not_moved(self.topic, _REPAIR_S)
                raise not_repaired(self.topic, self.restored(), self.problem, _REPAIR_S)
            stores = self._stores()
        try:
            yield stores
        except StoreCorruptError as problem:
            raise replaced_while_read(self.topic, problem) from problem

    def _lacks_rows(self) -> bool:
        """Whether a copy lacks rows that it had, or that another one has given to it."""
        return any(copy.emptied or copy.incomplete for copy in self._copies.values())

    def _stores(self) -> Stores:
        return {partition: copy.store for partition, copy in self._copies.items()}

    @property
    def problem(self) -> OnceflowError | None:
        """Why a copy cannot be written at the moment."""
        return next((copy.health.problem for copy in self._copies.values() if copy.health.problem is not None), None)

    def check(self) -> None:
        """Raise the error that has stopped the thread, if there is one."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    @property
    def follows_all(self) -> bool:
        """Whether it is to have all partitions of the topic, also those that may have been added a moment ago."""
        return self._all_partitions

    def offsets(self) -> dict[int, int]:
        """Up to which offset each partition is here."""
        return {partition: copy.position for partition, copy in sorted(self._copies.items())}

    def wait(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something is true that changes with the positions. Returns whether it is."""

        def over() -> bool:
            return reached() or self.failure is not None or self._stopping.is_set()

        with self._moved:
            self._moved.wait_for(over, timeout_s)
        self.check()
        return reached()

    def lag(self) -> Lag:
        return Lag.all_of(self.progress(partition).lag for partition in self._copies)

    def progress(self, partition: int) -> Progress:
        """How far one partition is. The position is never more than what lookups see from now on."""
        copy = self._copies[partition]
        # The position last: whatever is known about the copy before is true of this position, too.
        current_ms, end = copy.current_ms, self._ends.get(partition)
        position = copy.position
        age_ms = None if current_ms is None else max(0, clock_ms() - current_ms)
        lag = Lag(None if end is None else max(0, end - position), age_ms)
        restored = position >= self._targets.get(partition, 0) and current_ms is not None
        return Progress(position, lag, restored, copy.emptied, copy.incomplete, copy.health.problem)

    def restored(self) -> Restore:
        total = sum(max(0, end - self._begins[partition]) for partition, end in self._targets.items())
        unwritten = unread = 0
        for partition, end in self._targets.items():  # it runs until all is written, not only read
            position = self._copies[partition].position
            unwritten += max(0, end - position)
            unread += max(0, end - max(position, self._read.get(partition, 0)))
        return Restore(total - max(unread, 1 if unwritten else 0), total)

    def listen(self, listener: Callable[[RawChange], None]) -> Callable[[], None]:
        """Call a function with every change from now on, in this object's thread. Returns a function that ends it."""
        self._listeners = [*self._listeners, listener]

        def cancel() -> None:
            self._listeners = [each for each in self._listeners if each is not listener]

        return cancel

    # ---- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        finally:
            with self._moved:
                self._ended = True
                closing = self._then is not None
            if closing:
                self._close()

    def _close(self) -> None:
        assert self._then is not None
        for copy in self._copies.values():
            copy.close()
        self._then()

    def _work(self) -> None:
        try:
            while not self._stopping.is_set():
                cluster = Cluster(self._settings, refused_s=None)
                try:
                    self._restore(cluster)
                    self._follow(cluster)
                except (BrokerUnreachableError, DeadlineExceededError, EnvironmentUnusableError) as passing:
                    self._warn(f"{passing.what} {passing.detail}".strip())
                    self._stopping.wait(_PAUSE_S)
                except StoreCorruptError:
                    pass  # the copy has been emptied, and is restored now or after a pause
                finally:
                    cluster.close()
        except StoppingError:
            pass
        except OnceflowError as error:
            self._fail(error.locate(topic=self.topic))
        except BaseException as error:
            self._fail(cannot_be_followed(self.topic, error))

    def _fail(self, error: OnceflowError) -> None:
        log.error("table %s: stopped: %s", self.topic, error)
        with self._moved:
            self.failure = error
            self._moved.notify_all()

    def _restore(self, cluster: Cluster) -> None:
        """Bring copies that lack records up to the offsets at the start, as fast as possible, one after the other.

        What was committed after the start is followed, so that listeners hear of it.
        """
        self._check_topic(cluster, Deadline(_ATTEMPT_S, f"looking up topic {self.topic}"))
        source = StoppableSource(CommittedReader(cluster, _ATTEMPT_S), self._stopping, self._has_read)
        for partition, end in sorted(self._targets.items()):
            copy = self._copies[partition]
            if copy.health.resting:
                continue
            # A copy that is ahead when it is opened is one of records that Kafka has lost: it is restored, too.
            self._read.pop(partition, None)
            if copy.position < end or copy.emptied or (copy.position > end and not self._followed):
                with copy.mended():
                    copy.restore(source, end, self.targets_ms, partial(self._tell, copy))
            self._notify()
        self._followed = True

    def _follow(self, cluster: Cluster) -> None:
        """Apply what is committed, until it is time to try a copy again that is left alone now."""
        awake = {partition: copy for partition, copy in self._copies.items() if not copy.health.resting}
        left_alone = self._copies.keys() - awake.keys()
        until = min((self._copies[each].health.not_before for each in left_alone), default=math.inf)
        if not awake:
            self._stopping.wait(max(0.0, until - time.monotonic()))
            return
        positions = {(self.topic, partition): copy.position for partition, copy in awake.items()}
        poll = LongPoll(cluster, [self._info], positions)
        self._polled_at = time.monotonic()
        looked_at = time.monotonic()
        while not self._stopping.is_set() and time.monotonic() < until:
            for (_, partition), chunk in poll.poll(_POLL_S):
                self._apply(self._copies[partition], chunk, poll.followed[self.topic, partition])
            self._heard(poll)
            if time.monotonic() - looked_at > _METADATA_S or self._look_now:
                looked_at, self._look_now = time.monotonic(), False
                self._check_topic(cluster, Deadline(_ATTEMPT_S, f"looking up topic {self.topic}"))

    def _apply(self, copy: Copy, chunk: Chunk, answer: Followed) -> None:
        listeners, stable = self._listeners, answer.last_stable_offset
        self._ends[copy.partition] = max(stable, self._ends.get(copy.partition, 0))  # also if it cannot be written
        marks = marks_of(chunk)
        self._check_moved(marks)
        with copy.mended(), self._noted(copy):
            changes = copy.apply(chunk, marks, stable=stable, as_of_ms=answer.as_of_ms, wanted=bool(listeners))
        self._notify()
        for change in changes:
            for listener in listeners:
                if not self._stopping.is_set():
                    listener(change)

    def _check_moved(self, marks: Sequence[Mark]) -> None:
        """Rows have moved to other partitions. They are not looked for where they were.

        Raises:
            UnknownTopicError: some of these partitions are not followed.
        """
        partitions = max((mark.partitions for mark in marks), default=0)
        if partitions > self._info.partitions and self._all_partitions:
            raise has_more_partitions(self.topic, partitions, self._info.partitions)
        self._look_now = self._look_now or partitions > self.partitions_now

    @contextmanager
    def _noted(self, copy: Copy) -> Iterator[None]:
        """Note that a copy is damaged before it is emptied, so that lookups wait until it is where it was."""
        try:
            yield
        except StoreCorruptError:
            self._targets[copy.partition] = max(copy.position, self._targets[copy.partition])
            self._begins[copy.partition] = 0
            raise

    def _heard(self, poll: LongPoll[Chunk]) -> None:
        """Note which partitions are still current, and whether brokers answer."""
        newest = self._polled_at
        for (_, partition), each in poll.followed.items():
            copy = self._copies[partition]
            if each.answered_at is not None:
                self._ends[partition] = max(each.last_stable_offset, self._ends.get(partition, 0))
                newest = max(newest, each.answered_at)
                if each.last_stable_offset <= copy.position:
                    with copy.mended(), self._noted(copy):
                        copy.still_current(each.as_of_ms)
        if time.monotonic() - newest >= _ATTEMPT_S:
            self._warn("no answer")
        elif self.problem is None:  # also none of the disk
            self._outage.end()

    def _check_topic(self, cluster: Cluster, deadline: Deadline) -> None:
        """Raise an error if the topic is not the one that the table was opened with.

        Raises:
            UnknownTopicError: it was deleted, or created again, or has more partitions than before.
        """
        now = cluster.topic(self.topic, deadline, fresh=True, patient=True, leaderless=True)
        now.check_same(self._info.topic_id)
        self.partitions_now = now.partitions
        if now.partitions != self._info.partitions and self._all_partitions:
            raise has_more_partitions(self.topic, now.partitions, self._info.partitions)

    # ---- telling -------------------------------------------------------------------------------------

    def _notify(self) -> None:
        with self._moved:
            self._moved.notify_all()

    def _tell(self, copy: Copy, _: int) -> None:
        """Note how far a restore is, and log a long one every few seconds."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            copy.refresh()
            self._notify()
        if now - self._told_at >= _PROGRESS_S:
            self._told_at = now
            restore = self.restored()
            log.info("table %s: restored %d of %d offsets", self.topic, restore.done, restore.total)

    def _has_read(self, partition: int, chunk: Columns) -> None:
        copy = self._copies[partition]
        copy.check_placement(chunk.records.keys.filter(chunk.records.values.is_valid()))
        marks = marks_of(chunk)
        self._check_moved(marks)
        self._read[partition] = chunk.next_offset
        copy.note_marks(marks)
        if self.problem is None:
            self._outage.end()

    def _warn(self, problem: str) -> None:
        if not self._stopping.is_set():
            self._outage.warn(f"it cannot be updated at the moment, lookups answer from what is here ({problem})")


class StoppingError(OnceflowError):
    """The thread is to end. A restore keeps what it has read so far, as for every error of onceflow."""


class StoppableSource(WatchedSource):
    """Reads committed records until the thread is to end.

    Args:
        tell: called with the partition and what was read.
    """

    def __init__(
        self, reader: CommittedReader, stopping: threading.Event, tell: Callable[[int, Columns], None]
    ) -> None:
        super().__init__(reader)
        self._stopping = stopping
        self._tell = tell

    def see(self, topic: str, partition: int, chunk: Columns) -> None:
        if self._stopping.is_set():
            raise StoppingError("the table is being closed")
        self._tell(partition, chunk)
