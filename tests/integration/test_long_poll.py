"""Following the committed records of partitions, as lists and as Arrow columns, against a real broker."""

from __future__ import annotations

import dataclasses
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import confluent_kafka
import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient

from onceflow import BrokerUnsupportedError, DeadlineExceededError, ProtocolError
from onceflow.client import holes, long_poll
from onceflow.client.cluster import Cluster
from onceflow.client.column_chunks import ColumnChunk, ColumnForm
from onceflow.client.committed import LISTS, CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.holes import is_hole
from onceflow.client.long_poll import LongPoll
from onceflow.client.offsets import earliest_local
from onceflow.client.settings import ClientSettings
from onceflow.protocol.record_columns import CREATE_TIME, LOG_APPEND_TIME
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

MakeTopic = Callable[..., str]
Row = tuple[int, bytes | None, bytes | None, int, list[tuple[str, bytes | None]]]
COLUMNS = ColumnForm(headers=True)
FORMS = pytest.mark.parametrize("form", [LISTS, COLUMNS], ids=["lists", "columns"])
PACKED = "zstd"


@pytest.fixture
def cluster(onceflow_broker: str) -> Iterator[Cluster]:
    cluster = Cluster(ClientSettings(onceflow_broker))
    cluster.connect(Deadline(30, "connecting"))
    yield cluster
    cluster.close()


def following(
    cluster: Cluster, topic: str, positions: dict[int, int], form: Any = COLUMNS, **more: Any
) -> LongPoll[Any]:
    info = cluster.topic(topic, Deadline(30, "looking up a topic"))
    return LongPoll(cluster, [info], {(topic, at): offset for at, offset in positions.items()}, form, **more)


def rows_of(chunk: Any) -> list[Row]:
    if not isinstance(chunk, ColumnChunk):
        columns = chunk.offsets.tolist(), chunk.keys, chunk.values, chunk.timestamps_ms.tolist()
        return [(*row, chunk.headers.get(at, [])) for at, row in enumerate(zip(*columns, strict=True))]
    records = chunk.records
    assert isinstance(records.keys, pa.BinaryArray)
    columns = (
        records.offsets.tolist(),
        records.keys.to_pylist(),
        records.values.to_pylist(),
        records.timestamps_ms.tolist(),
    )
    headers = [None] * len(chunk) if records.headers is None else records.headers.to_pylist()
    listed = [[(each["key"], each["value"]) for each in of_row or ()] for of_row in headers]
    return [(*row, each) for row, each in zip(zip(*columns, strict=True), listed, strict=True)]


def committed_rows(bootstrap: str, topic: str) -> dict[int, list[Row]]:
    """The same from another client."""
    found: dict[int, list[Row]] = {}
    for seen in independent.read_topic(bootstrap, topic, decided=True):
        row = seen.offset, seen.key, seen.value, seen.timestamp_ms, [*(seen.headers or ())]
        found.setdefault(seen.partition, []).append(row)
    return found


class Taken:
    """What a poll has returned, by partition."""

    def __init__(self, poll: LongPoll[Any]) -> None:
        self.poll = poll
        self.chunks: dict[int, list[Any]] = {}

    def once(self, timeout_s: float = 0.2) -> None:
        for (_, partition), chunk in self.poll.poll(timeout_s):
            assert self.poll.followed[self.poll_topic, partition].position == chunk.next_offset
            self.chunks.setdefault(partition, []).append(chunk)

    @property
    def poll_topic(self) -> str:
        return next(iter(self.poll.followed))[0]

    def until(self, ends: dict[int, int]) -> None:
        def reached() -> bool:
            self.once()
            return all(self.chunks.get(at, ()) and self.chunks[at][-1].next_offset >= end for at, end in ends.items())

        wait_until(reached, 30, f"{ends} are reached")

    def rows(self) -> dict[int, list[Row]]:
        return {at: [row for chunk in chunks for row in rows_of(chunk)] for at, chunks in self.chunks.items()}


@contextmanager
def transaction(bootstrap: str, name: str, *, commit: bool = True, **options: str) -> Iterator[Any]:
    given = {key.replace("_", "."): value for key, value in options.items()}
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "transactional.id": name, **given})
    producer.init_transactions(30)
    producer.begin_transaction()
    yield producer
    assert producer.flush(30) == 0
    if commit:
        producer.commit_transaction(30)
    else:
        producer.abort_transaction(30)


