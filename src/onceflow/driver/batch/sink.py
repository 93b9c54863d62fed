"""What foreachBatch calls: it plans, runs and settles one micro-batch of Spark after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from pyspark.sql import DataFrame

from onceflow.driver.batch.batches import Batches, BatchSteps, timed
from onceflow.driver.record.offset_log import SourceRange
from onceflow.logs import log_context
from onceflow.planning.options import BatchSummary, SinkOptions
from onceflow.spark.query_session import set_up_clone
from onceflow.state.table_facts import TableFacts

log = logging.getLogger("onceflow.sink")


class SparkCommit(BatchSteps, Protocol):
    """The steps of a micro-batch of Spark."""

    def plan(self, spark_batch_id: int, batch: int) -> tuple[SourceRange, bool]:
        """The source range of a batch, and whether it is committed."""
        ...

    def drain(self, df: DataFrame) -> None:
        """Run a committed batch for its state in Spark."""
        ...


class BatchSink(Batches):
    """Writes the micro-batches of one query of Spark.

    Args:
        before_first: called before the first batch begins; may raise.
    """

    def __init__(
        self,
        commit: SparkCommit,
        options: SinkOptions,
        *,
        before_first: Callable[[], None] = lambda: None,
        tables: Callable[[], list[TableFacts]] = list,
    ) -> None:
        super().__init__(commit, options, tables=tables)
        self._commit = commit
        self._before_first = before_first

    def __call__(self, df: DataFrame, spark_batch_id: int) -> None:
        batch = self.progress.batch_id + 1
        with log_context.within(flow=self.flow, batch=batch):  # py4j uses the thread for other flows later
            self._in_turn(df, batch, lambda: self._run(df, spark_batch_id))

    def _run(self, df: DataFrame, spark_batch_id: int) -> None:
        self._commit.settle()
        if not self.history:
            set_up_clone(df.sparkSession)
            self._before_first()
        batch = self.progress.batch_id + 1
        summary = BatchSummary(batch, 0)
        with timed(summary, "plan"):
            source, is_committed = self._commit.plan(spark_batch_id, batch)
        if is_committed:
            log.warning(
                "flow %s: batch %d (%d in the checkpoint) is committed already: it is run again for its state only, "
                "nothing of it is written",
                self.flow,
                self.progress.batch_id,
                spark_batch_id,
            )
            self._commit.drain(df)
            self.drained.append(self.progress.batch_id)
            return
        self._run_planned(df, batch, source, summary)
