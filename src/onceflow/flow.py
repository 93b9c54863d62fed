"""``Flow``: read topics, keep state, write topics and other systems, exactly once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from onceflow.calls.concurrently import Calls
from onceflow.client.key_stores import check_pem
from onceflow.client.settings import ClientSettings
from onceflow.clock import clock_ms
from onceflow.direct.run import DirectRun, direct_run, external_run
from onceflow.driver.standby.standby import StandbyOptions
from onceflow.driver.start.external_run import prepare_external
from onceflow.driver.start.rehearsal import Rehearsal
from onceflow.driver.start.run import MicroBatchRun, prepare_query, spark_run
from onceflow.driver.start.startup import Startup
from onceflow.driver.step.joins import join_frame, join_order
from onceflow.engine_query import DIRECT
from onceflow.errors import OptionError
from onceflow.external.sink import ExternalSink
from onceflow.flow_chain import ChainWriter
from onceflow.flow_runs import FlowRuns
from onceflow.logs import json_logs
from onceflow.options.arguments import checked_arguments
from onceflow.options.durations import option_seconds
from onceflow.planning import calls as planned_calls
from onceflow.planning import foreign_keys, joins, maps, process, step_query, value_formats
from onceflow.planning.deduplicate import DedupOptions, check_deduplication, dedup_columns
from onceflow.planning.external_write import ExternalOptions, ExternalWrite, check_external
from onceflow.planning.process import StepOptions
from onceflow.planning.read_options import ReadOptions, check_read, source_options
from onceflow.planning.read_until import Until, check_until
from onceflow.planning.record_order import check_order
from onceflow.planning.source_starts import StartingOffsets
from onceflow.planning.step_frames import state_columns
from onceflow.planning.time_joins import RESULT, TimeJoinOptions, as_of_join, both_streams, interval_join
from onceflow.planning.write_options import CheckedWrite, WriteOptions, check_no_dead_letters, check_write
from onceflow.protocol.names import INTERNAL_SUFFIX, Names
from onceflow.query import FlowWriter
from onceflow.spark import jvm, queries, shipping
from onceflow.spark.arrow_maps import map_in_arrow
from onceflow.spark.kafka_source import load_source
from onceflow.spark.master import is_local
from onceflow.spark.pickling import pickled
from onceflow.state.api import serdes
from onceflow.state.api.processor import MAX_AHEAD, ColumnProcessor, Processor
from onceflow.state.api.time_joins import TimeJoin
from onceflow.state.foreign_keys.processors import LeftRows, Results, RightRows
from onceflow.state.joins.spec import JoinTable
from onceflow.state.stores.base import Store
from onceflow.task.call_rows import CallOrder, CallReports, CallRows
from onceflow.task.join_task import JoinTask
from onceflow.uncaught import fenced_ends_program

# Limits the first batch after downtime. At only 10,000 records a second, a batch takes a third of the default
# transaction timeout. Raise it for more throughput, lower it for large records.
DEFAULT_RECORDS_PER_BATCH = 200_000


class Flow:
    """One service: a name, the topics it reads, and one query that writes. The name is its identity in Kafka.

    The transactional id is ``onceflow.<name>``, the consumer group is ``<name>``. Two drivers with the same name are
    two copies of one flow: the one that started last continues, the other one stops with FencedError.

    Args:
        name: the flow's identity in Kafka: letters, digits, ``. _ -``; at most 200.
        spark: a classic (not Connect) session with the Kafka connector, for example ``onceflow.session()``.
        bootstrap_servers: ``host:port``, several separated by commas.
        options: connection options by their Java names, with or without Spark's ``kafka.`` prefix: see
            ``docs/connect.md``.
        transactional_id_prefix: put before transactional id and consumer group, so that one prefixed ACL covers many
            flows.
        group_id_prefix: put before the consumer group in its place; None: the same.
        connect_timeout: how long a start waits while all servers refuse connections or do not resolve.
        standby: wait in the first `read` until no other driver is active; False: a start fences it. Give it to both
            copies of a program, see ``docs/deploy.md``.
        standby_host: address of this machine by which the other copy sees that this process lives. In Kubernetes the
            IP of the pod.

    Raises:
        OptionError: a name, address or option is invalid.
        UnsupportedQueryError: Spark Connect, or a session with speculation.
    """

    @checked_arguments
    def __init__(
        self,
        name: str,
        spark: SparkSession,
        *,
        bootstrap_servers: str,
        options: Mapping[str, str] | None = None,
        transactional_id_prefix: str = "",
        group_id_prefix: str | None = None,
        connect_timeout: str | float = "15 seconds",
        standby: bool = False,
        standby_host: str = "127.0.0.1",
    ) -> None:
        json_logs.use(None)  # where the environment asks for it
        names = Names(name, transactional_id_prefix, group_id_prefix)
        settings = ClientSettings(bootstrap_servers, options or {})
        refused_s = option_seconds(connect_timeout, "connect_timeout", name)
        queries.check_session(spark, name)
        check_pem(settings.options, jvm.java_version(spark))
        shipping.share_modules(spark)
        self._name = name
        self._spark = spark
        self._settings = settings
        self._runs = FlowRuns(names, settings, refused_s, StandbyOptions(standby_host) if standby else None)
        self._beside: Flow | None = None  # the second flow of a chain
        self._connection: dict[str, Any] = {
            "bootstrap_servers": bootstrap_servers,
            "options": options,
            "transactional_id_prefix": transactional_id_prefix,
            "group_id_prefix": group_id_prefix,
            "connect_timeout": connect_timeout,
            "standby": standby,
            "standby_host": standby_host,
        }

    @property
    def name(self) -> str:
        return self._name

    @checked_arguments
    def read(
        self,
        topic: str,
        *,
        starting_offsets: StartingOffsets = "earliest",
        max_records_per_batch: int | None = DEFAULT_RECORDS_PER_BATCH,
        fail_on_data_loss: bool = True,
        include_headers: bool = False,
        options: Mapping[str, str] | None = None,
        until: Until | None = None,
        key_format: Any = None,
        value_format: Any = None,
        corrupt_column: str | None = None,
    ) -> DataFrame:
        """A streaming DataFrame of one topic. It continues after the last committed batch of the flow.

        Only committed records are read (``isolation.level=read_committed``). The first call fences older drivers of the
        same name, and aborts the transaction that they have left open. From then on only this driver can change the
        flow's committed offsets.

        Args:
            topic: the topic to read; make one call for each topic.
            starting_offsets: where a flow starts that has never read the topic: ``earliest``, ``latest``, or
                ``{partition: offset}``. Later starts continue at the committed offsets, and ignore a value other than
                ``earliest``, with a warning.
            max_records_per_batch: maximum number of records of this topic in one batch; None: no limit.
            fail_on_data_loss: whether records that expired unread stop the flow; False: they are skipped, with a
                warning.
            include_headers: adds the ``headers`` column.
            options: further options of Spark's Kafka source. With ``minPartitions`` and ``maxRecordsPerPartition``,
                several tasks read one partition: they need ``partitioner="round_robin"`` or ``checkpoint=``.
            until: where the read ends: ``latest``, a time, or ``{partition: offset}``; None: it does not end.
                ``latest``: at the end of the topic at this call. An offset is the first that is not read. A time (a
                datetime with a time zone, a text such as ``2025-01-31T08:00:00Z``, or epoch milliseconds): before the
                first record with this timestamp or a later one. The query ends when all reads are there.
            key_format, value_format: a serde of a `SchemaRegistry`, whose types the column has in place of bytes.
            corrupt_column: a further column with what is wrong with such a key or value, which is null then. None: it
                stops the flow.

        Returns:
            Spark's Kafka columns: key, value, topic, partition, offset, timestamp, timestampType[, headers].

        Raises:
            UnknownTopicError, PermissionDeniedError, BrokerUnreachableError, BrokerUnsupportedError,
            DataLossError, ProgressConflictError: see ``docs/guarantees.md``, "What stops a start".
            EnvironmentUnusableError: the session has no Kafka connector.
        """
        bound = check_until(until, topic=topic, flow=self.name, now_ms=clock_ms())
        given = ReadOptions(
            topic, starting_offsets, max_records_per_batch, fail_on_data_loss, include_headers, options or {}, bound
        )
        check_read(given, self.name)
        typed = value_formats.check_formats(key_format, value_format, corrupt_column, self.name)
        with fenced_ends_program(), self._runs.lock:
            self._runs.check_readable(topic)
            queries.check_connector(self._spark, self.name)
            takeover = self._runs.startup.takeover
            takeover.await_turn(topic, Rehearsal(self._spark, self._settings, given, self.name))
            offsets = takeover.add_source(given)
            ends = takeover.until.get(topic)
        options_of_source = source_options(given, offsets, self.name)
        rows = load_source(self._spark, self._settings, options_of_source, ends, partitions=len(offsets))
        return rows if typed is None else self.map(rows, typed, schema=value_formats.columns_behind(typed, rows.schema))

    @checked_arguments
    def process(
        self,
        df: DataFrame,
        processor: Processor | ColumnProcessor,
        *,
        table: str,
        partitions: int | None = None,
        on_error: str = "fail",
        dead_letter_topic: str | None = None,
        late_topic: str | None = None,
        retention: str | float | None = None,
        store: str | type[Store] = "lmdb",
        state_dir: str | Path | None = None,
        adopt_existing: bool = False,
        idle_timeout: str | float = "30 seconds",
        clock_after: str | float | None = None,
        max_timers_per_batch: int | None = 1_000,
        max_dead_letters: int | float | None = None,
        tables: Mapping[str, str | JoinTable] | None = None,
        changelog: bool = True,
        copies: int = 1,
        wait_for_restores: bool = True,
    ) -> DataFrame:
        """Run user code with state per key over a stream. The state is kept in the compacted topic ``table``.

        Each row is processed in the table partition that Kafka's default partitioner chooses for its key. Changes of
        the state are written to that topic in the transaction of the batch. A local store caches the topic. Write the
        returned DataFrame with ``Flow.write``. Without operators in between, the tasks that process the records also
        write the outputs. The processor also sees the columns partition, offset, timestamp, topic and headers, where
        they are present. All records of a batch see ``tables`` at the same offsets.

        Args:
            df: made from `read` or another `process` of this flow, with the columns key and value (string or binary).
            processor: an instance of your `Processor`, `ColumnProcessor` or `WindowProcessor`. All its attributes are
                pickled: create connections and locks in its ``open``.
            table: name of the table topic. It is created when it is missing, and so is ``<table>-internal``.
            partitions: number of partitions of a new table; None: as many as the source has.
            on_error: when processing a record raises: ``fail`` stops the flow, ``dead-letter`` writes it to
                ``dead_letter_topic``.
            dead_letter_topic: the topic for such records, which must exist.
            late_topic: the topic for records that are later than the processor's ``allowed_lateness``; give both or
                neither.
            retention: rows that were not written for this long are deleted (``"7 days"``). It replaces the processor's
                ``ttl``.
            store: the local store: ``lmdb``, ``memory``, ``rocksdb`` (needs the extra ``rocksdb``), or a class of your
                own.
            state_dir: folder of the local stores; None: each host's ``$ONCEFLOW_STATE_DIR``, else
                ``~/.local/state/onceflow``.
            adopt_existing: use the rows of an existing table for which the flow has no progress. In the first run of a
                copy (``onceflow fork``), the table may also begin empty.
            idle_timeout: event time stops waiting for a source partition that brought no records for this long, over
                all runs.
            clock_after: when no partition brought records for this long, event time goes on by the clock; None: it
                stands still. So windows close, but records that come later with an earlier time are late. At least
                ``idle_timeout``.
            max_timers_per_batch: maximum number of timers that fire per partition and batch; None: all. The others
                follow at once.
            max_dead_letters: stop the flow when one run has more: a count, or a share of the records read (``0.01``);
                None: no limit. A share counts from 100 records on. The batch that exceeds it is not committed.
            tables: tables that the processor looks up rows in with ``state.table(name)``, by name: topics, or
                `JoinTable`s.
            changelog: False: state that may be lost, in local stores only; a lost or outdated copy begins empty, with a
                warning.
            copies: on a cluster, how many hosts keep a local copy of each partition. With 2, the partitions of a host
                that is lost go on elsewhere without a restore.
            wait_for_restores: on a cluster, whether batches wait while partitions of a host that was lost are restored.
                False: only the records of their keys wait. This needs equal partition counts of sources and table, and
                keys where Kafka's default partitioner puts them; else all wait.

        Returns:
            A streaming DataFrame of what the processor yields: key, value, topic, headers, timestamp.

        Raises:
            OptionError, SchemaError: wrong arguments or columns; the processor cannot be pickled.
            UnsupportedQueryError: ``df`` is not a stream of this flow, or has operators that keep state in Spark.
            ProgressConflictError: the table topic does not match the flow's progress, or the state has another version.
            PermissionDeniedError: a topic is missing, and this principal may not create it.
        """
        options = StepOptions(
            table, partitions, on_error, dead_letter_topic, late_topic, retention, store,
            state_dir, adopt_existing, idle_timeout, max_timers_per_batch, max_dead_letters, changelog,
            clock_after=clock_after, copies=copies, wait_for_restores=wait_for_restores,
        )  # fmt: skip
        return self._step(df, options, processor, partial(state_columns, df, self.name), tables=tables)

    @checked_arguments
    def deduplicate(
        self,
        df: DataFrame,
        *,
        id: str,  # noqa: A002 (a keyword argument, and the word that users know)
        within: str | float | None = None,
        records: int | None = None,
        late: str = "drop",
        duplicates_topic: str | None = None,
        event_time: str | None = None,
        table: str | None = None,
        partitions: int | None = None,
        on_error: str = "fail",
        dead_letter_topic: str | None = None,
        store: str | type[Store] = "lmdb",
        state_dir: str | Path | None = None,
        adopt_existing: bool = False,
        idle_timeout: str | float = "30 seconds",
        max_ahead: str | float | None = MAX_AHEAD,
        max_dead_letters: int | float | None = None,
        copies: int = 1,
    ) -> DataFrame:
        """The first record of every id; records with an id that is remembered are duplicates, and are left out.

        Ids are state in a table, as in `process`: they are committed together with the outputs. Give either ``within``
        or ``records``. The topics that it writes to must exist. ``docs/deduplication.md`` says exactly what is
        remembered, and which records are late.

        Args:
            df: made from `read` or another step of this flow, with the columns key and value (string or binary).
            id: the column with the id, or ``"key"``. Numbers without fraction, decimals, booleans and dates count as
                their text.
            within: how long an id is remembered, in stream time (``"24 hours"``). Give this or ``records``.
            records: how many ids each partition of the table remembers.
            late: what happens to records that are older than ``within``: ``drop``, or the topic that they go to.
            duplicates_topic: the topic that duplicates go to; None: they are dropped.
            event_time: the column with the time of a record: a timestamp, or epoch milliseconds; None: ``timestamp``.
            table: name of the table topic; None: ``<flow>-ids``.
            max_ahead: how far the time of a record may be ahead of the clock; None: as far as it likes.
            on_error: what happens to a record without id or time, or with a time too far ahead, as of `process`.
            partitions, dead_letter_topic, store, state_dir, adopt_existing, idle_timeout, max_dead_letters, copies: as
                of `process`.

        Returns:
            A streaming DataFrame of the records that were not seen before: key, value, topic (null), headers,
            timestamp; and source_topic, source_partition, source_offset: where the record was read. `write` leaves
            these out, and steps take them for topic, partition and offset.

        Raises:
            OptionError, SchemaError: wrong arguments or columns.
            UnsupportedQueryError, ProgressConflictError, PermissionDeniedError: as in `process`.
        """
        own = DedupOptions(id, within, records, late, duplicates_topic, event_time, max_ahead)
        options = StepOptions(
            f"{self.name}-ids" if table is None else table, partitions, on_error, dead_letter_topic, own.late_topic,
            None, store, state_dir, adopt_existing, idle_timeout, max_dead_letters=max_dead_letters,
            duplicates_topic=duplicates_topic, copies=copies,
        )  # fmt: skip
        processor = check_deduplication(own, self.name)
        columns = partial(dedup_columns, df, own, self.name)
        return self._step(df, options, processor, columns, caller="Flow.deduplicate")

    @checked_arguments
    def join_interval(
        self,
        left: DataFrame,
        right: DataFrame,
        *,
        table: str,
        before: str | float,
        after: str | float,
        how: str = "inner",
        late_topic: str,
        allowed_lateness: str | float = 0,
        max_ahead: str | float | None = MAX_AHEAD,
        partitions: int | None = None,
        on_error: str = "fail",
        dead_letter_topic: str | None = None,
        store: str | type[Store] = "lmdb",
        state_dir: str | Path | None = None,
        adopt_existing: bool = False,
        idle_timeout: str | float = "30 seconds",
        clock_after: str | float | None = None,
        max_dead_letters: int | float | None = None,
        copies: int = 1,
    ) -> DataFrame:
        """Pairs of records of two streams with the same key and event times that are near each other.

        The results are exactly those of a batch join over all records that are not late: a pair is in them if
        ``left - before <= right <= left + after``. Records wait in a table, as state of `process`, until the watermark
        says that no partner can come.

        Args:
            left, right: made from `read` or a step of this flow, with the columns key, value and timestamp. The first
                two are string or binary, the last one is the event time. Both may be of the same topic.
            table: name of the table topic of waiting records.
            before, after: how much earlier and later than the left record the right one may be, both inclusive.
            how: ``inner``, ``left``, ``right`` or ``full``: of which streams also records without a partner are in the
                results. These are written when no partner can come.
            late_topic: the topic for records that are older than the watermark. They are in no result.
            allowed_lateness: how far the watermark stays behind the latest event of both streams.
            max_ahead: how far an event time may be ahead of the clock; None: as far as it likes.
            on_error: what happens to a record without key or time, or with a time too far ahead, as of `process`.
            partitions, dead_letter_topic, store, state_dir, adopt_existing, idle_timeout, clock_after: as of `process`.
            max_dead_letters, copies: as of `process`.

        Returns:
            A streaming DataFrame: key, left_value, right_value (binary), left_timestamp, right_timestamp, and
            timestamp, the later of the two. Where there is no partner, its timestamp is null.

        Raises:
            OptionError, SchemaError: wrong arguments or columns.
            UnsupportedQueryError, ProgressConflictError, PermissionDeniedError: as in `process`.
        """
        own = TimeJoinOptions("Flow.join_interval", how, allowed_lateness, max_ahead)
        options = StepOptions(
            table, partitions, on_error, dead_letter_topic, late_topic, None, store, state_dir, adopt_existing,
            idle_timeout, max_dead_letters=max_dead_letters, clock_after=clock_after, copies=copies,
        )  # fmt: skip
        return self._time_join(left, right, options, interval_join(own, before, after, self.name), own.caller)

    @checked_arguments
    def join_as_of(
        self,
        left: DataFrame,
        right: DataFrame,
        *,
        table: str,
        how: str = "inner",
        tolerance: str | float | None = None,
        late_topic: str,
        allowed_lateness: str | float = 0,
        max_ahead: str | float | None = MAX_AHEAD,
        partitions: int | None = None,
        on_error: str = "fail",
        dead_letter_topic: str | None = None,
        store: str | type[Store] = "lmdb",
        state_dir: str | Path | None = None,
        adopt_existing: bool = False,
        idle_timeout: str | float = "30 seconds",
        clock_after: str | float | None = None,
        max_dead_letters: int | float | None = None,
        copies: int = 1,
    ) -> DataFrame:
        """Each record of a stream with the record of another one that held at its event time: the last one of the same
        key that is not later.

        The results are exactly those of a batch as-of join over all records that are not late. The right stream may be
        a topic of changes of rows: then each left record sees the row as it was at its time, also in a later run over
        the same records. A tombstone deletes the row from its time on. Of right records of the same key and time, the
        one that is read last counts.

        Args:
            left, right: as of `join_interval`.
            table: name of the table topic of waiting left records, and of right ones that may still be asked for.
            how: ``inner``: only records for which there is a right one; ``left``: all.
            tolerance: how much earlier the right record may be; None: as much as it likes. With a tolerance, state is
                deleted by time; without one, the last right record of each key stays.
            late_topic, allowed_lateness, max_ahead, on_error: as of `join_interval`.
            partitions, dead_letter_topic, store, state_dir, adopt_existing, idle_timeout, clock_after: as of `process`.
            max_dead_letters, copies: as of `process`.

        Returns:
            A streaming DataFrame with the columns of `join_interval`; timestamp is that of the left record. A result is
            written when the watermark is later than its left record.

        Raises:
            OptionError, SchemaError: wrong arguments or columns.
            UnsupportedQueryError, ProgressConflictError, PermissionDeniedError: as in `process`.
        """
        own = TimeJoinOptions("Flow.join_as_of", how, allowed_lateness, max_ahead)
        options = StepOptions(
            table, partitions, on_error, dead_letter_topic, late_topic, None, store, state_dir, adopt_existing,
            idle_timeout, max_dead_letters=max_dead_letters, clock_after=clock_after, copies=copies,
        )  # fmt: skip
        return self._time_join(left, right, options, as_of_join(own, tolerance, self.name), own.caller)

    @checked_arguments
    def join_foreign_key(
        self,
        left: DataFrame,
        right: DataFrame,
        *,
        foreign_key: str,
        table: str,
        how: str = "inner",
        partitions: int | None = None,
        on_error: str = "fail",
        dead_letter_topic: str | None = None,
        store: str | type[Store] = "lmdb",
        state_dir: str | Path | None = None,
        copies: int = 1,
    ) -> DataFrame:
        """A table of two tables: each left row with the right row whose key it names. It follows changes and deletions
        of both.

        Both streams are changes of a table: the last record of a key is its row, a null value deletes it. The result is
        one, too: after each batch it is that of a batch join over the last rows of both.

        Args:
            left, right: made from `read` or a step of this flow, with the columns key and value (string or binary).
            foreign_key: the column of ``left`` with the key of the right row: string or binary; null: there is none.
            table: the names of the three tables of its state begin with it: ``<table>-left``, ``-right``, ``-result``.
            how: ``inner``, or ``left``: left rows without a right one are in the result, too.
            partitions, on_error, dead_letter_topic, store, state_dir, copies: as of `process`.

        Returns:
            A streaming DataFrame: key (that of the left row), left_value, right_value (binary). Where left_value is
            null, there is no row any more: write a null value then.

        Raises:
            OptionError, SchemaError: wrong arguments or columns.
            UnsupportedQueryError, ProgressConflictError, PermissionDeniedError: as in `process`.
        """
        keeps_left = foreign_keys.check_foreign_key_join(how, self.name)
        rows = foreign_keys.left_rows(left, foreign_key, self.name)
        others = foreign_keys.right_rows(right, self.name)
        steps = (LeftRows(keeps_left=keeps_left), RightRows(keeps_left=keeps_left), Results(keeps_left=keeps_left))
        for name, processor in zip(foreign_keys.TABLES, steps, strict=True):
            if isinstance(processor, RightRows):
                rows = rows.select("key", "value").unionByName(others, allowMissingColumns=True)
            options = StepOptions(
                table + name, partitions, on_error, dead_letter_topic, None, None, store, state_dir, False,
                "30 seconds", copies=copies,
            )  # fmt: skip
            columns = partial(state_columns, rows, self.name, caller=foreign_keys.CALLER)
            rows = self._step(rows, options, processor, columns, caller=foreign_keys.CALLER)
        return foreign_keys.result_columns(rows)

    @checked_arguments
    def join_table(
        self,
        df: DataFrame,
        table: str | JoinTable,
        *,
        on: str,
        columns: str | Mapping[str, str],
        how: str = "inner",
        corrupt_column: str | None = None,
    ) -> DataFrame:
        """Add columns of a table to the rows of a stream. All rows of a batch see the table at the same offsets.

        Args:
            df: a streaming DataFrame of this flow.
            table: a compacted topic, but no table of this flow; or a `JoinTable`, which also names its serdes.
            on: the column with the table's key: string or binary, or what the key serde takes.
            columns: fields of the values and their types, or the name of one column for the whole value. Fields
                (``{"name": "string"}``) need ``value=serdes.JSON`` or a struct. A whole value is binary unless the
                serde is STRING, LONG or DOUBLE.
            how: ``inner`` leaves out rows whose key is not in the table; ``left`` keeps them, with nulls.
            corrupt_column: a further binary column, with values of the table that cannot be read; None: one stops the
                flow.

        Returns:
            The columns of ``df`` and the new ones. Rows keep their order.

        Raises:
            OptionError, SchemaError: wrong arguments or columns.
            UnknownTopicError, PermissionDeniedError: the topic does not exist, or may not be read.
        """
        with self._runs.lock:
            startup = self._runs.startup
            startup.takeover.known_progress()
            checked = joins.checked_table(table, own=startup.table_names, flow=self.name)
            queries.check_query(df, self.name, checkpoint=True, columns=False)  # `write` knows of checkpoints
            spec = startup.find_join(checked.topic, checked, local=is_local(self._spark))
            number = next(self._runs.function_numbers)
            order, wanted = join_order(
                df, spec, self._settings, on=on, how=how, columns=columns, corrupt=corrupt_column, flow=self.name
            )
            task = JoinTask(order, number)
            joined = join_frame(df, task, wanted)
            startup.joins.append(spec)
            startup.functions[task.__name__] = task
            return joined

    @checked_arguments
    def map(
        self,
        df: DataFrame,
        function: Callable[[pa.RecordBatch], pa.RecordBatch],
        *,
        schema: str | T.StructType | None = None,
    ) -> DataFrame:
        """Change the rows of a stream with a Python function over Arrow batches, without state.

        The function is called in the driver, or in the tasks that read a backlog. In Spark's micro-batches tasks call
        it (``mapInArrow``). It may be called again for the same rows, and batches may have any number of rows, so its
        result must depend on each row alone.

        Args:
            df: a streaming DataFrame of this flow.
            function: gets a ``pyarrow.RecordBatch`` with the columns of ``df`` and returns one, or a ``pyarrow.Table``.
                Rows may be left out or added. Times are in UTC. The function is pickled when it is given, with the
                variables that it uses.
            schema: the columns that it returns, as in SQL (``"key binary, value string"``) or a ``StructType``; None:
                those of ``df``. Columns may come in another order, and with a type that is cast without a change of
                values, such as ``int32`` in place of ``bigint``.

        Returns:
            A streaming DataFrame with these columns.

        Raises:
            OptionError: the function cannot be called or sent to tasks, or the schema cannot be read.
            SchemaError: Arrow has no type for a column.
            UnsupportedQueryError: ``df`` is not a stream of this flow.

        A function that raises stops the flow with ProcessorError, and one that returns other columns with SchemaError.
        Nothing of that batch becomes visible.
        """
        with self._runs.lock:
            startup = self._runs.startup
            startup.takeover.known_progress()
            facts = queries.check_query(df, self.name, checkpoint=True, columns=False)  # `write` knows of checkpoints
            check_no_dead_letters(facts, "Flow.map", self.name)
            rows_map, columns = maps.map_of(
                df, function, schema, number=next(self._runs.function_numbers), flow=self.name
            )
            mapped = map_in_arrow(df, rows_map, columns)
            startup.maps[rows_map.__name__] = rows_map
            return mapped

    @checked_arguments
    def enrich(
        self,
        df: DataFrame,
        calls: Calls,
        *,
        topic: str,
        dead_letter_topic: str | None = None,
        value: Any = None,
        output: Any = None,
        max_dead_letters: int | float | None = None,
    ) -> DataFrame:
        """Call another service once for each row, many at a time, without state. Write the result with `write`, without
        ``topic=``.

        The function of ``calls`` gets a `Record` with the decoded value, and the key in bytes; also topic, partition,
        offset, timestamp and headers, where ``df`` has these columns. It returns the value to write under the same key,
        or a `Record`, or a list of `Record`s, or None for nothing. When a batch runs again, its calls are made again.

        Args:
            df: a streaming DataFrame of this flow, with the columns key and value (string or binary).
            calls: what `concurrently` returns. Rows keep their order.
            topic: where results go that name no other topic.
            dead_letter_topic: where rows go whose call fails; None: the flow stops with ProcessorError. With it,
                operators can only stand in front of this step.
            value: serde of the values that are read; None: bytes.
            output: serde of results that are not bytes; None: there are only bytes.
            max_dead_letters: as of `process`.

        Returns:
            A streaming DataFrame: key, value, topic, headers, timestamp.

        Raises:
            OptionError, SchemaError: wrong arguments or columns.
            UnsupportedQueryError: ``df`` is not a stream of this flow.
        """
        with self._runs.lock:
            startup = self._runs.startup
            order = CallOrder(
                calls, topic, dead_letter_topic, value or serdes.BYTES, output or serdes.BYTES, self.name,
                self._spark.sparkContext.accumulator({}, CallReports()), max_dead_letters,
            )  # fmt: skip
            planned_calls.check_enrich(order, startup.own_topics)
            facts = queries.check_query(df, self.name, checkpoint=True, columns=False)  # `write` knows of checkpoints
            check_no_dead_letters(facts, "Flow.enrich", self.name)
            task = CallRows(order, next(self._runs.function_numbers))
            frame = planned_calls.enrich_frame(df, task)
            startup.calls.append(order)
            startup.functions[task.__name__] = task
            return frame

    @checked_arguments
    def write(
        self,
        df: DataFrame,
        *,
        topic: str | None = None,
        trigger: str | float | None = None,
        guarantee: str = "exactly_once",
        partitioner: str = "key",
        checkpoint: str | Path | None = None,
        output_mode: str = "append",
        on_checkpoint_conflict: str = "refuse",
        transaction_timeout: str | float = "60 seconds",
        compression: str = "none",
        late: str = "drop",
        once: bool = False,
        engine: str = "auto",
    ) -> FlowWriter:
        """Prepare to write a streaming DataFrame; ``.start()`` runs it.

        Args:
            df: made from `read` or a step of this flow, with the columns of Spark's Kafka sink, and optionally
                timestamp.
            topic: output topic for all rows; None: every row names its own in the ``topic`` column.
            trigger: how often a batch starts, for example ``"100 milliseconds"``; None: as soon as the previous one is
                done.
            guarantee: ``exactly_once``, ``at_least_once`` or ``at_most_once``. ``at_least_once``: rows first, then
                progress, without transactions; a crash in between duplicates rows, and after `process` changes of
                state. ``at_most_once``: progress first, then rows; a crash or a failure in between loses rows.
            partitioner: how rows get their partition: ``key``, ``source`` or ``round_robin``. ``key``: as the Java
                client does, any for a null key; a ``partition`` column takes precedence. ``source``: the one that the
                row was read from, in a topic with as many; their records keep their order. ``round_robin``: evenly over
                all, without an order.
            checkpoint: folder of Spark's checkpoint, which must be kept; None: progress is in Kafka alone. Needed for
                state in Spark and for sources that are not topics. On a cluster all executors must be able to write
                there.
            output_mode: Spark's ``append``, ``update`` or ``complete``; the last two need ``checkpoint=``.
            on_checkpoint_conflict: ``resume``: accept an empty checkpoint; the flow continues at its offsets with empty
                state. ``refuse``: ProgressConflictError if the checkpoint and the progress in Kafka do not belong
                together.
            transaction_timeout: the broker aborts a batch whose transaction is open for longer. At most
                ``transaction.max.timeout.ms`` of the brokers (15 minutes by default).
            compression: ``none``, ``gzip``, ``snappy``, ``lz4`` or ``zstd``.
            late: rows later than Spark's watermark: ``drop`` counts them and warns, ``fail`` raises LateRowsError.
                ``fail`` needs ``guarantee="exactly_once"``.
            once: process what is in the sources now, in bounded batches, then stop.
            engine: what reads, processes and writes the batches: ``auto``, ``driver`` or ``tasks``. ``driver``: the
                driver alone. ``tasks``: Spark jobs, whose tasks read the topics. ``auto``: the driver, and tasks with a
                backlog; with ``checkpoint=`` the driver writes small batches.

        Raises:
            OptionError, SchemaError, UnsupportedQueryError, UnknownTopicError, ProgressConflictError: raised here or in
                ``start()``, before anything is written.
        """
        given = WriteOptions(
            topic=topic,
            trigger=trigger,
            guarantee=guarantee,
            partitioner=partitioner,
            checkpoint=checkpoint,
            output_mode=output_mode,
            on_checkpoint_conflict=on_checkpoint_conflict,
            transaction_timeout=transaction_timeout,
            compression=compression,
            late=late,
            once=once,
            engine=engine,
        )
        write = check_write(df, given, self._runs.startup.own_topics, self.name)
        return FlowWriter(lambda: self._runs.start(lambda startup: self._prepared(startup, write)))

    @checked_arguments
    def write_external(
        self,
        df: DataFrame,
        sink: ExternalSink,
        *,
        trigger: str | float | None = None,
        dead_letter_topic: str | None = None,
        max_dead_letters: int | float | None = None,
        once: bool = False,
        engine: str = "auto",
    ) -> FlowWriter:
        """Prepare to write a streaming DataFrame to a system other than Kafka, exactly once; ``.start()`` runs it.

        The rows of a batch and the flow's progress are in one transaction of that system, which decides where the flow
        is. Progress in Kafka and the consumer group follow. Columns of Spark's Kafka source (key, value, headers,
        topic, partition, offset, timestamp) that the table lacks are those of a dead letter. Without a value it is the
        row in JSON.

        Args:
            df: made from `read` of this flow, without process steps and without state in Spark; its columns are those
                of the sink.
            sink: what is written, for example ``PostgresSink(dsn, "ledger")``.
            trigger: as of `write`.
            dead_letter_topic: the topic for rows that the system does not take; None: such a row stops the flow. It
                must exist.
            max_dead_letters: as of `process`.
            once, engine: as of `write`.

        Raises:
            OptionError, SchemaError, UnsupportedQueryError, ProgressConflictError: raised here or in ``start()``,
                before anything is written.
        """
        given = ExternalOptions(trigger, dead_letter_topic, max_dead_letters, once, engine)
        write = check_external(df, sink, given, self.name)
        return FlowWriter(lambda: self._runs.start(lambda startup: self._prepared_external(startup, write)))

    def write_chain(
        self,
        df: DataFrame,
        sink: ExternalSink,
        *,
        topic: str,
        rows: Callable[[DataFrame], DataFrame],
        sink_flow: str | None = None,
        trigger: str | float | None = None,
        dead_letter_topic: str | None = None,
        max_dead_letters: int | float | None = None,
        once: bool = False,
        **options: Any,
    ) -> ChainWriter:
        """Prepare to write a stream to a topic, and from there to another system; ``.start()`` runs both flows.

        There is no transaction over Kafka and another system. So this flow writes ``topic`` in its transaction, and a
        second flow applies the topic to the system. Each is exactly-once. Rows can be seen in Kafka first.

        Args:
            df: as of `write`.
            topic: what the first flow writes and the second one reads; it must exist.
            options: further arguments of `write`.
            sink: what the second flow writes, for example a `PostgresSink`.
            rows: makes the sink's rows of what `read` returns for the topic; with headers if there is a
                ``dead_letter_topic``.
            sink_flow: name of the second flow; None: ``<flow>.sink``.
            trigger: of both flows.
            once: both process what is there now, one after the other. ``start()`` returns when the second one runs.
            dead_letter_topic, max_dead_letters: as of `write_external`.

        Raises:
            OnceflowError: as of `write`, `read` and `write_external`.
        """
        if sink_flow == self.name:
            raise OptionError(
                f"sink_flow={sink_flow!r} is the name of the first flow",
                flow=self.name,
                next_step="give the second flow a name of its own, or leave sink_flow out",
            )
        if self._runs.startup.takeover.until and not once:
            raise OptionError(
                "A read with until= ends the first flow of a chain, and with it the second one, which may be behind",
                flow=self.name,
                next_step="give once=True: the second flow begins when the first one has ended",
            )
        changes = self.write(df, topic=topic, trigger=trigger, once=once, **options)
        if self._beside is not None:
            self._beside.close()
        second = self._beside = self._second(sink_flow or f"{self.name}.sink")

        def applied() -> FlowWriter:
            records = second.read(topic, include_headers=dead_letter_topic is not None)
            return second.write_external(
                rows(records),
                sink,
                trigger=trigger,
                dead_letter_topic=dead_letter_topic,
                max_dead_letters=max_dead_letters,
                once=once,
            )

        return ChainWriter(changes, applied, once=once)

    def _second(self, name: str) -> Flow:
        """Another flow on the same cluster."""
        return Flow(name, self._spark, **self._connection)

    def close(self) -> None:
        """Stop the running query, if there is one, and close the connections. Then you can call `read` again."""
        self._runs.close()
        if self._beside is not None:
            self._beside.close()

    def __enter__(self) -> Flow:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _time_join(
        self, left: DataFrame, right: DataFrame, options: StepOptions, join: TimeJoin, caller: str
    ) -> DataFrame:
        both = both_streams(left, right, join, caller, self.name)
        return self._step(both, options, join, lambda one_topic: both, caller=caller).select(*RESULT)

    def _step(
        self,
        df: DataFrame,
        options: StepOptions,
        processor: Processor | ColumnProcessor,
        columns: Callable[..., DataFrame],
        *,
        tables: Mapping[str, str | JoinTable] | None = None,
        caller: str = "Flow.process",
    ) -> DataFrame:
        """Add a step with state.

        Args:
            columns: returns the rows that the step takes; called with ``one_topic``.
            tables: see `process`.
            caller: what the user has called, for messages.
        """
        with fenced_ends_program(), self._runs.lock:
            startup = self._runs.startup
            checked = process.check_options(
                options, processor, flow=self.name, sources=startup.takeover.sources, tables=startup.steps
            )
            # Pickled here only so that an error is raised at this line of user code. For the tasks it is pickled again
            # at the start: by then the processor may have changed, and names that it uses may have been defined.
            pickled(checked, flow=self.name)
            startup.takeover.known_progress()
            table, own = options.table, startup.table_names
            joins.check_not_joined(table, startup.joins, self.name)
            joined = joins.checked_tables(tables, own=own | {table, table + INTERNAL_SUFFIX}, flow=self.name)
            facts = queries.check_query(df, self.name, call=caller, columns=False)
            check_order(caller, facts, self.name)
            check_no_dead_letters(facts, caller, self.name)
            # The output rows of another step do not come from a topic.
            sources = startup.takeover.sources
            one_topic = next(iter(sources)) if len(sources) == 1 and not facts.has_step else None
            rows = columns(one_topic=one_topic is not None)
            local = is_local(self._spark)
            specs = [startup.find_join(*each, local=local, state_dir=options.state_dir) for each in joined.items()]
            startup.add_step(options, checked, source_topic=one_topic, local=local, joins=specs)
            startup.joins += specs
            return step_query.step_frame(rows, table, checked)

    def _prepared(self, startup: Startup, write: CheckedWrite) -> MicroBatchRun | DirectRun:
        prepared = prepare_query(self._spark, startup, write)
        return direct_run(prepared) if prepared.choice.engine == DIRECT else spark_run(prepared)

    def _prepared_external(self, startup: Startup, write: ExternalWrite) -> DirectRun:
        return external_run(prepare_external(self._spark, startup, write))
