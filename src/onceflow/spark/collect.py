"""Brings the rows of a small batch to the driver, with as little overhead as Spark allows.

Such a batch takes tens of milliseconds, and most of that is fixed cost. ``DataFrame.toArrow`` makes about twenty-five
calls to the JVM around its job (settings, the schema, the result element by element); this module makes five. Also,
every task generates Java source for its projections, formats it and looks it up, twice for Spark's Kafka reader alone.
At a hundred rows per task that is half of the task's CPU time. Spark's interpreted projections need no generated code,
and are slower only from thousands of rows on.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.errors.exceptions.captured import unwrap_spark_exception
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.serializers import ArrowCollectSerializer
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import DataType, StructField, StructType, YearMonthIntervalType

from onceflow.errors import SchemaError
from onceflow.spark import versions

_LARGE = "spark.sql.execution.arrow.useLargeVarTypes"
_PROJECTIONS = "spark.sql.codegen.factoryMode"
# Every Arrow batch becomes record batches and a request of its own. Below this size it is cheaper to join them.
_JOINED_BYTES_MAX = 1_000_000


def collect(df: DataFrame, *, interpreted: bool) -> list[pa.RecordBatch]:
    """Run a batch once and return its rows in their order. Raises the same errors as ``toArrow``.

    Args:
        interpreted: whether tasks use interpreted instead of generated projections, see ``QueryFacts.reads_little``.
    """
    context = df.sparkSession.sparkContext
    if not interpreted:
        return _joined(_collected(df))
    # Tasks take settings from the job's properties. A value that the user has set for the session has precedence:
    # Spark overwrites the property with it.
    context.setLocalProperty(_PROJECTIONS, "NO_CODEGEN")
    try:
        return _joined(_collected(df))
    finally:
        context.setLocalProperty(_PROJECTIONS, None)  # type: ignore[arg-type]


def arrow_schema(df: DataFrame) -> pa.Schema:
    """The columns of a DataFrame as its rows have them in Arrow, here and in tasks.

    Raises:
        SchemaError: Arrow has no type for one.
    """
    try:
        schema = df.schema
    except PySparkException as error:  # before Spark 4, Python cannot even name the type of an interval
        types = df._jdf.schema().simpleString()
        raise SchemaError(
            f"The columns are {types}, and one of them has a type that Python does not know",
            detail=str(error).splitlines()[0],
            next_step="select it as text, string(column), or leave it out",
        ) from error
    return arrow_schema_of(df.sparkSession, schema, "which tasks cannot bring to another system")


def spark_type_of(kind: pa.DataType) -> DataType:
    """What Spark calls a type of Arrow. Times without a time zone stay without one."""
    return from_arrow_type(kind, prefer_timestamp_ntz=True)


def arrow_schema_of(spark: SparkSession, schema: StructType, why: str, *, large: bool | None = None) -> pa.Schema:
    """Columns as rows have them in Arrow, here and in tasks.

    Args:
        why: what is not possible with a type that Arrow does not have, for the error.
        large: whether texts have large types; None: as the session says.

    Raises:
        SchemaError: Arrow has no type for one.
    """
    conf = spark.conf
    # Spark 4.2 knows no time zone but the one it is given; older versions take no such arguments.
    given: dict[str, Any] = {
        "timezone": conf.get("spark.sql.session.timeZone"),
        "prefers_large_types": conf.get(_LARGE, "false") == "true" if large is None else large,
    }
    known = inspect.signature(to_arrow_schema).parameters
    given = {name: value for name, value in given.items() if name in known}
    fields = []
    for field in schema:
        try:
            fields += to_arrow_schema(StructType([field]), **given)
        except (PySparkException, TypeError, ValueError) as error:
            raise SchemaError(
                f"Column {field.name} is {field.dataType.simpleString()}, {why}",
                next_step=f"select {_as_text(field)} AS {field.name}, or leave it out",
            ) from error
    return pa.schema(fields)


def _as_text(field: StructField) -> str:
    """An expression that other systems understand."""
    if isinstance(field.dataType, YearMonthIntervalType):
        return f"concat(extract(YEAR FROM {field.name}), ' years ', extract(MONTH FROM {field.name}), ' months')"
    return f"string({field.name})"


def _collected(df: DataFrame) -> list[pa.RecordBatch]:
    answer: Any = df._jdf.collectAsArrowToPython()  # the address to connect to, its secret, the server
    address = answer[0]
    secret = None if isinstance(address, str) else answer[1]  # a Unix socket needs none
    serializer: Any = ArrowCollectSerializer()  # type: ignore[no-untyped-call]
    received: list[Any] = []
    try:
        with _connected(address, secret) as stream:
            received = list(serializer.load_stream(stream))  # batches in the order in which tasks ended; that order
    finally:
        # This call is always needed: when the job fails, the stream may simply end.
        with unwrap_spark_exception():
            answer[2].getResult()
    *batches, order = received
    return [batches[i] for i in order]


@contextlib.contextmanager
def _connected(address: Any, secret: str | None) -> Iterator[Any]:
    """The stream of a job's rows. It is closed at the end: PySpark before 4.2 leaves that to the garbage collector."""
    home = "pyspark.util" if versions.has("socket in util") else "pyspark.java_gateway"
    connect: Any = importlib.import_module(home).local_connect_and_auth
    stream, connection = connect(address, secret)
    with connection, stream:
        connection.settimeout(None)  # a job may take any time
        yield stream


def _joined(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    if len(batches) < 2 or sum(batch.get_total_buffer_size() for batch in batches) > _JOINED_BYTES_MAX:
        return batches
    joined: list[pa.RecordBatch] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined
