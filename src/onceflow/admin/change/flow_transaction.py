"""One transaction of a flow's own transactional id, made by a command: records, the progress record and the group's
offsets become visible together, or not at all.

Before it, the command takes the flow over: a running driver is fenced, and its open transaction is aborted. So what the
command reads of the flow's progress and tables does not change any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from onceflow import hooks
from onceflow.admin.records.writer import Writer, abort_anew
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.interrupts import outcome_told
from onceflow.client.produce import Acknowledged
from onceflow.client.topics import topic_limits
from onceflow.clock import clock_ms
from onceflow.driver.record import progress_log
from onceflow.driver.record.session import DriverSession
from onceflow.errors import (
    DeadlineExceededError,
    FencedError,
    OnceflowError,
    OptionError,
    PermissionDeniedError,
    TransactionTimeoutError,
    UnknownTopicError,
)
from onceflow.protocol.names import Names
from onceflow.protocol.progress import Offsets, Progress
from onceflow.protocol.transaction import Event

TIMEOUT_MS = 900_000  # the brokers' default limit (transaction.max.timeout.ms)
_MIN_TIMEOUT_MS = 50_000
_COMMIT_S = 60.0

Written = Mapping[tuple[str, int], Acknowledged]


@dataclass(frozen=True)
class Wording:
    """What a command says of its transaction.

    Args:
        doing: what it does, as in "while ...": ``moving the rows of table T``.
        too_slow: the sentence before "within the transaction's timeout of 900 s".
        undone: what has not happened after a failure, and what to do then.
    """

    doing: str
    too_slow: str
    undone: str


def told_of_flow(names: Names) -> AbstractContextManager[None]:
    """Around the commit of a change of a flow: see `outcome_told`."""
    look = f"`onceflow status {names.progress_key}` shows where the flow is"
    return outcome_told(f"the change of flow {names.flow}", look)


class FlowTransaction:
    """The transaction of a command.

    Args:
        timeout_ms: of the transaction. None: 15 minutes; if the brokers allow less, it is halved until they accept it.
    """

    def __init__(self, cluster: Cluster, names: Names, wording: Wording, *, timeout_ms: int | None = None) -> None:
        self.session = DriverSession(cluster, names)
        self._cluster = cluster
        self._names = names
        self._wording = wording
        self._timeout_ms = timeout_ms
        self._transactions = self.session.transactions

    def take_over(self, deadline: Deadline) -> None:
        """Step ``init``, with the longest transaction timeout that the broker accepts.

        Raises:
            OptionError: the given timeout is too long.
        """
        transactions = self._transactions
        transactions.timeout_ms = self._timeout_ms or TIMEOUT_MS
        while True:
            try:
                self.session.init(deadline)
                break
            except OptionError:
                # The limit itself cannot be read: that needs a privilege that flows do not have.
                transactions.timeout_ms //= 2
                if self._timeout_ms is not None or transactions.timeout_ms < _MIN_TIMEOUT_MS:
                    raise
        hooks.at("init", where="driver", flow=self._names.flow)

    def group_offsets(self, progress: Progress, deadline: Deadline) -> dict[str, dict[int, int]]:
        """The source offsets to commit to the consumer group: those of topics and partitions that still exist."""
        found: dict[str, dict[int, int]] = {}
        for topic, offsets in progress.offsets.items():
            try:
                info = self._cluster.topics([topic], deadline)[topic]
            except (UnknownTopicError, PermissionDeniedError):
                continue
            if progress.topic_ids.get(topic) in (None, info.topic_id):
                found[topic] = {p: offset for p, offset in offsets.items() if p in info.leaders}
        return found

    def commit(
        self,
        topics: Collection[str],
        write: Callable[[Writer, Deadline], None],
        after: Callable[[Written], Progress],
        offsets: Offsets | None = None,
        *,
        before_end: Callable[[Deadline], None] = lambda _: None,
    ) -> Progress:
        """Steps ``write``, ``progress`` and ``end``. Returns the progress that is committed.

        Args:
            topics: those that records are written to.
            write: writes them. It may write nothing.
            after: the progress record, given what was written. The transaction and its time are added to it.
            offsets: those of the consumer group; None: `group_offsets` of the progress record.
            before_end: called when everything is written. An error of it aborts the transaction.

        Raises:
            FencedError: a driver of the flow has started meanwhile.
            TransactionTimeoutError: it took too long.
            DeadlineExceededError: the outcome is not known, or Kafka does not answer.
        """
        names, transactions = self._names, self._transactions
        deadline = Deadline(transactions.timeout_ms / 1000, self._wording.doing)
        limits = topic_limits(self._cluster, sorted(topics), deadline) if topics else {}
        identity = transactions.begin(deadline)
        try:
            writer = Writer(self._cluster, transactions, limits, deadline)
            write(writer, deadline)
            written = writer.finish()
            transactions.machine.on(Event.ROWS_AUDITED)
            hooks.at("write", where="driver", flow=names.flow)
            found = after(written)
            progress = replace(
                found,
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
                driver=None,  # a command is no driver
                time_ms=max(found.time_ms, clock_ms()),
            )
            found_offsets = self.group_offsets(progress, deadline) if offsets is None else offsets
            there = written.get(progress_log.topic_partition_of(progress.flow), Acknowledged()).count
            progress_log.write_progress(
                self._cluster, transactions, names, progress, found_offsets, deadline, sequence=there
            )
            hooks.at("progress", where="driver", flow=names.flow)
            before_end(deadline)
        except BaseException as problem:
            if not isinstance(problem, FencedError):
                abort_anew(self._cluster, transactions)
            if isinstance(problem, FencedError | DeadlineExceededError) and deadline.expired:
                raise self._timed_out(problem) from problem
            raise
        self._end(deadline)
        return progress

    def _end(self, deadline: Deadline) -> None:
        flow = self._names.flow
        try:
            with told_of_flow(self._names):
                self._transactions.commit(Deadline(_COMMIT_S, "committing"), flow=flow, doing=self._wording.doing)
        except DeadlineExceededError as error:
            raise DeadlineExceededError(
                "The outcome of the commit is not known: the coordinator does not answer",
                detail=f"{error.what}; {error.detail}",
                next_step="run the command again when the brokers are up: it finds out, and completes the change",
            ) from error
        except FencedError as error:  # also raised if the transaction has timed out
            raise (self._timed_out(error) if deadline.expired else error) from error
        hooks.at("end", where="driver", flow=flow)

    def _timed_out(self, problem: OnceflowError) -> TransactionTimeoutError:
        return TransactionTimeoutError(
            f"{self._wording.too_slow} within the transaction's timeout of {self._transactions.timeout_ms / 1000:g} s",
            detail=f"{problem.what}; {problem.detail}",
            next_step=self._wording.undone,
        )
