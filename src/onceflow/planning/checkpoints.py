"""Whether a Spark checkpoint and the flow's progress belong together: a pure decision, made before a start.

Spark's checkpoint holds the state of a query. Progress in Kafka says which batches are committed. Spark continues from
the checkpoint, so the two must agree about the last batch. There is one exception: after a crash the last batch may be
committed in Kafka and not yet in Spark's commit log.
"""

from __future__ import annotations

from dataclasses import dataclass

from onceflow.errors import ProgressConflictError, counted
from onceflow.protocol.progress import Progress
from onceflow.spark.checkpoint_files import CheckpointState

REFUSE, RESUME = "refuse", "resume"
ON_CONFLICT = (REFUSE, RESUME)


@dataclass(frozen=True)
class CheckpointStart:
    """The decision.

    Args:
        drains: Spark's number of a batch that is committed in Kafka and not in Spark's commit log. The commit log is
            completed, or the batch is run again for its state only (drained). None: there is no such batch.
        warning: a text to log.
    """

    drains: int | None = None
    warning: str = ""


def plan_checkpoint(
    checkpoint: CheckpointState,
    progress: Progress,
    *,
    digest: str | None,
    location: str,
    on_conflict: str,
    other_sources: bool,
    flow: str,
) -> CheckpointStart:
    """Decide how a query with this checkpoint starts, or refuse.

    Args:
        digest: of the batch that progress names, as in the checkpoint; None: the checkpoint has no such batch.
        location: of the checkpoint, for errors.
        on_conflict: ``refuse``, or ``resume``: an empty checkpoint may follow existing progress, with empty state.
        other_sources: whether the query has sources whose position is in the checkpoint only.

    Raises:
        ProgressConflictError: they do not belong together. Its text names the situation and the choices.
    """
    known = progress.checkpoint
    if checkpoint.planned > checkpoint.committed + 1:
        raise _damaged(checkpoint, location, flow)
    if known is not None and checkpoint.query_id == known.query_id:
        if known.batch > checkpoint.planned:
            raise _behind(checkpoint, known.batch, location, flow)
        if known.batch < checkpoint.committed:
            raise _ahead(checkpoint, known.batch, location, flow)
        if digest != known.digest:
            raise _diverged(known.batch, location, flow)
        if known.batch == checkpoint.planned > checkpoint.committed:
            return CheckpointStart(drains=known.batch)
        return CheckpointStart()
    if checkpoint.committed >= 0:
        raise _foreign(checkpoint, progress, location, flow)
    if progress.batch_id == 0:
        return CheckpointStart()  # the flow never committed a batch, and neither did the checkpoint
    if on_conflict != RESUME:
        raise _empty(progress, location, flow)
    if other_sources:
        raise ProgressConflictError(
            "The flow cannot be resumed with an empty checkpoint: it has sources whose position was in the old one",
            flow=flow,
            detail=f"checkpoint {location}; only topics that are read with Flow.read have offsets in Kafka",
            next_step=f"restore the old checkpoint, or start over: `onceflow reset {flow}`",
        )
    return CheckpointStart(
        warning=f"checkpoint {location} is empty: the flow continues at its committed offsets with empty Spark state"
    )


_CHOICES = (
    "1. start with the checkpoint that belongs to the flow; 2. continue at the committed offsets with empty Spark "
    'state: give an empty folder and on_checkpoint_conflict="resume"; 3. read everything again: `onceflow reset '
    "{flow}` and an empty folder"
)


def _conflict(what: str, detail: str, flow: str) -> ProgressConflictError:
    return ProgressConflictError(what, flow=flow, detail=detail, next_step=_CHOICES.format(flow=flow))


def _empty(progress: Progress, location: str, flow: str) -> ProgressConflictError:
    before = progress.checkpoint
    had = "without a checkpoint" if before is None else f"with the checkpoint of query {before.query_id}"
    return _conflict(
        f"The checkpoint is empty, and the flow has committed {counted(progress.batch_id, 'batch')} {had}",
        f"checkpoint {location}: was the old one deleted, or is this another folder? Aggregations, joins and "
        "de-duplication would start with empty state in the middle of the stream",
        flow,
    )


def _foreign(checkpoint: CheckpointState, progress: Progress, location: str, flow: str) -> ProgressConflictError:
    if progress.checkpoint is not None:
        ours = f"the flow's is that of query {progress.checkpoint.query_id}"
    elif progress.batch_id:
        ours = f"the flow has committed {counted(progress.batch_id, 'batch')} without a checkpoint since"
    else:
        ours = "the flow has never committed a batch, or was reset"
    return _conflict(
        "The checkpoint belongs to another query",
        f"checkpoint {location} is that of query {checkpoint.query_id} and has finished batch "
        f"{checkpoint.committed}; {ours}",
        flow,
    )


def _behind(checkpoint: CheckpointState, batch: int, location: str, flow: str) -> ProgressConflictError:
    return _conflict(
        "The checkpoint is older than the flow's progress",
        f"checkpoint {location} knows batches up to {checkpoint.planned}, Kafka has committed batch {batch}; "
        "was it restored from a backup? Spark would run batches again whose outputs are committed already",
        flow,
    )


def _ahead(checkpoint: CheckpointState, batch: int, location: str, flow: str) -> ProgressConflictError:
    return _conflict(
        "The checkpoint is ahead of the flow's progress",
        f"checkpoint {location} has finished batch {checkpoint.committed}, Kafka has committed batch {batch}; "
        "was the progress topic restored or tampered with? The records in between would be lost",
        flow,
    )


def _damaged(checkpoint: CheckpointState, location: str, flow: str) -> ProgressConflictError:
    return _conflict(
        "The checkpoint is damaged: its commit log ends too early",
        f"checkpoint {location} has planned batch {checkpoint.planned} and finished {checkpoint.committed}; "
        "Spark leaves at most one batch unfinished. Were files of the checkpoint deleted?",
        flow,
    )


def _diverged(batch: int, location: str, flow: str) -> ProgressConflictError:
    return _conflict(
        "The checkpoint and the flow's progress have diverged",
        f"batch {batch} ends at other offsets in checkpoint {location} than Kafka has committed; was a copy of "
        "it used elsewhere, or restored from a backup?",
        flow,
    )
