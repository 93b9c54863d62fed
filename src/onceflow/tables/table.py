"""``Table``: a view of a compacted topic, for lookups from any process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from onceflow.clock import clock_ms
from onceflow.errors import DeadlineExceededError, OptionError, counted
from onceflow.options.arguments import checked_arguments
from onceflow.options.durations import duration_ms
from onceflow.protocol.position import Position, other_topic
from onceflow.state.api import serdes
from onceflow.state.stores.base import Store
from onceflow.state.stores.stored_rows import StoredRows
from onceflow.tables.copies import RawChange
from onceflow.tables.flow_copies import FlowCopies
from onceflow.tables.following import Follower
from onceflow.tables.lag import Lag, Restore
from onceflow.tables.lookups import Lookups
from onceflow.tables.opening import OpenedTable, open_table


class Change(NamedTuple):
    """One committed record of a table's topic.

    Args:
        key: the key.
        value: its value now; None: the key was deleted.
        before: its value before; None: it had none.
        partition, offset: where the record is.
        timestamp_ms: the record's timestamp, epoch milliseconds; None: it has none.
    """

    key: Any
    value: Any
    before: Any
    partition: int
    offset: int
    timestamp_ms: int | None


class Table(Lookups):
    """The keys and values of a compacted topic, kept in a local store and up to date by a thread.

    Any compacted topic can be read: the table of a flow, a changelog or output of Kafka Streams, rows of Debezium
    (unwrapped). Only committed records are seen. ::

        with onceflow.Table("balances", bootstrap_servers="localhost:9092", key=serdes.STRING) as table:
            table.get("ada")

    The ``with`` block begins when the table contains everything that was committed at that moment. The local copy stays
    on disk, is verified at the next start, and then only what is new is read. Copies of one topic in several processes
    of a machine are kept apart.

    Reading methods may be called from any thread. They raise the error that has stopped the thread behind the table,
    for example because the topic was deleted. While brokers do not answer, they return what is here; `lag` says how old
    that is.

    Args:
        topic: the name of a compacted topic.
        bootstrap_servers: as of `Flow`.
        options: as of `Flow`.
        key, value: serde: ``serdes.STRING``, ``JSON``, ``LONG``, ...
        partitions: follow only these; None: all of them.
        store: as of `Flow.process`.
        state_dir: as of `Flow.process`.
        wait: whether `start` and ``with`` wait until the table is current; otherwise lookups answer from what is here.
        restore_timeout: how long that may take; None: no limit.
        connect_timeout: as of `Flow`.

    Raises:
        OptionError: an argument is invalid.
    """

    @checked_arguments
    def __init__(
        self,
        topic: str,
        *,
        bootstrap_servers: str,
        options: Mapping[str, str] | None = None,
        key: Any = serdes.BYTES,
        value: Any = serdes.BYTES,
        partitions: Sequence[int] | None = None,
        store: str | type[Store] = "lmdb",
        state_dir: str | Path | None = None,
        wait: bool = True,
        restore_timeout: str | float | None = None,
        connect_timeout: str | float = "15 seconds",
    ) -> None:
        super().__init__(key, value)
        self._opened: OpenedTable | None = OpenedTable(
            topic, bootstrap_servers, options, partitions, store, state_dir, connect_timeout
        )
        self._wait = wait
        self._restore_s = None if restore_timeout is None else _seconds(restore_timeout, "restore_timeout")
        self._topic: str | None = topic
        self._source: Follower | FlowCopies | None = None
        self._rows: StoredRows

    @classmethod
    def of_flow(
        cls,
        folder: str | Path,
        *,
        key: Any = serdes.BYTES,
        value: Any = serdes.BYTES,
        clock_ms: Callable[[], int] = clock_ms,
    ) -> Table:
        """A flow's table, read from the local copies that the flow keeps on this machine. It needs no broker.

        It shows what the flow has applied: a batch is visible when the next one has begun, or when the flow has ended.
        Partitions that tasks on other machines process are missing, or as old as their copy here. Nothing is written or
        kept open, and nothing has to be started or closed. ``map_entries`` works here only.

        Args:
            folder: ``<state_dir>/<flow>/<table>``. It need not exist before the first read.
            key, value: as for `Table`.
            clock_ms: returns the time in epoch milliseconds; for tests.
        """
        table = cls.__new__(cls)
        Lookups.__init__(table, key, value)
        table._opened, table._topic = None, None
        table._source = FlowCopies(Path(folder))
        table._rows = StoredRows(table._source.stores, clock_ms=clock_ms)
        return table

    # ---- its life ------------------------------------------------------------------------------------

    def start(self, *, progress: Callable[[Restore], None] | None = None) -> Table:
        """Open the local copy, verify it, and begin to follow the topic. The ``with`` block calls this.

        Args:
            progress: called repeatedly while `start` waits for the table to be current.

        Raises:
            UnknownTopicError, PermissionDeniedError, BrokerUnreachableError: the topic cannot be read.
            OptionError: the topic is not compacted, or lacks a partition that was asked for.
            EnvironmentUnusableError: the local copy cannot be written, for example because its disk is full.
            DeadlineExceededError: the table was not current within ``restore_timeout``.
        """
        if self._opened is None or self._source is not None:
            raise OptionError(f"Table {self.topic} is open already", next_step="open each table once")
        source = open_table(self._opened)
        self._source = source
        self._rows = StoredRows(partial(source.stores, complete=self._wait), partitions=source.partitions)
        if not self._wait:
            return self
        try:
            self._await_restore(source, progress)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End the thread and close the local copy, which stays on disk.

        If the thread does not end within some seconds, because it waits for a broker or for the disk, a warning says
        so: the copy is closed and can be opened again when it has ended. An ``on_change`` function may call this; then
        the table is closed when the function returns.
        """
        source, self._source = self._source, self._source if self._opened is None else None
        if self._opened is not None and isinstance(source, Follower):
            self._opened.release([source])

    def __enter__(self) -> Table:
        return self if self._source is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- how far it is -------------------------------------------------------------------------------

    @property
    def topic(self) -> str:
        """The name of the topic."""
        return self._topic or self._reading().topic

    @property
    def position(self) -> str:
        """How far the table has been read, as a short text. It is never more than what lookups see from now on."""
        source = self._reading()
        return str(Position({self.topic: source.offsets()}, {self.topic: source.topic_id}))

    @property
    def lag(self) -> Lag:
        """How far the table is behind its topic."""
        return self._reading().lag()

    @property
    def restore(self) -> Restore:
        """How far the table is on its way to what was committed when it was started."""
        source = self._reading()
        return source.restored() if isinstance(source, Follower) else Restore(0, 0)

    @property
    def ignored(self) -> int:
        """How many records of this run could not be kept: those without a key."""
        source = self._reading()
        return source.ignored if isinstance(source, Follower) else 0

    def wait_until_current(self, position: str | None = None, timeout: str | float = "30 seconds") -> None:
        """Wait until lookups see everything up to a position: read your own writes, also in another process.

        Args:
            position: ``query.position`` of a flow after a batch, `position` of another table, or the header
                ``Onceflow-Position`` of a query server. Topics other than that of this table are ignored. None:
                everything that is committed now.
            timeout: a duration.

        Raises:
            OptionError: the text is not a position, or says nothing about this topic, or is of an earlier topic of
                this name.
            UnknownTopicError: the topic has more partitions than before.
            DeadlineExceededError: the position was not reached in time.
        """
        source = self._reading()
        timeout_s = _seconds(timeout, "timeout")
        if position is None:
            wanted = Position({self.topic: self._ends()})
        else:
            wanted = self._own_part(Position.parse(position))
        if not source.wait(lambda: wanted.reached({self.topic: source.offsets()}), timeout_s):
            raise DeadlineExceededError(
                f"Table {self.topic} did not reach a position within {timeout_s:g} s",
                topic=self.topic,
                detail=f"wanted {wanted}, here is {self.position}",
                next_step="wait longer, or look at the lag and the log of the table: brokers may not answer, or an "
                "open transaction of another producer may hold committed records back",
            )

    def on_change(self, function: Callable[[Change], None]) -> Callable[[], None]:
        """Call a function with every change that is committed from now on, in the order of each partition.

        It is called in the thread of the table, after the change can be looked up. Calls do not survive a restart, and
        an error of the function stops the table: for work that must not be lost, use a flow.

        Returns:
            A function that ends the calls.
        """
        source = self._reading()
        if not isinstance(source, Follower):
            raise OptionError(
                "A table that is read from a flow's copies knows no changes", next_step="open it with Table(topic, ...)"
            )

        def call(change: RawChange) -> None:
            key, value, before, partition, offset, timestamp_ms = change
            function(
                Change(
                    self._decoded_key(key),
                    None if value is None else self._decoded(value, key),
                    None if before is None else self._decoded(before, key),
                    partition,
                    offset,
                    timestamp_ms,
                )
            )

        return source.listen(call)

    # ---- inside --------------------------------------------------------------------------------------

    def _readable(self) -> StoredRows:
        self._reading()
        return self._rows

    def _reading(self) -> Follower | FlowCopies:
        if self._source is None:
            raise OptionError(
                f"Table {self._topic} is not open",
                topic=self._topic,
                next_step="use it in a with block, or call start() first",
            )
        return self._source

    def _await_restore(self, source: Follower, progress: Callable[[Restore], None] | None) -> None:
        waited_s = 0.0
        while not source.wait(lambda: not source.restored().running, 0.2):
            waited_s += 0.2
            if (problem := source.problem) is not None:
                raise problem
            if progress is not None:
                progress(source.restored())
            if self._restore_s is not None and waited_s >= self._restore_s:
                restore = source.restored()
                raise DeadlineExceededError(
                    f"Table {self.topic} was not current within {self._restore_s:g} s",
                    topic=self.topic,
                    detail=f"read {restore.done} of {counted(restore.total, 'offset')}; they are kept",
                    next_step="start it again with a longer restore_timeout, or with wait=False",
                )

    def _ends(self) -> Mapping[int, int]:
        if self._opened is None:
            raise OptionError(
                "A table that is read from a flow's copies does not know what is committed",
                next_step="give wait_until_current() a position, for example query.position",
            )
        return self._opened.ends_now()

    def _own_part(self, position: Position) -> Position:
        own = position.offsets.get(self.topic)
        if own is None:
            raise OptionError(
                f"The position says nothing about topic {self.topic}",
                topic=self.topic,
                detail=f"it is {str(position)[:200]!r}",
                next_step="take the position of the flow that writes this table, or of another table of this topic",
            )
        source = self._reading()
        if not position.is_of(self.topic, source.topic_id):
            raise other_topic(self.topic)
        if isinstance(source, Follower) and source.follows_all:
            return Position({self.topic: own})  # a partition that is not here was added: the table stops for it, soon
        here = source.offsets()
        return Position({self.topic: {partition: end for partition, end in own.items() if partition in here}})


def _seconds(duration: str | float, name: str) -> float:
    try:
        return duration_ms(duration) / 1000
    except ValueError as error:
        raise OptionError(f"{name}: {error}", next_step='for example "30 seconds"') from None
