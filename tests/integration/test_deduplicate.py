"""``Flow.deduplicate`` as a user sees it: what passes, what is counted, where the rest goes, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import Any

import pytest
from confluent_kafka import Producer

import onceflow
from onceflow.planning import placement
from onceflow.testing import independent

pytestmark = pytest.mark.integration

COLUMNS = ("get_json_object(string(value), '$.id') as order", "bigint(get_json_object(string(value), '$.at')) as at")


def values(pipe: Any, topic: str) -> list[int]:
    found = independent.read_topic(pipe.bootstrap, topic, decided=True)
    return sorted(json.loads(seen.value or b"")["n"] for seen in found)


class Orders:
    """A flow that de-duplicates the records of a topic by the id in their values."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.number = 0

    def send(self, *orders: tuple[str | None, int]) -> None:
        """Records with an id and a time each, numbered. Records of an id have different keys."""
        records: list[Any] = []
        for id_, at in orders:
            value = {"n": self.number, "id": id_, "at": at}
            records.append((b"key-%d" % (self.number % 7), json.dumps(value).encode()))
            self.number += 1
        independent.fill(self.pipe.bootstrap, self.pipe.source, records)

    def run(self, *, write: Any = None, after: Any = None, **how: Any) -> Any:
        pipe = self.pipe
        with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
            df = flow.read(pipe.source, include_headers=True).selectExpr("*", *COLUMNS)
            given = {"id": "order", "state_dir": pipe.tmp_path, "idle_timeout": "1 ms", **how}
            if "records" not in given:
                given = {"within": "10 seconds", "event_time": "at", **given}
            first = flow.deduplicate(df, **given)
            first = first if after is None else after(first)
            query = flow.write(first, topic=pipe.target, once=True, **(write or {})).start()
            query.awaitTermination()
        return query


@pytest.mark.parametrize(
    "tasks", [pytest.param(False, id="driver"), pytest.param(True, id="tasks", marks=pytest.mark.long)]
)
def test_first_records_pass_and_the_rest_is_told(
    make_pipe: Any, make_topic: Any, tasks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "TASK_ROWS", 4)
    pipe = make_pipe(partitions=3)
    aside: Any = {"late": make_topic("late", 1), "duplicates_topic": make_topic("twice", 2)}
    orders = Orders(pipe)
    write = {"engine": "tasks" if tasks else "auto"}
    orders.send(*[(f"id-{n % 8}", 20_000 + n) for n in range(20)])  # numbers 0 to 19
    (batch,) = orders.run(write=write, **aside).batches
    assert (batch.records, batch.duplicates, batch.late) == (8, 12, 0)
    by_id = {
        json.loads(seen.value or b"")["id"]
        for seen in independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    }
    assert by_id == {f"id-{n}" for n in range(8)}
    assert len(values(pipe, pipe.target)) == 8

    shutil.rmtree(pipe.tmp_path / pipe.flow)  # the ids come back from the table topic
    long_id = "x" * 600
    orders.send(("id-3", 9_000), ("id-4", 21_000), ("new", 60_000), (long_id, 60_000), (long_id, 60_001), ("a", 10_020))
    orders.send(*[(f"later-{n}", 60_000) for n in range(7)])  # to every partition; numbers 26 to 32
    (batch,) = orders.run(write=write, **aside).batches
    assert (batch.records, batch.duplicates, batch.late) == (10, 2, 1)
    digest = f"sha256:{hashlib.sha256(long_id.encode()).hexdigest()}"  # not the long one, although it is kept like that
    orders.send(("id-4", 60_000), (long_id, 60_000), ("new", 1), (digest, 60_000), (digest, 60_000))
    batch = orders.run(write=write, **aside).batches[-1]
    assert (batch.records, batch.duplicates, batch.late) == (2, 2, 1), "id-4 is forgotten"
    assert values(pipe, aside["late"]) == [20, 35]
    assert {21, 34} < set(values(pipe, aside["duplicates_topic"]))
    assert {22, 25, *range(26, 34)} < set(values(pipe, pipe.target))
    assert len({36, 37} & set(values(pipe, pipe.target))) == 1, "the first one that was read"
    everything = [*values(pipe, pipe.target), *values(pipe, aside["late"]), *values(pipe, aside["duplicates_topic"])]
    assert sorted(everything) == list(range(38)), "nothing is lost, nothing is twice"
    first = independent.read_topic(pipe.bootstrap, pipe.target)[0]
    assert first.key is not None
    assert first.key.startswith(b"key-")