def fill_mixed(bootstrap: str, topic: str, partitions: int) -> None:
    """Small batches in all partitions: committed and aborted, packed and not, with and without keys and headers."""
    for n in range(6):
        options = {"compression_type": PACKED} if n % 3 == 1 else {}
        with transaction(bootstrap, f"{topic}-{n % 2}", commit=n % 2 == 0, linger_ms="0", **options) as producer:
            for row in range(60):
                key = None if row % 7 == 0 else b"k%d" % row
                value = None if row % 11 == 5 else b"%d of transaction %d" % (row, n) * (1 + row % 4)
                headers = [("h", b"x"), ("none", None)] if row % 5 == 0 else None
                producer.produce(topic, value, key, partition=row % partitions, headers=headers)
                if row % 20 == 19:
                    producer.flush(30)
        independent.fill(bootstrap, topic, [(b"plain", b"%d" % n)])


def ends_of(bootstrap: str, topic: str) -> dict[int, int]:
    ends = independent.end_offsets(bootstrap, topic, isolation="read_uncommitted")
    return {partition: end for (_, partition), end in ends.items() if end}


def delete_before(bootstrap: str, topic: str, offset: int) -> None:
    """Let the log of partition 0 begin there."""
    begin = confluent_kafka.TopicPartition(topic, 0, offset)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_records([begin])[begin].result(30)


@pytest.mark.long_but("2000-columns")
@FORMS
@pytest.mark.parametrize(
    "fetch_bytes", [pytest.param(1, marks=pytest.mark.long), 2000, pytest.param(8_000_000, marks=pytest.mark.long)]
)
def test_aborted_records_markers_and_small_responses(
    cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str, form: Any, fetch_bytes: int
) -> None:
    topic = make_topic("mixed", 3)
    fill_mixed(onceflow_broker, topic, 3)
    ends = ends_of(onceflow_broker, topic)
    expected = committed_rows(onceflow_broker, topic)
    assert not any(b"of transaction 1" in (row[2] or b"") for found in expected.values() for row in found)
    taken = Taken(following(cluster, topic, dict.fromkeys(ends, 0), form, fetch_bytes=fetch_bytes))
    taken.until(ends)
    assert taken.rows() == expected
    assert all(chunk.whole and chunk.expired_from is None for chunks in taken.chunks.values() for chunk in chunks)
    # From the middle of batches, too.
    for start in () if fetch_bytes == 1 else (1, 17):
        taken = Taken(following(cluster, topic, dict.fromkeys(ends, start), form, fetch_bytes=fetch_bytes))
        taken.until(ends)
        assert taken.rows() == {at: [row for row in found if row[0] >= start] for at, found in expected.items()}


def test_every_partition_has_its_turn(cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str) -> None:
    """With a backlog, the first partition of a request fills the response."""
    names = [make_topic("turns", partitions) for partitions in (4, 2)]
    for name in names:
        records: Any = [(b"k%d" % n, b"x" * 500) for n in range(600)]
        independent.fill(onceflow_broker, name, records, options={"batch.num.messages": 1})
    infos = cluster.topics(names, Deadline(30, "looking up topics"))
    places = {(name, n): 0 for name in names for n in range(infos[name].partitions)}
    poll = LongPoll(cluster, infos.values(), places, fetch_bytes=1_500)
    turns: list[Any] = []
    while len(turns) < 36:
        arrived = [place for place, _ in poll.poll(5)]
        assert arrived, "there is a backlog"
        turns += arrived
    for n in range(0, 36, 12):
        assert set(turns[n : n + 12]) == set(places), turns


