"""Reads the sources of a flow ahead of its batches: what has arrived waits here until a batch takes it.

One thread owns the reader. Its connections are its own, because a Fetch waits in them until there are records.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from onceflow.client.cluster import Cluster
from onceflow.client.column_chunks import ColumnChunk, ColumnForm
from onceflow.client.deadline import Deadline
from onceflow.client.long_poll import LongPoll
from onceflow.client.offsets import EARLIEST, LATEST, list_offsets
from onceflow.client.settings import ClientSettings
from onceflow.direct.arrivals import Arrivals
from onceflow.direct.fetched import FetchedPart
from onceflow.driver.offset_log import TopicOffsets, has_reached
from onceflow.errors import OnceflowError
from onceflow.protocol.names import TopicPartition
from onceflow.task.source_rows import QueryRows, expired

log = logging.getLogger("onceflow")

#: So many bytes wait for a batch at most; a response that is under way when they are reached is still taken.
BUFFER_BYTES = 32_000_000
FETCH_BYTES = 4_000_000
#: How often the partitions of the sources are looked at, in seconds: some may have been added.
_LOOK_EVERY_S = 5.0
_START_S = 60.0
_OTHERS_S = 0.004  # how long the answers of other brokers are waited for


class SourceReader:
    """The records of the sources, in the order in which they arrive; those of a partition in the order of its log.

    Args:
        starts: the offset at which each partition is read first, by topic.
        query: makes rows of the records.

    Attributes:
        arrivals: what waits for a batch.
        topic_ids: of the sources.
    """

    def __init__(
        self,
        settings: ClientSettings,
        query: QueryRows,
        starts: Mapping[str, Mapping[int, int]],
        *,
        flow: str,
    ) -> None:
        self._flow = flow
        self._query = query
        self._sources = {source.topic: source for source in query.plan.sources}
        self.arrivals = Arrivals({topic: starts[topic] for topic in self._sources})
        self._cluster = Cluster(settings, refused_s=None)
        self._looked_at = float("-inf")
        self._brokers = 1
        deadline = Deadline(_START_S, f"connecting to the sources of flow {flow}")
        try:
            self._cluster.connect(deadline)
            topics = self._cluster.topics(self._sources, deadline)
        except BaseException:
            self._cluster.close()
            raise
        positions = {
            (topic, n): offset for topic, offsets in self.arrivals.taken.items() for n, offset in offsets.items()
        }
        self.topic_ids = {info.name: info.topic_id for info in topics.values()}
        self._arrived = dict(positions)  # everything below has arrived
        form = ColumnForm(headers=any(source.include_headers for source in query.plan.sources))
        self._poll: LongPoll[ColumnChunk] = LongPoll(
            self._cluster, topics.values(), positions, fetch_bytes=FETCH_BYTES, form=form
        )

    def close(self) -> None:
        """Close the connections."""
        self._cluster.close()

    # ---- what is known -------------------------------------------------------------------------------

    def lag(self) -> TopicOffsets:
        """Offsets between what batches have taken and the last stable offset, as far as it is known."""
        found: TopicOffsets = {}
        for (topic, partition), each in self._poll.followed.items():
            if each.last_stable_offset >= 0:
                taken = self.arrivals.taken[topic][partition]
                found.setdefault(topic, {})[partition] = max(0, each.last_stable_offset - taken)
        return found

    @property
    def is_behind(self) -> bool:
        """Whether there are records that have not arrived here yet, as far as it is known."""
        return any(each.last_stable_offset > each.position for each in self._poll.followed.values())

    def reached(self, ends: Mapping[str, Mapping[int, int]]) -> bool:
        """Whether batches have taken everything before these offsets."""
        return has_reached(self.arrivals.taken, ends)

    # ---- fetching ------------------------------------------------------------------------------------

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
        for place, chunk in self._poll.poll(timeout_s):
            arrived = True
            self._add(place, chunk)
        return arrived

    def fetch_ahead(self) -> None:
        """Send the next requests without waiting, so that brokers answer while a batch runs."""
        if self.arrivals.nbytes < BUFFER_BYTES:
            self._poll.send()

    # ---- while tasks read ----------------------------------------------------------------------------

    def look_ahead(self) -> TopicOffsets:
        """What is left to read: ask for the last stable offsets. What has arrived is given up: tasks read it.

        Returns:
            The last stable offset of each partition.
        """
        self._look()
        self.arrivals.drop()
        deadline = Deadline(_START_S, f"looking for the ends of the sources of flow {self._flow}")
        wanted = {topic: sorted(offsets) for topic, offsets in self.arrivals.taken.items()}
        return list_offsets(self._cluster, wanted, LATEST, deadline)

    def go_on(self) -> None:
        """Read here again, from where batches are now."""
        for topic, offsets in self.arrivals.taken.items():
            for partition, offset in offsets.items():
                self._arrived[topic, partition] = offset
                self._poll.seek(topic, partition, offset)

    def _add(self, place: TopicPartition, chunk: ColumnChunk) -> None:
        if chunk.expired_from is not None:
            may_lose = not self._sources[place[0]].fail_on_data_loss
            expired(place, chunk.expired_from, chunk.next_offset, may_lose=may_lose, flow=self._flow)
        start, self._arrived[place] = self._arrived[place], chunk.next_offset
        part = FetchedPart(place, start, chunk.next_offset, chunk, self._query)
        self.arrivals.add(part)

    def _look(self) -> None:
        """Follow partitions that were added, from their beginning."""
        if time.monotonic() - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = time.monotonic()
        deadline = Deadline(_LOOK_EVERY_S, f"looking at the partitions of the sources of flow {self._flow}")
        try:
            found = self._cluster.topics(self._sources, deadline, once=True)
            self._brokers = len({leader for info in found.values() for leader in info.leaders.values()})
            for topic, info in found.items():
                added = sorted(set(info.leaders) - set(self.arrivals.taken[topic]))
                if not added:
                    continue
                starts = list_offsets(self._cluster, {topic: added}, EARLIEST, deadline)[topic]
                for partition, offset in starts.items():
                    log.info("flow %s: %s-%d is new, it is read from offset %d", self._flow, topic, partition, offset)
                    self.arrivals.begin(topic, partition, offset)
                    self._arrived[topic, partition] = offset
                    self._poll.add(topic, partition, offset)
        except OnceflowError as error:
            log.debug("flow %s: could not look for new partitions: %s", self._flow, error)
