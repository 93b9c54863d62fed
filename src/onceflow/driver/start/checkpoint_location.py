"""Where Spark's checkpoint of a run is: a folder that is kept, with Spark's state and offsets.

It is compared with the flow's progress before anything starts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pyspark.sql import SparkSession

from onceflow.driver.record.numbering import Numbering
from onceflow.driver.record.offset_log import TopicOffsets, read_digest, read_ends
from onceflow.planning.checkpoints import plan_checkpoint
from onceflow.protocol.progress import Progress
from onceflow.spark.checkpoint_files import (
    CheckpointState,
    Folder,
    look_at,
    open_folder,
)
from onceflow.spark.commit_log import complete

log = logging.getLogger("onceflow")

#: Whether a batch that Kafka has committed is put into Spark's commit log at a start, instead of being drained.
COMPLETE_COMMIT_LOG = True


@dataclass(frozen=True)
class CheckpointLocation:
    """Where Spark's checkpoint of a run is.

    Args:
        address: the folder's address, as Spark takes it.
        numbering: how Spark's batch numbers and the flow's go together.
    """

    folder: Folder
    address: str
    numbering: Numbering


def kept_location(
    spark: SparkSession, checkpoint: str, progress: Progress, *, on_conflict: str, other_sources: bool, flow: str
) -> CheckpointLocation:
    """The user's checkpoint, when it belongs to the flow's progress.

    Args:
        checkpoint: its folder.
        progress: the flow's, as committed.
        on_conflict: one of ``checkpoints.ON_CONFLICT``.
        other_sources: whether the query has sources whose position is in the checkpoint only.

    Raises:
        ProgressConflictError: checkpoint and progress do not belong together.
        OptionError: the checkpoint cannot be opened.
    """
    folder, address = open_folder(spark, checkpoint, flow)
    state = look_at(folder)
    known = progress.checkpoint
    start = plan_checkpoint(
        state,
        progress,
        digest=None if known is None or known.batch > state.planned else read_digest(folder, known.batch),
        location=checkpoint,
        on_conflict=on_conflict,
        other_sources=other_sources,
        flow=flow,
    )
    if start.warning:
        log.warning("flow %s: %s", flow, start.warning)
    entry = None if known is None or not COMPLETE_COMMIT_LOG else known.commit
    if start.drains is not None and entry is not None and complete(spark, address, start.drains, entry):
        log.warning(
            "flow %s: batch %d of the checkpoint is committed in Kafka: Spark's commit log is completed with it",
            flow,
            start.drains,
        )
    return CheckpointLocation(folder, address, Numbering(spark, folder, flow, moved_since(folder, state, progress)))


def moved_since(folder: Folder, state: CheckpointState, progress: Progress) -> TopicOffsets:
    """Offsets that starts have committed since the last batch: this start, or one before it that wrote no batch."""
    known = progress.checkpoint
    if known is not None and known.query_id == state.query_id:
        ends = read_ends(folder, known.batch, progress.offsets)
        return {
            topic: {p: offset for p, offset in progress.offsets.get(topic, {}).items() if ends[topic].get(p) != offset}
            for topic in ends
        }
    if progress.batch_id == 0:  # all that progress knows was committed by starts
        return {topic: dict(offsets) for topic, offsets in progress.offsets.items()}
    return {}
