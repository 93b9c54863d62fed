"""`onceflow verify` finds every way of breaking a history that topics can show: flows whose records are made by hand.

The mutations are those of ``tests/unit/test_history.py``, without those that only the recordings of drivers show.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.driver.record import progress_log
from onceflow.protocol import progress as records
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress, TableProgress
from onceflow.testing.broker import create_topic

pytestmark = pytest.mark.integration

PROCESSOR = '''
import onceflow

class Numbers(onceflow.Processor):
    """Yields each record, and keeps the last one."""
    def process(self, key, records, state):
        for record in records:
            state.put(record.value)
            yield onceflow.Record(key, record.value)

class Last(Numbers):
    """Yields the last record of each call."""
    def process(self, key, records, state):
        *_, last = super().process(key, records, state)
        yield last
'''
RECORDS, BATCH = 16, 4
KEYS = [b"a", b"d"]
"""They are in different partitions of two."""


@dataclass
class Batch:
    """What one transaction has. The source has one partition, with the keys in turn.

    Args:
        outputs, rows: partition, key and value of records of the output and the table.
        progress: where it takes the source; None: it has no progress record.
        commits: whether it is committed.
    """

    number: int
    outputs: list[tuple[int, bytes, bytes]]
    rows: list[tuple[int, bytes, bytes]]
    progress: int | None
    commits: bool = True


@dataclass
class World:
    """A flow of four batches of four records."""

    batches: list[Batch] = field(default_factory=list)
    aborted_sources: set[int] = field(default_factory=set)
    after: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    group: int | None = None

    @classmethod
    def sound(cls) -> World:
        made = [[record(n) for n in range(start, start + BATCH)] for start in range(0, RECORDS, BATCH)]
        return cls([Batch(n, list(each), list(each[-2:]), n * BATCH) for n, each in enumerate(made, 1)])


def record(n: int) -> tuple[int, bytes, bytes]:
    key = KEYS[n % 2]
    return n % 2, key, b"%d" % n


Mutation = Callable[[World], None]
MUTATIONS: list[Any] = []


def mutation(*kinds: str, arguments: tuple[str, ...] = ()) -> Callable[[Mutation], Mutation]:
    """A way to break a history, and what it is found as, with other arguments if the usual ones do not show it."""

    def register(mutate: Mutation) -> Mutation:
        MUTATIONS.append(pytest.param(mutate, set(kinds), arguments, id=mutate.__name__))
        return mutate

    return register


REPLAY = ("--replay", "numbers_service.py:Numbers")


@mutation()
def nothing(world: World) -> None:
    pass


@mutation(arguments=REPLAY)
def nothing_of_a_replay(world: World) -> None:
    pass


@mutation()
def an_aborted_attempt(world: World) -> None:
    first = world.batches[1]
    world.batches.insert(1, Batch(2, list(first.outputs), list(first.rows), first.progress, commits=False))


@mutation("lost")
def one_output_is_missing(world: World) -> None:
    del world.batches[1].outputs[0]


@mutation("lost", arguments=REPLAY)
def one_output_is_missing_of_a_replay(world: World) -> None:
    del world.batches[1].outputs[0]


@mutation("lost")
def progress_without_outputs(world: World) -> None:
    world.batches[2].outputs.clear()


@mutation("lost")
def half_of_a_torn_transaction(world: World) -> None:
    del world.batches[2].outputs[:2]


@mutation("lost")
def a_gap_between_batches(world: World) -> None:
    world.batches[2].outputs = world.batches[2].outputs[2:]
    world.batches[1].progress = 2 * BATCH + 2


@mutation("doubled")
def an_overlap_of_batches(world: World) -> None:
    world.batches[2].outputs = [*world.batches[1].outputs[-2:], *world.batches[2].outputs]


@mutation("doubled")
def an_output_is_there_twice(world: World) -> None:
    world.batches[2].outputs.append(world.batches[2].outputs[0])


@mutation("doubled")
def two_attempts_are_visible(world: World) -> None:
    first = world.batches[1]
    world.batches.insert(1, Batch(2, list(first.outputs), [], None))


@mutation("foreign")
def outputs_of_a_batch_without_progress(world: World) -> None:
    world.batches[3].progress = None
    world.batches[3].rows.clear()


@mutation("foreign", "table")
def outputs_and_rows_of_a_batch_without_progress(world: World) -> None:
    world.batches[3].progress = None


@mutation("foreign")
def an_output_of_an_aborted_source_record(world: World) -> None:
    world.aborted_sources.add(5)


@mutation("foreign")
def a_record_of_another_program(world: World) -> None:
    world.after.append((0, b"a", b"made up"))


@mutation("foreign", arguments=REPLAY)
def a_record_of_another_program_of_a_replay(world: World) -> None:
    world.after.append((0, b"a", b"made up"))


@mutation("progress")
def progress_goes_back(world: World) -> None:
    world.batches[2].progress = BATCH
    world.batches[3].progress = RECORDS


@mutation("lost", "progress")
def progress_is_behind_the_end_of_the_source(world: World) -> None:
    del world.batches[3].outputs[0]
    world.batches[3].progress = 10**6


@mutation()
def a_group_that_is_where_progress_is(world: World) -> None:
    world.group = RECORDS


@mutation("group")
def a_group_that_is_elsewhere(world: World) -> None:
    world.group = RECORDS - 1


@mutation("reordered")
def two_outputs_of_a_key_change_places(world: World) -> None:
    outputs = world.batches[2].outputs
    outputs[0], outputs[2] = outputs[2], outputs[0]


@mutation("misplaced")
def an_output_in_the_partition_of_another_key(world: World) -> None:
    partition, key, value = world.batches[2].outputs[0]
    world.batches[2].outputs[0] = 1 - partition, key, value


@mutation("misplaced", arguments=("--tables",))
def a_row_in_the_partition_of_another_key(world: World) -> None:
    partition, key, value = world.batches[2].rows[0]
    world.batches[2].rows[0] = 1 - partition, key, value


@mutation("state", arguments=REPLAY)
def a_value_of_the_state_is_wrong(world: World) -> None:
    partition, key, _ = world.batches[3].rows[0]
    world.batches[3].rows[0] = partition, key, b"wrong"


@mutation("state", arguments=REPLAY)
def the_state_lacks_a_key(world: World) -> None:
    for batch in world.batches:
        batch.rows = [row for row in batch.rows if row[1] != b"a"]


@mutation("state", arguments=REPLAY)
def the_state_has_another_key(world: World) -> None:
    world.batches[0].rows.append((0, b"c", b"1"))


@pytest.fixture(scope="module")
def producer(onceflow_broker: str) -> Producer:
    """One for all, because it waits for its producer id for a while."""
    options = {"bootstrap.servers": onceflow_broker, "transactional.id": "histories", "linger.ms": 0}
    made = Producer(options)
    with contextlib.closing(Cluster(ClientSettings(onceflow_broker))) as cluster:
        progress_log.ensure_topic(cluster, Deadline(60, "creating the progress topic"))
    made.init_transactions(60)
    return made


@pytest.fixture(scope="module")
def make_source(producer: Producer, onceflow_broker: str) -> Callable[[set[int]], str]:
    """A source with records of which some were aborted; each is a transaction of its own."""

    @cache
    def made(aborted: frozenset[int]) -> str:
        name = f"in-{uuid.uuid4().hex[:8]}"
        create_topic(onceflow_broker, name, 1)
        for n in range(RECORDS):
            _, key, value = record(n)
            producer.begin_transaction()
            producer.produce(name, value, key, partition=0)
            producer.flush(30)
            (producer.abort_transaction if n in aborted else producer.commit_transaction)(30)
        return name

    return lambda aborted: made(frozenset(aborted))


class Writer:
    """Writes a world to topics."""

    def __init__(self, bootstrap: str, producer: Producer, source: str, target: str, table: str) -> None:
        self._bootstrap, self._producer, self._flow = bootstrap, producer, f"flow-{target}"
        self._source, self._target, self._table = source, target, table
        self._ends = {topic: [0, 0] for topic in (target, table)}

    def write(self, world: World) -> None:
        self._transaction([], [], self._progress(0, 0), True)
        for batch in world.batches:
            # A marker follows in each partition that has records.
            rows = {p: sum(partition == p for partition, _, _ in batch.rows) for p in (0, 1)}
            ends = [self._ends[self._table][p] + rows[p] for p in (0, 1)]
            made = None if batch.progress is None else self._progress(batch.number, batch.progress, ends)
            self._transaction(batch.outputs, batch.rows, made, batch.commits)
            self._ends[self._table] = [ends[p] + (rows[p] > 0) for p in (0, 1)]
        if world.after:
            self._transaction(world.after, [], None, True)
        if world.group is not None:
            place = TopicPartition(self._source, 0, 2 * world.group)
            admin = AdminClient({"bootstrap.servers": self._bootstrap})  # it has to live as long as its request
            group = ConsumerGroupTopicPartitions(self._flow, [place])
            admin.alter_consumer_group_offsets([group])[self._flow].result(30)

    def _transaction(self, outputs: Any, rows: Any, made: Progress | None, commits: bool) -> None:
        self._producer.begin_transaction()
        for topic, listed in ((self._target, outputs), (self._table, rows)):
            for partition, key, value in listed:
                self._producer.produce(topic, value, key, partition=partition)
        if made is not None:
            key, value = records.encode(made)
            self._producer.produce(PROGRESS_TOPIC, value, key, partition=progress_log.partition_of(self._flow))
        self._producer.flush(30)
        (self._producer.commit_transaction if commits else self._producer.abort_transaction)(30)

    def _progress(self, batch: int, n: int, ends: Any = (0, 0)) -> Progress:
        # Each source record is a transaction of its own, with a marker behind it.
        changelogs = {self._table: dict(enumerate(ends)), f"{self._table}-internal": {0: 0, 1: 0}}
        tables = {self._table: TableProgress()}
        outputs = (self._target,) if batch else ()
        return Progress(
            self._flow, batch, {self._source: {0: 2 * n}}, {}, 1, changelogs, tables=tables, outputs=outputs
        )


@pytest.mark.parametrize("mutate, kinds, arguments", MUTATIONS)
def test_mutations_are_found(
    mutate: Mutation,
    kinds: set[str],
    arguments: tuple[str, ...],
    verify: Any,
    make_topic: Callable[..., str],
    make_source: Callable[[set[int]], str],
    producer: Producer,
    onceflow_broker: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("numbers_service.py").write_text(PROCESSOR)
    world = World.sound()
    mutate(world)
    source, target = make_source(world.aborted_sources), make_topic("out", 2)
    table = target.replace("out", "table", 1)
    for name in (table, f"{table}-internal"):
        create_topic(onceflow_broker, name, 2, {"cleanup.policy": "compact"})
    Writer(onceflow_broker, producer, source, target, table).write(world)
    found, last = verify(f"flow-{target}", *(arguments or ("--id", "record")), code=1 if kinds else 0)
    assert set(last["found"]) == kinds, (found, last)
    assert all("the flow has state" in note for note in last["notes"]), last["notes"]
    assert len(last["notes"]) == ("reordered" in kinds), "what may be out of order rightly"
    if mutate is nothing_of_a_replay:  # a processor that yields once for each call may have been called more often
        (text,) = verify(f"flow-{target}", "--replay", "numbers_service.py:Last", code=2)[1]["unjudged"]
        assert text.startswith("8 outputs that differ from the replay: the results depend on how many")
