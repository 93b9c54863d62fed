"""The reader that restores state, against a real broker and against answers that a broker seldom gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from onceflow import DataLossError, DeadlineExceededError, PermissionDeniedError, ProtocolError, UnknownTopicError
from onceflow.broker.local import LocalBroker
from onceflow.client import committed
from onceflow.client.cluster import Cluster, ConnectionFailedError
from onceflow.client.column_chunks import ColumnChunk, ColumnForm
from onceflow.client.committed import LISTS, Aborted, Chunk, CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.first_record import first_timestamp
from onceflow.client.long_poll import LongPoll
from onceflow.client.settings import ClientSettings
from onceflow.protocol.batches import ProducerIdAndEpoch, encode_batches, encode_single
from onceflow.testing import independent
from onceflow.testing.broker import BACK_SOON, create_topic

pytestmark = pytest.mark.integration

MakeTopic = Callable[..., str]
Pairs = list[tuple[bytes | None, bytes | None]]
TIME_MS = 1_700_000_000_000


@pytest.fixture
def cluster(onceflow_broker: str) -> Iterator[Cluster]:
    cluster = Cluster(ClientSettings(onceflow_broker))
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """A broker that may be killed, and that compacts at once."""
    properties = {"log.cleaner.backoff.ms": "100", **BACK_SOON}
    with LocalBroker(tmp_path_factory.mktemp("own"), properties=properties) as broker:
        yield broker


class Writer:
    """A transactional producer of confluent-kafka; every ``write`` is a batch of its own, or several."""

    def __init__(self, bootstrap: str, name: str, **options: Any) -> None:
        options = {key.replace("_", "."): value for key, value in options.items()}
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap, "transactional.id": name, "linger.ms": 5, **options}
        )
        self._producer.init_transactions(30)

    def begin(self) -> None:
        self._producer.begin_transaction()

    def write(self, topic: str, pairs: Pairs, **more: Any) -> None:
        for key, value in pairs:
            self._producer.produce(topic, value, key, partition=0, **more)
        assert self._producer.flush(30) == 0

    def end(self, *, commit: bool) -> None:
        if commit:
            self._producer.commit_transaction(30)
        else:
            self._producer.abort_transaction(30)

    def transaction(self, topic: str, pairs: Pairs, *, commit: bool = True) -> None:
        self.begin()
        self.write(topic, pairs)
        self.end(commit=commit)


def pairs_of(prefix: str, count: int = 3) -> Pairs:
    return [(f"{prefix}-{n}".encode(), f"value of {prefix}-{n}".encode()) for n in range(count)]


def ends_of(bootstrap: str, topic: str) -> int:
    return independent.end_offsets(bootstrap, topic, isolation="read_uncommitted")[topic, 0]


def records_of(chunks: list[Chunk]) -> Pairs:
    return [pair for chunk in chunks for pair in zip(chunk.keys, chunk.values, strict=True)]


def column_pairs(chunk: ColumnChunk) -> Pairs:
    return list(zip(chunk.records.keys.to_pylist(), chunk.records.values.to_pylist(), strict=True))


def read(cluster: Any, topic: str, start: int, end: int, *, seconds: float = 30.0, **options: Any) -> list[Chunk]:
    chunks = list(CommittedReader(cluster, seconds, **options).read(topic, 0, start, end))
    places = [start, *(chunk.next_offset for chunk in chunks)]
    assert places == sorted(places)
    assert places[-1] == max(start, end)
    return chunks


# ---- transactions ------------------------------------------------------------------------------------------


def interleaved(bootstrap: str, topic: str, **options: str) -> None:
    """Transactions of three producers, begun and ended across each other, with plain records between them."""
    a, b, c = (Writer(bootstrap, f"{name}-{topic}", **options) for name in "abc")
    a.transaction(topic, pairs_of("a1"))
    a.begin()
    a.write(topic, pairs_of("a2 aborted"))
    b.begin()
    b.write(topic, pairs_of("b1"))
    plain = {name.replace("_", "."): value for name, value in options.items()}
    independent.fill(bootstrap, topic, pairs_of("plain"), options=plain)
    a.write(topic, pairs_of("a2 aborted, more"))
    a.end(commit=False)
    c.transaction(topic, pairs_of("c1 aborted"), commit=False)
    a.begin()
    a.write(topic, pairs_of("a3"))
    b.write(topic, pairs_of("b1 more", 200))
    b.end(commit=True)
    c.begin()
    c.write(topic, pairs_of("c2"))
    c.end(commit=True)
    a.end(commit=True)
    b.transaction(topic, pairs_of("b2 aborted", 100), commit=False)


@pytest.mark.long
def test_when_the_first_committed_record_was_written(
    cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str
) -> None:
    """From wherever a range begins; not of an aborted record, and not of one behind the end."""
    topic = make_topic("when", 1)
    interleaved(onceflow_broker, topic, batch_num_messages="1")  # so the time of a batch is that of its record
    seen = independent.read_topic(onceflow_broker, topic, decided=True)
    deadline = Deadline(60, "a test")
    end = ends_of(onceflow_broker, topic)
    for start in range(end):
        after = next((record for record in seen if record.offset >= start), None)
        found = first_timestamp(cluster, topic, 0, start, end, deadline)
        assert found == (None if after is None else after.timestamp_ms), start
        if after is not None and after.offset > start:
            assert first_timestamp(cluster, topic, 0, start, after.offset, deadline) is None
    assert first_timestamp(cluster, topic, 0, 5, 5, deadline) is None
    appended = make_topic("appended", 1, message_timestamp_type="LogAppendTime")
    independent.fill(onceflow_broker, appended, pairs_of("a"))
    (stamp, *_) = (record.timestamp_ms for record in independent.read_topic(onceflow_broker, appended, decided=True))
    assert first_timestamp(cluster, appended, 0, 1, 3, deadline) == stamp
    admin, place = AdminClient({"bootstrap.servers": onceflow_broker}), TopicPartition(topic, 0, 3)
    admin.delete_records([place])[place].result(30)
    assert first_timestamp(cluster, topic, 0, 0, end, deadline) is None, "what has expired has no age any more"


def test_records_of_one_batch_are_as_old_as_its_first(
    cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str
) -> None:
    """Records are not decoded to find out when they were written."""
    topic = make_topic("when", 1)
    producer = confluent_kafka.Producer({"bootstrap.servers": onceflow_broker, "linger.ms": 60_000})
    for stamp in (TIME_MS + 5, TIME_MS, TIME_MS + 9):
        producer.produce(topic, b"v", b"k", 0, timestamp=stamp)
    assert producer.flush(30) == 0
    found = [first_timestamp(cluster, topic, 0, start, 3, Deadline(60, "a test")) for start in range(3)]
    assert found == [TIME_MS + 5] * 3


def test_committed_and_aborted_transactions(cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str) -> None:
    topic = make_topic("committed", 1)
    interleaved(onceflow_broker, topic)
    seen = independent.read_topic(onceflow_broker, topic, decided=True)
    assert not [record for record in seen if b"aborted" in (record.key or b"")]
    assert len(seen) == 3 * 5 + 200
    end = ends_of(onceflow_broker, topic)
    assert records_of(read(cluster, topic, 0, end)) == [(s.key, s.value) for s in seen]
    # From the middle of a batch, or of an aborted transaction, and up to such a place: the same records.
    for start in range(0, end + 1, 5):
        for stop in {start, min(start + 1, end), min(start + 37, end), end}:
            expected = [(s.key, s.value) for s in seen if start <= s.offset < stop]
            assert records_of(read(cluster, topic, start, stop)) == expected, (start, stop)


def test_small_fetches_return_the_same(cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str) -> None:
    topic = make_topic("committed", 1)
    interleaved(onceflow_broker, topic)
    end = ends_of(onceflow_broker, topic)
    whole = read(cluster, topic, 0, end)
    single = read(cluster, topic, 0, end, fetch_bytes=1)  # a broker sends one batch at least
    assert len(whole) == 1
    assert len(single) > 10
    assert records_of(single) == records_of(whole)


def test_somebody_elses_open_transaction(cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str) -> None:
    topic = make_topic("committed", 1)
    mine, other = Writer(onceflow_broker, f"mine-{topic}"), Writer(onceflow_broker, f"other-{topic}")
    mine.transaction(topic, pairs_of("first"))
    stable = ends_of(onceflow_broker, topic)
    other.begin()
    other.write(topic, pairs_of("open"))
    mine.transaction(topic, pairs_of("second"))
    end = ends_of(onceflow_broker, topic)
    # In front of it nothing has to be waited for.
    assert records_of(read(cluster, topic, 0, stable, seconds=5)) == pairs_of("first")
    reading = CommittedReader(cluster, 1.0).read(topic, 0, 0, end)
    chunk = next(reading)
    assert records_of([chunk]) == pairs_of("first")
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="open transaction") as caught:
        next(reading)
    assert 1.0 <= time.monotonic() - began < 10
    assert caught.value.topic == f"{topic}-0"
    assert f"last stable offset is {stable}" in caught.value.detail
    assert f"onceflow transactions list --topic {topic}" in caught.value.next_step
    # Once it has ended, reading goes on where it was.
    read_on = CommittedReader(cluster, 30).read(topic, 0, chunk.next_offset, end)
    other.end(commit=True)
    assert records_of(list(read_on)) == pairs_of("open") + pairs_of("second")


def test_a_transaction_that_ends_while_it_is_waited_for(
    cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic("committed", 1)
    mine, other = Writer(onceflow_broker, f"mine-{topic}"), Writer(onceflow_broker, f"other-{topic}")
    other.begin()
    other.write(topic, pairs_of("open"))
    mine.transaction(topic, pairs_of("mine"))
    end = ends_of(onceflow_broker, topic)
    fetches = 0
    exchange = cluster.exchange

    def counted(*arguments: Any) -> Any:
        nonlocal fetches
        fetches += 1
        if fetches == 4:
            other.end(commit=False)
        return exchange(*arguments)

    cluster.connect(Deadline(30, "a test"))
    cluster.topic(topic, Deadline(30, "a test"))
    monkeypatch.setattr(cluster, "exchange", counted)
    assert records_of(read(cluster, topic, 0, end)) == pairs_of("mine")
    assert fetches >= 4


# ---- what topics can look like -----------------------------------------------------------------------------


@pytest.mark.long_but("gzip-producer")
@pytest.mark.parametrize("by", ["producer", "broker"])
@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_by_librdkafka_and_by_java(
    cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str, compression: str, by: str
) -> None:
    """A broker whose topic asks for another compression writes the batches anew, with the Java client's code."""
    topic = make_topic("packed", 1, **({"compression_type": compression} if by == "broker" else {}))
    sent: Pairs = [(b"key-%d" % n, None if n % 11 == 0 else b"v" * (n % 300)) for n in range(20_000)]
    options = {"linger.ms": "100", **({"compression.type": compression} if by == "producer" else {})}
    independent.fill(onceflow_broker, topic, sent, options=options)
    chunks = read(cluster, topic, 0, len(sent))
    assert records_of(chunks) == sent


