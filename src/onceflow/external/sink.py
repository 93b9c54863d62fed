"""What a system other than Kafka must offer so that a flow writes it exactly once.

The system decides what is committed: one transaction of it has the rows of a batch and the flow's *progress row*. A
start reads this row (`ExternalSink.progress_row`) and decides whether it can continue there. Only then it takes the
flow over with `ExternalSink.open`, which fences older drivers. Kafka's progress record and the consumer group follow in
a transaction of their own, for lag tools.

The user's code may give other rows when a batch runs again. So rows are not compared, and nothing depends on repeating
them: only what one attempt has written is ever committed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from onceflow.errors import FencedError, OnceflowError, OptionError, ProgressConflictError, SchemaError

#: Columns of Spark's Kafka source. Of those that the table lacks, a dead letter gets its record's key, value, ...
RECORD_COLUMNS = ("key", "value", "headers", "topic", "partition", "offset", "timestamp", "timestampType")


def columns_of_record(names: Iterable[str], known: Collection[str], target: str) -> list[str]:
    """Columns of rows that are those of Kafka records, for dead letters, and not of the table.

    Args:
        names: of the rows. known: the columns of the table. target: the table, in words.

    Raises:
        SchemaError: one is a column of the table but for upper and lower case. The table's would be null.
    """
    found = [name for name in names if name in RECORD_COLUMNS and name not in known]
    for name in found:
        for similar in known:
            if similar.casefold() == name.casefold() and similar not in names:
                raise SchemaError(
                    f"The rows have {name}, and {target} has {similar}",
                    next_step=f'select it as the table has it: col("{name}").alias("{similar}")',
                )
    return found


_OWNER_SHOWN = 8  # characters of the owner in names of attempts


@dataclass(frozen=True)
class BatchAttempt:
    """One attempt of a batch.

    Args:
        flow: the identity of the flow, see `ExternalSink`.
        owner: of the driver, see `ProgressRow`.
        generation: of the driver, from `ExternalSink.open`.
        batch: number of the batch, counted since the flow's first start.
        attempt: 1 for the first attempt of the batch under this generation.
    """

    flow: str
    owner: str
    generation: int
    batch: int
    attempt: int

    def __str__(self) -> str:
        """Different for all attempts of the flow, also if the system has gone back to an older state in between, so
        that two drivers got the same generation."""
        return f"{self.generation}-{self.owner[:_OWNER_SHOWN]}-{self.batch}-{self.attempt}"


@dataclass(frozen=True)
class ProgressRow:
    """What the system keeps about a flow.

    Args:
        generation: of the driver that has it; higher than those of all drivers before.
        owner: a random text of one run of a driver. The generation tells which of two drivers is the newer one; the
            owner tells a driver that the last takeover or commit was its own, although the answer was lost.
        progress: the text of the last `ExternalSink.commit` that took effect; None: there was none.
    """

    generation: int
    owner: str
    progress: str | None


class UnavailableError(ConnectionError):
    """The system can be reached, and cannot do what it is asked at the moment: the driver waits, and tries again.

    Args:
        what: the reason, as the system gives it. next_step: what ends it, if it does not end by itself.
    """

    def __init__(self, what: str, next_step: str) -> None:
        super().__init__(what, next_step)
        self.what = what
        self.next_step = next_step

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class RefusedRow:
    """A row that the system does not take.

    Args:
        row: its values by column, as Python objects.
        record: what the DataFrame has of the Kafka record that it comes from: some of ``RECORD_COLUMNS``.
        kind: class of the error, for example ``UniqueViolation``. message: its text.
    """

    row: Mapping[str, Any]
    kind: str
    message: str
    record: Mapping[str, Any] = field(default_factory=dict)


def older_state(target: str, flow: str, detail: str) -> ProgressConflictError:
    """The error if the system has forgotten a commit of this driver: after a failover to a copy that lacked it, or
    because somebody has restored a backup."""
    return ProgressConflictError(
        f"{target} has gone back to an older state while flow {flow!r} was running",
        detail=detail,
        next_step="start the flow again: it continues where the progress row is, if Kafka still has the records",
    )


def next_generation(target: str, flow: str, found: ProgressRow | None, owner: str, generation: int | None) -> int:
    """The generation with which `ExternalSink.open` takes a flow over.

    Args:
        found: the progress row as it is; None: there is none. owner, generation: as they were given to ``open``.

    Raises:
        FencedError: another driver has the flow.
        ProgressConflictError: the system has gone back to an older state.
    """
    if generation is not None and (found is None or found.owner != owner or found.generation < generation):
        raise _fenced(target, flow, owner, generation, found)
    return 1 if found is None else found.generation + 1


def check_owner(target: str, attempt: BatchAttempt, found: ProgressRow | None) -> None:
    """Check in the transaction of `ExternalSink.commit` that the driver of the attempt still has the flow.

    Raises:
        FencedError: another driver has taken it over, or this one has done so once more.
        ProgressConflictError: the system has gone back to an older state.
    """
    if found is None or (found.owner, found.generation) != (attempt.owner, attempt.generation):
        raise _fenced(target, attempt.flow, attempt.owner, attempt.generation, found)


def _fenced(target: str, flow: str, owner: str, generation: int, found: ProgressRow | None) -> OnceflowError:
    if found is None or found.generation < generation:
        last = "there is none" if found is None else f"the last one there is {found.generation}"
        return older_state(target, flow, f"this driver has generation {generation}, {last}")
    who = "this driver itself has done so" if found.owner == owner else "by another driver"
    return FencedError(
        f"Flow {flow!r} was taken over in {target} after this driver had started",
        detail=f"this driver has generation {generation}, the last one is {found.generation}, {who}",
        next_step="stop one of the two drivers: a flow has one driver. Nothing was lost or written twice",
    )


class ExternalSink(ABC):
    """A system other than Kafka, and what is written there. Give an instance to ``Flow.write_external``.

    It is pickled and sent to the tasks, so connections are made where they are used. The driver calls ``check``,
    ``progress_row`` and ``open`` at a start, then ``begin`` and ``commit`` (or ``abort``) for each attempt of a batch,
    and ``close`` at the end. Tasks, or the driver for batches that it has read, call ``write`` in between.

    ``flow`` is the identity of a flow: its transactional id, ``@``, and the id of its Kafka cluster. So flows of one
    name with different prefixes, or on different clusters, do not share a progress row. It has letters, digits, ``.``,
    ``_``, ``-`` and ``@``, and may be longer than the name of a file or a table (up to about 340 characters).

    Whatever a method raises must not contain secrets. `OnceflowError`s stop the flow, and so do exceptions that say
    that the code, the rows or a name is wrong, such as ``TypeError``, ``ValueError`` or ``KeyError``,
    if a second attempt meets them, too. Other exceptions of ``begin``, ``write`` and ``commit``
    make the batch run again. ``ConnectionError`` of ``check``, ``progress_row``, ``open`` and
    ``begin`` means that the system cannot be reached at the moment: the driver waits for it, for two minutes at most;
    at a start for what is left of the start's minute. An `UnavailableError` also tells what to do.

    Attributes:
        local_only: whether tasks must run on the driver's machine.
    """

    local_only = False

    @property
    @abstractmethod
    def target(self) -> str:
        """Where rows go, for errors and logs: short, and without secrets."""

    @property
    def dataset(self) -> tuple[str, str]:
        """Namespace and name of the target, as OpenLineage's specification of names says; without secrets."""
        return "onceflow", self.target

    @abstractmethod
    def check(self, schema: pa.Schema) -> None:
        """Check that rows with these columns can be written.

        Raises:
            SchemaError: they cannot.
        """

    @abstractmethod
    def progress_row(self, flow: str) -> ProgressRow | None:
        """Read the progress row of a flow; None: there is none, or the system has no progress rows yet.

        It changes nothing: a start that is refused must leave the flow to the driver that has it.
        """

    @abstractmethod
    def open(self, flow: str, owner: str, generation: int | None) -> ProgressRow:
        """Take the flow over, so that no attempt of an earlier generation can be committed any more.

        In one atomic change, the generation becomes `next_generation`, and the owner this one. If a commit is running,
        it waits for its outcome. It is also called when the outcome of a commit, or of such a takeover, is not known,
        to find it out.

        Args:
            owner: of the driver that calls it.
            generation: take it over only if it still has this owner, and this generation or a higher one, which is that
                of an earlier call whose answer was lost; None: from any driver, or for the first time.

        Returns:
            The progress row as it is then.

        Raises:
            FencedError: another driver has taken it over.
            ProgressConflictError: the last generation is an older one, see `older_state`.
        """

    @abstractmethod
    def begin(self, attempt: BatchAttempt) -> None:
        """An attempt begins. What earlier attempts have left may be removed."""

    @abstractmethod
    def write(self, attempt: BatchAttempt, task: str, batches: Iterator[pa.RecordBatch]) -> bytes:
        """Bring the rows of one task to the system, where nobody sees them yet.

        Args:
            task: name of the task's attempt, different for all that write in this attempt of the batch.

        Returns:
            A receipt for ``commit``: what it needs to find these rows, and no others.
        """

    @abstractmethod
    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        """In one transaction: make the rows of these receipts visible, and keep ``progress`` as the progress row.

        Args:
            receipts: in the order of the tasks. Rows of a task stay in their order.

        Raises:
            FencedError: owner and generation are not those of the progress row, see `check_owner`; nothing has changed.
            BatchAbortedError: nothing has changed, and another attempt may help.
            ProgressConflictError: the progress row is not the one that this object has last written or got from
                ``open``, see `older_state`; nothing has changed.
            OnceflowError: nothing has changed, and another attempt would not help, for example because of a row.
            Exception: anything else: the outcome is not known. ``open`` finds it out.
        """

    def set_aside(self) -> None:
        """Called before ``check`` if rows that the system does not take become dead letters.

        From then on `commit_accepted` is called in place of ``commit``, and columns of ``RECORD_COLUMNS`` that the
        target lacks are accepted.

        Raises:
            OptionError: the sink cannot tell which rows are not taken.
        """
        raise OptionError(
            f"{type(self).__name__} cannot set aside rows that it does not take",
            next_step="leave dead_letter_topic= out: such a row stops the flow",
        )

    def commit_accepted(
        self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: Callable[[Sequence[RefusedRow]], str]
    ) -> None:
        """As ``commit``, but without the rows that the system does not take.

        Args:
            progress: returns the progress row for a batch without these rows. It may raise an `OnceflowError`; then
                nothing may be committed.
        """
        raise NotImplementedError

    @abstractmethod
    def abort(self, attempt: BatchAttempt) -> None:
        """The attempt will not be committed: what it has written may be removed."""

    def close(self) -> None:  # noqa: B027 (most sinks hold nothing)
        """Close what the driver holds."""
