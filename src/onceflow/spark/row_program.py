"""Rows of a query without state, made in the driver's JVM without a Spark job.

Spark plans operators once, over a leaf that yields the rows which the driver gives it (``row_plan.py``). The driver
then computes that physical plan in its own thread, as a task does (``driver_task.py``). So Spark's operators, its
generated code and its Python workers do the work, and what a job costs falls away: planning, scheduling, tasks. Rows
come and go as Arrow batches in files, which are in memory where the machine has ``/dev/shm``.

Columns that the operators pass on unchanged do not go through the JVM: each row that comes back has the number of the
row that it was made from.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from onceflow.arrow_types import nullable
from onceflow.errors import SchemaError
from onceflow.spark import batch_plan, plans
from onceflow.spark.collect import arrow_schema, arrow_schema_of, collect
from onceflow.spark.driver_task import DriverTask
from onceflow.spark.java_functions import JavaFunctions
from onceflow.spark.jvm import SPARK_ERRORS, first_line
from onceflow.spark.memory_file import MemoryFile
from onceflow.spark.query_session import active, clone_of
from onceflow.spark.row_plan import NoProgramError, planned

# From Spark 4 on, upper() and lower() need a table of all characters, which takes a second to make.
_CASES = "org.apache.spark.sql.catalyst.util.CollationAwareUTF8String"
_CASES_PATTERN = "UPPER_OR_LOWER"


class RowProgram:
    """What operators of an analyzed plan do with rows. One thread makes all calls, but for `interrupt`.

    Args:
        make, spark, node, base: see `row_plan.planned`.
        now_us: returns the time of the batch, in microseconds of the epoch.

    Attributes:
        needed: the places of the columns of ``base`` that are used.
        job: it is none.

    Raises:
        NoProgramError: they need a job.
    """

    job = ""

    def __init__(
        self, make: JavaFunctions, spark: SparkSession, node: Any, base: plans.Path, now_us: Callable[[], int]
    ) -> None:
        self._now_us = now_us
        self._clock = make.static("java.util.concurrent.atomic.AtomicReference")()
        self._file = MemoryFile()
        self._task: DriverTask | None = None
        try:
            self._plan = plan = planned(make, spark, node, base, self._file.path, self._clock)
            arrow_schema(plan.df)  # refuses types that Arrow lacks before there are rows
            rdd = _executed(plan.df)
            schema = plan.df._jdf.schema()
            self._task = DriverTask(make, spark, rdd, schema, MemoryFile())
        except BaseException:
            self.close()
            raise
        passed = {at for at in plan.passed if at is not None}
        self.needed = (plan.used | passed) - {len(plan.input) - 1}

    def __reduce__(self) -> Any:
        raise TypeError("a program runs in the driver")

    def close(self) -> None:
        """Remove its files."""
        if self._task is not None:
            self._task.close()
        self._file.close()

    def interrupt(self) -> None:
        """End what `rows` does, from another thread: it fails."""
        if self._task is not None:
            self._task.interrupt()

    def rows(self, columns: Sequence[pa.Array | None], count: int) -> Iterator[tuple[list[pa.Array], int]]:
        """The rows that become of these: columns, and how many rows they have. Many rows come in several parts.

        Args:
            columns: of ``base``. Those that are not `needed` may be None. count: how many rows they have.

        Raises:
            PySparkException, Py4JError: an operator fails for a row.
        """
        if self._task is None:
            raise RuntimeError("the program was closed")
        self._file.put(self._given(columns, count).serialize())
        if self._plan.timed:
            self._clock.set(self._now_us())
        for made in self._task.batches():
            self._file.clear()  # it was read as a whole
            yield self._whole(columns, made), made.num_rows

    def _whole(self, columns: Sequence[pa.Array | None], made: pa.RecordBatch) -> list[pa.Array]:
        """All columns of some rows."""
        passed = self._plan.passed
        fresh = iter(made.columns)
        found = [next(fresh) if at is None else None for at in passed]
        taken = next(fresh, None)  # the numbers of rows, if columns are passed on
        return [there(columns[at]).take(taken) if at is not None else found[n] for n, at in enumerate(passed)]

    def _given(self, columns: Sequence[pa.Array | None], rows: int) -> pa.RecordBatch:
        """The rows as the leaf has them, with their numbers. Columns that are not used are null."""
        arrays = []
        for at, field in enumerate(self._plan.input):
            if at not in self._plan.used:
                arrays.append(pa.nulls(rows, field.type))
            elif at == len(columns):
                arrays.append(pa.array(range(rows), pa.int64()))
            else:
                arrays.append(cast(columns[at], field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self._plan.input)


class RowPrograms:
    """The programs of one run.

    Args:
        spark: the session of the query.

    Attributes:
        now_us: the time of the batch, in microseconds of the epoch.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._programs: list[RowProgram | RowJob] = []
        self.now_us = 0

    @cached_property
    def session(self) -> SparkSession:
        """A clone of the session. Its settings stay as they were when the clone was needed first: for operators of
        Spark, at the start."""
        return clone_of(self._spark)

    @cached_property
    def _make(self) -> JavaFunctions:
        return JavaFunctions(self._spark)

    def evaluate(self, plan: Any, path: plans.Path, base: plans.Path) -> RowProgram | RowJob | str:
        """See ``driver.batch.driver_program.Evaluate``."""
        node = plans.at(plan, path)
        initialize_ahead(self._make, node)
        program: RowProgram | RowJob
        try:
            program = self._program(node, base)
        except SchemaError as error:
            return error.what
        self._programs.append(program)
        return program

    def _program(self, node: Any, base: plans.Path) -> RowProgram | RowJob:
        try:
            return RowProgram(self._make, self.session, node, base, self._now)
        except NoProgramError as error:
            why = str(error)
        except SPARK_ERRORS as error:  # such as the time of a batch in the condition of a join
            why = first_line(error)
        return RowJob(self.session, node, base, self._now, job=why)

    def _now(self) -> int:
        return max(self.now_us, 1 << 32)  # py4j makes an Integer of less, and the time is a Long

    def interrupt(self) -> None:
        """End what a program does, from another thread."""
        for program in self._programs:
            program.interrupt()

    def close(self) -> None:
        """Remove their files."""
        for program in self._programs:
            program.close()