@FORMS
def test_an_empty_response_is_a_hole_only_if_the_broker_has_the_place_on_its_disk(
    cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    """Records in remote storage may not have come (KIP-405). Faked: a slow remote storage is hard to have."""
    topic = make_topic("empty", 1)
    independent.fill(onceflow_broker, topic, [(b"k", b"v")] * 5)
    poll = following(cluster, topic, {0: 0}, form)
    looks, here = [], [False, False, True]
    monkeypatch.setattr(long_poll, "split_batches", lambda _: pytest.fail("there are no records"))

    def is_hole(*place: Any) -> bool:
        looks.append(place[1:4])
        return here[len(looks) - 1]

    def without_records(each: Any, answer: Any) -> Iterator[Any]:
        answer.records = None
        return given(each, answer)

    given = poll._records
    monkeypatch.setattr(long_poll, "is_hole", is_hole)
    monkeypatch.setattr(poll, "_records", without_records)
    taken = Taken(poll)
    taken.until({0: 5})
    assert looks == [(topic, 0, 0)] * 3
    (chunk,) = taken.chunks[0]
    assert (chunk.next_offset, chunk.whole, rows_of(chunk)) == (5, False, [])


def test_what_a_broker_has_on_its_disk(
    cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic("disk", 1)
    independent.fill(onceflow_broker, topic, [(b"k", b"v")] * 5)
    delete_before(onceflow_broker, topic, 3)
    deadline = Deadline(30, "asking")
    assert earliest_local(cluster, topic, 0, deadline) == 3
    assert [is_hole(cluster, topic, 0, offset, deadline) for offset in (2, 3, 4)] == [False, True, True]
    for error, found in ((DeadlineExceededError("no answer"), False), (BrokerUnsupportedError("Kafka 3.5"), True)):
        monkeypatch.setattr(holes, "earliest_local", Mock(side_effect=error))
        assert is_hole(cluster, topic, 0, 2, deadline) is found


@pytest.mark.long
def test_ranges_as_columns(cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str) -> None:
    topic = make_topic("ranges", 1)
    fill_mixed(onceflow_broker, topic, 1)
    (expected,) = committed_rows(onceflow_broker, topic).values()
    end = ends_of(onceflow_broker, topic)[0]
    for fetch_bytes in (1, 8_000_000):
        reader = CommittedReader(cluster, 30, fetch_bytes=fetch_bytes)
        for start, stop in [(0, end), (0, 7), (5, end - 1), (40, 41), *((at, at + 3) for at in range(0, end - 3, 60))]:
            chunks = list(reader.read_columns(topic, 0, start, stop, headers=True))
            assert chunks[-1].next_offset == stop
            assert [row for chunk in chunks for row in rows_of(chunk)] == [r for r in expected if start <= r[0] < stop]
    assert list(reader.read_columns(topic, 0, 5, 5)) == []
    without = list(reader.read_columns(topic, 0, 0, end))
    assert [chunk.records.headers for chunk in without] == [None] * len(without)
    assert sum(len(chunk) for chunk in without) == len(expected)


def test_the_time_of_appending(cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str) -> None:
    for kind, number in (("CreateTime", CREATE_TIME), ("LogAppendTime", LOG_APPEND_TIME)):
        topic = make_topic("stamped", 1, message_timestamp_type=kind)
        independent.fill(onceflow_broker, topic, [(b"k", b"v")] * 3)
        taken = Taken(following(cluster, topic, {0: 0}))
        taken.until({0: 3})
        (chunk,) = taken.chunks[0]
        assert chunk.records.timestamp_types.tolist() == [number] * 3
        assert taken.rows() == committed_rows(onceflow_broker, topic)


@FORMS
def test_expired_records_are_told_from_removed_ones(
    cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str, form: Any
) -> None:
    topic = make_topic("aged", 1)
    independent.fill(onceflow_broker, topic, [(b"k%d" % n, b"v") for n in range(10)])
    delete_before(onceflow_broker, topic, 4)
    taken = Taken(following(cluster, topic, {0: 1}, form))
    taken.until({0: 10})
    first, *rest = taken.chunks[0]
    assert (first.expired_from, first.next_offset, first.whole, rows_of(first)) == (1, 4, False, [])
    assert [(chunk.expired_from, chunk.whole) for chunk in rest] == [(None, True)] * len(rest)
    assert [row[1] for row in taken.rows()[0]] == [b"k%d" % n for n in range(4, 10)]
    reader = CommittedReader(cluster, 30)
    read: Any = reader.read_columns if form is COLUMNS else reader.read
    first, *rest = read(topic, 0, 2, 8)
    assert (first.expired_from, first.next_offset, first.whole, rows_of(first)) == (2, 4, False, [])
    assert [row[0] for chunk in rest for row in rows_of(chunk)] == [4, 5, 6, 7]
    (only,) = read(topic, 0, 0, 3)
    assert (only.expired_from, only.next_offset, rows_of(only)) == (0, 3, [])


def test_requests_are_sent_without_waiting(cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str) -> None:
    """The response is there before the next poll, although nothing runs in this process."""
    topic = make_topic("sent", 1)
    independent.fill(onceflow_broker, topic, [(b"k", b"1")])
    poll = following(cluster, topic, {0: 0})
    taken = Taken(poll)
    taken.until({0: 1})
    assert not poll.followed[topic, 0].asked
    independent.fill(onceflow_broker, topic, [(b"k", b"2")])
    poll.send()
    assert poll.followed[topic, 0].asked
    node = cluster.topic(topic, Deadline(10, "a leader")).leaders[0]
    has_arrived = bool(poll._results)  # while the request was sent
    has_arrived = has_arrived or bool(select.select([cluster.manager._conns[node].transport._sock], [], [], 10)[0])
    assert has_arrived
    poll.send()  # it is in flight: nothing more is sent
    taken.once(0)
    assert [row[2] for row in taken.rows()[0]] == [b"1", b"2"]


@pytest.mark.long
def test_a_request_is_sent_only_behind_what_was_taken(
    cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str
) -> None:
    """Also if the caller sends in the middle of a poll, or leaves it."""
    topic = make_topic("taken", 3)
    fill_mixed(onceflow_broker, topic, 3)
    ends, expected = ends_of(onceflow_broker, topic), committed_rows(onceflow_broker, topic)
    poll = following(cluster, topic, dict.fromkeys(ends, 0), fetch_bytes=3000)
    found: dict[int, list[Row]] = {}

    def read() -> bool:
        for (_, partition), chunk in poll.poll(0.2):
            found.setdefault(partition, []).extend(rows_of(chunk))
            poll.send()
            if len(found[partition]) % 3 == 0:
                break
        poll.send()
        return all(poll.followed[topic, at].position >= end for at, end in ends.items())

    wait_until(read, 30, "all is read")
    assert found == expected


@FORMS
def test_paused_partitions(cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str, form: Any) -> None:
    topic = make_topic("paused", 2)
    poll = following(cluster, topic, {0: 0, 1: 0}, form)
    taken = Taken(poll)
    for partition in (0, 1):
        poll.pause(topic, partition)
    taken.once(0)
    producer = confluent_kafka.Producer({"bootstrap.servers": onceflow_broker})
    for partition in (0, 1):
        producer.produce(topic, b"v", b"k", partition=partition)
    assert producer.flush(30) == 0
    for _ in range(3):
        taken.once(0.1)
    assert taken.chunks == {}
    poll.resume(topic, 1)
    taken.until({1: 1})
    assert 0 not in taken.chunks
    poll.seek(topic, 0, 0)  # it stays paused
    taken.once(0.1)
    assert 0 not in taken.chunks
    poll.resume(topic, 0)
    taken.until({0: 1})
    assert taken.rows().keys() == {0, 1}


def test_other_positions_and_fewer_partitions(cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str) -> None:
    topic = make_topic("sought", 2)
    pairs = [(b"k%d" % n, b"v%d" % n) for n in range(40)]
    independent.fill(onceflow_broker, topic, pairs)
    ends, expected = ends_of(onceflow_broker, topic), committed_rows(onceflow_broker, topic)
    poll = following(cluster, topic, dict.fromkeys(ends, 0))
    taken = Taken(poll)
    poll.send()
    poll.seek(topic, 0, 2)  # while a request is in flight
    poll.remove(topic, 1)
    taken.until({0: ends[0]})
    assert taken.rows() == {0: expected[0][2:]}
    poll.seek(topic, 0, 1)  # back
    poll.add(topic, 1, 3)
    taken.chunks.clear()
    taken.until(ends)
    assert taken.rows() == {0: expected[0][1:], 1: expected[1][3:]}
    taken.chunks.clear()
    poll.seek(topic, 0, 0)
    poll.seek(topic, 1, 0)

    def stopped() -> bool:
        for (_, partition), _ in poll.poll(0.2):
            poll.seek(topic, 1 - partition, ends[1 - partition])  # what is left of this response is not wanted
            return True
        return False

    wait_until(stopped, 20, "a chunk is returned")
    taken.once()
    assert all(not rows for rows in taken.rows().values())


@FORMS
def test_damage_names_the_partition_and_can_be_passed(
    cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic("damaged", 2)
    independent.fill(onceflow_broker, topic, [(b"k%d" % n, b"v%d" % n) for n in range(40)])
    ends, expected = ends_of(onceflow_broker, topic), committed_rows(onceflow_broker, topic)
    split, damaged = long_poll.split_batches, True

    def split_damaged(data: Any) -> Any:
        for raw in split(data):
            first = expected[1][0][1]
            hurt = damaged and first is not None and first in raw.data[raw.start : raw.end]
            yield dataclasses.replace(raw, count=raw.count - 1) if hurt else raw

    monkeypatch.setattr(long_poll, "split_batches", split_damaged)
    poll = following(cluster, topic, dict.fromkeys(ends, 0), form)
    taken = Taken(poll)
    with pytest.raises(ProtocolError, match="does not follow the format") as caught:
        taken.until(ends)
    assert caught.value.topic == f"{topic}-1"
    damaged = False
    taken.until(ends)
    assert taken.rows() == expected


@pytest.mark.long
def test_a_response_that_nobody_reads_in_time_is_no_fault_of_the_broker(
    cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch takes longer than a request may. Then kafka-python reads a part of the response, and gives it up."""
    monkeypatch.setattr(long_poll, "REQUEST_TIMEOUT_MS", 400)
    monkeypatch.setattr(long_poll, "REQUEST_TIMEOUT_MS", 400)
    topic = make_topic(partitions=1)
    independent.fill(onceflow_broker, topic, [(b"%d" % n, b"x" * 900_000) for n in range(8)])
    poll = following(cluster, topic, {0: 0}, fetch_bytes=8_000_000)
    taken = Taken(poll)
    for _ in range(3):
        poll.send()
        time.sleep(0.6)  # the batch
        taken.once(0.0)
        assert poll.followed[topic, 0].attempt == 0
    taken.until({0: 8})
    assert len(taken.rows()[0]) == 8
