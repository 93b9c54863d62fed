"""What the driver of a running flow knows of a table: for metrics, and for whoever asks for the flow's status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CopyFacts:
    """Where the copies of a table are on a cluster, at this moment.

    Args:
        hosts: how many hosts have partitions of the table at home.
        waiting: partitions whose home is not level. Batches wait until it is restored.
        lacking: records that copies lack which are homes, or will be.
        standby: standby copies that lack at most a few thousand records.
        standby_lacking: records that standby copies lack; all records of those that have no place.
        moved: how many partitions have got another home in this run, each time counted.
        restored_per_s: records that have lately been read in a second for copies which are homes, or will be; 0: none.
    """

    hosts: int
    waiting: int
    lacking: int
    standby: int
    standby_lacking: int
    moved: int
    restored_per_s: int = 0


@dataclass(frozen=True)
class TableFacts:
    """A table as the last batches of this run have found it.

    Args:
        partitions: how many it has. opened: how many of them were brought up to date in this run.
        rows: how many rows the local copies have, by `ROW_KINDS`, in the partitions that were opened; empty: not known.
        nbytes: size of the local copies on disk; None: they are not on disk, or none was opened.
        next_timer_ms: the earliest time at which something is due, per clock; None: nothing is. Expiry of rows belongs
            to ``processing``.
        restored: how many records were read from Kafka for the copies in this run. restore_seconds: the time for it,
            of all partitions together.
        waiting_letters: whether the values are dead letters that wait for their retry.
        copies: where the copies are on a cluster; None: they are on this machine.
    """

    table: str
    partitions: int
    opened: int
    rows: Mapping[str, int] = field(default_factory=dict)
    nbytes: int | None = None
    next_timer_ms: Mapping[str, int | None] = field(default_factory=dict)
    restored: int = 0
    restore_seconds: float = 0.0
    waiting_letters: bool = False
    copies: CopyFacts | None = None
