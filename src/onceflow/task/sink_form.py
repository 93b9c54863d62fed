"""The rows of a query as a sink takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from onceflow.state.engine import input_batch
from onceflow.task.row_operators import reinterpreted


@dataclass(frozen=True)
class SinkForm:
    """What the sink takes of the rows of a query: the same as ``ownership.prepare`` selects with Spark. In contrast to
    ``ownership.Columns``, tasks can load it fast.

    Args:
        taken: the columns, which have been checked. cast: those of them that are strings and become binary.
        by_source: whether rows stay in the partition that they were read from (``partitioner="source"``).
    """

    taken: tuple[str, ...]
    cast: tuple[str, ...]
    by_source: bool = False

    def rows(self, rows: pa.RecordBatch, source_partition: int) -> pa.RecordBatch:
        """The rows as the sink takes them.

        Args:
            rows: what a plan makes of records of this partition of a source.

        Returns:
            The columns of ``taken``: key and value are binary, the timestamp is epoch milliseconds. If rows stay in
            their partition, the column ``partition`` has its number.
        """
        made: dict[str, Any] = {}
        for name in self.taken:
            column = rows.column(name)
            if name in self.cast:
                column = reinterpreted(column, "binary")
            elif name == "timestamp":
                column = input_batch.milliseconds(column)
            made[name] = column
        if self.by_source:
            made["partition"] = pa.repeat(pa.scalar(source_partition, pa.int32()), rows.num_rows)
        return pa.RecordBatch.from_arrays(list(made.values()), names=list(made))


@dataclass(frozen=True)
class TableForm:
    """What an external sink takes of the rows of a query: all columns, with the types that Spark's tasks give them.

    Args:
        schema: the columns.
    """

    schema: pa.Schema
    by_source = False

    def rows(self, rows: pa.RecordBatch, source_partition: int) -> pa.RecordBatch:
        """The rows as the sink takes them. ``source_partition`` is not used."""
        pairs = zip(rows.columns, self.schema.types, strict=True)
        made = [column if column.type == kind else column.cast(kind) for column, kind in pairs]
        return pa.RecordBatch.from_arrays(made, schema=self.schema)


Form = SinkForm | TableForm
