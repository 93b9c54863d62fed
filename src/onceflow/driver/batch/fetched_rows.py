"""The rows of a batch: of a micro-batch of Spark, fetched by the driver, or to be read by tasks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from onceflow.driver.batch.blame import Alike, any_error, culprit
from onceflow.driver.batch.driver_program import DriverProgram
from onceflow.driver.batch.range_rows import RangeRows
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.record_columns import RecordColumns
from onceflow.task.source_rows import QueryRows, joined

#: Runs the process step of a table: takes its input, and returns the rows that it yields.
RunStep = Callable[[str, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class Fetched(Protocol):
    """Committed records of a source."""

    def rows(self, query: QueryRows) -> Iterator[pa.RecordBatch]:
        """The rows of a query that they become. Called for every attempt of the batch."""
        ...

    def sources(self) -> Sequence[tuple[TopicPartition, RecordColumns]]:
        """The records, by where they are."""
        ...


@dataclass(frozen=True)
class FetchedRows:
    """Rows that the direct engine has fetched. Without a Spark job, the driver writes or processes them itself.

    Args:
        sparkSession: named as that of a DataFrame.
        parts: in the order in which they are written.
        program: makes rows of them.
        meanwhile: called while it is being decided whether the batch is committed.
    """

    sparkSession: SparkSession
    parts: Sequence[Fetched]
    program: DriverProgram
    meanwhile: Callable[[], None] | None = None

    def batches(self, run_step: RunStep | None = None) -> Generator[pa.RecordBatch, None, None]:
        """The rows, as the sink or the process step of the query takes them.

        Args:
            run_step: for process steps whose rows are rows of the query. Each is run, also if it gets no rows.
        """
        return joined(self._rows(self.program, run_step))

    def culprit(
        self, refuses: Callable[[Iterator[pa.RecordBatch]], bool] | None = None, alike: Alike = any_error
    ) -> str:
        """The record of which the query cannot make rows, or none that can be written, see `blame.culprit`."""
        programs = [self.program]
        for program in programs:  # those of the inputs of steps, too
            programs += [step.input for step in program.steps]
        sources = (source for part in self.parts for source in part.sources())
        return culprit((each.query for each in programs), sources, refuses=refuses, alike=alike)

    def _rows(self, program: DriverProgram, run_step: RunStep | None) -> Iterator[pa.RecordBatch]:
        for part in self.parts:
            yield from part.rows(program.query)
        for step in program.steps:
            if run_step is None:
                raise RuntimeError(f"nothing runs the process step of table {step.table}")
            for rows in run_step(step.table, joined(self._rows(step.input, run_step))):
                for made in step.apply(rows):
                    yield program.query.formed(made)


Rows = DataFrame | FetchedRows | RangeRows
