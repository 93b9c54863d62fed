"""Rows of a query without state that are made by a Spark job: what needs a shuffle or a broadcast, such as a join with
a static DataFrame, or a subquery.

The rows of the batch become a small DataFrame, and the operators of the query stand on it. Spark optimizes and plans
them for every batch, as it does for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from onceflow.arrow_types import nullable
from onceflow.spark import batch_plan, plans
from onceflow.spark.collect import arrow_schema_of, collect
from onceflow.spark.java_functions import JavaFunctions
from onceflow.spark.memory_file import MemoryFile


class RowJob:
    """What operators of an analyzed plan do with rows, by a job each time.

    Args:
        spark: the session of the query. Its settings are those of this moment.
        node: the operator whose rows are wanted.
        base: the path from it to the node whose rows are given.
        now_us: returns the time of the batch, in microseconds of the epoch.
        job: why it is a job.
    """

    def __init__(
        self, spark: SparkSession, node: Any, base: plans.Path, now_us: Callable[[], int], *, job: str
    ) -> None:
        self._spark, self._node, self._base, self._now_us = spark, node, base, now_us
        self.job = job
        leaf = plans.at(node, base)
        struct = plans.struct_of(leaf)
        self._schema = struct.json()
        self._given = nullable(arrow_schema_of(spark, _by_number(struct), "which rows of a batch cannot have"))
        self.needed = frozenset(range(len(struct)))
        self._other_times = batch_plan.has_other_times(spark, node)
        self._utils = JavaFunctions(spark).static("org.apache.spark.sql.api.python.PythonSQLUtils")
        self._file = MemoryFile()

    def __reduce__(self) -> Any:
        raise TypeError("a program runs in the driver")

    def close(self) -> None:
        """Remove its files."""
        self._file.close()

    def interrupt(self) -> None:
        """Its jobs are cancelled with those of the query."""

    def rows(self, columns: Sequence[pa.Array | None], count: int) -> Iterator[tuple[list[pa.Array], int]]:
        """See `row_program.RowProgram.rows`."""
        given = plans.named_as(self._frame(columns), plans.at(self._node, self._base))
        plan = plans.grafted(self._spark, self._node, {self._base: given})
        df = plans.frame(self._spark, self._of_batch(plan))
        for made in collect(df, interpreted=False):
            yield made.columns, made.num_rows

    def _of_batch(self, plan: Any) -> Any:
        return batch_plan.of_batch(self._spark, plan, self._now_us(), other_times=self._other_times)

    def _frame(self, columns: Sequence[pa.Array | None]) -> DataFrame:
        arrays = [cast(column, field.type) for column, field in zip(columns, self._given, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._given)
        content = pa.BufferOutputStream()
        with pa.ipc.new_stream(content, self._given) as stream:
            stream.write_batch(batch)
        self._file.put(content.getvalue())
        session: Any = self._spark._jsparkSession
        rows = self._utils.readArrowStreamFromFile(self._file.path)
        return DataFrame(self._utils.toDataFrame(rows, self._schema, session), self._spark)


def _by_number(struct: T.StructType) -> T.StructType:
    """The same types; several columns may have one name."""
    return T.StructType([T.StructField(f"c{n}", field.dataType) for n, field in enumerate(struct)])


def cast(column: pa.Array | None, kind: pa.DataType) -> pa.Array:
    """A column that is needed, with the type that Spark reads."""
    column = there(column)
    return column if column.type == kind else column.cast(kind)


def there(column: pa.Array | None) -> pa.Array:
    """A column that is needed."""
    if column is None:
        raise RuntimeError("a column that is needed was not built")
    return column
