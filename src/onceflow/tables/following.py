"""The thread behind a `Table`: restores the copies of a topic's partitions, then applies what is committed to it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.committed import Chunk, CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.long_poll import LongPoll, created_again
from onceflow.client.settings import ClientSettings
from onceflow.errors import (
    BrokerUnreachableError,
    DeadlineExceededError,
    EnvironmentUnusableError,
    OnceflowError,
    UnknownTopicError,
)
from onceflow.state.local.stored_rows import Stores
from onceflow.state.stores.base import StoreCorruptError
from onceflow.tables.copies import Copy, RawChange
from onceflow.tables.lag import Lag, Progress, Restore

log = logging.getLogger("onceflow.tables")

# While a broker does not answer: how long one attempt may take, and the time between two warnings.
_ATTEMPT_S, _WARN_EVERY_S, _PAUSE_S = 10.0, 60.0, 0.5
_POLL_S = 0.5
_METADATA_S = 10.0
_PROGRESS_S, _LOOK_S = 5.0, 0.5
_STOP_S = 5.0


class _StoppingError(OnceflowError):
    """The thread is to end. A restore keeps what it has read so far, as for every error of onceflow."""


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
        self._targets_ms = 0
        self._begins = {partition: copy.position for partition, copy in copies.items()}
        self._read: dict[int, int] = {}  # up to where a restore has read; it writes much later
        self.partitions_now = info.partitions  # as last seen
        self._followed = False
        self._stopping = threading.Event()
        self._moved = threading.Condition()
        self._told_at = self._looked_at = self._polled_at = time.monotonic()
        self._warned_at: float | None = None
        self.failure: OnceflowError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"onceflow-table-{info.name}")

    @property
    def topic(self) -> str:
        return self._info.name

    @property
    def partitions(self) -> int:
        """How many partitions the topic has."""
        return self._info.partitions

    @property
    def partitions_here(self) -> Collection[int]:
        """The partitions that are followed."""
        return self._copies.keys()

    @property
    def targets(self) -> Mapping[int, int]:
        """The last stable offsets at the start, by partition."""
        return self._targets

    @property
    def ignored(self) -> int:
        return sum(copy.ignored for copy in self._copies.values())

    def start(self, ends: Mapping[int, int], *, of_now: bool = True) -> None:
        """Begin to follow.

        Args:
            ends: the last stable offsets now; the table is restored when it has reached them.
            of_now: whether they are. Otherwise they were read earlier, and more may be committed.
        """
        self._targets = dict(ends)
        self._targets_ms = int(time.time() * 1000)
        for partition, copy in self._copies.items() if of_now else ():
            self._ends[partition] = ends[partition]
            if copy.position == ends[partition]:
                copy.still_current()
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and close the copies. What they contain stays."""
        if not self.halt(_STOP_S):
            log.warning("table %s: a request is still waiting for a broker; the copy is closed without it", self.topic)
            return
        for copy in self._copies.values():
            copy.close()

    def halt(self, timeout_s: float) -> bool:
        """End the thread, but leave the copies open. Returns whether it has ended within these seconds."""
        self._stopping.set()
        with self._moved:
            self._moved.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @contextmanager
    def stores(self) -> Iterator[Stores]:
        """The stores for reading. Raises the error that has stopped the thread, if there is one."""
        self.check()
        yield {partition: copy.store for partition, copy in self._copies.items()}

    def check(self) -> None:
        """Raise the error that has stopped the thread, if there is one."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)

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
        position, current_ms = copy.position, copy.current_ms
        end = self._ends.get(partition)
        age_ms = None if current_ms is None else max(0, int(time.time() * 1000) - current_ms)
        lag = Lag(None if end is None else max(0, end - position), age_ms)
        return Progress(position, lag, position >= self._targets.get(partition, 0) and current_ms is not None)

    def restored(self) -> Restore:
        total = sum(max(0, end - self._begins[partition]) for partition, end in self._targets.items())
        unwritten = unread = 0
        for partition, end in self._targets.items():
            position = self._copies[partition].position
            unwritten += max(0, end - position)
            unread += max(0, end - max(position, self._read.get(partition, 0)))
        # It runs until all is written, not only read.
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
            while not self._stopping.is_set():
                cluster = Cluster(self._settings, refused_s=None)
                try:
                    self._restore(cluster)
                    self._follow(cluster)
                except (BrokerUnreachableError, DeadlineExceededError, EnvironmentUnusableError) as passing:
                    self._warn(passing)
                    self._stopping.wait(_PAUSE_S)
                except StoreCorruptError:
                    pass  # the copy has been replaced, and is restored now
                finally:
                    cluster.close()
        except _StoppingError:
            pass
        except OnceflowError as error:
            self._fail(error.locate(topic=self.topic))
        except BaseException as error:
            failure = OnceflowError(
                f"Table {self.topic} cannot be followed any more",
                topic=self.topic,
                detail=f"{type(error).__name__}: {error}",
                next_step="if this is an error of your on_change function, mend it; otherwise report this to onceflow",
            )
            failure.__cause__ = error
            self._fail(failure)

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
        source = _Source(CommittedReader(cluster, _ATTEMPT_S), self._stopping, self._has_read)
        for partition, end in sorted(self._targets.items()):
            copy = self._copies[partition]
            # A copy that is ahead when it is opened is one of records that Kafka has lost: it is restored, too.
            self._read.pop(partition, None)
            if copy.position < end or (copy.position > end and not self._followed):
                copy.restore(source, end, self._targets_ms, lambda _, copy=copy: self._tell(copy))  # type: ignore[misc]
            self._notify()
        self._followed = True

    def _follow(self, cluster: Cluster) -> None:
        positions = {(self.topic, partition): copy.position for partition, copy in self._copies.items()}
        poll = LongPoll(cluster, [self._info], positions)
        self._polled_at = time.monotonic()
        looked_at = time.monotonic()
        while not self._stopping.is_set():
            for (_, partition), chunk in poll.poll(_POLL_S):
                self._apply(self._copies[partition], chunk, poll.followed[self.topic, partition].last_stable_offset)
            self._heard(poll)
            if time.monotonic() - looked_at > _METADATA_S:
                looked_at = time.monotonic()
                self._check_topic(cluster, Deadline(_ATTEMPT_S, f"looking up topic {self.topic}"))

    def _apply(self, copy: Copy, chunk: Chunk, stable: int) -> None:
        listeners = self._listeners
        with copy.mended():
            changes = copy.apply(chunk, stable=stable, wanted=bool(listeners))
        self._ends[copy.partition] = max(stable, self._ends.get(copy.partition, 0))
        self._notify()
        for change in changes:
            for listener in listeners:
                listener(change)

    def _heard(self, poll: LongPoll) -> None:
        """Note which partitions are still current, and whether brokers answer."""
        newest = self._polled_at
        for (_, partition), each in poll.followed.items():
            copy = self._copies[partition]
            if each.answered_at is not None:
                self._ends[partition] = max(each.last_stable_offset, self._ends.get(partition, 0))
                newest = max(newest, each.answered_at)
                fresh = time.monotonic() - each.answered_at < _POLL_S
                if fresh and each.last_stable_offset <= copy.position and not each.attempt:
                    with copy.mended():
                        copy.still_current()
        if time.monotonic() - newest < _ATTEMPT_S:
            self._answered()
        else:
            self._warn(BrokerUnreachableError("no answer", topic=self.topic))

    def _check_topic(self, cluster: Cluster, deadline: Deadline) -> None:
        """Raise an error if the topic is not the one that the table was opened with.

        Raises:
            UnknownTopicError: it was deleted, or created again, or has more partitions than before.
        """
        now = cluster.topic(self.topic, deadline, fresh=True, patient=True)
        if now.topic_id != self._info.topic_id:
            raise created_again(self.topic)
        self.partitions_now = now.partitions
        if now.partitions != self._info.partitions and self._all_partitions:
            raise UnknownTopicError(
                f"Topic {self.topic} has {now.partitions} partitions now, it had {self._info.partitions}",
                topic=self.topic,
                next_step="open the table again: it follows all partitions then. Keys may have moved to other ones",
            )

    # ---- telling -------------------------------------------------------------------------------------

    def _notify(self) -> None:
        with self._moved:
            self._moved.notify_all()

    def _tell(self, copy: Copy) -> None:
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

    def _has_read(self, partition: int, chunk: Chunk) -> None:
        self._read[partition] = chunk.next_offset
        self._copies[partition].check_placement(chunk.keys)
        self._answered()

    def _warn(self, problem: OnceflowError) -> None:
        now = time.monotonic()
        if self._stopping.is_set() or (self._warned_at is not None and now - self._warned_at < _WARN_EVERY_S):
            return
        self._warned_at = now
        log.warning(
            "table %s: it cannot be updated at the moment, lookups answer from what is here (%s %s)",
            self.topic,
            problem.what,
            problem.detail,
        )

    def _answered(self) -> None:
        if self._warned_at is not None:
            log.warning("table %s: it is updated again", self.topic)
        self._warned_at = None


class _Source:
    """Reads committed records until the thread is to end."""

    def __init__(self, reader: CommittedReader, stopping: threading.Event, tell: Callable[[int, Chunk], None]) -> None:
        self._reader = reader
        self._stopping = stopping
        self._tell = tell

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
        for chunk in self._reader.read(topic, partition, start, end):
            if self._stopping.is_set():
                raise _StoppingError("the table is being closed")
            self._tell(partition, chunk)
            yield chunk
