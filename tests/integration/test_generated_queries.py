"""Queries that are made by chance: the driver, tasks and a batch query of Spark make the same rows and errors."""

from __future__ import annotations

import functools
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from onceflow.errors import BatchAbortedError, SchemaError
from onceflow.spark.collect import arrow_schema
from onceflow.spark.jvm import SPARK_ERRORS
from onceflow.spark.row_program import RowJob, RowProgram
from onceflow.testing import independent

sys.path.insert(0, str(Path(__file__).parent))
try:
    import generated_queries
    from both_engines import Engines, filled
    from row_bench import Bench, outcome
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.integration

ZONES = ("UTC", "Asia/Kathmandu", "America/St_Johns", "Europe/Berlin")


def session_of(spark: Any, chance: random.Random) -> Any:
    session = spark.newSession()
    session.conf.set("spark.sql.ansi.enabled", chance.choice(["true", "false"]))
    session.conf.set("spark.sql.session.timeZone", chance.choice(ZONES))
    return session


def leaf(df: DataFrame) -> DataFrame:
    """The same rows, of which the optimizer knows nothing but their types."""
    session: Any = df.sparkSession._jsparkSession
    return DataFrame(
        session.internalCreateDataFrame(df._jdf.queryExecution().toRdd(), df._jdf.schema(), False), df.sparkSession
    )


def some_rows(session: Any, chance: random.Random) -> DataFrame:
    """Rows of a schema that has most of the types."""
    kinds = chance.sample([*generated_queries.VALUES], k=16)
    columns = [f"{generated_queries.column(chance, kind, 'id')} AS c{n}" for n, kind in enumerate(kinds)]
    return leaf(
        session.range(chance.choice([1, 12, 12, 12]))
        .repartition(1)
        .sortWithinPartitions("id")
        .selectExpr("id", *columns)
    )


def made_query(rows: DataFrame, chance: random.Random) -> DataFrame | None:
    """A query; None: it is not one of this version of Spark."""
    try:
        query = generated_queries.query(rows, chance)
        arrow_schema(query)
        query._jdf.queryExecution().optimizedPlan()  # it may fail by itself, as where a constant fails
    except (*SPARK_ERRORS, SchemaError):
        return None
    return query


def compare(rows: DataFrame, seed: str) -> str:
    """What came of a query that this seed makes; empty: it is none of this version of Spark."""
    query = made_query(rows, random.Random(seed))
    if query is None:
        return ""
    bench = Bench(rows.sparkSession)
    try:
        assert isinstance(bench.program(rows, query), RowProgram | RowJob)
        driver, job = outcome(lambda: bench.driver(rows, query)), outcome(lambda: bench.job(query))
    finally:
        bench.programs.close()
    assert driver == job, query._jdf.queryExecution().analyzed().toString()
    return "rows" if isinstance(job, list) else "error"


SOME = [(3, 3)]
MANY = [(seed, 20) for seed in range(10, 18)]


@pytest.mark.parametrize("seed, count", [*SOME, *(pytest.param(*each, marks=pytest.mark.long) for each in MANY)])
def test_rows_and_errors_of_the_driver(onceflow_spark: Any, seed: int, count: int) -> None:
    """As those of a job. About a third of the queries fails for some row."""
    chance = random.Random(seed)
    rows = some_rows(session_of(onceflow_spark, chance), chance)
    seen = Counter(compare(rows, f"{seed} {number}") for number in range(count))
    assert seen["rows"] >= count // 4, seen


# ---- topics -------------------------------------------------------------------------------------------------

SCHEMA = (
    "a INT, b ARRAY<INT>, c MAP<STRING, INT>, d DOUBLE, t TIMESTAMP, s STRUCT<a: INT, b: STRING>, e DECIMAL(10,2), "
    "f DATE, g BOOLEAN, h ARRAY<STRUCT<a: INT, b: STRING>>, i BIGINT, j ARRAY<STRING>"
)
_FIELDS: dict[str, tuple[Any, ...]] = {
    "a": (1, -(2**31), 2**31 - 1, "7", 1.5, True), "b": ([1, None], [], {}, "1"), "c": ({"k": 1}, {"k": "x"}, {}),
    "d": (0.1, "NaN", 1e300, "x"), "t": ("2024-03-31T02:30:00Z", "2024-03-31 02:30:00", "9999", 12),
    "g": (True, "true", 0),
    "s": ({"a": 1, "b": "ä"}, {"b": None, "z": 1}, []), "e": (1.25, "1.2", 10**9), "f": ("2024-02-29", "2023-02-29", 1),
    "h": ([{"a": 1, "b": "x"}, None], {"a": 1}), "i": (2**63 - 1, 2**70, 5), "j": (["x", ""], ["a", None, "7"]),
}  # fmt: skip


