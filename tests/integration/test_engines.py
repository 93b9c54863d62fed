"""Both engines do the same: the same source ranges and the same records, from all that a source can contain."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    ResourceType,
)
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from onceflow import DataLossError, Flow
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

sys.path.insert(0, str(Path(__file__).parent))
try:
    from both_engines import (
        COLUMNS,
        ENGINES,
        PLACES,
        Engines,
        MakeTopic,
        Result,
        by_both_partitions,
        by_partition,
        content,
        filled,
        times,
        whole,
        without_null_keys,
    )
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.integration


# In short, test_range_tasks.py shows what differs when tasks read.
@pytest.fixture(params=["driver", pytest.param("tasks", marks=pytest.mark.long)])
def engines(onceflow_broker: str, onceflow_spark: Any, make_topic: MakeTopic, request: Any) -> Engines:
    return Engines(onceflow_broker, onceflow_spark, make_topic, by_tasks=request.param == "tasks")


# ---- copies ------------------------------------------------------------------------------------------------


@pytest.mark.long_but("driver-none")
@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_every_kind_of_record_of_one_partition(engines: Engines, compression: str) -> None:
    source = filled(engines, compression=compression)
    direct, spark = engines.both(
        lambda flow: flow.read(source.topic, include_headers=True).select(*COLUMNS), compression=compression
    )
    assert whole(direct) == whole(spark)
    assert by_partition(direct) == by_partition(spark), "in this order, byte by byte"
    assert len(direct.records) == 152, "committed records only"
    for seen in (direct.records, spark.records):
        assert any(each.key is None for each in seen)
        assert any(each.value is None for each in seen)
        assert any(each.headers for each in seen)


@pytest.mark.long
def test_values_alone(engines: Engines) -> None:
    """Without headers and timestamps: what is not selected is not written."""
    source = filled(engines)
    direct, spark = engines.both(lambda flow: flow.read(source.topic).select("key", "value"))
    assert by_partition(direct, timestamp=False) == by_partition(spark, timestamp=False)
    assert whole(direct, timestamp=False) == whole(spark, timestamp=False)
    assert not any(each.headers for each in direct.records)


@pytest.mark.long
def test_constants_alone(engines: Engines) -> None:
    """A record becomes a row also if nothing of it is used. And a topic that the query does not use is no reason to go
    on for ever."""
    source, unused = filled(engines), filled(engines)

    def build(flow: Flow) -> DataFrame:
        flow.read(unused.topic)
        return flow.read(source.topic).select(F.lit("all").alias("key"), F.lit("1").alias("value"))

    direct, spark = engines.both(build)
    assert len(direct.records) == 152
    assert by_partition(direct, timestamp=False) == by_partition(spark, timestamp=False)


@pytest.mark.long
@pytest.mark.parametrize(
    "partitioner, guarantee",
    [("key", "at_least_once"), pytest.param("round_robin", "at_most_once", marks=pytest.mark.long)],
)
def test_two_sources_with_many_partitions(engines: Engines, partitioner: str, guarantee: str) -> None:
    one, other = filled(engines, 4), filled(engines, 3)

    def build(flow: Flow) -> DataFrame:
        first, second = (flow.read(each.topic, include_headers=True).select(*COLUMNS) for each in (one, other))
        return first.union(second)

    direct, spark = engines.both(build, partitions=4, partitioner=partitioner, guarantee=guarantee)
    assert whole(direct) == whole(spark)
    if partitioner == "key":
        keyed = [by_both_partitions(without_null_keys(each), one, other) for each in (direct, spark)]
        assert keyed[0] == keyed[1]


@pytest.mark.long
def test_the_sides_of_a_union_are_taken_by_the_places_of_their_columns(engines: Engines) -> None:
    one, other, third = filled(engines), filled(engines), filled(engines)

    def build(flow: Flow) -> DataFrame:
        first = flow.read(one.topic).select("key", "value")
        swapped = flow.read(other.topic).select("value", "key")
        renamed = flow.read(third.topic).select(F.col("key").alias("k"), F.col("value").alias("Value"))
        return first.union(swapped).union(renamed)

    direct, spark = engines.both(build)
    assert len(direct.records) == 3 * 152
    assert whole(direct, timestamp=False) == whole(spark, timestamp=False)


@pytest.mark.long
def test_records_stay_in_their_partition(engines: Engines) -> None:
    source = filled(engines, 4)
    direct, spark = engines.both(
        lambda flow: flow.read(source.topic, include_headers=True).select(*COLUMNS), partitions=4, partitioner="source"
    )
    places = by_both_partitions(direct, source)
    assert places == by_both_partitions(spark, source), "also those without a key, in this order"
    assert sorted(places) == [((source.topic, n), n) for n in range(4)]


@pytest.mark.long
@pytest.mark.parametrize("fail", [pytest.param(True, marks=pytest.mark.long), False])
def test_records_that_have_expired_before_the_start(engines: Engines, fail: bool) -> None:
    """The log starts within a batch, after it was read for the first time."""
    source = filled(engines)
    targets = {engine: engines.make_topic("out", 3) for engine in ENGINES}

    def build(flow: Flow) -> DataFrame:
        return flow.read(source.topic, include_headers=True, fail_on_data_loss=fail).select(*COLUMNS)

    before = [engines.run(engine, build, target=targets[engine]) for engine in ENGINES]
    source.fill()
    start = before[0].covered[1][source.topic][0]
    delete_before(engines.bootstrap, source.topic, start + 20)
    if fail:
        lost = [refused(engines, engine, build, targets[engine]) for engine in ENGINES]
        assert lost[0] == lost[1]
        return
    direct, spark = (engines.run(engine, build, target=targets[engine]) for engine in ENGINES)
    assert direct.covered == spark.covered
    assert by_partition(direct) == by_partition(spark)
    assert whole(direct) == whole(spark)
    assert len(direct.records) == 2 * 152 - 20


def refused(engines: Engines, engine: str, build: Callable[[Flow], DataFrame], target: str) -> tuple[str, Any]:
    """How a run was refused, and where the flow is then."""
    with pytest.raises(DataLossError) as caught:
        engines.run(engine, build, target=target)
    return str(caught.value.topic), engines.progress(f"{engine}-{target}")[-1].offsets


def delete_before(bootstrap: str, topic: str, offset: int, partition: int = 0) -> None:
    admin, place = AdminClient({"bootstrap.servers": bootstrap}), TopicPartition(topic, partition, offset)
    admin.delete_records([place])[place].result(30)


@pytest.mark.usefixtures("quick_cleaner")
def test_a_compacted_source(engines: Engines) -> None:
    """Records, whole batches and markers are missing in the log, also where it begins."""
    topic = engines.make_topic("holes", 1, **COMPACTED_AT_ONCE)
    fill_until_compacted(engines.bootstrap, topic)
    left = independent.read_topic(engines.bootstrap, topic, decided=True)
    assert holes(left) > 20
    direct, spark = engines.both(
        lambda flow: flow.read(topic, max_records_per_batch=400, include_headers=True).select(*COLUMNS)
    )
    assert by_partition(direct) == by_partition(spark), "in this order, byte by byte"
    assert whole(direct) == Counter(content(each) for each in left)
    assert len(direct.query.batches) > 2, "batches begin and end in holes, too"


def holes(left: list[independent.Seen]) -> int:
    """How often more than a marker is missing between two records, or in front of the first one."""
    return sum(after - before > 2 for before, after in itertools.pairwise([-1, *(each.offset for each in left)]))


COMPACTED_AT_ONCE = {
    "cleanup_policy": "compact",
    "min_cleanable_dirty_ratio": "0.01",
    "segment_ms": "50",
    "max_compaction_lag_ms": "100",
    "delete_retention_ms": "0",
}


def fill_until_compacted(bootstrap: str, topic: str) -> None:
    """Write values of the same keys again and again, half of them aborted, until the cleaner has removed many of them.

    Then the cleaner leaves the topic alone, so that every reader sees the same."""
    chance = random.Random(7)
    with transactions(bootstrap, topic) as write:

        def is_compacted() -> bool:
            for commit in (True, False) * 10:
                keys = [b"key-%d" % chance.randrange(400) for _ in range(50)]
                write([(key, None if chance.random() < 0.1 else b"%r" % commit) for key in keys], 0, commit=commit)
            return holes(independent.read_topic(bootstrap, topic, decided=True)) > 20

        wait_until(is_compacted, 60, "compaction", poll_s=0.1)
    admin, resource = AdminClient({"bootstrap.servers": bootstrap}), ConfigResource(ResourceType.TOPIC, topic)
    entry = ConfigEntry("cleanup.policy", "delete", incremental_operation=AlterConfigOpType.SET)
    resource.add_incremental_config(entry)
    admin.incremental_alter_configs([resource])[resource].result(30)
    seen: list[list[int]] = []

    def is_left_alone() -> bool:  # a cleaner that had begun goes on to its end
        seen.append([each.offset for each in independent.read_topic(bootstrap, topic, decided=True)])
        return seen[-2:-1] == seen[-1:]

    wait_until(is_left_alone, 60, "the end of compaction", poll_s=1)


# ---- with a process step -----------------------------------------------------------------------------------


@pytest.fixture
def both_process(engines: Engines, ledger: Any, tmp_path: Path) -> Callable[..., Result]:
    """Runs the same flow with a process step by the driver and by tasks, compares outputs and the table topic, and
    returns the result of the driver."""

    def run(read: Callable[[Flow], DataFrame], **options: Any) -> Result:
        results, rows = [], []
        for engine in PLACES:
            table = engines.make_topic("table", 3, cleanup_policy="compact")

            def build(flow: Flow, engine: str = engine, table: str = table) -> DataFrame:
                return flow.process(read(flow), ledger.Ledger(), table=table, state_dir=tmp_path / engine)

            results.append(engines.run(engine, build, **options))
            rows.append(last_rows(engines.bootstrap, table))
        driver, tasks = results
        assert driver.read == tasks.read
        assert driver.covered == tasks.covered
        assert by_key(driver.records) == by_key(tasks.records), "outputs of each key in order"
        assert rows[0] == rows[1]
        assert len(rows[0]) > 30
        return driver

    return run


@pytest.mark.long_but("driver-exactly_once")
@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
@pytest.mark.parametrize("engines", ["driver"], indirect=True)  # it compares with tasks by itself
def test_a_process_step(engines: Engines, ledger: Any, both_process: Any, guarantee: str) -> None:
    """Outputs and the table topic, record by record."""
    source = engines.make_topic("in", 3)
    independent.fill(engines.bootstrap, source, ledger.inputs(0, 900))
    both_process(lambda flow: flow.read(source), guarantee=guarantee)


@pytest.mark.long
@pytest.mark.parametrize("engines", ["driver"], indirect=True)  # it compares with tasks by itself
def test_a_process_step_over_two_sources(engines: Engines, ledger: Any, both_process: Any) -> None:
    """The first has aborted records, which would raise, and a partition with nothing left but a transaction marker. The
    second has an empty partition, one with aborted records only, and one that ends with them."""
    first, second = engines.make_topic("in", 2), engines.make_topic("in", 3)
    boom = [(b"key-000", json.dumps({"n": -1, "op": "boom"}).encode())] * 30
    sent = ledger.inputs(0, 400)
    others = [(b"other-" + key, value) for key, value in ledger.inputs(400, 200)]
    with transactions(engines.bootstrap, first) as write:
        write(sent[:150], 0, commit=True)
        write(boom, 0, commit=False)
        write(sent[150:300], 0, commit=True)
        write(boom, 1, commit=True)
        delete_before(engines.bootstrap, first, len(boom), partition=1)
        write(sent[300:], 0, commit=True)
    with transactions(engines.bootstrap, second) as write:
        write(boom, 1, commit=False)
        write(others, 2, commit=True)
        write(boom, 2, commit=False)
    result = both_process(lambda flow: flow.read(first).union(flow.read(second)))
    assert result.covered[0][first] == {0: 0, 1: len(boom)}
    assert result.covered[1] == {
        first: {0: 400 + 3 + len(boom) + 1, 1: len(boom) + 1},
        second: {0: 0, 1: len(boom) + 1, 2: 200 + 1 + len(boom) + 1},
    }
    outputs, _, _ = ledger.expected(sent + others)
    assert {value["n"]: value for value in map(json.loads, (r.value for r in result.records))} == outputs
    assert len(result.records) == len(outputs)


@contextlib.contextmanager
def transactions(bootstrap: str, topic: str) -> Iterator[Callable[..., None]]:
    """``write(pairs, partition, commit=False)``: one transaction."""
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "transactional.id": f"writer-of-{topic}"})
    producer.init_transactions(30)

    def write(pairs: list[tuple[bytes, bytes | None]], partition: int, *, commit: bool) -> None:
        producer.begin_transaction()
        for n, (key, value) in enumerate(pairs):
            producer.produce(topic, value, key, partition, timestamp=next(times), headers=[("n", b"%d" % n)])
        assert producer.flush(30) == 0
        if commit:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)

    yield write


def by_key(records: list[independent.Seen]) -> dict[Any, list[Any]]:
    found = defaultdict(list)
    for seen in sorted(records, key=lambda each: (each.partition, each.offset)):
        found[seen.partition, seen.key].append((seen.value, seen.headers))
    return dict(found)


def last_rows(bootstrap: str, topic: str) -> dict[Any, Any]:
    rows = {}
    for seen in independent.read_topic(bootstrap, topic, decided=True):
        rows[seen.partition, seen.key] = (seen.value, seen.headers)
    return rows


# ---- one flow, from the driver to tasks and back ------------------------------------------------------------


def other_than(engine: str) -> str:
    return PLACES[1 - PLACES.index(engine)]


@pytest.mark.long
def test_a_flow_alternates(make_pipe: Any, inject: Any) -> None:
    """From start to start, every second one after an injected fault."""
    pipe = make_pipe()
    for n, engine in enumerate(("driver", "tasks", "driver", "tasks", "driver")):
        pipe.fill(700)
        if n % 2:
            done = pipe.committed_progress()[-1].batch_id
            inject(("write", "progress")[n // 2 % 2], "raise", batch=done + 1)
            with pytest.raises(Exception, match="injected at"):
                pipe.run(engine=other_than(engine))
            inject("init", "raise", flow="nobody")
        query = pipe.run(engine=engine)
        assert {"task" in batch.path for batch in query.batches} == {engine == "tasks"}
    pipe.check()
    assert [each.batch_id for each in pipe.committed_progress()] == list(range(len(pipe.committed_progress())))


@pytest.mark.long
def test_a_flow_with_state_alternates(make_state_pipe: Any, inject: Any) -> None:
    pipe = make_state_pipe()
    for n, engine in enumerate(("driver", "tasks", "driver", "tasks")):
        pipe.fill(500)
        if n:
            done = pipe.committed_progress()[-1].batch_id
            inject(("progress", "write", "audit")[n - 1], "raise", batch=done + 1)
            with pytest.raises(Exception, match="injected at"):
                pipe.run(engine=other_than(engine))
            inject("init", "raise", flow="nobody")
        pipe.run(engine=engine)
    pipe.check()


# ---- while it runs -----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "partitions, more_partitions, targets, engine",
    [(1, 3, 3, "driver"), (2, 4, 4, "tasks")],
    ids=["driver", "tasks"],
)
def test_partitions_that_are_added_while_the_direct_engine_runs(
    make_pipe: Any, partitions: int, more_partitions: int, targets: int, engine: str
) -> None:
    """They are read from their first record, by the driver or by tasks."""
    pipe = make_pipe(partitions=partitions, target_partitions=targets)
    pipe.fill(200)
    flow = pipe.open()
    rows = flow.read(pipe.source).select("key", "value")
    query = flow.write(rows, topic=pipe.target, engine=engine).start()
    try:
        query.processAllAvailable()
        admin = AdminClient({"bootstrap.servers": pipe.bootstrap})
        admin.create_partitions([NewPartitions(pipe.source, more_partitions)])[pipe.source].result(30)
        first = len(pipe.sent)
        more = [(f"new-{n}".encode(), f"{n:09d}".encode()) for n in range(first, first + 300)]
        independent.fill(pipe.bootstrap, pipe.source, more)
        pipe.sent += more
        wait_until(
            lambda: len(pipe.committed_progress()[-1].offsets[pipe.source]) == more_partitions, 30, lambda: repr(query)
        )
        query.processAllAvailable()
    finally:
        query.stop()
    pipe.check()
