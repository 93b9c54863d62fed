"""``Flow``: read topics, keep state, write topics, exactly once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from onceflow import json_logs, topic_frame
from onceflow.arguments import known_arguments
from onceflow.client.key_stores import check_pem
from onceflow.client.settings import ClientSettings
from onceflow.clock import clock_ms
from onceflow.durations import option_seconds
from onceflow.errors import OptionError
from onceflow.external.sink import ExternalSink
from onceflow.flow_chain import ChainWriter
from onceflow.flow_runs import FlowRuns
from onceflow.flow_steps import FlowSteps
from onceflow.flow_writer import FlowWriter
from onceflow.planning.process import StepOptions
from onceflow.planning.read_options import ReadOptions, check_read, source_options
from onceflow.planning.read_until import Until, check_until
from onceflow.planning.source_starts import StartingOffsets
from onceflow.planning.step_frames import state_columns
from onceflow.protocol.names import Names
from onceflow.spark import jvm, queries, shipping
from onceflow.spark.kafka_source import load_source
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.joins.spec import JoinTable
from onceflow.state.stores.base import Store
from onceflow.uncaught import fenced_ends_program

# Limits the first batch after downtime. At only 10,000 records a second, a batch takes a third of the default
# transaction timeout. Raise it for more throughput, lower it for large records.
DEFAULT_RECORDS_PER_BATCH = 200_000


class Flow(FlowSteps):
    """One service: a name, the topics it reads, and one query that writes. The name is its identity in Kafka.

    The transactional id is ``onceflow.<name>``, the consumer group is ``<name>``. Two drivers with the same name are
    two copies of one flow: the one that started last continues, the other one stops with FencedError.

    Args:
        name: letters, digits, ``. _ -``; at most 200.
        spark: a classic (not Connect) session with the Kafka connector, for example ``onceflow.session()``.
        bootstrap_servers: ``host:port``, several separated by commas.
        options: connection options by their Java names (``security.protocol``, ``sasl.jaas.config``, ...), with
            or without Spark's ``kafka.`` prefix. They go to Spark's reader and to onceflow's own connections.
        transactional_id_prefix: put before the transactional id and the consumer group, so that one prefixed ACL covers
            many flows.
        group_id_prefix: put before the consumer group in its place.
        connect_timeout: how long a start waits while all ``bootstrap_servers`` refuse connections or do not resolve.
            Raise it for a flow that is started before its brokers.
        read_only: the object can only `peek`. Everything that would fence a running driver or write raises OptionError.

    Raises:
        OptionError: a name, address or option is invalid.
        UnsupportedQueryError: Spark Connect, or a session with speculation.
    """

    @known_arguments
    def __init__(
        self,
        name: str,
        spark: SparkSession,
        *,
        bootstrap_servers: str,
        options: Mapping[str, str] | None = None,
        transactional_id_prefix: str = "",
        group_id_prefix: str | None = None,
        connect_timeout: str = "15 seconds",
        read_only: bool = False,
    ) -> None:
        json_logs.use(None)  # where the environment asks for it
        names = Names(name, transactional_id_prefix, group_id_prefix)
        settings = ClientSettings(bootstrap_servers, options or {})
        refused_s = option_seconds(connect_timeout, "connect_timeout", name)
        queries.check_session(spark, name)
        check_pem(settings.options, jvm.java_version(spark))
        shipping.share_modules(spark)
        super().__init__(name, spark, settings, FlowRuns(names, settings, refused_s, read_only=read_only))
        self._beside: Flow | None = None  # the second flow of a chain
        self._connection: dict[str, Any] = {
            "bootstrap_servers": bootstrap_servers,
            "options": options,
            "transactional_id_prefix": transactional_id_prefix,
            "group_id_prefix": group_id_prefix,
            "connect_timeout": connect_timeout,
        }

    @known_arguments
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
    ) -> DataFrame:
        """A streaming DataFrame of one topic. It continues after the last committed batch of the flow.

        Only committed records are read (``isolation.level=read_committed``). The first call fences older drivers of the
        same name, and aborts the transaction that they have left open. From then on only this driver can change the
        flow's committed offsets.

        Args:
            topic: the topic to read. Make one call for each topic.
            starting_offsets: where a flow starts that has never read the topic: ``earliest``, ``latest``, or a dict
                with an offset for every partition. The first start commits these offsets. Later starts continue at the
                committed offsets. They ignore a value other than ``earliest``, with a warning.
            max_records_per_batch: maximum number of records of this topic in one batch, and so in one transaction;
                None: no limit.
            fail_on_data_loss: what happens when records have expired before the flow has read them. True:
                DataLossError. False: a warning, and they are skipped.
            include_headers: adds the ``headers`` column.
            options: further options of Spark's Kafka source, for example ``groupIdPrefix``. With ``minPartitions`` or
                ``maxRecordsPerPartition`` several tasks read one partition, and records lose their order. So these two
                are refused except with ``partitioner="round_robin"`` and in queries that keep state in Spark.
            until: where the read ends; None: it does not end. ``latest``: at the end of the topic now, that is at this
                call. A time (a datetime with a time zone, a text such as ``2025-01-31T08:00:00Z``, or epoch
                milliseconds): in each partition before the first record with this timestamp or a later one. A dict
                with an offset for every partition: before these offsets. The query ends when all partitions of all
                reads are there. See ``docs/operations.md``, "A backfill that ends".

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
        with fenced_ends_program(), self._runs.lock:
            self._runs.check_readable(topic)
            queries.check_connector(self._spark, self.name)
            offsets = self._runs.startup.add_source(given)
            ends = self._runs.startup.until.get(topic)
        options_of_source = source_options(given, offsets, self.name)
        return load_source(self._spark, self._settings, options_of_source, ends, partitions=len(offsets))

    @known_arguments
    def peek(
        self,
        topic: str,
        *,
        last: int | None = None,
        first: int | None = None,
        since: str | float | datetime | None = None,
        partitions: Sequence[int] | None = None,
    ) -> DataFrame:
        """Some committed records of a topic as a batch DataFrame, with the connection options of this flow.

        It fences nobody, and works while the flow runs. Arguments, columns and errors are those of ``onceflow.peek``.
        """
        wanted = topic_frame.excerpt(topic, last=last, first=first, since=since, partitions=partitions)
        return topic_frame.frame(self._spark, self._settings, topic, wanted)

    @known_arguments
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
        retention: str | None = None,
        snapshot_per_partition: bool = False,
        store: str | type[Store] = "lmdb",
        state_dir: str | Path | None = None,
        adopt_existing: bool = False,
        idle_timeout: str = "30 seconds",
        clock_after: str | None = None,
        max_timers_per_batch: int | None = 1_000,
        max_dead_letters: int | float | None = None,
        tables: Mapping[str, str | JoinTable] | None = None,
        changelog: bool = True,
    ) -> DataFrame:
        """Run user code with state per key over a stream. The state is kept in the compacted topic ``table``.

        Each row is processed in the table partition that Kafka's default partitioner chooses for its key. Changes of
        the state are written to that topic in the transaction of the batch. A local store caches the topic. Write the
        returned DataFrame with ``Flow.write``. Without operators in between, the tasks that process the records also
        write the outputs.

        Args:
            df: made from ``Flow.read`` or another ``Flow.process`` of this flow, with the columns key and value (string
                or binary). The columns partition, offset, timestamp, topic and headers are optional; the processor
                sees them where they are present.
            processor: an instance of your class. It is pickled with all its attributes and sent to the tasks. Create
                connections and locks in its ``open``, because they cannot be pickled.
            table: name of the table topic. It is created when it is missing, and so is ``<table>-internal``.
            partitions: number of partitions of a new table; None: as many as the source has.
            on_error: what happens to a record for which user code raises. ``fail``: the flow stops. ``dead-letter``:
                the record goes to ``dead_letter_topic`` in the same transaction, with the cause in its headers.
            dead_letter_topic: the topic for such records. It must exist.
            late_topic: the topic for records that are later than ``allowed_lateness`` of the processor allows. It must
                exist. Give both of them or neither.
            retention: rows that were not written for this long are deleted (``"7 days"``). It replaces the processor's
                ``ttl``.
            snapshot_per_partition: keep the whole state of a partition in one record. Only for small state, because
                every batch writes all of it.
            store: the local store: ``lmdb``, ``memory``, ``rocksdb`` (needs the extra ``rocksdb``), or a class of your
                own.
            state_dir: folder of the local stores, on every host; None: the host's ``$ONCEFLOW_STATE_DIR``, or
                ``~/.local/state/onceflow`` where that is not set.
            adopt_existing: use the rows of an existing table topic for which the flow has no progress. In the first run
                of a copy (``onceflow fork``), the table may also begin empty in place of a copied one.
            idle_timeout: the watermark ignores a source partition that has had no new records for this long, over all
                runs of the flow.
            clock_after: when no source partition has had records for this long, event time goes on by the clock, as far
                as the time of day: windows close, though nothing comes any more. Records that come later with an
                earlier time are late. At least ``idle_timeout``. None: event time stands still.
            max_timers_per_batch: maximum number of timers that fire in one partition and batch, the earliest first. The
                others fire in further batches, which follow at once. None: all due timers fire in one transaction.
            max_dead_letters: stop the flow when one run has more dead letters than this: a count (``100``), or a share
                of the records that the step has read (``0.01``), checked from 100 records on. The batch that exceeds it
                is not committed. None: no limit.
            tables: tables that the processor looks up rows in, by name: topics, or `JoinTable`s. It gets them as
                ``state.table(name)``. All records of a batch see them at the same offsets.
            changelog: False: the table has no topics, and its state is in local stores only. Outputs stay exactly-once,
                but a partition whose local copy is lost or out of date begins empty, with a warning. For state that
                may be lost. ``table`` then only names local folders.

        Returns:
            A streaming DataFrame of what the processor yields: key, value, topic, headers, timestamp.

        Raises:
            OptionError, SchemaError: wrong arguments or columns; the processor cannot be pickled.
            UnsupportedQueryError: ``df`` is not a stream of this flow, or has operators that keep state in Spark.
            ProgressConflictError: the table topic does not match the flow's progress, or the state has another version.
            PermissionDeniedError: a topic is missing, and this principal may not create it.
        """
        options = StepOptions(
            table, partitions, on_error, dead_letter_topic, late_topic, retention, snapshot_per_partition, store,
            state_dir, adopt_existing, idle_timeout, max_timers_per_batch, max_dead_letters, changelog,
            clock_after=clock_after,
        )  # fmt: skip
        return self._step(df, options, processor, partial(state_columns, df, self.name), tables=tables)

    def write_chain(
        self,
        df: DataFrame,
        sink: ExternalSink,
        *,
        topic: str,
        rows: Callable[[DataFrame], DataFrame],
        sink_flow: str | None = None,
        trigger: str | None = None,
        dead_letter_topic: str | None = None,
        max_dead_letters: int | float | None = None,
        once: bool = False,
        **options: Any,
    ) -> ChainWriter:
        """Prepare to write a stream to a topic, and from there to another system; ``.start()`` runs both flows.

        There is no transaction over Kafka and another system. So this flow writes ``topic`` in its transaction, and a
        second flow applies the topic to the system. Each is exactly-once. Rows can be seen in Kafka first.

        Args:
            df, topic, options: as of `write`. The topic must exist.
            sink: what is written in the end, for example a `PostgresSink`.
            rows: makes the sink's rows of the topic's records. It gets what `read` returns; with headers if there is a
                ``dead_letter_topic``.
            sink_flow: name of the second flow; None: that of this one, and ``.sink``.
            trigger, once: of both flows.
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
        if self._runs.startup.until and not once:
            raise OptionError(
                "A read with until= ends the first flow of a chain, and with it the second one, which may be behind",
                flow=self.name,
                next_step="give once=True: the second flow begins when the first one has ended",
            )
        changes = self.write(df, topic=topic, trigger=trigger, once=once, **options)
        if self._beside is not None:
            self._beside.close()
        second = self._beside = Flow(sink_flow or f"{self.name}.sink", self._spark, **self._connection)

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

    def close(self) -> None:
        """Stop the running query, if there is one, and close the connections. Then you can call `read` again."""
        self._runs.close()
        if self._beside is not None:
            self._beside.close()

    def __enter__(self) -> Flow:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
