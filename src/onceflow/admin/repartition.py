"""Give a table more partitions: its topics grow, and every row moves to where Kafka's default partitioner looks for it.

Offline and exactly-once. InitProducerId of the flow's transactional id fences a running driver. Then one
transaction holds everything: rows that move are written to their new partition and deleted in the old one, and
progress says that the rows are placed for the new count. Partitions are made before that, and outside of it, since
Kafka knows no other way; so after a crash there may be more of them than progress says, which ``Flow.process`` refuses
and the same command, run again, mends.

Local stores are not touched. The next start finds those of old partitions behind progress and reads what is new, the
deletes; those of new partitions are restored. What is pending in a store is of an older transaction than the one
progress names now, so it is read from Kafka, too, if it was committed.

Memory is bounded by the rows of one partition, see `repartitioner`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from onceflow import hooks
from onceflow.admin.repartitioner import Repartitioner, RepartitionProgress
from onceflow.admin.writer import Writer, abort_anew
from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.produce import Acknowledged
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import create_partitions, find_topics, max_message_bytes
from onceflow.driver import progress_log
from onceflow.driver.driver_session import DriverSession
from onceflow.errors import (
    DeadlineExceededError,
    FencedError,
    OnceflowError,
    OptionError,
    PermissionDeniedError,
    ProgressConflictError,
    TransactionTimeoutError,
    UnknownTopicError,
    located,
)
from onceflow.protocol.names import Names
from onceflow.protocol.progress import Offsets, Progress
from onceflow.protocol.transaction import Event
from onceflow.state.local.format import INTERNAL_SUFFIX
from onceflow.state.topics import TableTopics, check_known, committed_ends

log = logging.getLogger("onceflow.state")

TIMEOUT_MS = 900_000  # what brokers allow by default (transaction.max.timeout.ms)
_MIN_TIMEOUT_MS = 50_000
_PREPARE_S, _COMMIT_S = 60.0, 60.0


@dataclass(frozen=True)
class Repartitioned:
    """What was done.

    Args:
        before: partitions that the rows were placed for; equal to ``partitions``: there was nothing to do.
        rows, internal_rows: that moved, of the table topic and of its companion.
        records: that were read to find them.
        snapshots: whether the table is one of snapshots (``snapshot_per_partition``); then rows of all kinds count
            as ``rows``.
    """

    flow: str
    table: str
    before: int
    partitions: int
    rows: int = 0
    internal_rows: int = 0
    records: int = 0
    snapshots: bool = False
    seconds: float = 0.0


def repartition(
    settings: ClientSettings,
    names: Names,
    table: str,
    partitions: int,
    *,
    timeout_ms: int | None = None,
    tell: Callable[[RepartitionProgress], None] | None = None,
) -> Repartitioned:
    """Bring a table of a flow to ``partitions`` partitions; a running driver of the flow is fenced.

    Args:
        timeout_ms: of the transaction; by default 15 minutes, or half of it and so on where the broker allows less.
        tell: called with the progress now and then.

    Raises:
        OptionError: there are more partitions already; nobody has been fenced. Or the timeout is too long.
        ProgressConflictError: the flow has no such table, or its topics are not what progress speaks of.
        FencedError: a driver of the flow has started meanwhile.
        TransactionTimeoutError: it took too long.
        DeadlineExceededError: the outcome is not known, or Kafka does not answer.
        OnceflowError: Kafka refused something. After any error but an unknown outcome, no row has moved.
    """
    cluster = Cluster(settings)
    try:
        with located(flow=names.flow, topic=table):
            return _Repartition(cluster, names, table, partitions, timeout_ms, tell or (lambda _: None)).run()
    finally:
        cluster.close()


class _Repartition:
    """One call of `repartition`."""

    def __init__(
        self,
        cluster: Cluster,
        names: Names,
        table: str,
        partitions: int,
        timeout_ms: int | None,
        tell: Callable[[RepartitionProgress], None],
    ) -> None:
        self._cluster = cluster
        self._names = names
        self._table, self._internal = table, table + INTERNAL_SUFFIX
        self._partitions = partitions
        self._timeout_ms = timeout_ms
        self._tell = tell
        self._session = DriverSession(cluster, names)
        self._transactions = self._session.transactions

    def run(self) -> Repartitioned:
        began = time.monotonic()
        deadline = Deadline(_PREPARE_S, f"preparing table {self._table} of flow {self._names.flow}")
        self._transactions.check_supported(deadline)
        infos = find_topics(self._cluster, {self._table: "table", self._internal: "table"}, deadline)
        self._check_enough(infos)  # before anybody is fenced
        self._take_over(deadline)
        progress = self._progress(infos, deadline)
        before = len(progress.changelogs[self._table])
        done = Repartitioned(self._names.flow, self._table, before, self._partitions)
        if before == self._partitions:
            return done
        for name, info in infos.items():
            if info.partitions < self._partitions:
                self._grow(name, deadline)
        mover = Repartitioner(
            CommittedReader(self._cluster),
            self._table,
            before=before,
            after=self._partitions,
            ends=self._ends(infos, progress, deadline),
            tell=self._tell,
        )
        mover.check_empty()
        snapshots = mover.holds_snapshots()
        self._commit(progress, self._offsets(progress, deadline), partial(mover.move, snapshots=snapshots))
        if mover.ignored:
            log.warning("table %s: %d records ignored that no processor wrote", self._table, mover.ignored)
        return replace(
            done,
            rows=mover.moved[self._table],
            internal_rows=mover.moved[self._internal],
            records=mover.records,
            snapshots=snapshots,
            seconds=time.monotonic() - began,
        )

    # ---- before the transaction ------------------------------------------------------------------------

    def _check_enough(self, infos: Mapping[str, TopicInfo]) -> None:
        for name, info in infos.items():
            if info.partitions > self._partitions:
                raise OptionError(
                    f"Topic {name} has {info.partitions} partitions already: Kafka cannot remove any, so "
                    f"{self._partitions} are too few",
                    topic=name,
                    next_step=f"give --partitions {info.partitions} or more. For fewer, process into a table of "
                    "another name: from the start of the source, or with a flow that copies this table",
                )

    def _take_over(self, deadline: Deadline) -> None:
        """Step ``init``, with as much time for the transaction as the broker grants."""
        self._transactions.timeout_ms = self._timeout_ms or TIMEOUT_MS
        while True:
            try:
                self._session.init(deadline)
                break
            except OptionError:
                # To ask for the limit takes a privilege that flows do not need.
                self._transactions.timeout_ms //= 2
                if self._timeout_ms is not None or self._transactions.timeout_ms < _MIN_TIMEOUT_MS:
                    raise
        hooks.at("init", where="driver", flow=self._names.flow)

    def _progress(self, infos: Mapping[str, TopicInfo], deadline: Deadline) -> Progress:
        names = self._names
        progress = self._session.progress({}, deadline, missing_is_fine=True)
        ends: Offsets = {} if progress is None else progress.changelogs
        if progress is None or self._table not in ends or self._internal not in ends:
            tables = sorted(name for name in ends if name + INTERNAL_SUFFIX in ends)
            raise ProgressConflictError(
                f"Flow {names.flow!r} has no table {self._table!r}",
                detail=f"its tables: {', '.join(tables) or 'none'}",
                next_step="check the names, and --transactional-id-prefix if the flow has one",
            )
        check_known(self._topics(infos, len(ends[self._table])), ends, progress.topic_ids)
        return progress

    def _topics(self, infos: Mapping[str, TopicInfo], partitions: int) -> TableTopics:
        table, internal = infos[self._table], infos[self._internal]
        return TableTopics(
            table=table.name,
            internal=internal.name,
            table_id=table.topic_id,
            internal_id=internal.topic_id,
            partitions=partitions,
            tombstone_ms=0,
            max_message_bytes=0,
        )

    def _await_partitions(self, name: str, deadline: Deadline) -> None:
        attempt = 0
        while (known := self._cluster.topic(name, deadline, fresh=True).partitions) < self._partitions:
            deadline.pause(attempt, f"{name} has {known} partitions, as far as brokers know")
            attempt += 1

    def _grow(self, name: str, deadline: Deadline) -> None:
        try:
            create_partitions(self._cluster, name, self._partitions, deadline)
        except PermissionDeniedError as error:
            raise PermissionDeniedError(
                f"This principal may not add partitions to {name}",
                topic=name,
                detail=error.detail,
                next_step=f"grant ALTER on it, or let somebody else run kafka-topics.sh --alter --topic {name} "
                f"--partitions {self._partitions}; then run this command again",
            ) from error
        except OptionError:
            # Somebody has just added them, and the broker that was asked for the count did not know yet.
            self._await_partitions(name, deadline)
            self._check_enough({name: self._cluster.topic(name, deadline)})
        log.info("topic %s grows to %d partitions", name, self._partitions)
        self._await_partitions(name, deadline)

    def _ends(
        self, infos: Mapping[str, TopicInfo], progress: Progress, deadline: Deadline
    ) -> dict[str, dict[int, int]]:
        """Up to where each partition is read: what progress says, or beyond, if somebody has written there."""
        found = committed_ends(self._cluster, self._topics(infos, self._partitions), deadline)
        return {
            name: {p: max(end, progress.changelogs[name].get(p, 0)) for p, end in ends.items()}
            for name, ends in found.items()
        }

    def _offsets(self, progress: Progress, deadline: Deadline) -> dict[str, dict[int, int]]:
        """What is committed to the group: of sources that are still there."""
        found: dict[str, dict[int, int]] = {}
        for topic, offsets in progress.offsets.items():
            try:
                info = self._cluster.topics([topic], deadline)[topic]
            except (UnknownTopicError, PermissionDeniedError):
                continue
            if progress.topic_ids.get(topic) in (None, info.topic_id):
                found[topic] = {p: offset for p, offset in offsets.items() if p in info.leaders}
        return found

    # ---- the transaction -------------------------------------------------------------------------------

    def _commit(self, progress: Progress, offsets: Offsets, move: Callable[[Writer, Deadline], None]) -> None:
        """Steps ``write``, ``progress`` and ``end``."""
        names, transactions = self._names, self._transactions
        deadline = Deadline(transactions.timeout_ms / 1000, f"moving the rows of table {self._table}")
        limits = max_message_bytes(self._cluster, [self._table, self._internal], deadline)
        identity = transactions.begin(deadline)
        try:
            writer = Writer(self._cluster, transactions, limits, deadline)
            move(writer, deadline)
            written = writer.finish()
            transactions.machine.on(Event.ROWS_AUDITED)
            hooks.at("write", where="driver", flow=names.flow)
            after = replace(
                progress,
                changelogs={
                    **progress.changelogs,
                    **{name: self._ends_after(name, progress, written) for name in (self._table, self._internal)},
                },
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
                time_ms=max(progress.time_ms, progress_log.now_ms()),
            )
            progress_log.write_progress(self._cluster, transactions, names, after, offsets, deadline)
            hooks.at("progress", where="driver", flow=names.flow)
        except BaseException as problem:
            if not isinstance(problem, FencedError):
                abort_anew(self._cluster, self._transactions)
            if isinstance(problem, FencedError | DeadlineExceededError) and deadline.expired:
                raise self._timed_out(problem) from problem
            raise
        try:
            transactions.commit(
                Deadline(_COMMIT_S, "committing"), flow=names.flow, doing="bringing rows to new partitions"
            )
        except DeadlineExceededError as error:
            raise DeadlineExceededError(
                "The outcome of the commit is not known: the coordinator does not answer",
                detail=f"{error.what}; {error.detail}",
                next_step="run the command again when the brokers are back: it finds out, and finishes",
            ) from error
        except FencedError as error:  # also what becomes of a transaction that timed out
            raise (self._timed_out(error) if deadline.expired else error) from error
        hooks.at("end", where="driver", flow=names.flow)

    def _ends_after(
        self, name: str, progress: Progress, written: Mapping[tuple[str, int], Acknowledged]
    ) -> dict[int, int]:
        known = progress.changelogs[name]
        return {
            p: written[name, p].end_offset if (name, p) in written else known.get(p, 0) for p in range(self._partitions)
        }

    def _timed_out(self, problem: OnceflowError) -> TransactionTimeoutError:
        return TransactionTimeoutError(
            f"The rows did not move within the transaction's timeout of {self._transactions.timeout_ms / 1000:g} s",
            detail=f"{problem.what}; {problem.detail}",
            next_step="nothing has moved; give a longer --transaction-timeout (the brokers' limit is "
            "transaction.max.timeout.ms), and run the command again",
        )
