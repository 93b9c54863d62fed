"""Logs in memory for the loop of the direct engine: the connections are replaced, the rest is as in production."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from onceflow import (
    DeadlineExceededError,
)
from onceflow.client.cluster import TopicInfo
from onceflow.client.column_chunks import ColumnChunk
from onceflow.client.followed import Followed
from onceflow.client.offsets import EARLIEST
from onceflow.client.settings import ClientSettings
from onceflow.direct import source_reader
from onceflow.direct.backlog import Backlog
from onceflow.direct.fetched import FetchedPart
from onceflow.direct.loop import DirectLoop
from onceflow.direct.source_reader import SourceReader
from onceflow.driver.batch.driver_program import DriverProgram
from onceflow.driver.batch.fetched_rows import FetchedRows
from onceflow.driver.batch.range_rows import RangeRows
from onceflow.driver.record.offset_log import SourceRange
from onceflow.errors import FencedError
from onceflow.planning.engine import DRIVER, TASKS
from onceflow.planning.options import BatchSummary
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.progress import Progress
from onceflow.protocol.record_columns import RecordColumns
from onceflow.spark.row_program import RowPrograms
from onceflow.task.source_rows import QueryRows
from onceflow.task.task_program import TaskProgram, TopicProgram, TopicRead

TOPIC = "in"


@dataclass
class Logs:
    """The partitions of the topic: where each begins and ends. Every offset has a record, but for those that were
    aborted."""

    ends: dict[int, int]
    begins: dict[int, int] = field(default_factory=dict)
    aborted: set[tuple[int, int]] = field(default_factory=set)
    most: Callable[[], int] = lambda: 10**9  # so many records are in the next response
    on_poll: Callable[[], None] = lambda: None
    topic_id: str = "id"
    unreachable: bool = False
    silent: set[int] = field(default_factory=set)  # the leaders of these do not answer
    leaderless: set[int] = field(default_factory=set)

    def records(self, partition: int, start: int, end: int) -> list[int]:
        return [offset for offset in range(start, end) if (partition, offset) not in self.aborted]


class Poll:
    """In the place of `LongPoll`: it follows the logs."""

    is_stale = False

    def __init__(self, logs: Logs, positions: Mapping[TopicPartition, int]) -> None:
        self._logs = logs
        self.followed: dict[TopicPartition, Followed] = {}
        for (topic, partition), position in positions.items():
            self.add(topic, partition, position)

    def add(self, topic: str, partition: int, position: int) -> None:
        self.followed[topic, partition] = Followed(topic, partition, position)

    def seek(self, topic: str, partition: int, position: int) -> None:
        paused = self.followed[topic, partition].paused
        self.followed[topic, partition] = Followed(topic, partition, position, paused=paused)

    def pause(self, topic: str, partition: int) -> None:
        self.followed[topic, partition].paused = True

    def resume(self, topic: str, partition: int) -> None:
        self.followed[topic, partition].paused = False

    def send(self) -> None:
        pass

    def poll(self, timeout_s: float) -> Iterator[tuple[TopicPartition, ColumnChunk]]:
        self._logs.on_poll()
        for (topic, partition), each in list(self.followed.items()):
            each.attempt = int(partition in self._logs.leaderless)
            if each.paused or each.attempt:
                continue
            start, begin, end = each.position, self._logs.begins.get(partition, 0), self._logs.ends[partition]
            each.last_stable_offset, each.known_at = end, time.monotonic()
            if start < begin:
                each.position = begin
                yield (topic, partition), chunk([], begin, expired_from=start)
            elif start < end:
                each.position = min(end, start + self._logs.most())
                yield (topic, partition), chunk(self._logs.records(partition, start, each.position), each.position)


def chunk(offsets: list[int], end: int, *, expired_from: int | None = None) -> ColumnChunk:
    """The value of a record is its offset."""
    values, stamps = pa.array([b"%d" % offset for offset in offsets], pa.binary()), np.array(offsets, np.int64)
    records = RecordColumns(values, values, stamps, stamps, np.zeros(len(offsets), np.int32))
    return ColumnChunk(records, end, True, expired_from, 10 * len(offsets))


@pytest.fixture
def reader_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SourceReader]:
    """``reader_of(logs, {0: 5})``: a reader of the logs, from these offsets on."""

    def make(
        logs: Logs, starts: dict[int, int], *, fail_on_data_loss: bool = True, most: int | None = None, was: str = "id"
    ) -> SourceReader:
        def ends(_: Any, wanted: Mapping[str, list[int]], at: int, *rest: Any) -> dict[str, dict[int, int]]:
            if logs.unreachable or logs.silent & {*wanted[TOPIC]}:
                raise DeadlineExceededError("nobody answers", next_step="wait")
            found = logs.begins if at == EARLIEST else logs.ends
            return {TOPIC: {partition: found.get(partition, 0) for partition in wanted[TOPIC]}}

        class Cluster:
            def __init__(self, *_: Any, **__: Any) -> None: ...
            def connect(self, deadline: Any) -> None: ...
            def known_topic(self, name: str) -> TopicInfo:
                leaders = {n: 2 if n in logs.silent else 1 for n in logs.ends}
                return TopicInfo(name, "id", {**leaders, **dict.fromkeys(logs.leaderless, -1)})

            def close(self) -> None: ...
            def topics(self, names: Any, deadline: Any, **_: Any) -> dict[str, TopicInfo]:
                return {TOPIC: TopicInfo(TOPIC, logs.topic_id, dict.fromkeys(logs.ends, 1))}

        monkeypatch.setattr(source_reader, "Cluster", Cluster)
        monkeypatch.setattr(source_reader, "LongPoll", lambda cluster, topics, positions, **_: Poll(logs, positions))
        monkeypatch.setattr(source_reader, "list_offsets", ends)
        read = TopicRead(TOPIC, include_headers=False, fail_on_data_loss=fail_on_data_loss, max_records=most)
        return SourceReader(
            ClientSettings("nowhere:1"), {TOPIC: read}, {TOPIC: starts}, topic_ids={TOPIC: was}, flow="copy"
        )

    return make


_READ = TopicRead(TOPIC, include_headers=False, fail_on_data_loss=True, max_records=None)


QUERY = QueryRows(TaskProgram((TopicProgram(_READ),), ("value",)))


def offsets_of(parts: Any) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for each in parts:
        assert isinstance(each, FetchedPart)
        for rows in each.rows(QUERY):
            found.setdefault(each.topic_partition[1], []).extend(
                int(value) for value in rows.column("value").to_pylist()
            )
    return found


class Written:
    """In the place of `DirectBatches`: what batches have taken, and who has read it."""

    flow, stopping, idle, guarantee, timers_s = "copy", False, False, "at_most_once", 0.0

    def __init__(self, logs: Logs, starts: dict[int, int]) -> None:
        self._logs = logs
        self.progress = Progress(self.flow, -1, {TOPIC: dict(starts)}, {}, 0)
        self.records: dict[int, list[int]] = {partition: [] for partition in logs.ends}
        self.ways: list[str] = []
        self.sizes: list[int] = []
        self.settled: list[int] = []
        self.failure: BaseException | None = None
        self.taken_over: FencedError | None = None
        self.before: Callable[[SourceRange], None] = lambda source: None
        self.held_back: Callable[[], Callable[[int], bool] | None] = lambda: None
        self.more: list[set[int]] = []
        self.history: list[BatchSummary] = []
        self.summary: BatchSummary | None = None

    def __call__(
        self, rows: Any, source: SourceRange, *, backlog: bool, caught_up: Mapping[TopicPartition, float]
    ) -> None:
        self.before(source)
        self.more.append({partition for (_, partition), known in caught_up.items() if known == -math.inf})
        assert source.start[TOPIC].items() >= self.progress.offsets[TOPIC].items(), "I2"
        if isinstance(rows, RangeRows):
            assert rows.range == source
            taken = {p: self._logs.records(p, start, end) for _, p, start, end in source.ranges()}
        else:
            assert isinstance(rows, FetchedRows)
            taken = offsets_of(rows.parts)
        for partition, offsets in taken.items():
            self.records[partition] += offsets
        seconds = {"write": 0.0, "end": 0.0}
        if isinstance(rows, FetchedRows) and rows.meanwhile is not None:
            started = time.monotonic()
            rows.meanwhile()
            seconds["end"] = time.monotonic() - started
        self.summary = BatchSummary(self.progress.batch_id + 1, 0, read=source.by_topic(), seconds=seconds)
        self.history += [self.summary, BatchSummary(self.progress.batch_id + 1, 0)]  # timers that were left
        self.ways.append(type(rows).__name__)
        self.sizes.append(source.max_rows)
        self.progress = replace(self.progress, batch_id=self.progress.batch_id + 1, offsets=source.end)

    def wants_batch(self, source: SourceRange, caught_up: Mapping[TopicPartition, float]) -> bool:
        return source.max_rows > 0

    def failed(self, error: BaseException) -> None:
        self.failure = error

    def settle_copies(self) -> None:
        self.settled.append(self.progress.batch_id)


class ByRecords(Backlog):
    """Tasks read while more records than this are left."""

    def __init__(self, rows_max: int) -> None:
        super().__init__("copy", TASKS if rows_max == 0 else DRIVER)
        self._most = rows_max
        self._driver_until = float("-inf")

    def looked(self, left: int, *, now: float) -> None:
        if not self._most:
            super().looked(left, now=now)
        elif now >= self._driver_until:
            self.by_tasks = left > self._most or (self.by_tasks and left > self._most // 2)

    def give_back(self, why: str, *, now: float, pause_s: float = 30.0) -> None:
        super().give_back(why, now=now, pause_s=pause_s)
        self._driver_until = now + pause_s


def loop_of(
    written: Written,
    reader: SourceReader,
    rows_max: int,
    *,
    most: int,
    until: dict[int, int],
    trigger_s: float = 0.0,
    ends: bool = True,
) -> DirectLoop:
    backlog = ByRecords(rows_max)
    batches: Any = written
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(setJobGroup=lambda *_, **__: None, _jsc=object()))
    tasks: Any = SimpleNamespace(spark=spark, program=DriverProgram(QUERY), all_batches=False)
    return DirectLoop(
        batches,
        reader,
        spark=spark,
        trigger_s=trigger_s,
        records_per_batch={TOPIC: most},
        until={TOPIC: until} if ends else None,
        backlog=backlog,
        tasks=tasks,
        programs=RowPrograms(spark),
    )
