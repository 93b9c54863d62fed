"""Rows for which queries in other systems are known to lose records, to change them, or to fail.

The reports are public; each test names the number of the report that it goes back to.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from onceflow import Flow, Processor, Record, serdes
from onceflow.errors import OnceflowError

sys.path.insert(0, str(Path(__file__).parent))
try:
    from both_engines import TIME_MS, Engines, MakeTopic, Result
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.integration

_SCHEMA = "'id INT, name STRING, list ARRAY<INT>'"
RECORDS: list[tuple[bytes | None, bytes | None]] = [
    (b"0", None),
    (b"0", b"{}"),
    (b"0", b'{"id": 10, "name": "bob", "list": [1, null]}'),
    (b"1", b'{"id": 11, "name": null, "list": []}'),
    (None, b'{"id": 10, "name": "ann", "list": null}'),
    (None, b"not JSON"),
    (b"", b"null"),
    (b"2", b""),
]


# In short, test_sql.py shows that tasks make the same of SQL.
@pytest.fixture(params=["driver", pytest.param("tasks", marks=pytest.mark.long)])
def engines(onceflow_broker: str, onceflow_spark: Any, make_topic: MakeTopic, request: Any) -> Engines:
    return Engines(onceflow_broker, onceflow_spark, make_topic, by_tasks=request.param == "tasks")


def produced(engines: Engines, records: list[tuple[bytes | None, bytes | None]]) -> str:
    """A topic with these records, each with a header and a timestamp of its own."""
    topic = engines.make_topic("in", 3)
    producer = confluent_kafka.Producer({"bootstrap.servers": engines.bootstrap})
    for n, (key, value) in enumerate(records):
        producer.produce(topic, value, key, n % 3, timestamp=TIME_MS + n, headers=[("n", b"%d" % n), ("n", None)])
    assert producer.flush(30) == 0
    return topic


def run(engines: Engines, topic: str, queries: dict[str, Callable[[DataFrame], DataFrame]]) -> Result:
    """All queries in one flow. Each record gets the name of its query as topic of a header, if it has none."""

    def build(flow: Flow) -> DataFrame:
        made = []
        for name, query in queries.items():
            rows = query(flow.read(topic, include_headers=True))
            if "headers" not in rows.columns:
                rows = rows.withColumn(
                    "headers", F.expr(f"array(struct('{name}' AS key, CAST(NULL AS BINARY) AS value))")
                )
            made.append(rows.selectExpr("CAST(key AS BINARY) AS key", "CAST(value AS BINARY) AS value", "headers"))
        return functools.reduce(DataFrame.union, made)

    return engines.run("direct", build)


def of(result: Result, name: str) -> Counter[Any]:
    return Counter((each.key, each.value) for each in result.records if each.headers[0][0] == name)


def field(name: str) -> str:
    return f"from_json(CAST(value AS STRING), {_SCHEMA}).{name}"


def test_rows_without_a_key_or_a_value(engines: Engines) -> None:
    """confluentinc/ksql 5755, 6646, 5634, 4747, 5723, 4746."""
    topic = produced(engines, RECORDS)
    result = run(
        engines,
        topic,
        {
            "no key": lambda df: df.selectExpr("CAST(NULL AS STRING) AS key", "value"),
            "by the key": lambda df: df.where("key > ''").selectExpr("string(int(string(key)) + 2) AS key", "value"),
            "is null": lambda df: df.where(f"{field('name')} IS NULL").select("key", "value"),
            "by a field": lambda df: df.selectExpr(f"string({field('id')}) AS key", "value"),
            "explode": lambda df: df.selectExpr("key", f"explode({field('list')}) AS v").selectExpr(
                "key", "string(v) AS value"
            ),
            "explode of a case": lambda df: df.selectExpr(
                "key",
                f"explode_outer(IF({field('name')} = 'bob', {field('list')}, array({field('id')}))) AS v",
            ).selectExpr("key", "string(v) AS value"),
        },
    )
    assert of(result, "no key") == Counter((None, value) for _, value in RECORDS)
    assert of(result, "by the key") == Counter((b"%d" % (int(k) + 2), v) for k, v in RECORDS if k)
    named = (b'{"id": 10, "name": "bob", "list": [1, null]}', b'{"id": 10, "name": "ann", "list": null}')
    assert of(result, "is null") == Counter((k, v) for k, v in RECORDS if v not in named)
    ids = [None, None, b"10", b"11", b"10", None, None, None]
    assert of(result, "by a field") == Counter((key, v) for key, (_, v) in zip(ids, RECORDS, strict=True))
    assert of(result, "explode") == Counter([(b"0", b"1"), (b"0", None)])
    others = [(k, i) for (k, v), i in zip(RECORDS, ids, strict=True) if v != named[0]]
    assert of(result, "explode of a case") == Counter([(b"0", b"1"), (b"0", None), *others])


@pytest.mark.long
def test_headers_and_times_stay(engines: Engines) -> None:
    """quixio/quix-streams 375. Two headers have one name, quarkusio/quarkus 50988."""
    topic = produced(engines, RECORDS)

    def build(flow: Flow) -> DataFrame:
        rows = flow.read(topic, include_headers=True).where("offset >= 0 AND hash(value) <> 7")
        return rows.selectExpr(
            "key", "upper(string(value)) AS value", "headers", "timestamp", "explode(array(1, 2)) AS n"
        ).drop("n")

    result = engines.run("direct", build)
    assert Counter((each.timestamp_ms, tuple(each.headers)) for each in result.records) == Counter(
        {(TIME_MS + n, (("n", b"%d" % n), ("n", None))): 2 for n in range(len(RECORDS))}
    )


def test_a_filter_that_drops_everything(engines: Engines) -> None:
    """faust-streaming/faust 287: what a filter has dropped is not read again. And nothing is written."""
    topic, target = produced(engines, RECORDS), engines.make_topic("out", 3)
    read = []
    for _ in range(2):
        result = engines.run(
            "direct", lambda flow: flow.read(topic).where("offset < 0").select("key", "value"), target=target
        )
        read.append(sum(result.read.values()))
        assert result.records == []
    assert read == [len(RECORDS), 0]


@pytest.mark.long
def test_texts_that_name_a_time_elsewhere(engines: Engines) -> None:
    """They are times in casts to types of times only, though Spark casts them to the binary type of a key, too."""
    topic = produced(engines, [(b"now", b"today "), (b"k", b"now "), (b"today", None)])

    def build(flow: Flow) -> DataFrame:
        # Before Spark 4, IN takes no texts beside bytes.
        rows = flow.read(topic).where("(key = 'now' OR key = 'today') AND CAST('now' AS TIMESTAMP) > timestamp")
        return rows.selectExpr("key", "concat(value, 'yesterday', CAST('now' AS BINARY)) AS value")

    result = engines.run("direct", build)
    assert {each.key: each.value for each in result.records} == {b"now": b"today yesterdaynow", b"today": None}


class Seen(Processor):
    """Yields what it gets."""

    key = serdes.BYTES
    value = output = serdes.BYTES
    state = serdes.JSON

    def process(self, key: bytes, records: Any, state: Any) -> Iterator[Record]:
        for record in records:
            yield Record(key=key, value=record.value)


def test_a_filter_before_a_new_key(engines: Engines) -> None:
    """faust-streaming/faust 553: it comes first, so that dropped rows do not reach the step."""
    topic, table = produced(engines, RECORDS), engines.make_topic("t", 4, cleanup_policy="compact")

    def build(flow: Flow) -> DataFrame:
        rows = flow.read(topic).where(f"{field('id')} IS NOT NULL")
        return flow.process(rows.selectExpr(f"binary(string({field('id')})) AS key", "value"), Seen(), table=table)

    result = engines.run("direct", build)
    assert Counter(each.key for each in result.records) == Counter({b"10": 2, b"11": 1})


def test_partitions_that_do_not_exist(engines: Engines) -> None:
    """apache/spark 26153: an error that says so. Without a number, the key decides."""
    topic = produced(engines, RECORDS)
    rows = "key", "value"
    result = engines.run(
        "direct", lambda flow: flow.read(topic).selectExpr(*rows, "IF(offset = 0, 2, NULL) AS partition")
    )
    places = {(each.key, each.value): each.partition for each in result.records}
    assert len(places) == len(RECORDS)
    assert all(places[each] == 2 for each in RECORDS[:3])
    with pytest.raises(OnceflowError) as caught:
        engines.run("direct", lambda flow: flow.read(topic).selectExpr(*rows, "int(3 + offset) AS partition"))
    assert "partition" in str(caught.value)


@pytest.mark.long
def test_one_time_for_all_rows_of_a_batch(engines: Engines) -> None:
    """apache/spark 57480."""
    topic = produced(engines, RECORDS)
    clocks = ["now()", "current_timestamp()", "CAST('now' AS TIMESTAMP)"]
    one = ", ".join(f"unix_micros({each}) AS t{n}" for n, each in enumerate(clocks))
    today = "CAST('Today ' AS DATE) - CAST('yesterday' AS DATE) AS d"
    queries = {f"q{n}": lambda df: df.selectExpr("key", f"to_json(struct({one}, {today})) AS value") for n in range(2)}
    result = run(engines, topic, queries)
    made = [json.loads(each.value or b"") for each in result.records]
    assert {row.pop("d") for row in made} == {"INTERVAL '1' DAY"}
    times = {time for row in made for time in row.values()}
    assert len(result.records) == 2 * len(RECORDS)
    assert len(times) == 1


@pytest.mark.long
def test_chance_is_thrown_once(engines: Engines) -> None:
    """apache/flink 21799: what a filter has looked at is what comes out."""
    topic = produced(engines, [(b"k", b"%d" % n) for n in range(200)])
    often = F.udf(_by_chance, "double").asNondeterministic()
    result = run(
        engines,
        topic,
        {
            "rand": lambda df: (
                df.select("key", F.rand().alias("n")).where("n > 0.5").selectExpr("key", "string(n) AS value")
            ),
            "udf": lambda df: (
                df.select("key", often("value").alias("n")).where("n > 0.5").selectExpr("key", "string(n) AS value")
            ),
        },
    )
    for name in ("rand", "udf"):
        found = of(result, name)
        assert 20 < sum(found.values()) < 180
        assert all(value > b"0.5" for _, value in found)


def _by_chance(value):  # type: ignore[no-untyped-def]
    import random

    return random.random()


def test_a_python_function_beside_another_condition(engines: Engines) -> None:
    """apache/spark 47313, 16193."""
    topic = produced(engines, RECORDS)
    short = F.udf(lambda value: value is not None and len(value) < 40, "boolean")
    rows = run(
        engines,
        topic,
        {"q": lambda df: df.where(short("value") & F.expr("key < '1' OR key IS NULL")).select("key", "value")},
    )
    assert of(rows, "q") == Counter(
        (k, v) for k, v in RECORDS if v is not None and len(v) < 40 and (k is None or k < b"1")
    )
