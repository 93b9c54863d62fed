"""Spark's operators in the driver, without a job: they make the same rows, and raise the same errors, as in a job."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from onceflow.errors import SchemaError
from onceflow.spark import plans
from onceflow.spark.collect import arrow_schema
from onceflow.spark.jvm import SPARK_ERRORS
from onceflow.spark.row_program import RowJob, RowProgram

sys.path.insert(0, str(Path(__file__).parent))
try:
    from row_bench import NOW_US, Bench, condition_of, outcome, whole
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.integration


@pytest.fixture
def bench(onceflow_spark: Any) -> Iterator[Bench]:
    made = Bench(onceflow_spark)
    yield made
    made.programs.close()


# ---- functions ---------------------------------------------------------------------------------------------

#: They need something that a row does not have, or do not end.
OTHERS = re.compile(
    r"current_|^now$|^unix_timestamp$|aes_encrypt|localtimestamp|curdate|rand|uuid|shuffle|monotonic|spark_partition|input_file|version|user|java_method"
    r"|reflect|raise_error|assert_true|sleep|try_reflect|uniform"
)


def examples(spark: Any, every: int) -> dict[str, list[str]]:
    """The examples of scalar functions of this Spark, as SQL expressions."""
    registry = spark._jsparkSession.sessionState().functionRegistry()
    found: dict[str, list[str]] = {}
    listed = registry.listFunction()
    for each in map(listed.apply, range(0, listed.size(), every)):
        name = str(each.funcName())
        info = registry.lookupFunction(each).get()
        if OTHERS.search(name) or info.getGroup() in ("agg_funcs", "window_funcs", "generator_funcs", "table_funcs"):
            continue
        texts = re.findall(r"> SELECT (.*?);\n", str(info.getExamples()), re.DOTALL)
        expressions = [text for text in texts if not re.search(r"\b(FROM|AS|OVER)\b", text)]
        if expressions:
            found[name] = expressions
    return found


def variants(example: str) -> Iterator[str]:
    """An example whose literals are made from columns, so that nothing is folded: as many of them as the function
    takes columns for."""
    for texts, numbers in ((True, True), (True, False), (False, True), (False, False)):
        made = ""
        for part in re.split(r"('(?:[^'\\\\]|\\\\.)*')", example):
            is_text = part.startswith("'")
            if is_text and texts and not re.search(r"\w\s*$", made):  # not DATE'2020-01-01'
                made += f"concat({part}, nothing)"
            elif not is_text and numbers:
                made += re.sub(r"(?<![\w.])(\d+)(?![\w.])", r"(one * \1)", part)
            else:
                made += part
        yield made


def analyzes(rows: DataFrame, text: str) -> bool:
    try:
        arrow_schema(rows.select(F.expr(text).alias("made")))
    except (PySparkException, SchemaError):
        return False
    return True


def compare_functions(bench: Bench, every: int) -> None:
    """Of every tenth function, or of each."""
    rows = bench.spark.createDataFrame([(1, ""), (1, "")], "one int, nothing string")
    chosen = {
        name: found
        for name, expressions in examples(bench.spark, every).items()
        if (found := next((v for each in expressions for v in variants(each) if analyzes(rows, v)), None))
    }
    assert sum("one *" in each or "nothing)" in each for each in chosen.values()) >= 200 // every, [*chosen.values()]
    names = list(chosen)
    failed = 0
    for start in range(0, len(names), 50):
        query = rows.select([F.expr(chosen[name]).alias(name) for name in names[start : start + 50]])
        both = outcome(lambda: bench.driver(rows, query)), outcome(lambda: bench.job(query))  # noqa: B023
        if isinstance(both[0], list):
            assert both[0] == both[1]
            continue
        for name in names[start : start + 50]:
            query = rows.select(F.expr(chosen[name]).alias(name))
            both = outcome(lambda: bench.driver(rows, query)), outcome(lambda: bench.job(query))  # noqa: B023
            assert both[0] == both[1], chosen[name]
            failed += not isinstance(both[0], list)
    assert failed < 30


def test_functions(bench: Bench) -> None:
    compare_functions(bench, every=10)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"spark.sql.ansi.enabled": "false", "spark.sql.session.timeZone": "Asia/Kathmandu"},
        {"spark.sql.ansi.enabled": "true", "spark.sql.session.timeZone": "America/St_Johns"},
    ],
    ids=["defaults", "not ansi", "ansi"],
)
def test_two_hundred_functions(onceflow_spark: Any, settings: dict[str, str]) -> None:
    session = onceflow_spark.newSession()
    for name, value in settings.items():
        session.conf.set(name, value)
    bench = Bench(session)
    compare_functions(bench, every=1)
    bench.programs.close()


# ---- time and chance ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu"])
def test_the_time_is_that_of_the_batch(onceflow_spark: Any, zone: str) -> None:
    """Also where it is used inside of other expressions, and for each batch anew."""
    session = onceflow_spark.newSession()
    session.conf.set("spark.sql.session.timeZone", zone)
    rows = session.range(2).selectExpr("id")
    query = rows.selectExpr(
        "unix_micros(current_timestamp()) AS a",
        "unix_micros(now()) AS b",
        "string(current_date()) AS c",
        "string(localtimestamp()) AS d",
        "date_format(date_trunc('HOUR', current_timestamp() + INTERVAL 1 HOUR), 'HH:mm') AS e",
    ).where("a > 0 AND current_date() > date'2000-01-01'")
    bench = Bench(session)
    program = bench.program(rows, query)
    given = [pa.array([0, 1], pa.int64())]
    for now_us in (NOW_US, NOW_US + 86_400_000_000):
        bench.programs.now_us = now_us
        local = datetime.fromtimestamp(now_us / 1e6, ZoneInfo(zone))
        hour = (local.astimezone(timezone.utc) + timedelta(hours=1)).astimezone(ZoneInfo(zone)).replace(minute=0)
        made, count = whole(program, given, 2)
        wanted = [now_us, now_us, str(local.date()), f"{local:%Y-%m-%d %H:%M:%S}.123456", f"{hour:%H:%M}"]
        assert [column.to_pylist() for column in made] == [[each] * 2 for each in wanted]
        assert count == 2
    bench.programs.close()


def test_random_numbers_differ_from_batch_to_batch(bench: Bench) -> None:
    rows = bench.spark.range(50).selectExpr("id")
    program = bench.program(rows, rows.selectExpr("rand() AS a", "rand(7) AS b", "uuid() AS c"))
    given = [pa.array(range(50), pa.int64())]
    made = [whole(program, given, 50)[0] for _ in range(3)]
    for n in range(3):
        assert len({value for columns in made for value in columns[n].to_pylist()}) == 150


# ---- rows --------------------------------------------------------------------------------------------------


@pytest.mark.short_form
def test_types(bench: Bench) -> None:
    """What goes in comes out, also nulls, through the JVM and beside it."""
    spark = bench.spark
    values = {
        "boolean": "true", "tinyint": "1", "smallint": "2", "int": "3", "bigint": "4", "float": "1.5",
        "double": "'NaN'", "decimal(3,2)": "1.23", "decimal(38,5)": "12345678901234567890.12345", "string": "'ä'",
        "binary": "X'00FF'", "date": "'0001-01-01'", "timestamp": "'9999-12-31 23:59:59.999999'",
        "timestamp_ntz": "'1969-01-01 01:02:03'", "array<int>": "array(1, NULL)",
        "map<string,struct<x:int,y:array<string>>>": "map('k', struct(1, array('y')))",
        "struct<p:int,q:binary>": "struct(NULL, X'')",
        "interval day to second": "INTERVAL '1 02:03:04.5' DAY TO SECOND",
        "map<int,array<date>>": "map(1, array(date'2024-02-29'))",
        "array<map<string,double>>": "array(map('a', -0.0))",
    }  # fmt: skip
    columns = [f"CAST(IF(id = 1, NULL, {value}) AS {kind}) AS c{n}" for n, (kind, value) in enumerate(values.items())]
    rows = spark.range(2).selectExpr(*columns)
    given = spark.createDataFrame(rows.collect(), rows.schema)
    same = given.selectExpr(
        *[f"coalesce({name}, {name}) AS {name}" for name in rows.columns], "c0 AS beside", "c14 AS also"
    )
    assert bench.driver(given, same) == bench.job(same)


@pytest.mark.long
def test_columns_that_are_never_null(bench: Bench) -> None:
    """Those that are not used go beside the JVM, whatever it may think of their values."""
    names = {"n": T.LongType(), "t": T.StringType(), "l": T.ArrayType(T.IntegerType(), False), "b": T.BooleanType()}
    schema = T.StructType([T.StructField(name, kind, nullable=False) for name, kind in names.items()])
    rows = bench.spark.createDataFrame([(1, "a", [1], True), (2, "b", [], False)], schema)
    query = rows.selectExpr("n", "l", "b", "upper(t) AS t")
    assert bench.driver(rows, query) == bench.job(query) == [("1", "[1]", "True", "'A'"), ("2", "[]", "False", "'B'")]


@pytest.mark.long
@pytest.mark.short_form
def test_functions_see_the_columns_that_there_are(bench: Bench) -> None:
    """Those of the DataFrame, in their order, and no others, whatever is in front of the function."""

    def in_arrow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"names": [",".join(batch.schema.names)] * batch.num_rows})

    def in_pandas(frames: Iterator[Any]) -> Iterator[Any]:
        import pandas as pd

        for frame in frames:
            yield pd.DataFrame({"names": [",".join(frame.columns)] * len(frame)})

    rows = bench.spark.range(3).selectExpr("id", "string(id) AS value", "id * 2 AS unused")
    for given in (rows, rows.where("id > 0"), rows.select("value", "id"), rows.selectExpr("*", "id + 1 AS more")):
        for query in (given.mapInArrow(in_arrow, "names string"), given.mapInPandas(in_pandas, "names string")):
            for behind in (query, query.where("names <> ''").selectExpr("names", "1 AS one")):
                found = bench.driver(rows, behind)
                assert found == bench.job(behind)
                assert {each[0] for each in found} == {repr(",".join(given.columns))}


def test_columns_of_one_name_and_no_columns(bench: Bench) -> None:
    rows = bench.spark.range(5).selectExpr("id", "id + 1 AS ID2")
    twice = rows.select("id", F.col("ID2").alias("id"), (F.col("id") * 2).alias("id"))
    made, count = whole(bench.program(rows, twice), [pa.array(range(5)), pa.array(range(1, 6))], 5)
    assert [each.to_pylist() for each in made] == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [0, 2, 4, 6, 8]]
    made, count = whole(bench.program(rows, rows.where("id > 1").select()), [pa.array(range(5)), None], 5)
    assert (made, count) == ([], 3)


@pytest.mark.long
def test_no_rows(bench: Bench) -> None:
    rows = bench.spark.range(5).selectExpr("id")
    for query in (rows.where("id < 0"), rows.where("false"), rows.selectExpr("id", "id + 1"), rows.where("id + 1 < 0")):
        made, count = whole(bench.program(rows, query), [pa.array([], pa.int64())], 0)
        assert count == 0
        made, count = whole(bench.program(rows, query.where("id IS NULL")), [pa.array(range(5))], 5)
        assert count == 0
        assert not any(map(len, made))


@pytest.mark.long
def test_many_rows_are_computed_as_they_are_taken(bench: Bench) -> None:
    """Another program may run in between. And whoever takes no more leaves nothing behind."""
    rows = bench.spark.range(5).selectExpr("id")
    many = bench.program(rows, rows.selectExpr("id", "explode(sequence(1, 20000)) AS n", "repeat('x', 5000) AS t"))
    other = bench.program(rows, rows.selectExpr("id + 1 AS id"))
    given, seen = [pa.array(range(5))], []
    for made, count in many.rows(given, 5):
        assert count * 5000 < 6_000_000
        assert set(made[2].to_pylist()) == {"x" * 5000}
        seen += list(zip(made[0].to_pylist(), made[1].to_pylist(), strict=True))
        assert whole(other, given, 5)[0][0].to_pylist() == [1, 2, 3, 4, 5]
    assert seen == [(row, n) for row in range(5) for n in range(1, 20_001)]
    for _ in range(3):
        begun = many.rows(given, 5)
        next(begun)
        begun.close()
    assert whole(other, given, 5)[1] == 5


@pytest.mark.long
def test_whoever_takes_no_more_keeps_no_lock_of_a_broadcast_variable(bench: Bench) -> None:
    rows = bench.spark.range(2).selectExpr("id")
    sent = bench.spark.sparkContext.broadcast(["x" * 5000, "y" * 5000])
    text = F.udf(lambda n: sent.value[n % 2], "string")
    query = rows.select(F.explode(F.sequence(F.lit(1), F.lit(8000))).alias("n")).select(text("n").alias("t"))
    program = bench.program(rows, query)
    for _ in range(3):
        begun = program.rows([pa.array(range(2))], 2)
        next(begun)
        begun.close()
    assert whole(program, [pa.array(range(2))], 2)[1] == 16_000
    sent.unpersist(blocking=True)
    assert whole(program, [pa.array(range(2))], 2)[1] == 16_000
    assert query.count() == 16_000
    sent.destroy(blocking=True)


# ---- errors ------------------------------------------------------------------------------------------------


@pytest.mark.short_form
def test_an_error_of_a_row(bench: Bench) -> None:
    """It is the error of a job. And the next batch is as if nothing had been."""
    session = bench.spark.newSession()
    session.conf.set("spark.sql.ansi.enabled", "true")
    rows = session.range(3).selectExpr("id")
    query = rows.selectExpr("10 DIV (id - 1) AS a")
    failing = Bench(session)
    program = failing.program(rows, query)
    for _ in range(3):
        with pytest.raises(SPARK_ERRORS) as caught:
            whole(program, [pa.array(range(3))], 3)
        assert condition_of(caught.value) == "DIVIDE_BY_ZERO"
        made, _ = whole(program, [pa.array([0, 11])], 2)
        assert made[0].to_pylist() == [-10, 1]
    assert outcome(lambda: failing.driver(rows, query)) == outcome(lambda: failing.job(query))
    failing.programs.close()


def test_an_error_that_a_filter_prevents(bench: Bench) -> None:
    session = bench.spark.newSession()
    session.conf.set("spark.sql.ansi.enabled", "true")
    rows = session.createDataFrame([("1",), ("x",), (None,)], "t string")
    query = rows.where("t RLIKE '^[0-9]+$'").selectExpr("CAST(t AS INT) + 1 AS n")
    filtered = Bench(session)
    assert filtered.driver(rows, query) == [("2",)]
    filtered.programs.close()


def test_large_types_of_the_session(onceflow_spark: Any) -> None:
    session = onceflow_spark.newSession()
    session.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    rows = session.createDataFrame([("a", b"xy"), ("bcd", b""), ("", b"z")], "t string, b binary")
    query = rows.selectExpr("concat(t, '!') AS t", "concat(b, b) AS b")
    bench = Bench(session)
    made, _ = whole(bench.program(rows, query), [pa.array(["a", "bcd", ""]), pa.array([b"xy", b"", b"z"])], 3)
    assert [each.to_pylist() for each in made] == [["a!", "bcd!", "!"], [b"xyxy", b"", b"zz"]]
    bench.programs.close()


# ---- what needs a job --------------------------------------------------------------------------------------


@pytest.mark.short_form
def test_why_there_is_a_job(bench: Bench) -> None:
    spark = bench.spark
    rows = spark.range(3).selectExpr("id")
    other = spark.createDataFrame([(1, "one")], "id long, name string")
    joined = rows.join(F.broadcast(other), "id")
    program = bench.program(rows, joined)
    assert isinstance(program, RowJob)
    assert program.job == "BroadcastHashJoin"
    made, _ = whole(program, [pa.array([2, 1, 1])], 3)
    assert [each.to_pylist() for each in made] == [[1, 1], ["one", "one"]]
    assert bench.program(rows, rows.selectExpr("id + 1")).job == ""
    for expression in ("rand()", "uuid()", "CAST('now' AS TIMESTAMP)", "CAST(' Today' AS DATE)"):
        assert isinstance(bench.program(rows, rows.selectExpr(expression)), RowJob), expression
    for expression in ("CAST('2020-01-01' AS DATE)", "CAST(id AS TIMESTAMP)"):
        assert isinstance(bench.program(rows, rows.selectExpr(expression)), RowProgram), expression


def test_a_join_with_the_time_of_the_batch(bench: Bench) -> None:
    rows = bench.spark.range(3).selectExpr("id")
    other = bench.spark.createDataFrame([(1, "2023-11-14"), (1, "2023-11-16")], "number long, until string")
    query = rows.join(other, F.expr("id = number AND CAST(until AS TIMESTAMP) > current_timestamp()")).select("until")
    program = bench.program(rows, query)
    made, _ = whole(program, [pa.array([0, 1, 2])], 3)
    assert made[0].to_pylist() == ["2023-11-16"]


def test_types_that_arrow_lacks_are_a_reason(bench: Bench) -> None:
    rows = bench.spark.range(3).selectExpr("id")
    found = bench.programs.evaluate(plans.analyzed(rows.selectExpr("make_interval(1) AS i")), (), (0,))
    assert isinstance(found, str)
    assert "interval" in found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the files have names while they are used")
def test_programs_have_no_files_with_names(onceflow_spark: Any) -> None:
    """So that nothing is left behind if the process is killed. And memory is free between two batches."""
    bench, before = Bench(onceflow_spark), set(os.listdir("/dev/shm"))
    rows = onceflow_spark.range(3).selectExpr("id")
    program = bench.program(rows, rows.selectExpr("id + 1 AS id", "repeat('x', 1000000) AS t"))
    assert whole(program, [pa.array(range(3))], 3)[0][0].to_pylist() == [1, 2, 3]
    assert not [each for each in os.listdir("/dev/shm") if each.startswith("onceflow-rows-") and each not in before]
    assert isinstance(program, RowProgram)
    assert program._task is not None
    assert [os.stat(each.path).st_size for each in (program._file, program._task._file)] == [0, 0]
    bench.programs.close()