def test_headers_and_nulls(cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str) -> None:
    topic = make_topic("headers", 1)
    writer = Writer(onceflow_broker, f"headers-{topic}")
    writer.begin()
    writer.write(topic, [(b"plain", b"1"), (None, b"2"), (b"deleted", None)])
    writer.write(topic, [(b"with", b"3"), (b"with", b"4")], headers=[("h", b"x"), ("null", None), ("h", b"")])
    writer.end(commit=True)
    end = ends_of(onceflow_broker, topic)
    listed = [("h", b"x"), ("null", None), ("h", b"")]
    (chunk,) = read(cluster, topic, 0, end)
    assert chunk.keys == [b"plain", None, b"deleted", b"with", b"with"]
    assert chunk.values == [b"1", b"2", None, b"3", b"4"]
    assert chunk.headers == {3: listed, 4: listed}
    (later,) = read(cluster, topic, 2, end)
    assert later.headers == {1: listed, 2: listed}
    (cut,) = read(cluster, topic, 2, 4)
    assert (cut.keys, cut.headers) == ([b"deleted", b"with"], {1: listed})


def test_the_log_starts_later(cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str) -> None:
    topic = make_topic("deleted", 1)
    sent = pairs_of("record", 100)
    independent.fill(onceflow_broker, topic, sent)
    admin = AdminClient({"bootstrap.servers": onceflow_broker})
    for first in (40, 100):
        admin.delete_records([TopicPartition(topic, 0, first)])[TopicPartition(topic, 0)].result(30)
        for start in (0, first - 1, min(first + 1, 100)):
            assert records_of(read(cluster, topic, start, 100, seconds=5)) == sent[max(start, first) :]
    # Whoever needs only what is deleted gets an end all the same.
    assert [chunk.next_offset for chunk in read(cluster, topic, 0, 30, seconds=5)] == [30]


