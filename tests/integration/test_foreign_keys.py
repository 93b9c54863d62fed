"""``Flow.join_foreign_key``: after each run, the result is that of a join over the last rows of both tables."""

from __future__ import annotations

import json
import random
import shutil
from typing import Any

import pytest
from confluent_kafka import Producer

import onceflow
from onceflow import serdes
from onceflow.errors import OptionError, ProgressConflictError, SchemaError
from onceflow.planning import placement
from onceflow.testing import independent
from onceflow.testing.flow_driver import FlowDriver

pytestmark = pytest.mark.integration

AS_JSON = (
    "key",
    (
        "CASE WHEN left_value IS NOT NULL THEN "
        "to_json(struct(string(left_value) AS left, hex(right_value) AS right)) END AS value"
    ),
)


class Tables:
    """Two tables, a flow that joins them, and what their last rows are."""

    def __init__(self, pipe: Any, right: str, how: str, engine: str) -> None:
        self.pipe, self.right, self.how, self.engine = pipe, right, how, engine
        self.rows: tuple[dict[str, str | None], dict[str, bytes]] = ({}, {})
        self.producer = Producer({"bootstrap.servers": pipe.bootstrap, "partitioner": "murmur2_random"})

    def put_left(self, key: str, name: str | None, number: int) -> None:
        value = json.dumps({"customer": name, "n": number}) if name is not None else json.dumps({"n": number})
        self.producer.produce(self.pipe.source, value.encode(), key.encode())
        self.rows[0][key] = value

    def delete_left(self, key: str) -> None:
        self.producer.produce(self.pipe.source, None, key.encode())
        self.rows[0].pop(key, None)

    def put_right(self, key: str, value: bytes) -> None:
        self.producer.produce(self.right, value, key.encode())
        self.rows[1][key] = value

    def delete_right(self, key: str) -> None:
        self.producer.produce(self.right, None, key.encode())
        self.rows[1].pop(key, None)

    def run(self, **read: Any) -> None:
        assert self.producer.flush(30) == 0
        pipe = self.pipe
        with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
            left = flow.read(pipe.source, **read).selectExpr("*", "get_json_object(string(value), '$.customer') AS fk")
            joined = flow.join_foreign_key(
                left,
                flow.read(self.right, **read),
                foreign_key="fk",
                table=pipe.flow,
                how=self.how,
                state_dir=pipe.tmp_path,
            )
            flow.write(
                joined.selectExpr(*AS_JSON), topic=pipe.target, once=True, engine=self.engine
            ).start().awaitTermination()

    def expected(self) -> dict[str, tuple[str, str | None]]:
        found = {}
        for key, value in self.rows[0].items():
            right = self.rows[1].get(json.loads(value or "").get("customer"))
            if right is not None or self.how == "left":
                found[key] = (value or "", None if right is None else right.hex().upper())
        return found

    def result(self) -> dict[str, tuple[str, str | None]]:
        """The last rows of the output."""
        found = {}
        for seen in independent.read_topic(self.pipe.bootstrap, self.pipe.target, decided=True):
            key = (seen.key or b"").decode()
            if seen.value is None:
                assert key in found, "only rows that are there are deleted"
                del found[key]
            else:
                row = json.loads(seen.value)
                found[key] = (row["left"], row.get("right"))
        return found


@pytest.mark.parametrize(
    "how, engine",
    [
        pytest.param("inner", "driver", id="inner-driver", marks=pytest.mark.long),
        pytest.param("left", "tasks", id="left-tasks"),
        pytest.param("left", "driver", id="left-driver", marks=pytest.mark.long),
        pytest.param("inner", "tasks", id="inner-tasks", marks=pytest.mark.long),
    ],
)
def test_the_result_follows_both_tables(
    make_pipe: Any, make_topic: Any, how: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "TASK_ROWS", 4)
    pipe = make_pipe(partitions=3, target_partitions=2)
    tables = Tables(pipe, make_topic("customers", 2), how, engine)
    picked = random.Random(how)
    names = [f"c{n}" for n in range(5)]
    for run in range(4):
        for number in range(60):
            key, name = f"o{picked.randrange(12)}", picked.choice(names)
            chance = picked.random()
            if chance < 0.5:
                tables.put_left(key, picked.choice([name, name, name, None, "unknown", ""]), number)
            elif chance < 0.65:
                tables.delete_left(key)
            elif chance < 0.85:
                tables.put_right(name, picked.randbytes(picked.randrange(4)))
            else:
                tables.delete_right(name)
        tables.run(max_records_per_batch=[None, 5, 20][run % 3])
        assert tables.result() == tables.expected(), run
        if run == 2:
            shutil.rmtree(pipe.tmp_path / pipe.flow)
    assert tables.expected()


def test_what_cannot_be_joined(make_pipe: Any) -> None:
    pipe = make_pipe(partitions=1)
    with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
        rows = flow.read(pipe.source)
        with pytest.raises(OptionError, match=r"how='outer' of .* is unknown"):
            flow.join_foreign_key(rows, rows, foreign_key="key", table="t", how="outer")
        with pytest.raises(SchemaError, match=r"from the column 'ky' .*it is missing") as caught:
            flow.join_foreign_key(rows, rows, foreign_key="ky", table="t")
        assert "did you mean" in str(caught.value).lower()
        with pytest.raises(SchemaError, match="it is bigint"):
            flow.join_foreign_key(rows, rows, foreign_key="offset", table="t")


