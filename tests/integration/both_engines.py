"""The same flow by the direct engine and by Spark's micro-batches: what it reads, and what comes out."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import confluent_kafka
from pyspark.sql import DataFrame

from onceflow import Flow
from onceflow.protocol.progress import PROGRESS_TOPIC, decode
from onceflow.testing import independent

#: Spark's micro-batches run what has a checkpoint.
ENGINES = ("direct", "spark")
#: What reads the batches of the direct engine.
PLACES = ("driver", "tasks")
TIME_MS = 1_700_000_000_000
COLUMNS = ("key", "value", "headers", "timestamp")
MakeTopic = Callable[..., str]
times = itertools.count(TIME_MS)


class Source:
    """Writes everything that a log can contain. Every record has a timestamp of its own, which tells it apart.

    Args:
        value: makes the values of records; None: they are texts and others.
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        partitions: int,
        compression: str = "zstd",
        value: Callable[[], bytes | None] | None = None,
    ) -> None:
        self.topic, self._partitions, self._value = topic, partitions, value
        settings = {"bootstrap.servers": bootstrap, "linger.ms": 2, "compression.type": compression}
        self._plain = confluent_kafka.Producer(settings)
        self._transactional = confluent_kafka.Producer({**settings, "transactional.id": f"writer-of-{topic}"})
        self._transactional.init_transactions(30)
        self.partition_of: dict[int, int] = {}

    def fill(self) -> None:
        """Committed, aborted, empty and no transactions in turn; the last offset is that of a marker."""
        self._write(self._plain, "plain")
        for name, count, commit in (("a", 40, True), ("b", 60, False), ("none", 0, True), ("c", 25, True)):
            self._transaction(name, count, commit=commit)
        self._write(self._plain, "between", 7)
        self._transaction("d", 30, commit=True)
        self._transaction("e", 9, commit=False)

    def _transaction(self, name: str, count: int, *, commit: bool) -> None:
        self._transactional.begin_transaction()
        self._write(self._transactional, name, count)
        if commit:
            self._transactional.commit_transaction(30)
        else:
            self._transactional.abort_transaction(30)

    def _write(self, producer: Any, name: str, count: int = 50) -> None:
        for n, partition in itertools.product(range(count), range(self._partitions)):
            time_ms = next(times)
            key = None if n % 11 == 5 else b"" if n % 11 == 6 else b"key-%d" % (n % 13)
            value = None if n % 10 == 3 else b"" if n % 10 == 4 else f"ä {name} {partition} {n}".encode() + b"\xff" * n
            if self._value is not None:
                value = self._value()
            headers = [[], [("h", b"\xff"), ("h", None), ("ü", b"")], [("n", b"%d" % n)]][n % 3]
            producer.produce(self.topic, value, key, partition, timestamp=time_ms, headers=headers)
            self.partition_of[time_ms] = partition
        assert producer.flush(30) == 0


@dataclass(frozen=True)
class Result:
    """What one flow has left behind.

    Args:
        read: offsets of each source that its batches have read.
        covered: where the first batch has begun and the last one has ended, from its progress records.
    """

    query: Any
    read: Mapping[str, int]
    covered: tuple[Any, Any]
    records: list[independent.Seen]


class Engines:
    """Runs the same flow with each engine.

    Args:
        by_tasks: whether tasks read the records of the direct engine, not the driver.
    """

    def __init__(self, bootstrap: str, spark: Any, make_topic: MakeTopic, *, by_tasks: bool) -> None:
        self.bootstrap, self.spark, self.by_tasks = bootstrap, spark, by_tasks
        # Timestamps lie years back: the topics would lose their records when the broker looks for old ones.
        self.make_topic = partial(make_topic, retention_ms=-1)

    def run(
        self, engine: str, build: Callable[[Flow], DataFrame], *, target: str = "", partitions: int = 3, **write: Any
    ) -> Result:
        """Run it.

        Args:
            engine: one of ``ENGINES``, or of ``PLACES``.
        """
        place = ""
        target = target or self.make_topic("out", partitions)
        if engine == "spark":  # what it has read before is in Kafka only, as with the direct engine
            write |= {"checkpoint": tempfile.mkdtemp(), "on_checkpoint_conflict": "resume"}
        else:
            write["engine"] = place = PLACES[self.by_tasks] if engine == "direct" else engine
        flow = Flow(f"{engine}-{target}", self.spark, bootstrap_servers=self.bootstrap)
        try:
            query = flow.write(build(flow), topic=target, once=True, **write).start()
            try:
                assert query.awaitTermination(60)
            finally:
                query.stop()
        finally:
            flow.close()
        assert query.engine == ("spark" if engine == "spark" else "direct")
        read: Counter[str] = Counter()
        if engine != "spark" and query.batches:
            assert any("task" in batch.path for batch in query.batches) == (place == "tasks")
        for batch in query.batches:
            read.update(batch.read)
        progress = self.progress(flow.name)
        records = independent.read_topic(self.bootstrap, target, decided=True)
        return Result(query, dict(read), (progress[0].offsets, progress[-1].offsets), records)

    def both(self, build: Callable[[Flow], DataFrame], **options: Any) -> tuple[Result, Result]:
        direct, spark = (self.run(engine, build, **options) for engine in ENGINES)
        assert direct.read == spark.read
        assert direct.covered == spark.covered, "where the first batch begins, and where the last one ends"
        assert direct.records, "a comparison of nothing"
        return direct, spark

    def progress(self, flow: str) -> list[Any]:
        seen = independent.read_topic(self.bootstrap, PROGRESS_TOPIC, decided=True)
        return [decode(each.key, each.value) for each in seen if each.key == flow.encode() and each.value is not None]


def filled(engines: Engines, partitions: int = 1, **options: Any) -> Source:
    source = Source(engines.bootstrap, engines.make_topic("in", partitions), partitions, **options)
    source.fill()
    return source


def content(seen: independent.Seen, *, timestamp: bool = True) -> tuple[Any, ...]:
    return seen.key, seen.value, seen.headers, seen.timestamp_ms if timestamp else None


def by_partition(result: Result, **options: Any) -> dict[int, list[Any]]:
    """The records of each output partition in order, without those whose missing key allows any partition."""
    found = defaultdict(list)
    for seen in sorted(result.records, key=lambda each: (each.partition, each.offset)):
        if seen.key is not None:
            found[seen.partition].append(content(seen, **options))
    return dict(found)


def by_both_partitions(result: Result, *sources: Source) -> dict[Any, list[Any]]:
    """The records that went from one source partition to one output partition, in order."""
    place = {at: (source.topic, n) for source in sources for at, n in source.partition_of.items()}
    found = defaultdict(list)
    for seen in sorted(result.records, key=lambda each: (each.partition, each.offset)):
        found[place[seen.timestamp_ms], seen.partition].append(content(seen))
    return dict(found)


def whole(result: Result, **options: Any) -> Counter[Any]:
    return Counter(content(seen, **options) for seen in result.records)


def without_null_keys(result: Result) -> Result:
    """A record without a key may go to any partition."""
    return replace(result, records=[each for each in result.records if each.key is not None])
