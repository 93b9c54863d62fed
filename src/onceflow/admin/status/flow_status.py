"""What is known of a flow from Kafka alone: where it is, how far behind, its tables, and warnings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from onceflow.admin.status.driver_status import DriverStatus
from onceflow.admin.status.similar_flows import alike, meant, named
from onceflow.admin.status.standby_status import StandbyDriver
from onceflow.admin.status.table_counts import TableCounts
from onceflow.errors import OptionError, counted
from onceflow.protocol.progress import PROGRESS_TOPIC, DriverProcess

#: With records that wait, a flow that has not committed for so long, in seconds, may not run.
QUIET_AFTER_S = 60.0

#: Whether the driver of a flow has answered. NOT_SERVED: endpoints have answered, and none of them serves the flow.
NOT_ASKED, ANSWERS, SILENT, NOT_SERVED = "not asked", "answers", "does not answer", "not at these endpoints"


@dataclass(frozen=True)
class PartitionStatus:
    """A partition of a source. Offsets and counts of offsets; transaction markers are counted, too.

    Args:
        offset: what the flow has committed; None: it does not know the partition yet.
        first, stable, end: the first offset, the last stable offset, and the high watermark.
        lag: offsets from the committed one to the last stable offset.
        lag_seconds: age of the first record that is not committed; 0 if there is none, None if it is not known.
        held_back: offsets behind an open transaction, which no read_committed reader gets.
    """

    partition: int
    offset: int | None
    first: int
    stable: int
    end: int
    lag: int
    lag_seconds: float | None
    held_back: int


@dataclass(frozen=True)
class SourceStatus:
    """A source topic.

    Args:
        offsets: what the flow has committed.
        partitions: those that could be asked. None: they could not be read, or belong to another topic of this name.
        unseen: why the others could not be asked, by partition.
        held: warnings about transactions of others that have been open for long.
    """

    topic: str
    offsets: Mapping[int, int]
    partitions: Sequence[PartitionStatus] | None
    unseen: Mapping[int, str] = field(default_factory=dict)
    held: Sequence[str] = ()


@dataclass(frozen=True)
class TableStatus:
    """A table or its companion topic.

    Args:
        offsets: committed end offsets by partition; empty for a table without a changelog.
        records_at_most: an upper bound; None: not known.
        watermark_ms: of the flow at this table, epoch milliseconds; None: it has none.
        contents: what was counted; None: the topic was not read.
    """

    topic: str
    offsets: Mapping[int, int]
    records_at_most: int | None
    watermark_ms: int | None = None
    contents: TableCounts | None = None


@dataclass(frozen=True)
class LetterTopic:
    """A topic for records that the program of the flow sets aside, as its progress names it.

    Args:
        role: ``dead letter``, ``late``, ``duplicate`` or ``parked``.
        ends: last stable offsets by partition; empty: not known.
        records_at_most: an upper bound; None: not known.
        waiting: how many records are parked now, or how many letters of another topic were not replayed; None: they
            were not counted.
    """

    topic: str
    role: str
    ends: Mapping[int, int] = field(default_factory=dict)
    records_at_most: int | None = None
    waiting: int | None = None


@dataclass(frozen=True)
class TransactionStatus:
    """What the coordinator knows of the flow's transactional id.

    Args:
        state: ``Empty``, ``Ongoing``, ...; ``Dead`` if it is not known there.
        age_s: how long the running transaction is open, in seconds; None: none is.
    """

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    age_s: float | None


@dataclass
class FlowStatus:
    """A flow.

    Args:
        flow: its name, after its prefix of transactional ids if it has one.
        batch, last_commit_ms: number and time (epoch milliseconds) of the last committed batch. None: not known.
        age_s: seconds since that commit.
        transaction: None: not permitted.
        producer_id, producer_epoch: those of the last committed batch; -1: its record does not have them.
        committed_by: the driver that has committed last; None: a command has, or an older version of onceflow.
        missing: permissions without which something is not known here.
        unseen: partitions and coordinators that could not be asked, each with the reason.
        driver: what its driver says; None: no endpoint of it has answered.
        driver_answer: one of the constants above.
        standbys: its drivers with ``standby=True``, the active one first; looked at if the flow is named.
    """

    flow: str
    batch: int | None = None
    last_commit_ms: int | None = None
    age_s: float | None = None
    producer_id: int = -1
    producer_epoch: int = -1
    committed_by: DriverProcess | None = None
    transaction: TransactionStatus | None = None
    sources: list[SourceStatus] = field(default_factory=list)
    tables: list[TableStatus] = field(default_factory=list)
    letters: list[LetterTopic] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    driver: DriverStatus | None = None
    driver_answer: str = NOT_ASKED
    standbys: list[StandbyDriver] = field(default_factory=list)

    @property
    def lag(self) -> int | None:
        """Records (offsets) behind, in all sources. None: not known for at least one of them."""
        if self.batch is None or any(source.partitions is None or source.unseen for source in self.sources):
            return None
        return self.lag_at_least

    @property
    def lag_at_least(self) -> int:
        """Records (offsets) behind, in the partitions that could be asked."""
        return sum(each.lag for source in self.sources for each in source.partitions or ())

    @property
    def lag_seconds(self) -> float | None:
        """The largest of all partitions. None: not known for at least one of them."""
        found = [each.lag_seconds for source in self.sources for each in source.partitions or ()]
        if self.lag is None or None in found:
            return None
        return max((each for each in found if each is not None), default=0.0)


def quiet_s(status: FlowStatus) -> float | None:
    """For how long records wait, at least, and nothing is committed, in seconds; None: not for a minute, or not known.

    A flow that had nothing to read has an old commit, too: so the oldest record that waits counts as well. Where its
    time is not known, the age of the commit decides.
    """
    waiting = [part for source in status.sources for part in source.partitions or () if part.lag]
    if not waiting or status.age_s is None:
        return None
    oldest_s = [status.age_s if part.lag_seconds is None else part.lag_seconds for part in waiting]
    found = min(status.age_s, max(oldest_s))
    return found if found >= QUIET_AFTER_S else None


def signs_of_life(status: FlowStatus) -> str:
    """What Kafka shows of whether a driver runs: no more than that. Empty: nothing."""
    transaction, quiet = status.transaction, quiet_s(status)
    if transaction is not None and transaction.age_s is not None:
        return (
            f"its transaction has been open for {transaction.age_s:.0f} s: a batch is being written, or its driver has "
            "ended in one"
        )
    if quiet is not None:
        return (
            f"records wait, and nothing was committed for {quiet:.0f} s: it does not run, cannot commit, or waits for "
            "its trigger"
        )
    if status.lag == 0:
        held = any(part.held_back for source in status.sources for part in source.partitions or ())
        why = "what is left to read is held back" if held else "it has read everything"
        return f"{why}, so Kafka does not show whether it runs"
    return ""


def exceeded(status: FlowStatus, max_lag: int | None, max_age_s: float | None) -> list[str]:
    """Which limits a flow exceeds, a sentence each. A lag that is not known exceeds them: a monitor must not be silent.

    Args:
        max_lag: records behind. None: any number.
        max_age_s: seconds since the last commit while there is lag. None: any time.
    """
    if status.lag is None or status.age_s is None:
        return [f"{status.flow}: its lag is not known"] if (max_lag, max_age_s) != (None, None) else []
    found = []
    if max_lag is not None and status.lag > max_lag:
        found.append(f"{status.flow}: a lag of {status.lag:,} exceeds --max-lag {max_lag:,}")
    if max_age_s is not None and status.lag and status.age_s > max_age_s:
        found.append(
            f"{status.flow}: a lag of {status.lag:,} and no commit for {status.age_s:,.0f} s "
            f"exceed --max-age {max_age_s:g} s"
        )
    return found


def unknown_flow(name: str, known: Iterable[str]) -> OptionError:
    """The error for a flow that has no progress, with similar names."""
    found = alike(name, known)
    step = "`onceflow status` lists the flows; a flow with a transactional_id_prefix has it in front of its name"
    return OptionError(
        f"There is no flow {name} here: {PROGRESS_TOPIC} has no progress of it",
        detail=named(found),
        next_step=meant(found, step),
    )


def expired(topic: str, parts: Iterable[PartitionStatus]) -> list[str]:
    """Warnings about records that are gone although the flow has not read them."""
    return [
        f"{topic}-{part.partition} starts at offset {part.first}, the flow is at {part.offset}: "
        f"{counted(part.first - part.offset, 'offset')} expired unread, so records are lost"
        for part in parts
        if part.offset is not None and part.first > part.offset
    ]


def unknown_partitions(status: FlowStatus, topic: str, parts: Iterable[PartitionStatus]) -> None:
    """Partitions that the flow does not know yet: a warning where there are records, else a note."""
    new = [part for part in parts if part.offset is None]
    for found, says in (
        ([part.partition for part in new if part.lag], status.warnings),
        ([part.partition for part in new if not part.lag], status.notes),
    ):
        if found:
            says.append(f"the flow does not know {places(topic, found)} yet")


def places(topic: str, numbers: Iterable[int]) -> str:
    """Partitions as a list for people."""
    return ", ".join(f"{topic}-{number}" for number in numbers)