@pytest.mark.long
def test_a_compacted_topic(own_broker: LocalBroker) -> None:
    bootstrap, topic = own_broker.bootstrap_servers, "compacted"
    settings = {
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "0.01",
        "segment.ms": "50",
        "max.compaction.lag.ms": "100",
        "delete.retention.ms": "0",
    }
    create_topic(bootstrap, topic, 1, settings)
    cluster = Cluster(ClientSettings(bootstrap))
    writer = Writer(bootstrap, topic)
    last: dict[bytes | None, bytes | None] = {}
    deadline = Deadline(60, "waiting for compaction")
    written = rounds = 0
    while True:
        pairs: Pairs = [(b"key-%d" % n, b"%d of round %d" % (n, rounds)) for n in range(rounds % 3, 300, 2)]
        writer.transaction(topic, [(key, b"aborted") for key, _ in pairs], commit=False)
        writer.transaction(topic, pairs)
        last.update(pairs)
        written += len(pairs)
        rounds += 1
        end = ends_of(bootstrap, topic)
        for options in ({}, {"fetch_bytes": 1}):
            records = records_of(read(cluster, topic, 0, end, **options))
            assert dict(records) == last
            columns = list(CommittedReader(cluster, 30, **options).read_columns(topic, 0, 0, end))
            # The cleaner may have removed more records meanwhile, but never the last one of a key.
            pairs_left = [pair for chunk in columns for pair in column_pairs(chunk)]
            assert set(pairs_left) <= set(records)
            assert dict(pairs_left) == last
        if rounds > 5 and len(records) < written / 2:
            break
        deadline.pause(4, f"{len(records)} of {written} records are left after {rounds} rounds")
    assert not all(chunk.whole for chunk in columns)
    forms: list[Any] = [LISTS, ColumnForm(headers=False)]
    for form, pairs_in in zip(forms, (lambda chunk: records_of([chunk]), column_pairs), strict=True):
        poll = LongPoll(cluster, [cluster.topic(topic, deadline)], {(topic, 0): 0}, form, fetch_bytes=1000)
        chunks = []
        while poll.followed[topic, 0].position < end:
            chunks += [chunk for _, chunk in poll.poll(deadline.capped(1))]
        # The cleaner goes on meanwhile, so there may be fewer records than before.
        pairs_left = [pair for chunk in chunks for pair in pairs_in(chunk)]
        assert set(pairs_left) <= set(records)
        assert dict(pairs_left) == last
        assert not all(chunk.whole for chunk in chunks)
    cluster.close()


