"""``mapInArrow`` over columns of any names.

PySpark looks the columns up by their names as expressions, so ``a.b`` is a field of a column ``a``, and ``*`` is every
column (PandasMapOpsMixin.mapInArrow, Dataset.col). Here names that are no plain ones are quoted before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

Batches = Iterator[pa.RecordBatch]


def quoted(name: str) -> str:
    """The name of a column as an expression."""
    return "`" + name.replace("`", "``") + "`"


def map_in_arrow(df: DataFrame, function: Callable[[Batches], Batches], schema: StructType | str) -> DataFrame:
    """As `DataFrame.mapInArrow`.

    Raises:
        PySparkException: Spark cannot give a column to Python; or there are two columns of one name.
    """
    if not all(name.isidentifier() for name in df.columns):
        kind: Any = type(df)
        columns = property(lambda same: list(map(quoted, same.schema.names)))
        df = type("QuotedColumns", (kind,), {"columns": columns})(df._jdf, df.sparkSession)
    return df.mapInArrow(function, schema)
