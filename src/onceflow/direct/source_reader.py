"""Reads the sources of a flow ahead of its batches: what has arrived waits here until a batch takes it.

One thread owns the reader. Its connections are its own, because a Fetch waits in them until there are records.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from types import MappingProxyType

from onceflow.client.cluster import UNKNOWN_TOPIC_S, Cluster, TopicInfo
from onceflow.client.column_chunks import ColumnChunk, ColumnForm
from onceflow.client.deadline import Deadline
from onceflow.client.followed import Followed
from onceflow.client.leaders import known_leader
from onceflow.client.long_poll import LongPoll
from onceflow.client.offsets import EARLIEST, LATEST, list_offsets
from onceflow.client.settings import ClientSettings
from onceflow.clock import passing_s
from onceflow.direct.arrivals import Arrivals
from onceflow.direct.fetched import FetchedPart
from onceflow.driver.record.offset_log import TopicOffsets, has_reached
from onceflow.errors import BrokerUnreachableError, DeadlineExceededError, OnceflowError, UnknownTopicError
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.progress import Epochs
from onceflow.task.source_rows import expired
from onceflow.task.task_program import TopicRead

log = logging.getLogger("onceflow")

#: So many bytes wait for a batch at most; a response that is under way when they are reached is still taken.
BUFFER_BYTES = 32_000_000
FETCH_BYTES = 4_000_000
_PARTITION_BYTES = 32_000  # of a partition in a response, at least, if all are to have the same
_SILENT_S = 0.5  # a partition that has nothing new is asked so often, if a batch has enough of its topic
#: How often the partitions of the sources are looked at, in seconds: some may have been added.
_LOOK_EVERY_S = 5.0
_START_S = 60.0
# While tasks read: how long the answer of a leader is waited for, and for how long it is not asked if none came.
_ANSWER_S, _AWAY_S = 3.0, 5.0
_OTHERS_S = 0.004  # how long the answers of other brokers are waited for


class SourceReader:
    """The records of the sources, in the order in which they arrive; those of a partition in the order of its log.

    Args:
        starts: the offset at which each partition is read first, by topic.
        reads: how each topic is read.
        topic_ids: of the sources, as they were when these offsets were chosen.
        epochs: what progress knows of their leaders.

    Attributes:
        arrivals: what waits for a batch. Nothing of it is behind the bound of its partition, see `end_at`.
    """

    def __init__(
        self,
        settings: ClientSettings,
        reads: Mapping[str, TopicRead],
        starts: Mapping[str, Mapping[int, int]],
        *,
        topic_ids: Mapping[str, str],
        epochs: Epochs = MappingProxyType({}),
        flow: str,
        refused_s: float | None = None,
    ) -> None:
        self._flow = flow
        self._sources = reads
        self._most = {topic: source.max_records for topic, source in self._sources.items() if source.max_records}
        self._topic_ids = topic_ids
        self._bounds: TopicOffsets | None = None
        self._pausing = False
        self.arrivals = Arrivals({topic: starts[topic] for topic in self._sources})
        self._cluster = Cluster(settings, refused_s=refused_s)
        self._looked_at = float("-inf")
        self._unknown_since: float | None = None  # a look has found that a topic does not exist
        self._brokers = 1
        self._away_until: dict[int, float] = {}  # leaders that have not answered, by number
        deadline = Deadline(_START_S, f"connecting to the sources of flow {flow}")
        positions = {
            (topic, n): offset for topic, offsets in self.arrivals.taken.items() for n, offset in offsets.items()
        }
        self._arrived = dict(positions)  # everything below has arrived
        form = ColumnForm(headers=any(source.include_headers for source in self._sources.values()))
        try:
            self._cluster.connect(deadline)
            topics = self._cluster.topics(self._sources, deadline)
            self._check_same(topics)
            self._poll: LongPoll[ColumnChunk] = LongPoll(
                self._cluster, topics.values(), positions, fetch_bytes=FETCH_BYTES, form=form
            )
            self._know(epochs)
            self._ask_for_ends(deadline)
        except BaseException:
            self._cluster.close()
            raise

    def close(self) -> None:
        """Close the connections."""
        self._cluster.close()

    # ---- what is known -------------------------------------------------------------------------------

    def lag(self, *, readable: bool = False) -> TopicOffsets:
        """Offsets between what batches have taken and the last stable offset, as far as it is known.

        Args:
            readable: only of partitions whose leader answers.
        """
        found: TopicOffsets = {}
        for (topic, partition), each in self._poll.followed.items():
            if readable and (each.attempt or not self._has_leader(topic, partition)):
                continue
            if each.last_stable_offset >= 0:
                taken = self.arrivals.taken[topic][partition]
                found.setdefault(topic, {})[partition] = max(0, each.last_stable_offset - taken)
        return found

    @property
    def is_behind(self) -> bool:
        """Whether there are records that can be fetched now, as far as it is known, of a topic that batches lack."""
        full = self._full()
        return any(
            each.last_stable_offset > self._arrived[topic_partition]
            and self._bound(topic_partition) > self._arrived[topic_partition]
            and topic_partition[0] not in full
            and not each.attempt
            for topic_partition, each in self._poll.followed.items()
        )

    @property
    def has_enough(self) -> bool:
        """Whether of one of the topics as much waits as a batch may take."""
        return bool(self._full())

    @property
    def has_more(self) -> bool:
        """Whether there is something for the next batch already, as far as it is known."""
        return self.arrivals.has_records or self.has_enough or self.is_behind

    def _full(self) -> set[str]:
        waiting = self.arrivals.offsets
        return {topic for topic, most in self._most.items() if waiting[topic] >= most}

    def caught_up(self) -> dict[TopicPartition, float]:
        """Until when it is known of each partition that there is nothing that no batch has taken, as of `passing_s`.

        ``-math.inf``: there is something. Otherwise its leader has known so then. A partition at its bound is silent.
        """
        found = {}
        for topic_partition, each in self._poll.followed.items():
            taken = self.arrivals.taken[topic_partition[0]][topic_partition[1]]
            if each.last_stable_offset > taken or each.known_at is None:
                found[topic_partition] = -math.inf
            else:
                found[topic_partition] = math.inf if taken >= self._bound(topic_partition) else each.known_at
        return found

    def reached(self, ends: Mapping[str, Mapping[int, int]]) -> bool:
        """Whether batches have taken everything before these offsets."""
        return has_reached(self.arrivals.taken, ends)

    # ---- fetching ------------------------------------------------------------------------------------

    def end_at(self, bounds: TopicOffsets | None) -> None:
        """Batches may take what is before these offsets, for now; None: everything. What is behind them is not fetched,
        so that it does not wait in memory.

        Args:
            bounds: partitions that are not in it may not be read at all.
        """
        if bounds is self._bounds or bounds == self._bounds:
            return
        self._bounds = bounds
        for topic_partition, each in list(self._poll.followed.items()):
            if each.position > self._arrived[topic_partition]:  # what was behind the old bound was not kept
                self._seek(topic_partition, self._arrived[topic_partition])

    def _bound(self, topic_partition: TopicPartition) -> float:
        return math.inf if self._bounds is None else self._bounds.get(topic_partition[0], {}).get(topic_partition[1], 0)

    def _pause(self) -> None:
        """Leave partitions out of requests that are at their bound, or of which enough waits.

        With a backlog, partitions get the same room in responses: without that, one would be read after the other, and
        the watermark would stand still meanwhile. If a batch has enough of a topic, the others of its partitions are
        still asked for.
        """
        full = self._full()
        sharing = len(self._arrived) if full else self._count_behind()
        self._poll.partition_bytes = max(_PARTITION_BYTES, FETCH_BYTES // sharing) if sharing > 1 else None
        if not (full or self._pausing or self._bounds is not None):
            return
        self._pausing = False
        now = passing_s()
        for topic_partition, each in self._poll.followed.items():
            is_at_bound = self._arrived[topic_partition] >= self._bound(topic_partition)
            if is_at_bound or (topic_partition[0] in full and self._has_share(each, now)):
                self._pausing = True
                self._poll.pause(*topic_partition)
            elif each.paused:
                self._poll.resume(*topic_partition)

    def _count_behind(self) -> int:
        """How many partitions have records that have not arrived, as far as it is known."""
        followed = self._poll.followed.items()
        return sum(each.last_stable_offset > self._arrived[topic_partition] for topic_partition, each in followed)

    def _has_share(self, each: Followed, now: float) -> bool:
        """Whether nothing more of a partition is needed for now. Of its topic as much waits as a batch may take."""
        if self.arrivals.nbytes >= BUFFER_BYTES // 2:
            return True  # the rest is for other topics
        taken = self.arrivals.taken[each.topic]
        waiting = self._arrived[each.topic, each.partition] - taken[each.partition]
        if each.position >= each.last_stable_offset and each.known_at is not None and now - each.known_at < _SILENT_S:
            return True  # a broker answers only when there are records, and others would wait for that
        most = self._most[each.topic]
        return waiting >= most or waiting * len(taken) >= 2 * most

    def fetch(self, timeout_s: float) -> bool:
        """Wait for records, at most this many seconds. Returns whether any have arrived, or offsets without records.

        Raises:
            DataLossError: records have expired before they were read.
            OnceflowError: see `LongPoll.poll`.
        """
        self._look()
        arrived = self._receive(timeout_s)
        if arrived and self._brokers > 1:
            # All brokers are asked at the same time. Without this, what another one answers a moment later would wait
            # for the next batch.
            end = time.monotonic() + _OTHERS_S
            while (left_s := end - time.monotonic()) > 0 and self._receive(left_s):
                pass
        return arrived

    def _receive(self, timeout_s: float) -> bool:
        arrived = False
        self._pause()
        for topic_partition, chunk in self._poll.poll(timeout_s):
            arrived = True
            self._add(topic_partition, chunk)
        return arrived

    def fetch_ahead(self) -> None:
        """Send the next requests without waiting, so that brokers answer while a batch runs."""
        if self.arrivals.nbytes < BUFFER_BYTES:
            self._pause()
            self._poll.send()

    def take_arrived(self) -> None:
        """Take what has arrived for the next batch, and ask for more, without waiting."""
        if self.arrivals.nbytes < BUFFER_BYTES and not self._poll.is_stale:
            self._receive(0)
            self.fetch_ahead()

    def look(self) -> TopicOffsets:
        """Ask where the partitions end now.

        Raises:
            OnceflowError: the brokers do not answer.
        """
        return self._ask_for_ends(Deadline(_ANSWER_S, f"looking for the ends of the sources of flow {self._flow}"))

    def is_short_of(self, ends: TopicOffsets) -> bool:
        """Whether something before these offsets, and before the bounds, has not arrived. What leaders have answered
        last may be older."""
        places = (((topic, n), end) for topic, offsets in ends.items() for n, end in offsets.items())
        return any(self._arrived[place] < min(end, self._bound(place)) for place, end in places)

    def _ask_for_ends(self, deadline: Deadline) -> TopicOffsets:
        found: TopicOffsets = {}
        for wanted in self._led().values():
            for topic, offsets in self._ends(wanted, deadline).items():
                found.setdefault(topic, {}).update(offsets)
        return found

    # ---- while tasks read ----------------------------------------------------------------------------

    def look_ahead(self) -> TopicOffsets | None:
        """What is left to read: ask for the last stable offsets. What has arrived is given up: tasks read it.

        Returns:
            The last stable offset of each partition; where batches are if it has no leader that answers. None: no
            leader has answered.
        """
        self._look()
        self.arrivals.drop()
        found = {topic: dict(offsets) for topic, offsets in self.arrivals.taken.items()}
        led, now = self._led(), time.monotonic()
        present = [node for node in led if self._away_until.get(node, now) <= now]
        is_answered = not led
        for node in present or led:
            deadline = Deadline(_ANSWER_S, f"looking for the ends of the sources of flow {self._flow}")
            try:
                ends = self._ends(led[node], deadline)
            except (DeadlineExceededError, BrokerUnreachableError, UnknownTopicError) as error:
                log.debug("flow %s: %s", self._flow, error)
                self._away_until[node] = time.monotonic() + _AWAY_S
                continue
            is_answered = True
            for topic, offsets in ends.items():
                found[topic].update(offsets)
        return found if is_answered else None

    def _led(self) -> dict[int, dict[str, list[int]]]:
        """The partitions that have a leader, by its number; -1: nobody knows it yet."""
        led: dict[int, dict[str, list[int]]] = {}
        for topic, offsets in self.arrivals.taken.items():
            for partition in sorted(offsets):
                if self._has_leader(topic, partition):
                    node = known_leader(self._cluster, topic, partition)
                    led.setdefault(node, {}).setdefault(topic, []).append(partition)
        return led

    def _ends(self, wanted: Mapping[str, list[int]], deadline: Deadline) -> TopicOffsets:
        """The last stable offsets of partitions."""
        asked_at = passing_s()
        ends = list_offsets(self._cluster, wanted, LATEST, deadline)
        for topic, offsets in ends.items():
            for partition, end in offsets.items():
                self._heard((topic, partition), end, asked_at)
        return ends

    def _has_leader(self, topic: str, partition: int) -> bool:
        return self._cluster.known_topic(topic) is None or known_leader(self._cluster, topic, partition) >= 0

    def go_on(self, epochs: Epochs = MappingProxyType({})) -> None:
        """Read here again, from where batches are now.

        Args:
            epochs: what progress knows of the leaders.
        """
        for topic, offsets in self.arrivals.taken.items():
            for partition, offset in offsets.items():
                self._arrived[topic, partition] = offset
                self._seek((topic, partition), offset)
        self._know(epochs)
        for each in self._poll.followed.values():  # nobody has asked for them meanwhile
            each.attempt, each.unknown_since = min(each.attempt, 1), None

    def _seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """Go on from there. What is known of the end of the partition stays true."""
        known = self._poll.followed[topic_partition]
        self._poll.seek(*topic_partition, offset)
        self._heard(topic_partition, known.last_stable_offset, known.known_at)
        each = self._poll.followed[topic_partition]
        each.attempt, each.not_before, each.unknown_since = known.attempt, known.not_before, known.unknown_since
        each.leader_epoch = known.leader_epoch if offset <= known.position else -1

    def _know(self, epochs: Epochs) -> None:
        """Let the leaders check that they have the records before the positions. An older fact about a log says nothing
        of all of them."""
        for (topic, partition), each in self._poll.followed.items():
            offset, epoch = epochs.get(topic, {}).get(partition, (-1, -1))
            if offset >= each.position:
                each.leader_epoch = epoch

    def _heard(self, topic_partition: TopicPartition, end: int, at: float | None) -> None:
        each = self._poll.followed[topic_partition]
        each.last_stable_offset, each.known_at = max(end, each.last_stable_offset), at

    def _add(self, topic_partition: TopicPartition, chunk: ColumnChunk) -> None:
        start, bound = self._arrived[topic_partition], self._bound(topic_partition)
        if start >= bound:
            return  # it was asked for before there was a bound, and is read again when it may be taken
        end = int(min(chunk.next_offset, bound))
        if chunk.expired_from is not None:
            may_lose = not self._sources[topic_partition[0]].fail_on_data_loss
            expired(topic_partition, chunk.expired_from, end, may_lose=may_lose, flow=self._flow)
        self._arrived[topic_partition] = end
        epoch = self._poll.followed[topic_partition].leader_epoch
        self.arrivals.add(FetchedPart(topic_partition, start, end, chunk, epoch))

    def _look(self) -> None:
        """Follow partitions that were added, from their beginning."""
        if time.monotonic() - self._looked_at < _LOOK_EVERY_S:
            return
        began = time.monotonic()
        deadline = Deadline(_LOOK_EVERY_S, f"looking at the partitions of the sources of flow {self._flow}")
        found: Mapping[str, TopicInfo] = {}
        try:
            found = self._cluster.topics(self._sources, deadline, once=True, leaderless=True)
            self._brokers = len({leader for info in found.values() for leader in info.leaders.values() if leader >= 0})
            for topic, info in found.items():
                known = self.arrivals.taken[topic]
                added = sorted(n for n, leader in info.leaders.items() if n not in known and leader >= 0)
                if added and info.topic_id == self._topic_ids[topic]:
                    self._begin(topic, list_offsets(self._cluster, {topic: added}, EARLIEST, deadline)[topic])
            self._unknown_since = None
        except UnknownTopicError as error:
            # Nobody asks for its records while there are enough of others, or while tasks read.
            self._unknown_since = self._unknown_since or began
            if time.monotonic() - self._unknown_since > UNKNOWN_TOPIC_S:
                error.locate(flow=self._flow)
                raise
        except OnceflowError as error:
            log.debug("flow %s: could not look for new partitions: %s", self._flow, error)
        self._looked_at = time.monotonic()
        self._check_same(found)

    def _begin(self, topic: str, starts: Mapping[int, int]) -> None:
        for partition, offset in starts.items():
            log.info("flow %s: %s-%d is new, it is read from offset %d", self._flow, topic, partition, offset)
            self.arrivals.begin(topic, partition, offset)
            self._arrived[topic, partition] = offset
            self._poll.add(topic, partition, offset)

    def _check_same(self, found: Mapping[str, TopicInfo]) -> None:
        """Refuse a topic that was deleted and created again: offsets of the old one mean nothing in it."""
        for topic, info in found.items():
            info.check_same(self._topic_ids[topic])