@pytest.mark.long
def test_a_broker_that_is_killed_in_the_middle(own_broker: LocalBroker) -> None:
    bootstrap, topic = own_broker.bootstrap_servers, "mortal"
    create_topic(bootstrap, topic, 1)
    sent = pairs_of("record", 3000)
    for part in range(0, 3000, 1000):
        independent.fill(bootstrap, topic, sent[part : part + 1000])
    cluster = Cluster(ClientSettings(bootstrap))
    chunks = CommittedReader(cluster, 60, fetch_bytes=1000).read(topic, 0, 0, 3000)
    got = [next(chunks)]
    own_broker.kill()
    own_broker.start()
    got += chunks
    assert records_of(got) == sent
    cluster.close()


# ---- what cannot be read -----------------------------------------------------------------------------------


def test_a_log_that_is_shorter_than_committed(cluster: Cluster, make_topic: MakeTopic, onceflow_broker: str) -> None:
    topic = make_topic("short", 1)
    independent.fill(onceflow_broker, topic, pairs_of("record", 10))
    with pytest.raises(DataLossError, match="ends at offset 10") as caught:
        read(cluster, topic, 11, 12)
    assert caught.value.topic == f"{topic}-0"
    with pytest.raises(DataLossError, match="ends at offset 10"):
        read(cluster, topic, 5, 12, seconds=0.5)


