"""Changes of a table as server-sent events, read from its topic.

They do not come from the local copies: so every instance can tell of all partitions, and a client can continue after
any position with any instance.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import orjson
from starlette.responses import Response

from onceflow.client.cluster import Cluster
from onceflow.client.committed import Chunk
from onceflow.client.deadline import Deadline
from onceflow.client.long_poll import LongPoll
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.client.settings import ClientSettings
from onceflow.errors import BrokerUnreachableError, DeadlineExceededError, OnceflowError
from onceflow.protocol.position import Position
from onceflow.protocol.timestamps import known_ms
from onceflow.server.formats import Format
from onceflow.server.problems import Problem, another_topic, unavailable
from onceflow.server.requests import position_of
from onceflow.server.service import Served, Service
from onceflow.server.streams import LeasedStream
from onceflow.state.local.move_marks import Moves, marks_of

_LOOK_S = 10.0
_POLL_S = 0.5
_ALIVE_S = 10.0
_METADATA_S = 3.0
_TEXT_BYTES = 256 << 10


class Tail:
    """What is committed to a topic, from a position on. Each tail has connections of its own.

    Args:
        since: offsets by partition. If it names all partitions up to its last one, those after it were added since, and
            begin with their first record. Otherwise partitions that it does not name begin with what is committed from
            now on.
    """

    def __init__(self, settings: ClientSettings, topic: str, topic_id: str, since: Mapping[int, int]) -> None:
        self._cluster = Cluster(settings)
        self._topic = topic
        self.moves: dict[int, Moves] = {}
        try:
            deadline = Deadline(_LOOK_S, f"looking for the end of topic {topic}")
            self._cluster.connect(deadline)
            info = self._cluster.topic(topic, deadline)
            info.check_same(topic_id)
            ends = list_offsets(self._cluster, {topic: sorted(info.leaders)}, LATEST, deadline)[topic]
            ahead = [partition for partition, offset in since.items() if offset > ends.get(partition, -1)]
            if ahead:
                raise Problem(
                    400,
                    f"The position is beyond the end of partition {ahead[0]}",
                    next_step="give a position of this topic; it may have been deleted and created again",
                )
            self._topic_id = topic_id
            named_all = since and since.keys() == set(range(len(since)))
            self.offsets = {partition: since.get(partition, 0 if named_all else end) for partition, end in ends.items()}
            self._looked_at = time.monotonic()
            self._poll = LongPoll(self._cluster, [info], {(topic, at): offset for at, offset in self.offsets.items()})
        except BaseException:
            self._cluster.close()
            raise

    def read(self) -> Iterator[tuple[int, Chunk]]:
        """What has been committed, chunk by chunk; waits a little if that is nothing."""
        if time.monotonic() - self._looked_at > _METADATA_S:
            self._add_partitions()
            self._looked_at = time.monotonic()
        for (_, partition), chunk in self._poll.poll(_POLL_S):
            yield partition, chunk

    def position(self) -> str:
        """Where it is."""
        return str(Position({self._topic: self.offsets}, {self._topic: self._topic_id}))

    def close(self) -> None:
        self._cluster.close()

    def _add_partitions(self) -> None:
        """Follow partitions that were added, from their first record on."""
        try:
            deadline = Deadline(_LOOK_S, f"looking up topic {self._topic}")
            info = self._cluster.topic(self._topic, deadline, fresh=True, leaderless=True)
        except (BrokerUnreachableError, DeadlineExceededError):
            return  # the next time
        info.check_same(self._topic_id)
        for partition in sorted(info.leaders.keys() - self.offsets.keys()):
            self.offsets[partition] = 0
            self._poll.add(self._topic, partition, 0)


async def changes_of(service: Service, served: Served, since: str | None, prefix: bytes, written: Format) -> Response:
    """A stream of events.

    Each change is an event ``change`` whose id is the position after it. An event ``position`` comes first, and from
    time to time, so that a client can continue even if nothing has changed.

    Args:
        since: where to begin, a position; None: with what is committed from now on.
        prefix: only keys that begin with it.
    """
    lease = service.begin_stream()
    try:
        tail, thread = await _tail(service, served, since)
    except BaseException:
        lease.close()
        raise
    lease.at_end(lambda: thread.shutdown(wait=False))
    lease.at_end(lambda: thread.submit(tail.close))  # the last one is the first one
    loop = asyncio.get_running_loop()

    async def events() -> AsyncIterator[bytes]:
        until = time.monotonic() + service.limits.stream_s
        try:
            yield _event("position", tail, {})
            told_at = time.monotonic()
            texts: Iterator[bytes] = iter(())
            while not service.stopping and time.monotonic() < until:
                text = await loop.run_in_executor(thread, next, texts, None)
                if text is None:  # all of a response
                    texts = _texts(tail, served.topic, prefix, written)
                    if time.monotonic() - told_at <= _ALIVE_S:
                        continue
                    text = _event("position", tail, {})
                told_at = time.monotonic()
                yield text
        except (OnceflowError, Problem) as error:
            problem = unavailable(error) if isinstance(error, OnceflowError) else error
            yield _event("problem", tail, problem.document())

    headers = {"Cache-Control": "no-store", "Onceflow-Position": tail.position()}
    return LeasedStream(lease, events(), headers, "text/event-stream")


async def _tail(service: Service, served: Served, since: str | None) -> tuple[Tail, ThreadPoolExecutor]:
    """What follows the topic, and the thread that does it: one of the shared threads would be taken from others for as
    long as the stream lasts."""
    topic_id = served.share.topic_id
    offsets, of_topic = ({}, "") if since is None else position_of("since", since, served.topic)
    if of_topic not in ("", topic_id):
        raise another_topic(served.topic)
    thread = ThreadPoolExecutor(1, f"onceflow-changes-{served.topic}")
    making = thread.submit(Tail, service.settings, served.topic, topic_id, offsets)
    try:
        return await asyncio.wrap_future(making), thread
    except BaseException as error:
        making.add_done_callback(_close_unused)
        thread.shutdown(wait=False)
        if isinstance(error, OnceflowError):
            raise unavailable(error) from error
        raise


def _close_unused(made: Future[Tail]) -> None:
    """The client has gone while the topic was looked up."""
    if not made.cancelled() and made.exception() is None:
        made.result().close()


def _texts(tail: Tail, topic: str, prefix: bytes, written: Format) -> Iterator[bytes]:
    """Events of what has been committed, some at a time: a response of a broker may have very many. It is called in the
    thread of the stream, because they may take seconds."""
    events, size = list[bytes](), 0
    for event in _events(tail, topic, prefix, written):
        events.append(event)
        size += len(event)
        if size >= _TEXT_BYTES:
            yield b"".join(events)
            events, size = [], 0
    if events:
        yield b"".join(events)


def _events(tail: Tail, topic: str, prefix: bytes, written: Format) -> Iterator[bytes]:
    for partition, chunk in tail.read():
        written.learn_now(chunk.values)
        columns = chunk.keys, chunk.values, chunk.offsets.tolist(), chunk.timestamps_ms.tolist()
        moves = tail.moves[partition] = tail.moves.get(partition, Moves()).after(len(chunk.keys), marks_of(chunk))
        for at, (key, value, offset, timestamp_ms) in enumerate(zip(*columns, strict=True)):
            if at in moves.still:  # a client does not continue in the middle: it would not know that rows only move
                continue
            tail.offsets[partition] = offset + 1
            if key is not None and key.startswith(prefix):
                more = {"partition": partition, "offset": offset, "timestamp_ms": known_ms(timestamp_ms)}
                yield _event("change", tail, {**written.item(key, value), **more})
        if not moves.moving:
            tail.offsets[partition] = chunk.next_offset


def _event(kind: str, tail: Tail, document: dict[str, Any]) -> bytes:
    return b"event: %s\nid: %s\ndata: %s\n\n" % (kind.encode(), tail.position().encode(), orjson.dumps(document))