def a_value(chance: random.Random) -> bytes | None:
    """Mostly JSON, with some fields of other types than wanted."""
    odd = (None, b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a": 1} x', b" 7 ")
    if chance.random() < 0.2:
        return chance.choice(odd)
    names = chance.sample([*_FIELDS], k=chance.randint(0, len(_FIELDS)))
    first = 0 if chance.random() < 0.6 else None  # mostly a value of the type
    made = {name: _FIELDS[name][0] if first == 0 else chance.choice(_FIELDS[name]) for name in names}
    return json.dumps(made, ensure_ascii=chance.random() < 0.5).encode()


def parsed(df: DataFrame) -> DataFrame:
    """All columns of the source, and of the JSON in its records."""
    return df.selectExpr(
        "key AS kk", "value AS vv", "CAST(value AS STRING) AS text", "topic", "partition", "offset", "timestamp AS at",
        "timestampType", "headers", "headers.key AS names", f"from_json(CAST(value AS STRING), '{SCHEMA}') AS j",
    ).selectExpr("* EXCEPT (j)", "j.*")  # fmt: skip


def sink_form(df: DataFrame, name: str) -> DataFrame:
    """All columns as one text. The key is another one than that of the source."""
    made = df.selectExpr(
        f"to_json(struct({', '.join(f'`{each}` AS c{n}' for n, each in enumerate(df.columns))})) AS value"
    )
    return made.selectExpr(
        "CAST(IF(hash(value) % 19 = 0, NULL, hash(value) % 19) AS STRING) AS key",
        "value",
        f"array(struct('{name}' AS key, CAST(NULL AS BINARY) AS value)) AS headers",
    )


def written(df: DataFrame) -> Counter[Any]:
    rows = df.selectExpr("CAST(key AS BINARY) AS key", "CAST(value AS BINARY) AS value", "headers[0].key AS name")
    texts = [(*(None if each is None else bytes(each) for each in row[:2]), row[2]) for row in rows.collect()]
    return Counter(texts)


#: An error without a condition.
OTHER = "no condition"


class Topics:
    """Compares queries over one topic."""

    def __init__(self, engines: Engines, topic: str, seed: int) -> None:
        self.engines, self.topic, self.seed = engines, topic, seed
        self.batch = self._read([0, 1, 2])

    def _read(self, partitions: list[int]) -> DataFrame:
        kafka = {"kafka.bootstrap.servers": self.engines.bootstrap, "kafka.isolation.level": "read_committed"}
        chosen = json.dumps({self.topic: partitions})
        return self.engines.spark.read.format("kafka").options(**kafka, assign=chosen, includeHeaders=True).load()

    def parts(self, df: DataFrame, number: int) -> list[DataFrame]:
        """One query, or two."""
        chance = random.Random(f"{self.seed} {number}")
        base = parsed(df)
        return [sink_form(generated_queries.query(base, chance), f"q{number}") for _ in range(chance.choice([1, 1, 2]))]

    def query(self, df: DataFrame, number: int) -> DataFrame:
        """All of them."""
        return functools.reduce(DataFrame.union, self.parts(df, number))

    def errors(self, number: int) -> set[str]:
        """The conditions of all errors that may come first: it depends on the order in which partitions are read."""
        every = (part for partition in range(3) for part in self.parts(self._read([partition]), number))
        found = [outcome(lambda part=part: [written(part)]) for part in every]  # type: ignore[misc]
        return {each or OTHER for each in found if not isinstance(each, list)}

    def expected(self, number: int) -> Counter[Any] | str | None:
        """What a batch query makes, or the condition of its error; None: it is no query."""
        try:
            df = self.query(self.batch, number)
            df._jdf.queryExecution().optimizedPlan()
        except SPARK_ERRORS:
            return None
        found = outcome(lambda: [written(df)])
        return found[0] if isinstance(found, list) else found or OTHER


def run(way: Engines, topics: Topics, numbers: list[int]) -> Any:
    """Queries in one flow."""

    def build(flow: Any) -> DataFrame:
        return functools.reduce(
            DataFrame.union, [topics.query(flow.read(topics.topic, include_headers=True), each) for each in numbers]
        )

    return way.run("direct", build)


def keys_elsewhere(engines: Engines, records: list[independent.Seen], partitions: int) -> set[bytes]:
    """The keys of records that are not in the partition to which the partitioner of the Java client brings them."""
    reference = engines.make_topic("keys", partitions)
    keys = {each.key for each in records if each.key is not None}
    independent.fill(engines.bootstrap, reference, [(key, b"") for key in keys])
    wanted = {each.key: each.partition for each in independent.read_topic(engines.bootstrap, reference)}
    return {each.key for each in records if each.key is not None and each.partition != wanted[each.key]}


@pytest.mark.parametrize(
    "seed, count, ways",
    [pytest.param(seed, 12, [False, True], marks=pytest.mark.long) for seed in range(2, 8)],
)
def test_records_and_errors(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Any, seed: int, count: int, ways: list[bool]
) -> None:
    """As those of a batch query, in the driver and in tasks. The queries change the key, so rows change partitions."""
    chance = random.Random(seed)
    session = session_of(onceflow_spark, chance)
    engines = [Engines(onceflow_broker, session, make_topic, by_tasks=by_tasks) for by_tasks in ways]
    source = filled(engines[0], partitions=3, value=lambda: a_value(chance))
    topics = Topics(engines[0], source.topic, seed)
    expected = {number: found for number in range(count) if (found := topics.expected(number)) is not None}
    good = {number: found for number, found in expected.items() if isinstance(found, Counter)}
    failing = {number: found for number, found in expected.items() if isinstance(found, str)}
    wanted: Counter[Any] = sum(good.values(), Counter())
    assert wanted, "a comparison of nothing"
    assert failing
    for way in engines:
        result = run(way, topics, list(good))
        assert Counter((each.key, each.value, each.headers[0][0]) for each in result.records) == wanted
        assert not keys_elsewhere(way, result.records, 3)
        for number in [*failing][:2]:
            with pytest.raises(BatchAbortedError) as caught:
                run(way, topics, [number])
            assert any(each in f"{caught.value} {OTHER}" for each in topics.errors(number))
