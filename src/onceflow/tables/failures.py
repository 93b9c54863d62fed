"""Errors of the thread behind a table, and of lookups while it repairs a copy."""

from __future__ import annotations

from onceflow.errors import DeadlineExceededError, OnceflowError, UnknownTopicError, counted
from onceflow.state.stores.base import StoreCorruptError
from onceflow.tables.lag import Restore


def not_repaired(topic: str, restore: Restore, problem: OnceflowError | None, waited_s: float) -> DeadlineExceededError:
    """A lookup has waited in vain for a copy that is read again."""
    detail = f"read {restore.done} of {counted(restore.total, 'offset')} after {waited_s:g} s of waiting"
    return DeadlineExceededError(
        f"Table {topic} is being read again from Kafka, because its local copy was damaged",
        topic=topic,
        detail=detail if problem is None else f"{detail}; {problem.what}",
        next_step="ask again later; Table(..., wait=False) answers from what is here meanwhile",
    )


def not_moved(topic: str, waited_s: float) -> DeadlineExceededError:
    """A lookup has waited in vain for rows that are being moved."""
    return DeadlineExceededError(
        f"Rows of table {topic} were moved to other partitions, and have not arrived there yet",
        topic=topic,
        detail=f"waited for {waited_s:g} s: a broker that leads some of the partitions may be down",
        next_step="ask again later; Table(..., wait=False) answers from what is here meanwhile",
    )


def replaced_while_read(topic: str, damage: StoreCorruptError) -> OnceflowError:
    """A lookup has found a copy that is damaged, or was closed."""
    return OnceflowError(
        f"The local copy of table {topic} was replaced while it was read, or is damaged",
        topic=topic,
        detail=damage.what,
        next_step="ask again; if that fails, too, close the table and open it again, which verifies the copy",
    )


def cannot_be_followed(topic: str, error: BaseException) -> OnceflowError:
    """The thread has ended with an error that is not one of onceflow."""
    failure = OnceflowError(
        f"Table {topic} cannot be followed any more",
        topic=topic,
        detail=f"{type(error).__name__}: {error}",
        next_step="if this is an error of your on_change function, mend it; otherwise report this to onceflow",
    )
    failure.__cause__ = error
    return failure


def has_more_partitions(topic: str, now: int, before: int) -> UnknownTopicError:
    """The topic got partitions that are not followed."""
    return UnknownTopicError(
        f"Topic {topic} has {counted(now, 'partition')} now, it had {before}",
        topic=topic,
        next_step="open the table again: it follows all partitions then. Keys may have moved to other ones",
    )
