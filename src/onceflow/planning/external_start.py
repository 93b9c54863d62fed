"""Where a flow with an external sink starts: a pure decision from its progress row and its progress in Kafka."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from onceflow.errors import OnceflowError, ProgressConflictError, counted
from onceflow.protocol.progress import Progress


@dataclass(frozen=True)
class ExternalStart:
    """The decision.

    Args:
        progress: where the flow is.
        follows: whether Kafka's progress has to be moved there.
        owes_letters: whether the dead letters of the row's batch are not in Kafka yet.
        warning: a text to log, or "".
    """

    progress: Progress
    follows: bool
    owes_letters: bool = False
    warning: str = ""


def plan_external(
    kafka: Progress, row: Progress | None, sources: Collection[str], *, target: str, flow: str, identity: str
) -> ExternalStart:
    """Decide where the flow is. The progress row decides.

    Args:
        kafka: progress in Kafka, with the offsets at which topics are read that the row does not know.
        row: the progress row; None: there is none.
        sources: the topics that are read.
        identity: of the flow in the external system, for errors.

    Raises:
        ProgressConflictError: the flow has written batches, but not to this target.
    """
    if row is None:
        if kafka.batch_id:
            raise ProgressConflictError(
                f"The flow has committed {counted(kafka.batch_id, 'batch')}, but {target} has no progress row of it",
                flow=flow,
                detail=f"its progress row would be {identity!r}: the transactional id, and the id of the Kafka cluster",
                next_step="write where it has written before, or give a new target to a new flow. To write everything "
                f"that its topics still have, also what was written before: `onceflow reset {flow}`",
            )
        return ExternalStart(kafka, follows=False)
    is_other = row.external_commit != kafka.external_commit and bool(row.external_commit and kafka.external_commit)
    if row.batch_id == kafka.batch_id and not is_other:
        # Starts may have moved it since: new partitions, expired records, a reset.
        return ExternalStart(kafka, follows=False)
    new = {topic: offsets for topic, offsets in kafka.offsets.items() if topic in sources and topic not in row.offsets}
    progress = replace(
        row,
        offsets={**row.offsets, **new},
        topic_ids={**row.topic_ids, **{topic: kafka.topic_ids[topic] for topic in new if topic in kafka.topic_ids}},
        epochs={**row.epochs, **{topic: kafka.epochs[topic] for topic in new if topic in kafka.epochs}},
    )
    behind, warning = row.batch_id <= kafka.batch_id, ""
    if row.batch_id < kafka.batch_id:
        warning = f"and progress in Kafka at batch {kafka.batch_id}: an older state of {target} was restored"
    elif behind:
        warning = (
            "which is another one than that of progress in Kafka: the flow was reset, or has written another system"
        )
    # A driver that dies between both commits leaves Kafka one batch behind. Anything else was done by hand after the
    # letters of the row's batch were written.
    is_next = row.batch_id == kafka.batch_id + 1 and row.external_before in (None, kafka.external_commit)
    if not behind and not is_next:
        warning = (
            f"and progress in Kafka at batch {kafka.batch_id}, from which it does not follow: the flow was reset, or "
            "older progress was imported; dead letters of that batch are not written once more"
        )
    if warning:
        at = f"{target} (progress row {identity!r}) is at batch {row.batch_id}"
        warning = f"{at}, {warning}; the flow continues there"
    return ExternalStart(progress, follows=True, owes_letters=is_next and not behind, warning=warning)


def of_row(error: OnceflowError, target: str, identity: str) -> OnceflowError:
    """The error of a start that cannot continue where the progress row is: it says that the row decides, not Kafka's
    progress."""
    fields = {**error.fields(), "next_step": f"{error.next_step}; or delete or restore the progress row, which decides"}
    said = f"this is what the progress row {identity!r} of {target} says"
    return type(error)(error.what, **{**fields, "detail": f"{error.detail}; {said}" if error.detail else said})