@pytest.mark.long
def test_the_last_ids_by_key_with_operators_behind(make_pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The id is the key, which may be long, and must not be null."""
    monkeypatch.setattr(placement, "TASK_ROWS", 4)
    pipe = make_pipe(partitions=2)
    orders = Orders(pipe)
    tasks = {"engine": "tasks"}
    by_key: dict[str, Any] = {"id": "key", "records": 100, "write": tasks}
    orders.send(*[("x", n) for n in range(21)])
    (batch,) = orders.run(**by_key).batches
    assert (batch.records, batch.duplicates) == (7, 14)
    independent.fill(pipe.bootstrap, pipe.source, [(b"k" * 500, b"{}"), (b"key-3", b"{}"), (b"k" * 500, b"{}")])
    (batch,) = orders.run(**by_key, after=lambda df: df.where("length(key) > 5")).batches
    assert (batch.records, batch.duplicates) == (1, 2)
    assert {seen.key for seen in independent.read_topic(pipe.bootstrap, pipe.target, decided=True)} >= {
        b"k" * 500,
        b"key-0",
    }
    independent.fill(pipe.bootstrap, pipe.source, [(None, b"{}")])
    with pytest.raises(onceflow.OnceflowError, match="no id: column 'key' is null"):
        orders.run(**by_key)
    with pytest.raises(onceflow.ProgressConflictError, match="has the fields"):
        orders.run(id="key", within="1 hour")


class Ship(onceflow.Processor):
    """Knows where its records were read; fails the first time."""

    def process(self, key: bytes, records: Any, state: Any) -> Any:
        for record in records:
            if b'"id": "bad"' in record.value and b"onceflow.attempt" not in str(record.headers).encode():
                raise ValueError("the printer is out of paper")
            yield onceflow.Record(key, f"{onceflow.idempotency_key(record)} {record.value.decode()}".encode())


async def place(record: Any) -> bytes:
    return onceflow.idempotency_key(record).encode()


@pytest.mark.long
@pytest.mark.parametrize("tasks", [False, True], ids=["driver", "tasks"])
def test_steps_behind_know_where_a_record_was_read_and_get_its_retries(
    make_pipe: Any, make_topic: Any, tasks: bool
) -> None:
    """The pattern of docs/deduplication.md: the retry topic joins behind the step."""
    pipe = make_pipe(partitions=2)
    names = {"failed": make_topic("failed", 1), "retry": make_topic("retry", 1)}
    orders = Orders(pipe)
    orders.send(("a", 20_000), ("bad", 20_001), ("a", 20_002), ("bad", 20_003), ("c", 20_004))
    read = {
        f"{pipe.source}/{each.partition}/{each.offset}": json.loads(each.value or b"")["n"]
        for each in independent.read_topic(pipe.bootstrap, pipe.source)
    }
    own = {n: place for place, n in read.items()}

    def run() -> Any:
        with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
            df = flow.read(pipe.source, include_headers=True).selectExpr("*", *COLUMNS)
            unique = flow.deduplicate(
                df, id="order", event_time="at", within="10 seconds", state_dir=pipe.tmp_path, idle_timeout="1 ms"
            )
            again = flow.read(names["retry"], include_headers=True)
            rows = unique.unionByName(again, allowMissingColumns=True)
            shipped = flow.process(
                rows, Ship(), table=f"{pipe.flow}-shipped", on_error="dead-letter", dead_letter_topic=names["failed"],
                state_dir=pipe.tmp_path,
            )  # fmt: skip
            query = flow.write(shipped, topic=pipe.target, once=True, engine="tasks" if tasks else "auto").start()
            query.awaitTermination()
            return query.batches[-1]

    batch = run()
    assert (batch.records, batch.duplicates, batch.dead_letters) == (2, 2, 1)
    (letter,) = independent.read_topic(pipe.bootstrap, names["failed"])
    headers = dict(letter.headers)
    origin = "/".join(headers[f"onceflow.origin.{part}"].decode() for part in ("topic", "partition", "offset"))
    assert origin in (own[1], own[3])
    assert origin == own[json.loads(letter.value or b"")["n"]]
    # As `Retry` writes it.
    kept = [(name, value) for name, value in letter.headers if "error" not in name]
    producer = Producer({"bootstrap.servers": pipe.bootstrap})
    producer.produce(names["retry"], key=letter.key, value=letter.value, headers=kept)
    assert producer.flush(30) == 0
    batch = run()
    assert (batch.records, batch.duplicates, batch.dead_letters) == (1, 0, 0)
    shipped = [
        (each.value or b"").decode().split(" ", 1) for each in independent.read_topic(pipe.bootstrap, pipe.target)
    ]
    assert sorted(json.loads(value)["id"] for _, value in shipped) == ["a", "bad", "c"]
    assert all(own[json.loads(value)["n"]] == place for place, value in shipped)


@pytest.mark.long
@pytest.mark.parametrize("engine", [pytest.param("driver", marks=pytest.mark.long), "tasks"])
def test_calls_behind_know_where_a_record_was_read_and_all_go_to_the_topic_given(
    make_pipe: Any, make_topic: Any, engine: str
) -> None:
    pipe = make_pipe(partitions=2, target_partitions=1)
    orders, results = Orders(pipe), make_topic("results", 1)
    orders.send(*[(f"id-{n % 5}", 20_000 + n) for n in range(10)])
    places = {
        f"{pipe.source}/{each.partition}/{each.offset}".encode()
        for each in independent.read_topic(pipe.bootstrap, pipe.source)
    }
    twice = make_topic("twice", 1)
    with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
        df = flow.read(pipe.source, include_headers=True).selectExpr("*", *COLUMNS)
        how: Any = {"event_time": "at", "within": "10 s", "state_dir": pipe.tmp_path, "duplicates_topic": twice}
        unique = flow.deduplicate(df, id="order", **how)
        called = flow.enrich(unique.where("length(value) > 1"), onceflow.concurrently(place), topic=results)
        flow.write(called, once=True, engine=engine).start().awaitTermination()
    found = [each.value for each in independent.read_topic(pipe.bootstrap, results)]
    assert len(found) == 5
    assert set(found) < places
    orders.send(*[(f"new-{n % 5}", 20_000 + n) for n in range(10)])
    query = orders.run(**how, after=lambda df: df.where("source_offset >= 0"), write={"engine": engine})
    assert (query.batches[-1].records, query.batches[-1].duplicates) == (5, 5)
    assert len(values(pipe, pipe.target)) == 5, "with one partition, whatever partitions the source has"
    assert len(values(pipe, twice)) == 10


def test_columns_that_cannot_be_used(make_pipe: Any) -> None:
    pipe = make_pipe(partitions=1)
    orders = Orders(pipe)
    for how, message in (
        ({"id": "oder"}, "'oder', which does not exist"),
        ({"id": "headers"}, "cannot take ids of the type"),
        ({"event_time": "order"}, "it is string"),
        ({"late": pipe.source}, "cannot go to"),
        ({"duplicates_topic": "no-such-topic"}, "no-such-topic"),
        ({"within": None}, "neither is given"),
    ):
        with pytest.raises(onceflow.OnceflowError) as caught:
            orders.run(**how)
        assert message in str(caught.value)