def _executed(df: DataFrame) -> Any:
    """The RDD of a physical plan.

    Raises:
        NoProgramError: only a job can compute it.
    """
    try:
        with active(df.sparkSession):
            rdd = df._jdf.queryExecution().executedPlan().execute()
    except SPARK_ERRORS as error:
        if "not serializable" not in str(error):
            raise
        # Before Spark 4, Python functions make closures that contain the plan, and with it its leaf.
        raise NoProgramError("a Python function") from error
    if rdd.isBarrier():
        raise NoProgramError("barrier")
    return rdd


def initialize_ahead(make: JavaFunctions, plan: Any) -> None:
    """Initialize those that a plan is going to use in a thread, while it is optimized and planned."""
    if plan.containsPattern(make.tree_pattern(_CASES_PATTERN)):
        loader = make.java_class("org.apache.spark.sql.SparkSession").getClassLoader()
        threading.Thread(target=_initialize, args=(make, loader), daemon=True, name="onceflow-classes").start()


def _initialize(make: JavaFunctions, loader: Any) -> None:
    with contextlib.suppress(*SPARK_ERRORS, OSError):  # Spark 3.5 has no such class
        make.static("java.lang.Class").forName(_CASES, True, loader)


class RowJob:
    """What operators of an analyzed plan do with rows, by a job each time: joins with static DataFrames, subqueries.

    The rows of the batch become a small DataFrame, and the operators of the query stand on it. Spark optimizes and
    plans them for every batch, as it does for every micro-batch.

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