def joined(how: str) -> Any:
    """A flow. Left rows begin with their foreign key and a comma."""

    def flow(flow: Any) -> Any:
        left = flow.read("left").selectExpr("*", "split_part(string(value), ',', 1) AS fk")
        letters = {"on_error": "dead-letter", "dead_letter_topic": "letters"}
        rows = flow.join_foreign_key(left, flow.read("right"), foreign_key="fk", table="t", how=how, **letters)
        value = "concat_ws('|', string(left_value), coalesce(string(right_value), 'none'))"
        written = rows.selectExpr("key", f"CASE WHEN left_value IS NOT NULL THEN {value} END AS value")
        return flow.write(written, topic="out")

    return flow


def log(driver: FlowDriver, topic: str = "out") -> list[tuple[Any, Any]]:
    return [(record.key, record.value) for record in driver.read(topic, key=serdes.BYTES, value=serdes.BYTES)]


def test_each_change_is_written_once() -> None:
    driver = FlowDriver(joined("left"))
    for topic, key, value in (
        *[("left", b"k", b"A,1"), ("right", b"A", b"a"), ("right", b"B", b"b"), ("left", b"k", b"B,1")],
        *[("left", b"k", b"nobody,1"), ("left", b"k", None), ("left", b"k", None), ("left", b"unknown", None)],
    ):
        driver.send(topic, key, value)
    written = [b"A,1|none", b"A,1|a", b"B,1|b", b"nobody,1|none", None]
    assert log(driver) == [(b"k", value) for value in written]


def test_rows_are_deleted_and_made_again_in_one_batch_with_changes_of_the_other_table() -> None:
    driver = FlowDriver(joined("left"))
    sent = (("left", b"k", b"A,1"), ("left", b"A", b"A,0"), ("right", b"A", b"a"), ("right", b"B", b"b"))
    for topic, key, value in sent:
        driver.send(topic, key, value, run=False)
    driver.run()
    assert dict(log(driver)) == {b"k": b"A,1|a", b"A": b"A,0|a"}
    for topic, key, value in (
        *[("left", b"k", None), ("left", b"k", b"B,2"), ("right", b"A", None), ("right", b"B", None)],
        *[("right", b"B", b"b2"), ("left", b"A", b"B,3"), ("left", b"n", b",9"), ("right", b"", b"empty")],
    ):
        driver.send(topic, key, value, run=False)
    driver.run()
    assert dict(log(driver)) == {b"k": b"B,2|b2", b"A": b"B,3|b2", b"n": b",9|empty"}


def test_a_letter_has_the_record_as_it_was_read() -> None:
    driver = FlowDriver(joined("inner"))
    for topic, key, value in (
        ("left", None, b"A,1"),
        ("right", None, b"a"),
        ("left", b"k", b"A,2"),
        ("right", b"A", b"a"),
    ):
        driver.send(topic, key, value)
    assert log(driver) == [(b"k", b"A,2|a")]
    assert sorted(log(driver, "letters")) == [(None, b"A,1"), (None, b"a")]


@pytest.mark.parametrize("first, second", [("inner", "left"), ("left", "inner")])
def test_another_kind_of_join_needs_other_tables(first: str, second: str) -> None:
    driver = FlowDriver(joined(first))
    driver.send("left", b"k", b"A,1")
    with pytest.raises(ProgressConflictError, match=f"this is an? {second} foreign-key join"):
        driver.restart(joined(second))


@pytest.mark.long
def test_a_left_row_that_is_too_large_leaves_what_was_there(make_pipe: Any, make_topic: Any) -> None:
    """The source takes the record; the row of the second table, which has the left key in it, is larger."""
    pipe, right, letters = make_pipe(partitions=1), make_topic("right", 1), make_topic("letters", 1)
    large = b"B," + b"x" * 1_048_470

    def run(*records: tuple[str, bytes, bytes]) -> dict[bytes | None, bytes | None]:
        producer = Producer({"bootstrap.servers": pipe.bootstrap, "message.max.bytes": 5_000_000})
        for topic, key, value in records:
            producer.produce(topic, value, key)
        assert producer.flush(30) == 0
        with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
            left = flow.read(pipe.source).selectExpr("*", "split_part(string(value), ',', 1) AS fk")
            options = {"on_error": "dead-letter", "dead_letter_topic": letters, "state_dir": pipe.tmp_path}
            rows = flow.join_foreign_key(left, flow.read(right), foreign_key="fk", table=pipe.flow, **options)
            written = rows.selectExpr("key", "concat(left_value, '|', right_value) AS value")
            flow.write(written, topic=pipe.target, once=True).start().awaitTermination()
        return {seen.key: seen.value for seen in independent.read_topic(pipe.bootstrap, pipe.target, decided=True)}

    assert run((pipe.source, b"k", b"A,1"), (right, b"A", b"a"), (right, b"B", b"b")) == {b"k": b"A,1|a"}
    assert run((pipe.source, b"k", large)) == {b"k": b"A,1|a"}
    (letter,) = independent.read_topic(pipe.bootstrap, letters, decided=True)
    assert letter.key == b"k"
    assert run((right, b"A", b"a2")) == {b"k": b"A,1|a2"}
