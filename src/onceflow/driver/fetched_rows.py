"""The rows of a batch: those of a micro-batch of Spark, or those that the driver has fetched by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession


class Fetched(Protocol):
    """Committed records of a source, and the operators that make rows of them."""

    def rows(self) -> Iterator[pa.RecordBatch]:
        """The rows. Called for every attempt of the batch."""
        ...


# Larger batches are not joined: the copy would cost more than it saves.
_JOINED_BYTES = 1_000_000


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
        waiting: list[pa.RecordBatch] = []
        size = 0
        for part in self.parts:
            for batch in part.rows():
                if waiting and (size + batch.nbytes > _JOINED_BYTES or batch.schema != waiting[0].schema):
                    yield _joined(waiting)
                    waiting, size = [], 0
                waiting.append(batch)
                size += batch.nbytes
        if waiting:
            yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch: what is written to a partition by one Arrow batch is one record batch, or few."""
    joined: pa.RecordBatch = batches[0]
    if len(batches) > 1:
        (joined,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined


Rows = DataFrame | FetchedRows