def test_a_topic_that_does_not_exist(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceflow.client.cluster.UNKNOWN_TOPIC_S", 0.5)
    with pytest.raises(UnknownTopicError, match="no-such-topic"):
        read(cluster, "no-such-topic", 0, 1)
    assert read(cluster, "no-such-topic", 3, 3) == []  # nothing to read, nothing is asked


# ---- answers made up ---------------------------------------------------------------------------------------


class FakeCluster:
    """Answers to Fetch from a list: an exception, an error code, or records and a last stable offset."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[int, int, int]] = []  # offset, bytes, wait
        self.fresh: list[bool] = []

    def connect(self, deadline: Deadline) -> None:
        pass

    def version(self, request: Any, *, min_version: int, max_version: int) -> int:
        return max_version

    def leader(self, topic: str, partition: int, deadline: Deadline, *, fresh: bool = False) -> int:
        self.fresh.append(fresh)
        return 1

    def exchange(self, request: Any, node: int, deadline: Deadline) -> Any:
        asked = request.topics[0].partitions[0]
        self.asked.append((asked.fetch_offset, asked.partition_max_bytes, request.max_wait_ms))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if answer == "throttled":
            return SimpleNamespace(error_code=0, responses=[])
        code, records, stable = (answer, b"", -1) if isinstance(answer, int) else (0, *answer)
        part = SimpleNamespace(
            error_code=code,
            records=records,
            last_stable_offset=stable,
            high_watermark=stable,
            aborted_transactions=None,
        )
        return SimpleNamespace(error_code=0, responses=[SimpleNamespace(partitions=[part])])


def fake_batch(base_offset: int, value: bytes = b"v") -> bytes:
    batch = encode_single(b"k", value, timestamp_ms=1, identity=ProducerIdAndEpoch(-1, -1), base_sequence=0)
    return base_offset.to_bytes(8, "big") + batch.head[8:] + bytes(batch.body)


@pytest.mark.long
def test_problems_that_pass_are_waited_out() -> None:
    problems = ["throttled", ConnectionFailedError("gone"), 6, 3, 5, 56, 74, 78, -1]
    cluster = FakeCluster(*problems, (fake_batch(0), 2), (fake_batch(1), 2))
    assert [chunk.next_offset for chunk in read(cluster, "t", 0, 2)] == [1, 2]
    assert cluster.fresh == [False] + [True] * len(problems) + [False]
    assert cluster.asked[0][1] > cluster.asked[2][1]  # smaller answers on a line that breaks


def test_problems_that_stay_end_at_the_deadline() -> None:
    with pytest.raises(DeadlineExceededError, match=r"t-0 at offset 0.*\n.*NOT_LEADER_OR_FOLLOWER") as caught:
        read(FakeCluster(6), "t", 0, 2, seconds=0.05)
    assert caught.value.topic == "t-0"
    with pytest.raises(PermissionDeniedError):
        read(FakeCluster(29), "t", 0, 2)


def test_progress_extends_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def deadline(seconds: float, what: str) -> Deadline:
        return Deadline(seconds, what, clock=lambda: now, sleep=lambda _: None)

    monkeypatch.setattr(committed, "Deadline", deadline)
    cluster = FakeCluster(*((fake_batch(n), 20) for n in range(20)))
    read_ = CommittedReader(cluster, 10.0).read("t", 0, 0, 20)  # type: ignore[arg-type]
    for n in range(20):
        assert next(read_).next_offset == n + 1
        now += 9.0
    assert list(read_) == []


def test_nothing_left_up_to_the_end_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed, "is_hole", lambda *place: place[1:4] == ("t", 0, 4))
    cluster = FakeCluster((fake_batch(3), 10), (b"", 10))
    assert [chunk.next_offset for chunk in read(cluster, "t", 0, 8)] == [4, 8]
    assert [wait for _, _, wait in cluster.asked] == [0, 0]  # nothing is waited for that is known to be decided


def test_records_that_have_not_come_from_remote_storage_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """KIP-405: a broker answers without records, and without an error. Faked: a slow remote storage is hard to have."""
    monkeypatch.setattr(committed, "is_hole", lambda *place: False)
    cluster = FakeCluster((b"", 2), (b"", 2), (fake_batch(0), 2), (b"", 2), (fake_batch(1), 2))
    assert [(chunk.next_offset, len(chunk.keys)) for chunk in read(cluster, "t", 0, 2)] == [(1, 1), (2, 1)]
    with pytest.raises(DeadlineExceededError, match="t-0: the records have not come from remote storage"):
        read(FakeCluster((b"", 2)), "t", 0, 2, seconds=0.05)


def test_an_answer_of_half_a_batch_is_not_an_end() -> None:
    cluster = FakeCluster((fake_batch(0)[:-1], 10))
    with pytest.raises(DeadlineExceededError):
        read(cluster, "t", 0, 8, seconds=0.05)


def test_damage_names_the_partition() -> None:
    damaged = fake_batch(0)[:-1] + b"?"
    with pytest.raises(ProtocolError, match="checksum") as caught:
        read(FakeCluster((damaged, 1)), "t", 0, 1)
    assert caught.value.topic == "t-0"


def test_much_in_one_answer_becomes_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed, "_CHUNK_BYTES", 1000)
    values = pa.array([b"%04d" % n * 25 for n in range(100)])
    keys = pa.array([b"k"] * 100)
    parts = encode_batches(
        keys,
        values,
        None,
        None,
        identity=ProducerIdAndEpoch(-1, -1),
        base_sequence=0,
        max_batch_bytes=100_000,
        target_batch_bytes=600,
        default_timestamp_ms=1,
    )
    data, base = b"", 0
    for part in parts:
        data += base.to_bytes(8, "big") + part.head[8:] + bytes(part.body)
        base += part.count
    chunks = read(FakeCluster((data, 100)), "t", 0, 100)
    assert len(chunks) > 5
    assert [value for chunk in chunks for value in chunk.values] == values.to_pylist()


def test_a_transaction_is_aborted_up_to_its_marker() -> None:
    def raw(first: int, last: int, producer: int, marker: str | None = None, transactional: bool = True) -> Any:
        return SimpleNamespace(
            base_offset=first,
            last_offset=last,
            producer_id=producer,
            transactional=transactional,
            control=marker is not None,
            decode=lambda: SimpleNamespace(marker=marker),
        )

    aborted = Aborted([(20, 1), (3, 1), (5, 2)])
    asked = [
        (raw(0, 2, 1), True),  # before its first aborted transaction
        (raw(3, 4, 1), False),
        (raw(5, 6, 2), False),
        (raw(7, 8, 3), True),  # somebody else
        (raw(9, 9, 1, "abort"), False),
        (raw(10, 10, 1), True),  # its next transaction
        (raw(11, 11, 2), False),  # the other one's is aborted still
        (raw(12, 12, 1, "commit"), False),
        (raw(13, 13, 2, transactional=False), True),
        (raw(14, 14, 2, "abort"), False),
        (raw(15, 19, 2), True),
        (raw(20, 30, 1), False),
    ]
    assert [aborted.keeps(batch) for batch, _ in asked] == [kept for _, kept in asked]
