"""Evaluates what a query does with given rows in the driver, without a job, and in a job."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from onceflow.spark import plans
from onceflow.spark.collect import arrow_schema, collect
from onceflow.spark.jvm import SPARK_ERRORS
from onceflow.spark.row_program import RowJob, RowProgram, RowPrograms
from onceflow.task import row_operators

NOW_US = 1_700_000_000_123_456


class Bench:
    """Evaluates queries over given rows in both ways."""

    def __init__(self, spark: Any) -> None:
        self.spark = spark
        self.programs = RowPrograms(spark)
        self.programs.now_us = NOW_US

    def program(self, rows: DataFrame, query: DataFrame) -> RowProgram | RowJob:
        """The program for what a query does with the rows of a DataFrame without operators."""
        node, base = plans.analyzed(query), plans.analyzed(rows)
        made = self.programs.evaluate(node, (), next(path for path, each in _nodes(node) if each.equals(base)))
        assert isinstance(made, RowProgram | RowJob)
        return made

    def driver(self, rows: DataFrame, query: DataFrame) -> list[Any]:
        """The rows that become of them in the driver."""
        given = arrow(rows)
        columns = [column.combine_chunks() for column in given.columns]
        columns = [each.chunk(0) if isinstance(each, pa.ChunkedArray) else each for each in columns]
        made, count = whole(self.program(rows, query), columns, given.num_rows)
        assert all(len(each) == count for each in made)
        if not made:
            return []
        return _comparable(pa.RecordBatch.from_arrays(made, schema=arrow_schema(query)), count)

    def job(self, query: DataFrame) -> list[Any]:
        """The rows of the same query, from a job."""
        found = arrow(query)
        return _comparable(found.combine_chunks(), found.num_rows)


def arrow(df: DataFrame) -> pa.Table:
    """The rows of a job (``DataFrame.toArrow``, which Spark 3.5 does not have)."""
    batches = collect(df, interpreted=False)
    return pa.Table.from_batches(batches) if batches else arrow_schema(df).empty_table()


def condition_of(error: BaseException) -> str | None:
    """What Spark calls the error. Spark 3.5 puts that of a job into its text."""
    found = re.search(r"\[([A-Z_0-9.]+)\] ", str(error))
    return None if found is None else found[1]


def whole(program: RowProgram | RowJob, columns: list[Any], count: int) -> tuple[list[pa.Array], int]:
    """All rows that a program makes."""
    parts = list(program.rows(columns, count))
    return [pa.concat_arrays(each) for each in zip(*(made for made, _ in parts), strict=True)], sum(n for _, n in parts)


def _nodes(node: Any, path: plans.Path = ()) -> Iterator[tuple[plans.Path, Any]]:
    yield path, node
    for number, child in enumerate(plans.children(node)):
        yield from _nodes(child, (*path, number))


def _comparable(rows: pa.RecordBatch | pa.Table, count: int) -> list[Any]:
    assert rows.num_rows == count
    if not rows.num_columns or not count:
        return rows.to_pylist()
    # Before Spark 4.2, times have the time zone of the session. As texts NaN is like NaN.
    columns = [each.chunk(0) if isinstance(each, pa.ChunkedArray) else each for each in rows.columns]
    texts = [list(map(repr, row_operators.plain(each).to_pylist())) for each in columns]
    return list(zip(*texts, strict=True))


def outcome(made: Callable[[], list[Any]]) -> Any:
    """The rows, or the condition of the error."""
    try:
        return made()
    except SPARK_ERRORS as error:
        return condition_of(error)
