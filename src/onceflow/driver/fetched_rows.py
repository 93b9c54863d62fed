"""The rows of a batch: of a micro-batch of Spark, fetched by the driver, or to be read by tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from onceflow.driver.range_rows import RangeRows
from onceflow.task.source_rows import joined


class Fetched(Protocol):
    """Committed records of a source, and the operators that make rows of them."""

    def rows(self) -> Iterator[pa.RecordBatch]:
        """The rows. Called for every attempt of the batch."""
        ...


@dataclass(frozen=True)
class FetchedRows:
    """Rows that the direct engine has fetched. Without a Spark job, the driver writes or processes them itself.

    Args:
        sparkSession: named as that of a DataFrame.
        parts: in the order in which they are written.
    """

    sparkSession: SparkSession
    parts: Sequence[Fetched]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, as the sink or the process step of the query takes them."""
        return joined(rows for part in self.parts for rows in part.rows())


Rows = DataFrame | FetchedRows | RangeRows
