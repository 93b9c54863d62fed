"""What a write task does with rows: routes them, numbers them, hands them on, keeps nothing, reports."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from kafka.partitioner.default import murmur2
from kafka.record.memory_records import MemoryRecords

from onceflow import hooks
from onceflow.client.cluster import TopicInfo
from onceflow.client.produce import Acknowledged
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import TopicLimits
from onceflow.clock import clock_ms
from onceflow.errors import BadRecordError, BatchAbortedError, FencedError, ProtocolError, UnknownTopicError
from onceflow.messages import REPORT_SCHEMA, OutputTopic, Report, Routing, TaskInfo, WriteOrder, from_rows
from onceflow.protocol.batches import EncodedBatch, ProducerIdAndEpoch
from onceflow.protocol.timestamps import ANY_TIME, AcceptedTimes
from onceflow.task import row_writer
from onceflow.task.row_writer import RowWriter, WriteTask, owner_of
from onceflow.testing import faults

PRODUCER = ProducerIdAndEpoch(producer_id=4711, producer_epoch=3)
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@dataclass(frozen=True)
class Sent:
    topic: str
    partition: int
    base_sequence: int
    count: int
    rows: list[tuple[bytes | None, bytes | None]]
    records: list[Any]  # as kafka-python parses them


@dataclass
class Recorder:
    """Stands for ``Producer``: decodes what it gets and forgets the bytes."""

    sent: list[Sent] = field(default_factory=list)
    alive: list[weakref.ref[memoryview]] = field(default_factory=list)
    made: list[dict[str, Any]] = field(default_factory=list)
    flushed: int = 0
    error: Exception | None = None

    def __call__(self, cluster: Any, **arguments: Any) -> Recorder:
        self.made.append({"cluster": cluster, **arguments})
        return self

    def send(self, topic: str, partition: int, batch: EncodedBatch) -> None:
        if self.error is not None:
            raise self.error
        parsed = MemoryRecords(batch.head + bytes(batch.body)).next_batch()
        assert parsed.validate_crc()
        assert (parsed.producer_id, parsed.producer_epoch, parsed.is_transactional) == (4711, 3, True)
        records = list(parsed)
        assert len(records) == batch.count
        rows = [(r.key, r.value) for r in records]
        self.alive.append(weakref.ref(batch.body))
        self.sent.append(Sent(topic, partition, parsed.base_sequence, batch.count, rows, records))

    def flush(self) -> dict[tuple[str, int], Acknowledged]:
        self.flushed += 1
        done: dict[tuple[str, int], Acknowledged] = {}
        for one in self.sent:
            place = done.setdefault((one.topic, one.partition), Acknowledged(base_offset=50))
            place.count += one.count
            place.nbytes += 100
        return done

    def rows(self) -> dict[tuple[str, int], list[tuple[bytes | None, bytes | None]]]:
        found: dict[tuple[str, int], list[tuple[bytes | None, bytes | None]]] = defaultdict(list)
        for one in self.sent:
            found[one.topic, one.partition] += one.rows
        return dict(found)

    def values(self) -> dict[tuple[str, int], list[bytes | None]]:
        return {place: [value for _, value in rows] for place, rows in self.rows().items()}


class FakeCluster:
    """Knows one topic, ``late``, that the driver did not."""

    transaction_version = 2

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []

    def topic(self, name: str, deadline: Any, *, fresh: bool = False, patient: bool = False) -> TopicInfo:
        self.asked.append((name, fresh))
        if name != "late":
            raise UnknownTopicError(f"Topic {name!r} does not exist", topic=name)
        return TopicInfo(name, "id", dict.fromkeys(range(7), 1))

    def topics(self, names: None, deadline: Any) -> dict[str, TopicInfo]:
        return {"late": TopicInfo("late", "id", {})}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(row_writer, "Producer", made)
    limits = TopicLimits(2_000, ANY_TIME)
    monkeypatch.setattr(row_writer, "topic_limits", lambda _cluster, names, _deadline: dict.fromkeys(names, limits))
    return made


ORDER = WriteOrder(
    transaction_version=2,
    flow="orders",
    batch=8,
    settings=ClientSettings("h:9092"),
    transactional_id="onceflow.orders",
    producer=PRODUCER,
    compression="none",
    topic="out",
    targets={"out": OutputTopic(4, 1_000_000)},
    routing=Routing("key", tasks=1, hash_key=False),
    deadline_s=30.0,
)
BY_KEY = Routing("key", tasks=1, hash_key=True)


def writer(task: int = 0, cluster: Any = None, **changes: Any) -> RowWriter:
    return RowWriter(replace(ORDER, **changes), TaskInfo("task", task, 0), cluster or FakeCluster())


def rows(partitions: list[int | None] | None = None, first: int = 0, **columns: Any) -> pa.RecordBatch:
    """``value`` counts up from ``first``; ``columns`` as lists."""
    kinds = {"key": pa.binary(), "topic": pa.string(), "timestamp": pa.int64(), "headers": HEADERS}
    count = len(partitions) if partitions is not None else len(next(iter(columns.values())))
    arrays: dict[str, Any] = {"value": pa.array([b"%d" % n for n in range(first, first + count)], pa.binary())}
    for name, given in columns.items():
        arrays[name] = pa.array(given, kinds.get(name, pa.int32()))
    if partitions is not None:
        arrays["partition"] = pa.array(partitions, pa.int32())
    return pa.RecordBatch.from_pydict(arrays)


def numbers(*given: int) -> list[bytes]:
    return [b"%d" % n for n in given]


def assert_sequences(sent: list[Sent]) -> None:
    """I4: from 0, without a gap, per partition."""
    expected: dict[tuple[str, int], int] = defaultdict(int)
    for one in sent:
        assert one.base_sequence == expected[one.topic, one.partition]
        expected[one.topic, one.partition] += one.count


# ---- one topic ---------------------------------------------------------------------------------------


def test_rows_go_to_their_partition_in_order(recorder: Recorder) -> None:
    write = writer()
    write.write(rows([2, 0, 2, 1, 0]))
    write.write(rows([0, 0], first=5))
    assert recorder.values() == {
        ("out", 0): numbers(1, 4, 5, 6),
        ("out", 1): numbers(3),
        ("out", 2): numbers(0, 2),
    }
    assert_sequences(recorder.sent)
    assert write.rows == 7


def test_one_partition_takes_the_rows_as_they_are(recorder: Recorder) -> None:
    writer().write(rows([3, 3, 3]))
    assert recorder.values() == {("out", 3): numbers(0, 1, 2)}


def test_all_columns_arrive(recorder: Recorder) -> None:
    batch = rows(
        [0, 0],
        key=[b"k", None],
        timestamp=[1_700_000_000_000, 1_700_000_000_500],
        headers=[[{"key": "h", "value": b"x"}, {"key": "n", "value": None}], None],
    )
    writer().write(batch)
    first, second = recorder.sent[0].records
    assert (first.key, first.value, first.timestamp) == (b"k", b"0", 1_700_000_000_000)
    assert first.headers == [("h", b"x"), ("n", None)]
    assert (second.key, second.value, second.timestamp, second.headers) == (None, b"1", 1_700_000_000_500, [])


def test_rows_without_key_and_timestamp(recorder: Recorder) -> None:
    writer().write(rows([0]))
    assert recorder.rows() == {("out", 0): [(None, b"0")]}
    assert recorder.sent[0].records[0].timestamp > 1_700_000_000_000


def test_timestamps_that_the_topic_refuses(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    """They take the time of writing, so that no record stops the flow, and the header has their own."""
    now = clock_ms()
    times = [now, now + 7_200_000, now * 1000, 2**63 - 1, 5, -1, None]
    headers: list[Any] = [None, [{"key": "h", "value": b"x"}], *[None] * 5]
    write = writer(targets={"out": OutputTopic(4, 1_000_000, AcceptedTimes(86_400_000, 3_600_000))})
    write.write(rows([0] * 7, timestamp=times, headers=headers))
    write.write(rows([1], timestamp=[now + 7_200_000]))
    assert caplog.text.count("topic out does not accept the timestamps of 4 records") == 1
    assert len(caplog.records) == 1, "once a minute"
    found = recorder.sent[0].records
    assert found[0].timestamp == now
    assert found[0].headers == []
    assert all(now <= record.timestamp <= clock_ms() for record in found[1:])
    assert [dict(record.headers).get("onceflow.timestamp") for record in found] == [
        None,
        b"%d" % (now + 7_200_000),
        b"%d" % (now * 1000),
        b"%d" % (2**63 - 1),
        b"5",
        None,
        None,
    ]
    assert found[1].headers[0] == ("h", b"x")
    assert [record.value for record in found] == numbers(*range(7))


def test_a_topic_that_accepts_every_timestamp(recorder: Recorder) -> None:
    writer().write(rows([0, 0], timestamp=[5, 4_070_908_800_000]))
    assert [record.timestamp for record in recorder.sent[0].records] == [5, 4_070_908_800_000]


def test_sequences_over_many_batches(recorder: Recorder) -> None:
    write = writer(targets={"out": OutputTopic(3, 300)})
    for step in range(20):
        write.write(rows([n % 3 for n in range(90)], first=90 * step))
    assert len(recorder.sent) > 60, "the size limit did not split anything"
    assert_sequences(recorder.sent)
    for place, values in recorder.values().items():
        assert values == numbers(*range(place[1], 1800, 3))


def test_a_batch_without_rows(recorder: Recorder) -> None:
    write = writer()
    write.write(rows([]))
    assert (write.rows, write.finish(), recorder.made) == (0, {}, [])


def test_the_producer_is_made_once_with_the_flows_identity(recorder: Recorder) -> None:
    cluster = FakeCluster()
    write = writer(cluster=cluster)
    assert recorder.made == [], "a task without rows needs no connection"
    write.write(rows([0]))
    write.write(rows([1]))
    (made,) = recorder.made
    assert (made["cluster"], made["transactional_id"]) == (cluster, "onceflow.orders")
    assert made["deadline"].seconds == 30.0
    assert "batch 8 of flow orders" in made["deadline"].what


def test_finish_waits_and_tells(recorder: Recorder) -> None:
    write = writer()
    write.write(rows([0, 1, 1]))
    assert recorder.flushed == 0
    assert write.finish() == {("out", 0): Acknowledged(50, 1, 100), ("out", 1): Acknowledged(50, 2, 100)}
    assert recorder.flushed == 1


@pytest.mark.parametrize(
    "partitions, asked, wrong",
    [([0, 4], 4, 1), ([-1, 2], -1, 1), ([-3, None], -3, 1), ([1, 1000, 2, 4], 1000, 2), ([2**31 - 1], 2**31 - 1, 1)],
)
@pytest.mark.parametrize("routing", [BY_KEY, ORDER.routing], ids=["keys", "no keys"])
def test_partition_that_does_not_exist(
    recorder: Recorder, routing: Routing, partitions: list[int | None], asked: int, wrong: int
) -> None:
    with pytest.raises(BadRecordError, match=f"asks for partition {asked} of topic out") as caught:
        writer(routing=routing).write(rows(partitions, key=[b"k"] * len(partitions)))
    assert (caught.value.flow, caught.value.batch, caught.value.topic) == ("orders", 8, "out")
    assert f"{wrong} row" in caught.value.detail
    assert "partitions 0 to 3" in caught.value.detail
    assert recorder.sent == [], "nothing of a bad batch is sent"


@pytest.mark.parametrize("routing", [Routing("key", 8, False), Routing("key", 8, True)], ids=["no keys", "null keys"])
def test_partition_that_does_not_exist_in_a_task_that_owns_none(recorder: Recorder, routing: Routing) -> None:
    """The shuffle brings such a row anywhere; the user must hear of the row, not of a bug."""
    write = writer(owner_of("a", 5, 8), topic=None, targets={"a": OutputTopic(2, 1_000_000)}, routing=routing)
    with pytest.raises(BadRecordError, match="asks for partition 5 of topic a"):
        write.write(rows([5], key=[None], topic=["a"]))


def java_partition(key: bytes, count: int) -> int:
    return int(murmur2(key) & 0x7FFF_FFFF) % count


def test_keys_decide_as_in_java(recorder: Recorder) -> None:
    keys = [f"key-{n}".encode() for n in range(40)]
    writer(routing=BY_KEY).write(rows(key=keys))
    for (_, partition), found in recorder.rows().items():
        assert {java_partition(key, 4) for key, _ in found if key is not None} == {partition}
    assert sum(len(found) for found in recorder.rows().values()) == 40
    assert_sequences(recorder.sent)


def test_keys_do_not_decide_when_they_are_not_to(recorder: Recorder) -> None:
    writer().write(rows(key=[f"key-{n}".encode() for n in range(40)]))
    assert len(recorder.sent) == 1


def test_partition_column_goes_before_the_key(recorder: Recorder) -> None:
    """Where it is null the key decides; without either, any partition that the task owns."""
    elsewhere = (java_partition(b"a", 4) + 1) % 4
    writer(routing=BY_KEY).write(rows([elsewhere, None, None], key=[b"a", b"a", None]))
    found = recorder.values()
    assert b"0" in found["out", elsewhere]
    assert b"1" in found["out", java_partition(b"a", 4)]
    assert sorted(v for values in found.values() for v in values if v) == numbers(0, 1, 2)


def test_null_keys_stay_with_the_task(recorder: Recorder) -> None:
    """The shuffle has brought them here: any other partition has another writer."""
    for batch in range(8):
        writer(2, batch=batch, targets={"out": OutputTopic(12, 1_000)}, routing=Routing("key", 5, True)).write(
            rows(key=[None, None])
        )
    assert {one.partition for one in recorder.sent} == {2, 7}
    assert all(one.count == 2 for one in recorder.sent), "rows without key are not kept together"


def test_source_partitions(recorder: Recorder) -> None:
    """The whole task goes to one partition, whatever its rows say."""
    routing = Routing("source", 3, False, (3, 0, 2))
    for task in range(3):
        writer(task, routing=routing).write(rows([1, 1], first=2 * task, key=[b"a", b"b"]))
    assert recorder.values() == {("out", 3): numbers(0, 1), ("out", 0): numbers(2, 3), ("out", 2): numbers(4, 5)}


def test_record_that_is_too_large_says_where(recorder: Recorder) -> None:
    with pytest.raises(BadRecordError) as caught:
        writer(targets={"out": OutputTopic(4, 80)}).write(rows([2], key=[b"k" * 100]))
    assert (caught.value.flow, caught.value.batch, caught.value.topic) == ("orders", 8, "out-2")


def test_the_size_that_the_broker_stores_counts(recorder: Recorder) -> None:
    large: dict[str, Any] = {"key": [b"k" * 5_000]}
    writer(targets={"out": OutputTopic(4, 1_000)}, compression="gzip").write(rows([2], **large))
    (sent,) = recorder.sent
    assert sent.rows[0] == (b"k" * 5_000, b"0")
    with pytest.raises(BadRecordError, match=r"takes 50\d\d bytes in a batch of its own"):
        writer(targets={"out": OutputTopic(4, 1_000, stored="uncompressed")}, compression="gzip").write(
            rows([2], **large)
        )
    assert len(recorder.sent) == 1


def test_a_compacted_topic_needs_keys(recorder: Recorder) -> None:
    compacted = {"out": OutputTopic(4, 1_000, compacted=True)}
    writer(targets=compacted).write(rows([2], key=[b"k"]))
    for given in ({"key": [b"k", None]}, {}):
        with pytest.raises(
            BadRecordError, match=r"is compacted, so its records need a key; (1 row|2 rows) without one"
        ) as caught:
            writer(targets=compacted).write(rows([2, 2], **given))
        assert (caught.value.flow, caught.value.batch, caught.value.topic) == ("orders", 8, "out-2")
    assert len(recorder.sent) == 1


# ---- rows that name their topic ----------------------------------------------------------------------

TARGETS = {"a": OutputTopic(2, 1_000_000), "b": OutputTopic(3, 1_000_000)}


def test_topic_column(recorder: Recorder) -> None:
    write = writer(topic=None, targets=TARGETS)
    write.write(rows([1, 2, 0, 1], topic=["a", "b", "a", "a"]))
    write.write(rows([2, 2], first=4, topic=["b", "b"]))
    assert recorder.values() == {("a", 0): numbers(2), ("a", 1): numbers(0, 3), ("b", 2): numbers(1, 4, 5)}
    assert_sequences(recorder.sent)


def test_the_bound_is_that_of_the_rows_topic(recorder: Recorder) -> None:
    with pytest.raises(BadRecordError, match="partition 2 of topic a"):
        writer(topic=None, targets=TARGETS).write(rows([2, 2], topic=["b", "a"]))


def test_topic_column_is_not_looked_at_when_the_topic_is_given(recorder: Recorder) -> None:
    writer().write(rows([0], topic=["elsewhere"]))
    assert recorder.values() == {("out", 0): numbers(0)}


def test_null_topic(recorder: Recorder) -> None:
    with pytest.raises(BadRecordError, match="2 rows with a null topic") as caught:
        writer(topic=None, targets=TARGETS).write(rows([0, 0, 0], topic=[None, "a", None]))
    assert (caught.value.flow, caught.value.batch) == ("orders", 8)
    assert recorder.sent == []


def test_unknown_topic(recorder: Recorder) -> None:
    with pytest.raises(UnknownTopicError, match="'nowhere' does not exist"):
        writer(topic=None, targets=TARGETS).write(rows([None], topic=["nowhere"]))


LATE = {"topic": None, "targets": TARGETS, "routing": Routing("key", 5, True)}


def test_topic_that_the_driver_did_not_know(recorder: Recorder) -> None:
    """All its rows are in one task, which asks for the partition count and hashes as Java does."""
    cluster = FakeCluster()
    write = writer(cluster=cluster, **LATE)
    write.write(rows(key=[f"key-{n}".encode() for n in range(40)], topic=["late"] * 40))
    assert cluster.asked == [("late", True)]
    for (topic, partition), found in recorder.rows().items():
        assert topic == "late"
        assert {java_partition(key, 7) for key, _ in found if key is not None} == {partition}
    assert sum(len(found) for found in recorder.rows().values()) == 40
    write.write(rows(key=[b"k"], topic=["late"]))
    assert len(cluster.asked) == 1, "asked once per batch"
    assert_sequences(recorder.sent)


def test_limit_of_a_topic_that_the_driver_did_not_know(recorder: Recorder) -> None:
    with pytest.raises(BadRecordError, match="limit of 2000"):
        writer(**LATE).write(rows(key=[b"k" * 3000], topic=["late"]))


@pytest.mark.parametrize("task", range(5))
@pytest.mark.parametrize("hash_key", [True, False])
def test_rows_without_key_of_a_topic_that_the_driver_did_not_know(
    recorder: Recorder, hash_key: bool, task: int
) -> None:
    """No task but this one writes it: it may use every partition."""
    write = writer(task, **{**LATE, "routing": Routing("key", 5, hash_key)})
    for step in range(14):
        write.write(rows(key=[None] * 2, first=2 * step, topic=["late"] * 2))
    assert {partition for _, partition in recorder.rows()} == set(range(7))
    assert {len(values) for values in recorder.values().values()} == {4}
    assert_sequences(recorder.sent)


def test_bad_partition_of_a_topic_that_the_driver_did_not_know(recorder: Recorder) -> None:
    with pytest.raises(BadRecordError, match="partition 7 of topic late"):
        writer(**LATE).write(rows([None, 7], key=[b"a", b"a"], topic=["late"] * 2))


# ---- who owns what -----------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", [None, "out"], ids=["topic given", "topic column"])
@pytest.mark.parametrize("tasks_count, partitions", [(1, 1), (1, 5), (2, 5), (3, 8), (4, 4)])
def test_rows_without_key_fill_exactly_the_partitions_a_task_owns(
    recorder: Recorder, topic: str | None, tasks_count: int, partitions: int
) -> None:
    order_topic = "out" if topic is None else None
    writers: dict[int, set[int]] = {}
    for task in range(tasks_count):
        recorder.sent.clear()
        write = writer(
            task,
            topic=order_topic,
            routing=Routing("key", tasks_count, False),
            targets={"out": OutputTopic(partitions, 1_000_000)},
        )
        for step in range(20):
            write.write(rows(first=step, key=[b"k"], topic=["out"]))
        writers[task] = {one.partition for one in recorder.sent}
        assert_sequences(recorder.sent)
        counts = [len(values) for values in recorder.values().values()]
        assert max(counts) - min(counts) <= 1, "turns are not even"
    owned = sorted(p for mine in writers.values() for p in mine)
    assert owned == list(range(partitions)), "a partition has two writers or none"
    for task, mine in writers.items():
        assert mine == {p for p in range(partitions) if owner_of(topic, p, tasks_count) == task}


def test_owners_are_those_of_sparks_expression() -> None:
    """``pmod(crc32(topic) + partition, tasks)``, the CRC over UTF-8: other numbers give a partition two writers."""
    assert [owner_of(None, p, 3) for p in range(5)] == [0, 1, 2, 0, 1]
    assert [owner_of("123456789", p, 1 << 40) for p in (0, 7)] == [0xCBF43926, 0xCBF43926 + 7]
    assert owner_of("\u00e4", 0, 1 << 40) == 0x70B5F183


def test_rows_in_a_task_that_owns_no_partition(recorder: Recorder) -> None:
    """Must not happen; if it does, better no record than a second writer."""
    task = (owner_of("a", 0, 8) + 5) % 8
    with pytest.raises(ProtocolError, match=f"Task {task} received rows of a and owns no partition") as caught:
        writer(task, topic=None, targets=TARGETS, routing=Routing("key", 8, False)).write(rows(key=[b"a"], topic=["a"]))
    assert (caught.value.flow, caught.value.batch, caught.value.topic) == ("orders", 8, "a")
    assert recorder.sent == []


def test_rows_without_key_of_an_arrow_batch_stay_together(recorder: Recorder) -> None:
    writer().write(rows(key=[b"a", b"b", b"c"]))
    assert len(recorder.sent) == 1


def test_every_batch_starts_at_another_partition(recorder: Recorder) -> None:
    """Else small batches would all go to partition 0."""
    for batch in range(8, 16):
        writer(batch=batch).write(rows(key=[b"a"]))
    assert sorted(one.partition for one in recorder.sent) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_driver_owns_every_partition(recorder: Recorder) -> None:
    write = writer(-1)
    for step in range(8):
        write.write(rows(key=[b"a"], first=step))
    assert {one.partition for one in recorder.sent} == {0, 1, 2, 3}


# ---- transaction version 1 ---------------------------------------------------------------------------


def test_version_1_enrols_a_partition_before_it_is_written(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    """The driver's version decides, whatever the task's connection knows of the cluster."""
    enrolled: list[tuple[str, int]] = []

    def enrol(
        cluster: Any,
        transactional_id: str,
        producer: ProducerIdAndEpoch,
        partitions: dict[str, list[int]],
        deadline: Any,
    ) -> None:
        assert (transactional_id, producer) == ("onceflow.orders", PRODUCER)
        places = [(t, p) for t, ps in partitions.items() for p in ps]
        assert not set(places) & set(recorder.rows())
        enrolled.extend(places)

    monkeypatch.setattr(row_writer, "add_partitions", enrol)
    cluster = FakeCluster()
    write = writer(cluster=cluster, transaction_version=1)
    write.write(rows([0, 1, 0]))
    write.write(rows([1, 2, 0]))
    assert sorted(enrolled) == [("out", 0), ("out", 1), ("out", 2)], "once each"
    monkeypatch.setattr(cluster, "transaction_version", 1)
    monkeypatch.setattr(row_writer, "add_partitions", None)
    writer(cluster=cluster, transaction_version=2).write(rows([0]))
    assert [made["transaction_version"] for made in recorder.made] == [1, 2]


# ---- memory ------------------------------------------------------------------------------------------


def test_nothing_is_kept_after_it_was_sent(recorder: Recorder) -> None:
    write = writer(targets={"out": OutputTopic(4, 5_000)})
    inputs = []
    for step in range(5):
        batch = rows([n % 4 for n in range(4000)], first=4000 * step)
        inputs.append(weakref.ref(batch))
        write.write(batch)
        del batch
    gc.collect()
    assert len(recorder.alive) > 20
    assert [ref for ref in recorder.alive if ref() is not None] == []
    assert [ref for ref in inputs if ref() is not None] == []


def test_rows_are_taken_only_as_they_are_sent(recorder: Recorder) -> None:
    sent_before: list[int] = []

    def stream() -> Iterator[pa.RecordBatch]:
        for step in range(4):
            sent_before.append(len(recorder.sent))
            yield rows([0], first=step)

    run(stream())
    assert sent_before == [0, 1, 2, 3]


# ---- write_rows --------------------------------------------------------------------------------------


THIRD = TaskInfo("task", 3, 0, 40)


def run(batches: Any, info: TaskInfo = THIRD, **changes: Any) -> tuple[Report, ...]:
    cluster: Any = FakeCluster()
    order = replace(ORDER, **{"routing": Routing("key", 4, False), **changes})
    return row_writer.write_rows(order, info, batches, cluster).written


def test_report_for_every_partition(recorder: Recorder) -> None:
    found = run([rows([1, 0, 1])])
    assert {(r.topic, r.partition, r.base_offset, r.count, r.nbytes) for r in found} == {
        ("out", 0, 50, 1, 100),
        ("out", 1, 50, 2, 100),
    }
    for one in found:
        assert (one.task, one.attempt, one.stage, one.rows, one.error) == (3, 0, 40, 3, None)
        assert one.seconds >= 0
        assert one.rss_kib > 1000


def test_a_task_without_rows_reports_too(recorder: Recorder) -> None:
    (one,) = run([])
    assert (one.task, one.topic, one.partition, one.count, one.rows, one.error) == (3, None, -1, 0, 0, None)


@pytest.mark.parametrize("where", ["send", "rows"])
def test_errors_of_ours_are_reported(recorder: Recorder, where: str) -> None:
    recorder.error = FencedError("newer epoch") if where == "send" else None
    (one,) = run([rows([0 if where == "send" else 99])])
    assert type(one.error) is (FencedError if where == "send" else BadRecordError)
    assert (one.topic, one.count, one.rows) == (None, 0, 1)
    assert one.error.flow == "orders"
    assert recorder.flushed == 0


def test_other_errors_are_raised(recorder: Recorder) -> None:
    recorder.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        run([rows([0])])


def test_extra_task_attempt_writes_nothing(recorder: Recorder) -> None:
    def stream() -> Iterator[pa.RecordBatch]:
        raise AssertionError("rows were asked for")
        yield

    (one,) = run(stream(), TaskInfo("task", 3, 1, 40))
    assert isinstance(one.error, BatchAbortedError)
    assert "task 3 is at attempt 1" in one.error.what
    assert (one.attempt, recorder.made) == (1, [])


def test_tasks_announce_write_after_the_last_acknowledgement(
    monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hooks, "at", lambda step, **facts: told.append((step, facts, recorder.flushed)))
    run([rows([0])])
    assert told == [("write", {"where": "task", "flow": "orders", "batch": 8, "task": 3}, 1)]
    run([rows([0])], TaskInfo("driver", -1, 0))
    assert len(told) == 1, "the driver announces the step itself"
    run([rows([99])])
    assert len(told) == 1, "a failed write is no write"


# ---- in a Spark task ---------------------------------------------------------------------------------


def test_write_task_outside_of_spark(recorder: Recorder) -> None:
    with pytest.raises(RuntimeError, match="outside a Spark task"):
        list(WriteTask(ORDER)(iter([])))


def test_write_task(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    import pyspark

    context = SimpleNamespace(partitionId=lambda: 2, attemptNumber=lambda: 0, stageId=lambda: 40)
    monkeypatch.setattr(pyspark.TaskContext, "get", lambda: context)
    monkeypatch.setattr(row_writer, "worker_cluster", lambda _settings: FakeCluster())
    order = replace(ORDER, routing=Routing("key", 4, False))
    # Left over from the flow that used this worker before.
    monkeypatch.setenv(hooks.VARIABLE, faults.fault("begin", "raise", where="task"))
    (batch,) = WriteTask(order)(iter([rows([0, 1])]))
    assert batch.schema == REPORT_SCHEMA
    written = from_rows([(row["report"],) for row in batch.to_pylist()]).written
    assert [report.task for report in written] == [2, 2]
    assert [report.stage for report in written] == [40, 40]
    assert [report.count for report in written] == [1, 1]
    faulty = replace(order, faults=faults.fault("begin", "raise", where="task", task=2))
    faults._fired.clear()
    with pytest.raises(faults.InjectedFaultError):
        list(WriteTask(faulty)(iter([])))


def test_a_worker_keeps_one_connection_per_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ClientSettings] = []

    class Made:
        def __init__(self, settings: ClientSettings, *, refused_s: float | None) -> None:
            assert refused_s is None, "brokers of a flow that runs may be away"
            made.append(settings)

    monkeypatch.setattr(row_writer, "Cluster", Made)
    monkeypatch.setattr(row_writer, "_clusters", {})
    first = row_writer.worker_cluster(ClientSettings("h:9092", {"client.id": "a"}))
    assert row_writer.worker_cluster(ClientSettings("h:9092", {"kafka.client.id": "a"})) is first
    assert row_writer.worker_cluster(ClientSettings("h:9092", {"client.id": "b"})) is not first
    assert row_writer.worker_cluster(ClientSettings("i:9092", {"client.id": "a"})) is not first
    assert len(made) == 3
    monkeypatch.setattr(row_writer.os, "getpid", lambda: -5)
    assert row_writer.worker_cluster(ClientSettings("h:9092", {"client.id": "a"})) is not first, (
        "sockets survive no fork"
    )
