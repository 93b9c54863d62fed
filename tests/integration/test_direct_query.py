"""Which queries are direct, why others are not, and that Spark makes the same rows as a direct plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from onceflow.calls.concurrently import concurrently
from onceflow.client.settings import ClientSettings
from onceflow.driver.batch.driver_program import DriverProgram, Functions, driver_program
from onceflow.planning.calls import enrich_frame
from onceflow.planning.direct_plan import DirectPlan, DirectSource
from onceflow.planning.direct_query import direct_plan
from onceflow.planning.maps import map_of
from onceflow.planning.ownership import HEADERS, check_columns, prepare
from onceflow.planning.read_options import ReadOptions, source_options
from onceflow.planning.step_frames import state_columns
from onceflow.protocol.batches import ProducerIdAndEpoch, encode_batches
from onceflow.spark import function_names, jvm, plans
from onceflow.spark.collect import collect
from onceflow.spark.kafka_source import load_source
from onceflow.spark.query_facts import facts_of
from onceflow.task.call_rows import CallOrder, CallRows
from onceflow.task.map_rows import RowsMap
from onceflow.task.row_operators import SOURCE_TYPES, reinterpreted
from onceflow.task.sink_form import SinkForm
from onceflow.task.state_tasks import StepPlaceholder, engine_rows
from onceflow.task.task_program import TaskProgram, TopicRead

pytestmark = [pytest.mark.integration, pytest.mark.short_form]

FLOW = "direct"
EARLIER = "which was made before an earlier run of the flow"
Build = Callable[[DataFrame], DataFrame]


def read(
    spark: Any, topic: str = "a", *, flow: str = FLOW, most: int | None = None, until: Any = None, **given: Any
) -> DataFrame:
    """What ``Flow.read`` returns, without a broker."""
    given = {"fail_on_data_loss": True, "include_headers": True, **given}
    options = ReadOptions(topic, "earliest", most, **given)
    settings = ClientSettings("localhost:1", {})
    return load_source(spark, settings, source_options(options, {0: 0}, flow), until)


class NoRows:
    """In the place of a program."""

    needed: frozenset[int] = frozenset()
    job = ""

    def rows(self, columns: Any, count: int) -> Iterator[tuple[list[pa.Array], int]]:
        yield from ()


def planned(df: DataFrame, maps: Any = None) -> DirectPlan | str:
    return direct_plan(facts_of(df).root, FLOW, [*(maps or {})])


def direct(df: DataFrame, maps: Any = None, programs: list[Any] | None = None) -> TaskProgram:
    """Args: programs: gets the operators of each program: the last one, and what the first one stands on."""

    def evaluate(plan: Any, path: plans.Path, base: plans.Path) -> NoRows:
        if programs is not None:
            programs.append(tuple(jvm.kind(plans.at(plan, each)) for each in (path, path + base)))
        return NoRows()

    plan = planned(df, maps)
    assert isinstance(plan, DirectPlan), plan
    functions = Functions({name: found.apply for name, found in (maps or {}).items()}, {}, evaluate)
    found = driver_program(plan, plans.analyzed(df), functions, None)
    assert isinstance(found, DriverProgram), found
    return found.query.program


def test_how_topics_are_read(onceflow_spark: Any) -> None:
    one = read(onceflow_spark, "a", most=7)
    other = read(onceflow_spark, "b", fail_on_data_loss=False, include_headers=False, options={"groupIdPrefix": "g"})
    assert planned(one) == DirectPlan((DirectSource(TopicRead("a", True, True, 7)),), tuple(SOURCE_TYPES))
    both = direct(one.select("value").union(other.select("key")))
    assert [each.read for each in both.topics] == [TopicRead("a", True, True, 7), TopicRead("b", False, False, None)]
    assert [each.needed for each in both.topics] == [("value",), ("key",)]
    assert both.columns == ("value",)
    assert [each.columns for each in both.topics] == [("value",)] * 2, "Spark, too, names a union by its first"


#: Direct queries of one topic, and the source columns that each needs.
DIRECT: dict[str, tuple[Build, tuple[str, ...]]] = {
    "everything": (lambda df: df, tuple(SOURCE_TYPES)),
    "some columns in another order": (lambda df: df.select("value", "key"), ("key", "value")),
    "renamed": (lambda df: df.select(F.col("key").alias("value"), F.col("value").alias("key")), ("key", "value")),
    "renamed twice": (
        lambda df: df.withColumnRenamed("offset", "x").select("x", "value").toDF("n", "value"),
        ("value", "offset"),
    ),
    "a column twice": (lambda df: df.select("value", F.col("value").alias("copy")), ("value",)),
    "dropped": (lambda df: df.drop("headers", "timestampType", "offset"), (*tuple(SOURCE_TYPES)[:4], "timestamp")),
    "as text": (lambda df: df.select(F.col("value").cast("string")), ("value",)),
    "as text and back": (lambda df: df.selectExpr("cast(cast(value as string) as binary) value"), ("value",)),
    "text and back in two steps": (
        lambda df: df.selectExpr("cast(key as string) k", "value").selectExpr("cast(k as binary) key", "value"),
        ("key", "value"),
    ),
    "topic as bytes": (lambda df: df.select(F.col("topic").cast("binary").alias("value")), ("topic",)),
    "casts that do nothing": (
        lambda df: df.selectExpr("cast(value as binary) value", "cast(partition as int) partition", "timestamp"),
        ("value", "partition", "timestamp"),
    ),
    "a topic for all": (lambda df: df.select("value", F.lit("out").alias("topic")), ("value",)),
    "constants": (
        lambda df: df.select(
            F.lit(None).alias("nothing"),
            F.lit(None).cast("string").alias("key"),
            F.lit("ä").cast("binary").alias("b"),
            F.lit(b"\xff").alias("value"),
            F.lit(3).alias("partition"),
            F.lit(2**40).alias("long"),
            F.lit(None).cast(HEADERS).alias("headers"),
            F.lit(None).cast("timestamp").alias("timestamp"),
        ),
        (),
    ),
    "with constants added": (
        lambda df: df.withColumns({"topic": F.lit("x"), "key": F.lit(None).cast("binary")}),
        ("value", *tuple(SOURCE_TYPES)[3:]),
    ),
    "an alias": (lambda df: df.alias("d").select("d.value"), ("value",)),
}  # fmt: skip


@pytest.mark.parametrize("name", DIRECT)
def test_spark_makes_the_same_rows(onceflow_spark: Any, name: str) -> None:
    build, needed = DIRECT[name]
    plan = direct(build(read(onceflow_spark)))
    (source,) = plan.topics
    assert source.needed == needed
    assert_same(plan, build(rows_in_spark(onceflow_spark)))


@pytest.mark.parametrize("name", ["everything", "as text", "topic as bytes", "constants", "with constants added"])
def test_the_sink_gets_the_same_from_both(onceflow_spark: Any, name: str) -> None:
    build, _ = DIRECT[name]
    of_spark = build(rows_in_spark(onceflow_spark))
    for topic in ("out", None) if "topic" in of_spark.columns else ("out",):
        columns = check_columns(of_spark.schema, topic=topic, flow=FLOW)
        prepared = prepare(
            of_spark, columns, partitioner="key", topic=topic, targets={}, source={}, max_tasks=1, on_driver=True
        )
        (expected,) = collect(prepared.df, interpreted=False)
        program = direct(build(read(onceflow_spark)).select(*columns.taken))
        made = SinkForm(columns.taken, columns.cast).rows(applied(program, records()), 0)
        assert made.schema.names == expected.schema.names
        for own, theirs in zip(made.columns, expected.columns, strict=True):
            assert comparable(own) == comparable(theirs)
        assert encoded(made) == encoded(expected), "byte by byte, also values that are no text"


def test_a_process_step_gets_the_same_from_both(onceflow_spark: Any) -> None:
    def build(df: DataFrame) -> DataFrame:
        return state_columns(df.withColumn("value", F.col("value").cast("string")), FLOW, one_topic=True)

    plan = direct(build(read(onceflow_spark)))
    assert plan.columns == ("key", "value", "partition", "offset", "timestamp", "headers")
    (expected,) = collect(build(rows_in_spark(onceflow_spark)), interpreted=False)
    assert engine_rows(applied(plan, records())).equals(engine_rows(expected))


def test_unions_are_by_position_or_by_name(onceflow_spark: Any) -> None:
    spark = onceflow_spark

    def by_name(one: DataFrame, other: DataFrame) -> DataFrame:
        return one.select("key", "value").unionByName(
            other.select(F.col("value"), F.col("topic").cast("binary").alias("key"))
        )

    def three(one: DataFrame, other: DataFrame, third: DataFrame) -> DataFrame:
        named = by_name(one, other).select(F.col("value").cast("string").alias("text"), "key")
        return named.union(third.select("topic", "value")).selectExpr("key as value", "text as key")

    def missing(one: DataFrame, other: DataFrame) -> DataFrame:
        return one.select("key", "value").unionByName(other.select("value"), allowMissingColumns=True)

    for build, topics in ((by_name, "ab"), (three, "abc"), (missing, "ab")):
        plan = direct(build(*[read(spark, topic) for topic in topics]))
        assert [source.read.topic for source in plan.topics] == list(topics)
        frames = [rows_in_spark(spark) if topic == "a" else none_in_spark(spark) for topic in topics]
        for topic in topics:  # the rows of each topic alone
            frames = [rows_in_spark(spark) if each == topic else none_in_spark(spark) for each in topics]
            assert_same(plan, build(*frames), topic)


class Maps(dict[str, RowsMap]):
    """``Flow.map`` without a flow, for streams and for the rows of a batch."""

    def map(self, df: DataFrame, function: Any, schema: Any = None) -> DataFrame:
        rows_map, columns = map_of(df, function, schema, number=len(self) + 1, flow=FLOW)
        self[rows_map.__name__] = rows_map
        return df.mapInArrow(rows_map, columns)


def _with_value(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.filter(batch.column("value").is_valid())


def _twice(batch: pa.RecordBatch) -> pa.RecordBatch:
    # Each batch as a whole: these rows are one batch in both engines.
    return pa.concat_batches([batch, batch]).select(["value", "key"])


def test_functions_make_the_same_rows(onceflow_spark: Any) -> None:
    def build(df: DataFrame, other: DataFrame, maps: Maps) -> DataFrame:
        kept = maps.map(
            df.select("value", F.col("key").cast("string").alias("key"), "headers", "timestamp"), _with_value
        )
        both = kept.unionByName(other.select("value", F.lit("k").alias("key"), "headers", "timestamp"))
        renamed = both.selectExpr("cast(key as binary) value", "value as key", "timestamp")
        return maps.map(renamed, _twice, "key string, value binary").select(F.lit(1).alias("n"), "value", "key")

    maps, of_spark = Maps(), Maps()
    plan = direct(build(read(onceflow_spark), read(onceflow_spark, "b"), maps), maps)
    assert plan.needed("a") == ("key", "value", "timestamp", "headers")
    assert plan.needed("b") == ("value", "timestamp")
    rows, none = rows_in_spark(onceflow_spark).where("partition < 3"), none_in_spark(onceflow_spark)
    given = records().slice(0, 3)
    for topic, frames in (("a", (rows, none)), ("b", (none, rows))):
        made = applied(plan, given, topic)
        (expected,) = collect(build(*frames, of_spark), interpreted=False)
        assert made.schema.names == expected.schema.names == list(plan.columns)
        for own, theirs in zip(made.columns, expected.columns, strict=True):
            assert comparable(own) == comparable(theirs)


def test_what_is_needed_without_a_function_that_uses_it(onceflow_spark: Any) -> None:
    maps = Maps()
    mapped = direct(maps.map(read(onceflow_spark), _with_value).select("value"), maps)
    assert mapped.needed("a") == tuple(SOURCE_TYPES), "a function may use every column that it gets"


def test_names_of_views(onceflow_spark: Any) -> None:
    read(onceflow_spark).createOrReplaceTempView("direct_view")
    try:
        plan = direct(onceflow_spark.sql("SELECT v.value AS key, 'x' AS topic, value FROM direct_view v"))
    finally:
        onceflow_spark.catalog.dropTempView("direct_view")
    assert plan.columns == ("key", "topic", "value")
    assert plan.needed("a") == ("value",)
    assert applied(plan, records()).column("key") == records().column("value")


def _batches(batches: Any) -> Any:
    yield from batches


#: Queries that are not direct, and the reason that is given.
REFUSED: dict[str, Callable[[Any], DataFrame]] = {
    "the query has an aggregation": lambda s: read(s).groupBy("key").count(),
    "the query has dropDuplicates": lambda s: read(s).dropDuplicates(["key"]),
    "the query has a join of two streams": lambda s: read(s).join(read(s, "b").select("key"), "key"),
    "the query has rows that are not from a stream": (
        lambda s: read(s).select("value").union(none_in_spark(s).select("value"))
    ),
    "topic a is read with minPartitions": lambda s: read(s, options={"minpartitions": "9"}),
    "topic a is read with maxRecordsPerPartition": lambda s: read(s, options={"maxRecordsPerPartition": "9"}),
    "topic a is read with minOffsetsPerTrigger": lambda s: read(s, options={"minOffsetsPerTrigger": "9"}),
    "the query reads a source that is not a topic of this flow": lambda s: read(s, flow="another"),
}  # fmt: skip

#: Queries that have one program, and the logical operator that it stands on.
EVALUATED: dict[str, Callable[[Any], DataFrame]] = {
    "where": lambda s: read(s).where("key is not null"),
    "explode": lambda s: read(s).select(F.explode("headers")),
    "mapInPandas": lambda s: read(s).mapInPandas(_batches, "key binary"),
    "mapInArrow": lambda s: read(s).mapInArrow(_batches, "key binary"),
    "join": lambda s: read(s).join(s.range(3), F.col("id") == F.col("partition")),
    "udf": lambda s: read(s).select(F.udf(lambda v: v)("value").alias("value")),
    "a number as text": lambda s: read(s).select(F.col("partition").cast("string").alias("n")),
    "a text as number": lambda s: read(s).select(F.lit("7").cast("int").alias("n")),
    "the time": lambda s: read(s).select(F.current_timestamp().alias("now")),
    "a constant of another type": lambda s: read(s).select(F.lit(datetime(2026, 1, 1).date()).alias("day")),
    "all operators in one": lambda s: (
        read(s).where("offset > 3").select(F.upper("topic").alias("t"), "key").where("t > 'a'").select("key", "t")
    ),
}


@pytest.mark.parametrize("name", EVALUATED)
def test_what_spark_evaluates(onceflow_spark: Any, name: str) -> None:
    """It is one program, whatever the number of operators; it begins at the topic."""
    programs: list[tuple[str, str]] = []
    df = EVALUATED[name](onceflow_spark)
    plan = planned(df)
    assert isinstance(plan, DirectPlan), plan
    assert plan.by_spark
    direct(df, programs=programs)
    assert [base for _, base in programs] == ["StreamingRelationV2"]


def test_names_and_places_need_no_program(onceflow_spark: Any) -> None:
    df = read(onceflow_spark)
    plain = direct(df.select("key", F.col("value").alias("v")))
    read(onceflow_spark, until={0: 5, 1: 7}).createOrReplaceTempView("bounded")
    for same in (
        df.withWatermark("timestamp", "1 minute").repartition(3, "key").hint("broadcast").coalesce(2),
        onceflow_spark.table("bounded"),
    ):
        assert direct(same.select("key", F.col("value").alias("v"))) == plain


def test_a_topic_that_is_used_several_times_is_read_once(onceflow_spark: Any) -> None:
    def one_of(**given: Any) -> DataFrame:
        return read(onceflow_spark, **given).select("key", "value")

    plan = direct(one_of(include_headers=False, most=9).union(one_of(fail_on_data_loss=False, most=5)))
    assert len(plan.topics) == 2
    assert plan.reads == {"a": TopicRead("a", True, True, 5)}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_direct_and_why(onceflow_spark: Any, reason: str) -> None:
    assert planned(REFUSED[reason](onceflow_spark)) == reason


def test_functions_and_steps_that_are_not_direct(onceflow_spark: Any) -> None:
    df, maps = read(onceflow_spark), Maps()
    mapped = maps.map(df, _with_value)
    assert (
        planned(mapped) == "the query has Flow.map with _with_value, which was made before an earlier run of the flow"
    )
    assert isinstance(planned(mapped.where("key is not null"), maps), DirectPlan)
    order = CallOrder(concurrently(len), "out", None, None, None, FLOW)
    assert (
        planned(enrich_frame(df, CallRows(order))) == f"the query has calls of another service (Flow.enrich), {EARLIER}"
    )
    step = planned(df.mapInArrow(StepPlaceholder("t"), "key binary, value binary").select("value"))
    assert isinstance(step, DirectPlan)
    assert [(each.table, each.columns) for each in step.steps] == [("t", ("value",))]
    assert (step.sources, list(step.reads)) == ((), ["a"])
    _batches.__name__, before = function_names.join_name("t"), _batches.__name__
    try:
        joined = df.mapInArrow(_batches, df.schema)
        assert planned(joined) == f"the query has a join with a table (Flow.join_table), {EARLIER}"
    finally:
        _batches.__name__ = before


def test_other_sources_are_not_direct(onceflow_spark: Any) -> None:
    rate = onceflow_spark.readStream.format("rate").load().selectExpr("cast(value as string) value")
    assert planned(rate) == "the query reads a source that is not a topic of this flow"


# ---- the same rows, in both ways ---------------------------------------------------------------------

TEXTS = (b"text", "ä€".encode(), b"", b"\xff\xc3\x28 no text", None)


SCHEMA = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int, "
    f"headers {HEADERS}"
)


def records() -> pa.RecordBatch:
    """Records of a topic, as Arrow; among them nulls and values that are no text."""
    count = len(TEXTS)
    columns: dict[str, list[Any]] = {
        "key": [None, *TEXTS[:-1]],
        "value": list(TEXTS),
        "topic": ["in"] * count,
        "partition": list(range(count)),
        "offset": [2**40 + n for n in range(count)],
        "timestamp": [datetime(2026, 1, 1 + n, 12, 0, 0, 345_000, tzinfo=timezone.utc) for n in range(count)],
        "timestampType": [0] * count,
        "headers": [None, [], [{"key": "h", "value": None}], [{"key": "h", "value": b"\xff"}] * 2, None],
    }
    return pa.RecordBatch.from_arrays([pa.array(columns[n], k) for n, k in SOURCE_TYPES.items()], names=list(columns))


def rows_in_spark(spark: Any) -> DataFrame:
    """The same records, as a batch DataFrame of one task."""
    given = [tuple(row.values()) for row in records().to_pylist()]
    rows = [
        (*row[:-1], None if row[-1] is None else [(header["key"], header["value"]) for header in row[-1]])
        for row in given
    ]
    found: DataFrame = spark.createDataFrame(rows, SCHEMA).coalesce(1)
    return found


def none_in_spark(spark: Any) -> DataFrame:
    found: DataFrame = spark.createDataFrame([], SCHEMA)
    return found


def applied(plan: TaskProgram, rows: pa.RecordBatch, topic: str = "a") -> pa.RecordBatch:
    (made,) = plan.rows(topic, dict(zip(rows.schema.names, rows.columns, strict=True)), rows.num_rows)
    return made


def assert_same(plan: TaskProgram, of_spark: DataFrame, topic: str = "a") -> None:
    made = applied(plan, records(), topic)
    expected = pa.Table.from_batches(collect(of_spark, interpreted=False)).combine_chunks()
    assert list(plan.columns) == expected.schema.names
    for own, theirs in zip(made.columns, expected.columns, strict=True):
        assert comparable(own) == comparable(theirs.chunk(0))


def comparable(column: pa.Array) -> list[Any]:
    """Values and type of a column. Texts are compared as bytes, because some are no text."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", "UTC"))
    kind = str(column.type).replace(" not null", "").replace("element", "item")
    column = reinterpreted(column, "binary") if pa.types.is_string(column.type) else column
    return [kind, *column.to_pylist()]


def encoded(rows: pa.RecordBatch) -> bytes:
    """The record batch that is sent to Kafka."""
    names = rows.schema.names
    columns = [rows.column(name) if name in names else None for name in ("key", "value", "headers", "timestamp")]
    (batch,) = encode_batches(
        *columns,
        identity=ProducerIdAndEpoch(1, 0),
        base_sequence=0,
        compression="none",
        max_batch_bytes=1_000_000,
        default_timestamp_ms=0,
    )
    return batch.head + bytes(batch.body)
