"""Relates Spark's batch numbers in a kept checkpoint to those of the flow.

Spark numbers a query's batches from 0 in its checkpoint. The flow numbers its own since its first start. A batch that
Spark runs must be the one after the last committed one. Or it is the last committed one again, if a crash came before
its entry in Spark's commit log. Anything else means that checkpoint and progress do not belong together any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pyspark.sql import DataFrame, SparkSession

from onceflow.driver.record.offset_log import SourceRange, read_range
from onceflow.errors import ProgressConflictError
from onceflow.protocol.progress import CheckpointProgress, Progress
from onceflow.spark import jvm
from onceflow.spark.checkpoint_files import Folder, look_at
from onceflow.spark.commit_log import CommitLog


class Numbering:
    """The batch numbers of one run of a query with a kept checkpoint.

    Args:
        spark: the session that the query was started in.
        moved: offsets that starts have committed since the last batch, for new partitions and accepted data loss.
            Spark's log has other offsets there.
    """

    def __init__(
        self, spark: SparkSession, folder: Folder, flow: str, moved: Mapping[str, Mapping[int, int]] | None = None
    ) -> None:
        self._spark = spark
        self._folder = folder
        self._flow = flow
        self._moved = dict(moved or {})
        self._query_id: str | None = None
        self._log = CommitLog(spark, folder)
        self._current: CheckpointProgress | None = None

    @property
    def query_id(self) -> str:
        """The query id in the checkpoint. Spark writes it before the first batch."""
        if self._query_id is None:
            self._query_id = look_at(self._folder).query_id or ""
        return self._query_id

    def read_range(self, batch: int, partitions: Mapping[str, int]) -> SourceRange:
        """The source range of Spark's batch, from the offset log of the checkpoint.

        Args:
            partitions: as of `offset_log.read_range`.
        """
        return read_range(self._folder, batch, partitions)

    def is_committed(self, batch: int, source: SourceRange, progress: Progress) -> bool:
        """Whether Spark's batch is the last committed one.

        Raises:
            ProgressConflictError: it is neither that batch nor the one after it.
        """
        known = progress.checkpoint
        if known is None or known.query_id != self.query_id:
            if batch == 0:
                return False
            raise self._conflict(batch, "not in this checkpoint", progress)
        if batch == known.batch:
            if source.digest != known.digest:
                raise self._conflict(batch, "the same batch with other offsets", progress)
            return True
        if batch != known.batch + 1:
            raise self._conflict(batch, f"its batch {known.batch}", progress)
        return False

    def planned(self, batch: int, source: SourceRange) -> None:
        """To be called before a batch is written. Its progress will contain Spark's batch number."""
        self._current = CheckpointProgress(self.query_id, batch, source.digest)

    def current(self, *, has_run: bool) -> CheckpointProgress | None:
        """What the progress record of the current batch says of the checkpoint.

        Args:
            has_run: whether all tasks of the batch are done. Then it is known what Spark will write to its commit log.
        """
        if self._current is None or not has_run:
            return self._current
        return replace(self._current, commit=self._log.entry(self.query_id, self._current.batch))

    def bridged(self, source: SourceRange, progress: Progress) -> SourceRange:
        """The range, beginning at the offsets that starts have committed since the last batch."""
        if not self._moved:
            return source
        start = {topic: dict(partitions) for topic, partitions in source.start.items()}
        for topic, partitions in self._moved.items():
            for partition, offset in partitions.items():
                if topic in start and progress.offsets.get(topic, {}).get(partition) == offset:
                    start[topic][partition] = max(offset, start[topic].get(partition, 0))
        self._moved = {}
        return replace(source, start=start)

    def forget_attempt(self, df: DataFrame) -> None:
        """To be called before a batch is run again, see ``jvm.forget_state_ids``."""
        if int(str(df.sparkSession.conf.get(jvm.STATE_FORMAT, "1"))) >= 2:
            jvm.forget_state_ids(self._spark, self.query_id)

    def rows_kept(self) -> float:
        """Number of rows in Spark's state after the last batch; infinite when Spark does not report it."""
        return jvm.state_rows(self._spark, self.query_id)

    def rows_dropped(self) -> int:
        """Number of rows that the current batch has dropped as late, in all its attempts."""
        return jvm.rows_dropped(self._spark, self.query_id)

    def _conflict(self, batch: int, committed: str, progress: Progress) -> ProgressConflictError:
        return ProgressConflictError(
            "The checkpoint and the flow's progress do not belong together any more",
            flow=self._flow,
            batch=progress.batch_id + 1,
            detail=f"Spark runs batch {batch} of checkpoint {self._folder}; the last committed batch is {committed}",
            next_step="start the flow again: the start reports what has happened and what you can do",
        )
