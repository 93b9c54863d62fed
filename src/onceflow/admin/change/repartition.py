"""Gives a table more partitions, and moves every row to the partition that Kafka's default partitioner now chooses.

No driver of the flow runs meanwhile, and rows move exactly once. InitProducerId with the flow's transactional id fences
a running driver. Everything else is in one transaction: rows that move are written to their new partition and deleted
in the old one, and the progress record states the new number of partitions. Partitions are added before that,
outside of the transaction, because Kafka has no other way. So after a crash there may be more partitions than the
progress record states. Then ``Flow.process`` refuses to start; the same command, run again, completes the change.

Local stores are not touched. At the next start, those of old partitions lag behind progress and catch up, which applies
the deletes. Those of new partitions are restored. Pending changes in a local store belong to an older transaction
than the one in progress. If they were committed, they are read from Kafka, too.

Memory is limited by the rows of one partition, see `repartitioner`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from onceflow.admin.change.flow_transaction import FlowTransaction, Wording, Written
from onceflow.admin.change.move import known
from onceflow.admin.change.row_moves import Repartitioner, RepartitionProgress
from onceflow.admin.records.writer import Writer
from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.produce import Acknowledged
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import create_partitions, find_topics
from onceflow.errors import (
    OptionError,
    PermissionDeniedError,
    ProgressConflictError,
    UnknownTopicError,
    counted,
    located,
)
from onceflow.protocol import acls
from onceflow.protocol.names import INTERNAL_SUFFIX, Names
from onceflow.protocol.progress import Offsets, Progress
from onceflow.state.changelog.topics import TableTopics, check_known, committed_ends

log = logging.getLogger("onceflow.state")

_PREPARE_S = 60.0
_KNOWN_S = 5.0  # longer than `tables.following` and `driver.step.joins` take to see new partitions


@dataclass(frozen=True)
class Repartitioned:
    """The result of `repartition`.

    Args:
        before: number of partitions before. If it equals ``partitions``, there was nothing to do.
        rows, internal_rows: numbers of rows that moved, in the table topic and in the companion topic.
        records: number of records that were read to find these rows.
    """

    flow: str
    table: str
    before: int
    partitions: int
    rows: int = 0
    internal_rows: int = 0
    records: int = 0
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
    """Increase the partitions of a flow's table to ``partitions``. A running driver of the flow is fenced.

    Args:
        timeout_ms: timeout of the transaction. By default 15 minutes; if the brokers allow less, it is halved until
            they accept it.
        tell: called with the progress from time to time.

    Raises:
        OptionError: the table already has more partitions (then no driver was fenced), or the timeout is too long.
        ProgressConflictError: the flow has no such table, or its topics are not those in the progress record.
        FencedError: a driver of the flow has started meanwhile.
        TransactionTimeoutError: it took too long.
        DeadlineExceededError: the outcome is not known, or Kafka does not answer.
        OnceflowError: Kafka refused a request. After every error except an unknown outcome, no row has moved.
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
        self._tell = tell
        wording = Wording(
            doing=f"moving the rows of table {table}",
            too_slow="The rows did not move",
            undone="nothing has moved; give a longer --transaction-timeout (the brokers' limit is "
            "transaction.max.timeout.ms), and run the command again",
        )
        self._transaction = FlowTransaction(cluster, names, wording, timeout_ms=timeout_ms)
        self._session = self._transaction.session

    def run(self) -> Repartitioned:
        began = time.monotonic()
        deadline = Deadline(_PREPARE_S, f"preparing table {self._table} of flow {self._names.flow}")
        self._session.transactions.check_supported(deadline)
        infos = find_topics(self._cluster, {self._table: "table"}, deadline)
        try:
            infos |= self._cluster.topics([self._internal], deadline)
        except UnknownTopicError:
            raise OptionError(
                f"Topic {self._table} is no table of a flow: it has no companion topic {self._internal}",
                topic=self._table,
                next_step="`onceflow table list` shows the tables",
            ) from None
        self._check_enough(infos)  # before a driver is fenced
        self._transaction.take_over(deadline)
        progress = self._progress(infos, deadline)
        before = len(progress.changelogs[self._table])
        done = Repartitioned(self._names.flow, self._table, before, self._partitions)
        if before == self._partitions:
            return done
        growing = [name for name, info in infos.items() if info.partitions < self._partitions]
        for name in growing:
            self._grow(name, deadline)
        if self._table in growing:
            # Query servers, tables and joining flows look at their topics this often. Those that know the new
            # partitions before rows move have nothing to wait for afterwards.
            time.sleep(_KNOWN_S)
        mover = Repartitioner(
            CommittedReader(self._cluster),
            self._table,
            before=before,
            after=self._partitions,
            ends=self._ends(infos, progress, deadline),
            tell=self._tell,
        )
        mover.check_empty()
        offsets = self._transaction.group_offsets(progress, deadline)
        self._commit(progress, offsets, mover.move)
        if mover.ignored:
            log.warning("table %s: %d records ignored that no processor wrote", self._table, mover.ignored)
        return replace(
            done,
            rows=mover.moved[self._table],
            internal_rows=mover.moved[self._internal],
            records=mover.records,
            seconds=time.monotonic() - began,
        )

    # ---- before the transaction ------------------------------------------------------------------------

    def _check_enough(self, infos: Mapping[str, TopicInfo]) -> None:
        for name, info in infos.items():
            if info.partitions > self._partitions:
                raise OptionError(
                    f"Topic {name} has {counted(info.partitions, 'partition')} already: Kafka cannot remove any, so "
                    f"{self._partitions} are too few",
                    topic=name,
                    next_step=f"give --partitions {info.partitions} or more. For fewer, use a table with another "
                    "name: process from the start of the source, or copy this table with a flow",
                )

    def _progress(self, infos: Mapping[str, TopicInfo], deadline: Deadline) -> Progress:
        names = self._names
        progress = known(self._session.progress({}, deadline, missing_is_fine=True), names, self._cluster)
        ends = progress.changelogs
        if self._table not in ends or self._internal not in ends:
            tables = sorted(name for name in ends if name + INTERNAL_SUFFIX in ends)
            raise ProgressConflictError(
                f"Flow {names.flow!r} has no table {self._table!r}",
                detail=f"its tables: {', '.join(tables) or 'none'}",
                next_step="check the names, and --transactional-id-prefix if the flow has one",
            )
        check_known(self._topics(infos, len(ends[self._table])), ends, progress.topic_ids, flow=names.flow)
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
            deadline.pause(attempt, f"{name} still has {counted(known, 'partition')} in the brokers' metadata")
            attempt += 1

    def _grow(self, name: str, deadline: Deadline) -> None:
        try:
            create_partitions(self._cluster, name, self._partitions, deadline)
        except PermissionDeniedError as error:
            raise PermissionDeniedError(
                f"This principal may not add partitions to {name}",
                topic=name,
                detail=error.detail,
                next_step=f"{acls.grant('ALTER', acls.TOPIC, name)}; or let an operator run kafka-topics.sh --alter "
                f"--topic {name} --partitions {self._partitions}. Then run this command again",
            ) from error
        except OptionError:
            # Another process has just added them, and the broker that was asked for their number did not know it yet.
            self._await_partitions(name, deadline)
            self._check_enough({name: self._cluster.topic(name, deadline)})
        log.info("topic %s gets %d partitions", name, self._partitions)
        self._await_partitions(name, deadline)

    def _ends(
        self, infos: Mapping[str, TopicInfo], progress: Progress, deadline: Deadline
    ) -> dict[str, dict[int, int]]:
        """The offset up to which each partition is read: the one in progress, or the current end if that is later
        because another process has written there."""
        found = committed_ends(self._cluster, self._topics(infos, self._partitions), deadline)
        return {
            name: {p: max(end, progress.changelogs[name].get(p, 0)) for p, end in ends.items()}
            for name, ends in found.items()
        }

    # ---- the transaction -------------------------------------------------------------------------------

    def _commit(self, progress: Progress, offsets: Offsets, move: Callable[[Writer, Deadline], None]) -> None:
        """Steps ``write``, ``progress`` and ``end``."""

        def after(written: Written) -> Progress:
            ends = {name: self._ends_after(name, progress, written) for name in (self._table, self._internal)}
            tables = dict(progress.tables)
            if self._table in tables and tables[self._table].unfired:  # the rows may be in any partition now
                tables[self._table] = replace(tables[self._table], unfired=tuple(range(self._partitions)))
            return replace(progress, changelogs={**progress.changelogs, **ends}, tables=tables)

        self._transaction.commit([self._table, self._internal], move, after, offsets)

    def _ends_after(
        self, name: str, progress: Progress, written: Mapping[tuple[str, int], Acknowledged]
    ) -> dict[int, int]:
        known = progress.changelogs[name]
        return {
            p: written[name, p].end_offset if (name, p) in written else known.get(p, 0) for p in range(self._partitions)
        }
