"""A limited topic with a backlog: all partitions are read at the same pace, and the other sources are still heard."""

from __future__ import annotations

import contextvars
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from onceflow.client.column_chunks import ColumnChunk
from onceflow.direct.source_reader import BUFFER_BYTES, FETCH_BYTES, SourceReader
from onceflow.driver.record.offset_log import SourceRange
from onceflow.protocol.names import TopicPartition

sys.path.insert(0, str(Path(__file__).parent))
try:
    from direct_logs import TOPIC, Logs, Poll, Written, chunk, loop_of, reader_of
finally:
    sys.path.pop(0)

__all__ = ["reader_of"]  # a fixture
RECORD_BYTES = 2_000  # as much as a record takes in a response


class Rotating(Poll):
    """A response has room for so many bytes. Partitions that have returned records are asked for last the next time."""

    partition_bytes: int | None = None

    def __init__(self, logs: Logs, positions: Mapping[TopicPartition, int], inflated: int) -> None:
        super().__init__(logs, positions)
        self._inflated = inflated  # so many times larger records are when they are not compressed any more

    def poll(self, timeout_s: float) -> Iterator[tuple[TopicPartition, ColumnChunk]]:
        self._logs.on_poll()
        room = FETCH_BYTES // RECORD_BYTES
        most = min(room, (self.partition_bytes or FETCH_BYTES) // RECORD_BYTES)
        for (topic, partition), each in list(self.followed.items()):
            if each.paused:
                continue
            each.last_stable_offset, each.known_at = self._logs.ends[partition], time.monotonic()
            start = each.position
            each.position = end = min(self._logs.ends[partition], start + min(room, most))
            if end > start:
                room -= end - start
                self.followed[topic, partition] = self.followed.pop((topic, partition))
                found = chunk(self._logs.records(partition, start, end), end)
                size = (end - start) * RECORD_BYTES * self._inflated
                yield (topic, partition), ColumnChunk(found.records, end, True, None, size)


def rotating(reader: SourceReader, logs: Logs, starts: dict[int, int], inflated: int) -> SourceReader:
    reader._poll = Rotating(logs, {(TOPIC, n): at for n, at in starts.items()}, inflated)  # type: ignore[assignment]
    return reader


@pytest.mark.long_but("100-50-4")
@pytest.mark.parametrize("partitions, most, inflated", [(2, 1, 4), (9, 500, 4), (64, 500, 1), (100, 50, 4)])
def test_all_partitions_are_read_at_the_same_pace(
    reader_of: Callable[..., SourceReader],
    monkeypatch: pytest.MonkeyPatch,
    partitions: int,
    most: int,
    inflated: int,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    logs, starts = Logs(dict.fromkeys(range(partitions), 10**9)), dict.fromkeys(range(partitions), 0)
    written = Written(logs, starts)
    reader = rotating(reader_of(logs, starts, most=most), logs, starts, inflated)
    loop = loop_of(written, reader, 10**15, most=most, until={}, ends=False)
    waiting, looked = [0], [0.0]
    logs.on_poll = lambda: looked.append(now[0])

    def ran(source: SourceRange) -> None:
        now[0] += 0.1
        waiting.append(reader.arrivals.nbytes)
        if len(waiting) > 100:
            loop.stop()

    written.before = ran
    contextvars.copy_context().run(loop._run)  # it says for which flow it works
    assert loop.error is None
    ends = list(written.progress.offsets[TOPIC].values())
    assert sum(ends) >= 95 * most
    assert min(ends) >= 0.7 * sum(ends) / partitions
    assert max(waiting) <= BUFFER_BYTES // 2 + FETCH_BYTES * inflated
    assert max(later - before for before, later in itertools.pairwise(looked)) <= 1.0, "nobody is heard"


def test_silent_partitions_do_not_hold_up_the_others(
    reader_of: Callable[..., SourceReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request for them alone would be answered only when they have something."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    logs, starts = Logs({0: 10**6, 1: 0, 2: 0}), dict.fromkeys(range(3), 0)
    reader = rotating(reader_of(logs, starts, most=500), logs, starts, 1)
    asked: list[set[int]] = []
    for _ in range(20):
        now[0] += 0.1
        reader.fetch(0)
        asked.append({n for (_, n), each in reader._poll.followed.items() if not each.paused})
    assert sum(partitions == {1, 2} for partitions in asked) in (3, 4), "every half second"
    assert sum(not partitions for partitions in asked) >= 14
