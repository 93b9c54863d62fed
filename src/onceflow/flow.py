"""``Flow``: read topics, write topics, exactly once. The one place that wires the rest together."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from onceflow import hooks, interactive
from onceflow.client import offsets as kafka_offsets
from onceflow.client.brokers import warn_of_settings
from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.deadline import Deadline
from onceflow.client.first_connection import REFUSED_S
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import find_topics
from onceflow.driver import progress_log
from onceflow.driver.batch_sink import BatchSink
from onceflow.driver.commit import BatchCommit
from onceflow.driver.delivery import EXACTLY_ONCE, GUARANTEES, ExactlyOnce, delivery
from onceflow.driver.driver_session import DriverSession
from onceflow.driver.late_rows import FAIL, LATE
from onceflow.driver.running import (
    OUTPUT_MODES,
    RunOptions,
    duration_s,
    kept,
    scratch,
)
from onceflow.driver.targets import load_targets
from onceflow.driver.watching import Watch
from onceflow.durations import duration_ms
from onceflow.errors import (
    BatchAbortedError,
    OnceflowError,
    OptionError,
    UnsupportedQueryError,
)
from onceflow.planning import (
    checkpoints,
    process,
    source_starts,
    step_query,
)
from onceflow.planning.options import SinkOptions
from onceflow.planning.ownership import Columns, check_columns
from onceflow.planning.process import Step, StepOptions
from onceflow.planning.step_frames import state_columns
from onceflow.protocol.compression import compression_code
from onceflow.protocol.names import Names, OwnTopics
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress
from onceflow.query import FlowQuery
from onceflow.spark import (
    logs,
    queries,
    query_listener,
    shipping,
    token_endpoint,
)
from onceflow.spark.imports import ImportCheck, sent_to_tasks
from onceflow.spark.pickling import pickled
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.stores.base import Store
from onceflow.state.topics import TableTopics

log = logging.getLogger("onceflow")

PARTITIONERS = ("key", "source", "round_robin")
# Bounds a batch after downtime: at a modest 10,000 records a second it takes a third of the default
# transaction timeout. Raise it for throughput, lower it for large records.
DEFAULT_RECORDS_PER_BATCH = 200_000
_START_SECONDS = 60.0


class Flow:
    """One service: a name, the topics it reads, and one query that writes. The name is its identity in Kafka.

    The transactional id is ``onceflow.<name>``, the consumer group is ``<name>``. Two drivers with one name are two
    copies of one flow: the one that started last goes on, the other one stops with FencedError.

    Args:
        name: letters, digits, ``. _ -``; at most 200.
        spark: a classic (not Connect) session with the Kafka connector, for example ``onceflow.session()``.
        bootstrap_servers: ``host:port``, several separated by commas.
        options: connection options by their Java names (``security.protocol``, ``sasl.jaas.config``, ...), with
            or without Spark's ``kafka.`` prefix. They go to Spark's reader and to onceflow's own connections.
        transactional_id_prefix, group_id_prefix: put before the transactional id and the consumer group, so that one
            prefixed ACL covers many flows.
        connect_timeout: how long a start waits while all ``bootstrap_servers`` refuse connections or do not resolve.
            Raise it for a flow that is started before its brokers. It does not apply to a running flow, whose brokers
            may be away for longer.

    Raises:
        OptionError: a bad name, address or option.
        UnsupportedQueryError: Spark Connect, or a session with speculation.
    """

    def __init__(
        self,
        name: str,
        spark: SparkSession,
        *,
        bootstrap_servers: str,
        options: Mapping[str, str] | None = None,
        transactional_id_prefix: str = "",
        group_id_prefix: str = "",
        connect_timeout: str = "15 seconds",
    ) -> None:
        self._names = Names(name, transactional_id_prefix, group_id_prefix)
        self._settings = ClientSettings(bootstrap_servers, options or {})
        self._refused_s = duration_s(connect_timeout, "connect_timeout", name)
        queries.check_session(spark, name)
        shipping.share_modules(spark)
        self._spark = spark
        self._hold: DriverSession | None = None
        self._committed: Progress | None = None
        self._sources: dict[str, source_starts.SourceTopic] = {}
        self._steps: dict[str, Step] = {}
        self._lock = threading.RLock()
        self._running: FlowQuery | None = None
        self._fresh = False  # whether progress was read after the last InitProducerId

    @property
    def name(self) -> str:
        return self._names.flow

    # ---- reading -------------------------------------------------------------------------------------

    def read(
        self,
        topic: str,
        *,
        starting_offsets: source_starts.StartingOffsets = "earliest",
        max_records_per_batch: int | None = DEFAULT_RECORDS_PER_BATCH,
        fail_on_data_loss: bool = True,
        include_headers: bool = False,
        options: Mapping[str, str] | None = None,
    ) -> DataFrame:
        """A streaming DataFrame of one topic. It continues after the last committed batch of the flow.

        Only committed records are read (``isolation.level=read_committed``). The first call takes the flow over: an
        older driver of the same name is fenced, and the transaction it left open is aborted. From then on the flow's
        committed offsets cannot change, unless this driver changes them.

        Args:
            topic: the topic to read. Make one call for each topic.
            starting_offsets: where a flow starts that has never read the topic: ``earliest``, ``latest``, or a dict
                with an offset for every partition. The first start commits these offsets. Later starts continue where
                the flow is. They ignore a value other than ``earliest``, with a warning.
            max_records_per_batch: most records of this topic in one batch, and so in one transaction; None: no bound.
            fail_on_data_loss: what happens when records have expired before the flow has read them. True:
                DataLossError. False: a warning, and they are skipped.
            include_headers: adds the ``headers`` column.
            options: further options of Spark's Kafka source, for example ``groupIdPrefix``. With ``minPartitions`` or
                ``maxRecordsPerPartition`` several tasks read one partition, and records lose their order. So these two
                are refused except with ``partitioner="round_robin"`` and in queries that keep state in Spark.

        Returns:
            Spark's Kafka columns: key, value, topic, partition, offset, timestamp, timestampType[, headers].

        Raises:
            UnknownTopicError, PermissionDeniedError, BrokerUnreachableError, BrokerUnsupportedError,
            DataLossError, ProgressConflictError: see ``docs/guarantees.md``, "What stops a start".
            EnvironmentUnusableError: the session has no Kafka connector.
        """
        if not topic or not str(topic).strip():
            raise OptionError(f"{topic!r} is not the name of a topic", flow=self.name, next_step="give one topic name")
        if max_records_per_batch is not None and max_records_per_batch < 1:
            raise OptionError(
                "max_records_per_batch must be at least 1, or None", flow=self.name, next_step="leave it at its default"
            )
        extra = queries.reader_options(options or {}, self.name)
        with self._lock:
            if self._runs():
                self._stop_earlier(topic)
            if self._runs():
                raise OptionError(
                    "The flow is running; its sources cannot be changed",
                    flow=self.name,
                    next_step="call read before write(...).start(), or stop the query first",
                )
            queries.check_connector(self._spark, self.name)
            try:
                start = self._start_of(topic, starting_offsets, fail_on_data_loss)
            except OnceflowError as error:
                self._fresh = False  # whatever was open is aborted by the next take-over
                error.locate(flow=self.name, topic=topic)
                raise
        query_listener.watch(self._spark)
        connection = {**self._settings.spark_reader(), **token_endpoint.reader_options(self._spark, self._settings)}
        reader = self._spark.readStream.format("kafka").options(**connection).options(**extra)
        reader = (
            reader.option("subscribe", topic)
            .option("startingOffsets", queries.starting_offsets_json(topic, start.offsets))
            .option("kafka.isolation.level", "read_committed")
            .option("failOnDataLoss", str(fail_on_data_loss).lower())
            .option("includeHeaders", str(include_headers).lower())
            .option(queries.MARK, self.name)
        )
        if max_records_per_batch is not None:
            reader = reader.option("maxOffsetsPerTrigger", str(max_records_per_batch))
        return reader.load()

    def _stop_earlier(self, topic: str) -> None:
        """Stop the query that an earlier cell has started, unless this one has only mistyped the topic."""
        if interactive.is_interactive():
            find_topics(self._connected(), {topic: "source"}, self._starting())
            interactive.stop_earlier(self._settings.bootstrap_servers, self._names.transactional_id)

    def _start_of(
        self, topic: str, starting_offsets: source_starts.StartingOffsets, fail_on_data_loss: bool
    ) -> source_starts.Start:
        deadline = self._starting()
        self._connect(deadline)
        info = find_topics(self._connected(), {topic: "source"}, deadline)[topic]
        self._take_over({topic: sorted(info.leaders)}, deadline)
        # Looked at after the take-over: an older driver cannot move progress past these offsets any more.
        source = self._sources[topic] = self._look_at(info, deadline)
        start = source_starts.plan(
            source,
            self._committed,
            starting_offsets=starting_offsets,
            fail_on_data_loss=fail_on_data_loss,
            flow=self.name,
        )
        for warning in start.warnings:
            log.warning("flow %s: %s", self.name, warning)
        if start.pin:
            self._pin(topic, start.offsets, deadline)
        return start

    def _starting(self) -> Deadline:
        """The deadline of a start: one that waits longer for its brokers has more time in all."""
        seconds = _START_SECONDS + max(0.0, self._refused_s - REFUSED_S)
        return Deadline(seconds, f"starting flow {self.name}")

    def _connect(self, deadline: Deadline) -> None:
        if self._hold is None:
            self._hold = DriverSession(Cluster(self._settings, refused_s=self._refused_s), self._names)
            self._hold.transactions.check_supported(deadline)

    def _look_at(self, info: TopicInfo, deadline: Deadline) -> source_starts.SourceTopic:
        cluster = self._connected()
        span = {info.name: sorted(info.leaders)}
        earliest = kafka_offsets.list_offsets(cluster, span, kafka_offsets.EARLIEST, deadline)[info.name]
        latest = kafka_offsets.list_offsets(cluster, span, kafka_offsets.LATEST, deadline)[info.name]
        return source_starts.SourceTopic(info.name, info.topic_id, earliest, latest)

    def _take_over(self, sources: dict[str, list[int]], deadline: Deadline) -> None:
        """Step ``init``: fence before reading progress, so that what is read cannot change any more."""
        if self._fresh:
            return
        hold = self._held()
        interactive.stop_earlier(self._settings.bootstrap_servers, self._names.transactional_id)
        progress_log.ensure_topic(hold.cluster, deadline)
        hold.init(deadline)
        self._committed = hold.progress(sources, deadline)
        self._fresh = True
        hooks.at("init", where="driver", flow=self.name)

    def _pin(self, topic: str, offsets: dict[int, int], deadline: Deadline) -> None:
        """Commit where a topic is read from, before anything of it is read."""
        source = self._sources[topic]
        before = self._committed
        progress = Progress(
            flow=self._names.progress_key,
            batch_id=0 if before is None else before.batch_id,
            offsets={**({} if before is None else before.offsets), topic: offsets},
            topic_ids={**({} if before is None else before.topic_ids), topic: source.topic_id},
            time_ms=progress_log.now_ms(),
        )
        if before is not None:
            progress = replace(before, offsets=progress.offsets, topic_ids=progress.topic_ids, time_ms=progress.time_ms)
        self._commit_progress(progress, deadline)

    # ---- state -----------------------------------------------------------------------------------------

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
        max_timers_per_batch: int | None = 1_000,
        max_dead_letters: int | float | None = None,
    ) -> DataFrame:
        """Run user code with state per key over a stream. The state is kept in the compacted topic ``table``.

        Each row goes to the partition of the table that Kafka's default partitioner gives its key. What user code
        changes is written to that topic in the transaction of the batch. A local store caches the topic. Write the
        returned DataFrame with ``Flow.write``. Without operators in between, the tasks that process the records also
        write the outputs.

        Args:
            df: made from ``Flow.read`` or another ``Flow.process`` of this flow, with the columns key and value (string
                or binary). The columns partition, offset, timestamp, topic and headers are optional; the processor
                sees them where they are present.
            processor: an instance of your class. It is pickled with all its attributes and sent to the tasks. Create
                connections and locks in its ``open``, because they cannot be pickled.
            table: name of the table topic. It is created when it is missing, and so is ``<table>-internal``.
            partitions: how many partitions a table gets that does not exist yet; None: as many as the source has.
            on_error: what happens to a record for which user code raises. ``fail``: the flow stops. ``dead-letter``:
                the record goes to ``dead_letter_topic`` in the same transaction, with the cause in its headers.
            dead_letter_topic: the topic for such records. It must exist.
            late_topic: the topic for records that are later than ``allowed_lateness`` of the processor allows. It must
                exist. Give both of them or neither.
            retention: rows that were not written for this long are deleted (``"7 days"``). It takes the place of the
                processor's ``ttl``.
            snapshot_per_partition: keep the whole state of a partition in one record. Only for small state, because
                every batch writes all of it.
            store: the local store: ``lmdb``, ``memory``, ``rocksdb`` (needs the extra ``rocksdb``), or a class of your
                own.
            state_dir: folder of the local stores, on every host; None: the host's ``$ONCEFLOW_STATE_DIR``, or
                ``~/.local/state/onceflow`` where that is not set.
            adopt_existing: take over the rows of a table topic that the flow has no progress of.
            idle_timeout: event time stops waiting for a source partition that has brought no records for this long.
            max_timers_per_batch: most timers that fire in one partition and batch, the earliest first. The others fire
                in further batches, which follow at once. None: all due timers fire in one transaction.
            max_dead_letters: stop the flow when one run has more dead letters than this: a count (``100``), or a share
                of the records that the step has read (``0.01``), checked from 100 records on. The batch that exceeds it
                is not committed. None: no limit.

        Returns:
            A streaming DataFrame of what the processor yields: key, value, topic, headers, timestamp.

        Raises:
            OptionError, SchemaError: wrong arguments or columns; the processor cannot be pickled.
            UnsupportedQueryError: ``df`` is not a stream of this flow, or has operators that keep state in Spark.
            ProgressConflictError: the table topic is not what progress says, or the state has another version.
            PermissionDeniedError: a topic is missing and may not be created.
        """
        options = StepOptions(
            table, partitions, on_error, dead_letter_topic, late_topic, retention, snapshot_per_partition, store,
            state_dir, adopt_existing, idle_timeout, max_timers_per_batch, max_dead_letters,
        )  # fmt: skip
        with self._lock:
            checked = process.check_options(
                options, processor, flow=self.name, sources=self._sources, tables=self._steps
            )
            pickled(checked, flow=self.name)
            if not self._fresh or self._committed is None:
                raise OptionError("Nothing was read yet", flow=self.name, next_step="call Flow.read first")
            facts = queries.check_plan(df, self.name)
            self._check_order("Flow.process", facts)
            # Rows that another step has made come from no topic.
            one_topic = next(iter(self._sources)) if len(self._sources) == 1 and not facts.has_step else None
            rows = state_columns(df, self.name, one_topic=one_topic is not None)
            deadline = Deadline(_START_SECONDS, f"preparing table {table} of flow {self.name}")
            try:
                topics = self._ensure_table(options, checked, deadline)
            except OnceflowError as error:
                error.locate(flow=self.name, topic=table)
                raise
            spec = process.make_spec(
                options,
                checked,
                topics,
                flow=self.name,
                flow_key=self._names.progress_key,
                source_topic=one_topic,
                local=process.runs_here(self._spark),
            )
            lateness = checked.allowed_lateness
            self._steps[table] = Step(
                spec=spec,
                lateness_ms=None if lateness is None else duration_ms(lateness),
                idle_s=duration_ms(idle_timeout) / 1000,
            )
            return step_query.step_frame(rows, table)

    def _ensure_table(
        self, options: StepOptions, processor: Processor | ColumnProcessor, deadline: Deadline
    ) -> TableTopics:
        """The table's topics; progress knows of them before anything is written to them."""
        before = self._committed
        if before is None:
            raise OptionError("Nothing was read yet", flow=self.name, next_step="call Flow.read first")
        known = before.tables.get(options.table)
        if known is not None:
            process.check_migration(processor, known.version, table=options.table, flow=self.name)
        counts = {name: len(source.earliest) for name, source in self._sources.items()}
        topics, progress = process.ensure_table(self._connected(), options, before, counts, processor, deadline)
        if progress is not before:
            self._commit_progress(progress, deadline)
        return topics

    def _commit_progress(self, progress: Progress, deadline: Deadline) -> None:
        """Commit what a start has decided, in a transaction of its own."""
        try:
            self._try_to_commit(progress, deadline)
        except BatchAbortedError as error:
            # Between two calls of a start may be days: Kafka may have forgotten the transactional id meanwhile.
            log.info("flow %s: what its start has decided is committed again: %s", self.name, error.what)
            ExactlyOnce(self._held(), []).abort(deadline)
            self._try_to_commit(progress, deadline)

    def _try_to_commit(self, progress: Progress, deadline: Deadline) -> None:
        transaction = ExactlyOnce(self._held(), [])
        transaction.begin(deadline)
        transaction.written([])  # it has no rows
        # The group gets offsets of topics that are read; progress may know others, which may be gone.
        read = {topic: dict(offsets) for topic, offsets in progress.offsets.items() if topic in self._sources}
        transaction.write_progress(progress, read, deadline)
        transaction.commit(deadline, doing="starting")
        self._committed = progress

    # ---- writing -------------------------------------------------------------------------------------

    def write(
        self,
        df: DataFrame,
        *,
        topic: str | None = None,
        trigger: str | None = None,
        guarantee: str = "exactly_once",
        partitioner: str = "key",
        checkpoint: str | Path | None = None,
        output_mode: str = "append",
        on_checkpoint_conflict: str = "refuse",
        transaction_timeout: str = "60 seconds",
        compression: str = "none",
        small_batch_rows: int | None = None,
        late: str = "drop",
        once: bool = False,
    ) -> FlowWriter:
        """Prepare to write a streaming DataFrame; ``.start()`` runs it.

        Args:
            df: made from ``Flow.read`` or ``Flow.process`` of this flow, with the columns of Spark's own Kafka sink
                (key, value, topic, partition, headers) and optionally timestamp. Other columns are ignored.
            topic: output topic for all rows. None: every row names its own in the ``topic`` column.
            trigger: how often a batch (and so a transaction) starts, for example ``"100 milliseconds"``. None: as soon
                as the previous one is done.
            guarantee: ``exactly_once``: rows, progress and source offsets are written in one transaction.
                ``at_least_once``: rows first, then progress, without transactions; a crash in between duplicates rows.
                ``at_most_once``: progress first, then rows; a crash or a failure in between loses rows.
            partitioner: ``key`` places rows as the Java client does. ``source`` keeps the partition a row was read
                from, without a shuffle. ``round_robin`` fills partitions evenly, without a shuffle; keys lose their
                order.
            checkpoint: folder of Spark's checkpoint, which must be kept. Needed for queries with state in Spark
                (aggregations, stream-stream joins, de-duplication, transformWithState) and for sources that are not
                topics. With a local master it may be a local path, otherwise all executors must be able to write there
                (``s3a://...``). None: progress is in Kafka alone, and Spark's checkpoint is a scratch folder.
            output_mode: Spark's ``append``, ``update`` or ``complete``; the last two need checkpoint=.
            on_checkpoint_conflict: what happens when the checkpoint and the flow's progress in Kafka do not belong
                together. ``refuse``: ProgressConflictError. ``resume``: an empty checkpoint is accepted, and the flow
                continues at its committed offsets with empty Spark state.
            transaction_timeout: the broker aborts a batch whose transaction is open for longer. It can be at most
                ``transaction.max.timeout.ms`` of the brokers (15 minutes by default).
            compression: none, gzip, snappy, lz4 or zstd.
            small_batch_rows: the driver writes a batch itself when it expects at most this many rows. That saves Python
                tasks and a shuffle, and so much latency. Behind ``Flow.process`` source records are counted in place of
                rows. 0: tasks always write. None: 8,000 rows, or 10,000 source records behind ``Flow.process``; but
                0 when the query has mapInArrow or mapInPandas, where a few records may become any number of rows.
            late: what happens to rows that Spark drops because they are later than the watermark of a query with state.
                ``drop``: they are counted (``BatchSummary.dropped``), and a warning says so. ``fail``: LateRowsError,
                and the batch is not committed; needs ``guarantee="exactly_once"``.
            once: process what is in the sources now, in bounded batches, then stop (Spark's availableNow).

        Raises:
            OptionError, SchemaError, UnsupportedQueryError, UnknownTopicError, ProgressConflictError: here or in
                ``start()``; nothing has been written.
        """
        for name, value, known in (
            ("guarantee", guarantee, GUARANTEES),
            ("partitioner", partitioner, PARTITIONERS),
            ("output_mode", output_mode, OUTPUT_MODES),
            ("on_checkpoint_conflict", on_checkpoint_conflict, checkpoints.ON_CONFLICT),
            ("late", late, LATE),
        ):
            if value not in known:
                raise OptionError(
                    f"{name}={value!r} is unknown", flow=self.name, next_step=f"use one of {', '.join(known)}"
                )
        if checkpoint is not None and not str(checkpoint).strip():
            raise OptionError("checkpoint= is empty", flow=self.name, next_step="give a folder, or leave it out")
        compression_code(compression)
        timeout_s = duration_s(transaction_timeout, "transaction_timeout", self.name)
        if trigger is not None:
            # In the words Spark knows: it takes fewer units than we do.
            trigger = f"{round(duration_s(trigger, 'trigger', self.name) * 1000)} milliseconds"
            if once:
                raise OptionError("trigger and once exclude each other", flow=self.name, next_step="give one of them")
        facts = queries.check_plan(df, self.name, checkpoint=checkpoint is not None)
        if output_mode != "append" and checkpoint is None:
            raise OptionError(
                f"output_mode={output_mode!r} needs a checkpoint",
                flow=self.name,
                next_step="give checkpoint=, or leave output_mode out: without state in Spark all rows are appended",
            )
        if late == FAIL and guarantee != EXACTLY_ONCE:
            raise OptionError(
                f'late="fail" does not go with guarantee={guarantee!r}: without a transaction rows are out already',
                flow=self.name,
                next_step="leave one of them out",
            )
        if partitioner != "round_robin" and not facts.stateful:
            self._check_order(f'partitioner="{partitioner}"', facts)
        self._check_output(topic)
        columns = check_columns(df.schema, topic=topic, flow=self.name)
        if columns.ignored:
            log.info("flow %s: columns not written: %s", self.name, ", ".join(columns.ignored))
        interval_s = 0.0 if trigger is None else duration_s(trigger, "trigger", self.name)
        options = SinkOptions(
            topic, partitioner, compression, timeout_s, small_batch_rows, guarantee=guarantee, stateful=facts.stateful,
            trigger_s=interval_s,
            timers_s=math.inf if once else max(1.0, interval_s),
            late=late if facts.stateful and facts.watermark else None,
        )  # fmt: skip
        run = RunOptions(
            trigger,
            once,
            None if checkpoint is None else str(checkpoint),
            output_mode,
            on_checkpoint_conflict,
            facts,
        )
        return FlowWriter(self, df, options, columns, run)

    def _check_order(self, what: str, facts: queries.PlanFacts) -> None:
        """Refuse what needs records in the order of their offsets, where tasks share a partition. Warn where the query
        itself gives the order up."""
        if facts.dealt_out:
            log.warning(
                'flow %s: repartition(n) without a column loses the order of a key\'s records; repartition(n, "key") '
                "keeps it",
                self.name,
            )
        if facts.splitting is not None:
            option, topic = facts.splitting
            raise OptionError(
                f"{what} needs the records of a key in order, and {option} divides the partitions of {topic} among "
                "tasks",
                flow=self.name,
                topic=topic,
                next_step=f'leave {option} out of Flow.read, or write with partitioner="round_robin"',
            )

    def _own_topics(self) -> OwnTopics:
        tables = frozenset(name for step in self._steps.values() for name in step.spec.topics.ids)
        return OwnTopics(frozenset(self._sources), tables)

    def _check_output(self, topic: str | None) -> None:
        why = "" if topic is None else self._own_topics().refusal(topic)
        if why:
            raise OptionError(
                f"The output topic {topic!r} {why}", flow=self.name, next_step="give outputs a topic of their own"
            )

    def _start(self, df: DataFrame, options: SinkOptions, columns: Columns, run: RunOptions) -> FlowQuery:
        with self._lock:
            if self._runs():
                raise OptionError(
                    "The flow has a running write already",
                    flow=self.name,
                    next_step="one flow writes one query (it may feed many topics through a topic column); "
                    "use another Flow for another query",
                )
            if not self._fresh and run.facts.topics:
                raise UnsupportedQueryError(
                    "The DataFrame was read before an earlier run of this flow; its offsets are out of date",
                    flow=self.name,
                    next_step="call Flow.read again before starting the flow again",
                )
            queries.check_session(self._spark, self.name)
            step_query.check_goes_with(df, self._steps, options.guarantee, run.checkpoint, flow=self.name)
            self._check_output(options.topic)  # sources may have been read since Flow.write
            process.check_side_topics(process.side_topics(self._steps), self._own_topics(), self.name)
            shipping.share_modules(self._spark)  # what was imported since
            check = ImportCheck(self._spark, sent_to_tasks(df, self._steps, self.name), flow=self.name)
            check.at_start()
            deadline = self._starting()
            try:
                self._connect(deadline)
                self._take_over({}, deadline)  # only a query without topics has not done it yet
                progress = self._committed or Progress(self._names.progress_key, 0, {}, {}, progress_log.now_ms())
                location = None if run.checkpoint is None else kept(self._spark, run, progress, self.name)
                hold = self._held()
                letters = process.side_topics(self._steps)
                load_targets(hold.cluster, options.topic, deadline, more=letters)
                outputs = [t for t in (options.topic, *letters) if t is not None]
                written = [*outputs, *(t for s in self._steps.values() for t in s.spec.topics.ids)]
                warn_of_settings(hold.cluster, [*written, PROGRESS_TOPIC], deadline, flow=self.name)
                hold.decide(written, self._committed, deadline)
                hold.transactions.timeout_ms = int(options.transaction_timeout_s * 1000)
                hold.transactions.renew(deadline)
            except OnceflowError as error:
                error.locate(flow=self.name)
                raise
            query = step_query.wire(
                df, options, columns, self._steps, progress,
                flow=self.name,
                source_partitions={name: sorted(source.earliest) for name, source in self._sources.items()},
                clock=not run.once,
            )  # fmt: skip
            location = location or scratch(self.name)  # nothing is refused from here on but by Spark
            state, options = query.state, query.options
            reads_little = not run.facts.others and queries.reads_little(df)
            options = replace(options, reads_little=reads_little)
            commit = BatchCommit(
                state=state,
                names=self._names,
                settings=self._settings,
                cluster=hold.cluster,
                delivery=delivery(options.guarantee, hold, written),
                progress=progress,
                options=options,
                columns=query.columns,
                cores=step_query.current_cores(self._spark),
                checkpoint=location.folder,
                numbering=location.numbering,
                source_starts={name: dict(source.earliest) for name, source in self._sources.items()},
                source_partitions={name: len(source.earliest) for name, source in self._sources.items()},
            )
            sink = BatchSink(commit, options, before_first=check.finish)
            writer = query.df.writeStream.foreachBatch(sink).option("checkpointLocation", location.address)
            if all(query.name != self.name for query in self._spark.streams.active):
                writer = writer.queryName(self.name)  # else an older driver of this flow is in this session
            self._fresh = False
            watch = Watch(
                self._settings,
                {name: sorted(source.earliest) for name, source in self._sources.items()},
                flow=self.name,
                over=lambda: sink.over or sink.failure is not None,
            )

            def stopped() -> None:
                watch.stop()
                sink.ended()
                if state is not None:
                    state.settle()
                location.close()
                self._release(hold)

            try:
                logs.silence_py4j()
                query_listener.watch(self._spark)  # a query without Flow.read has not done it yet
                with query_listener.by_flow(self.name):
                    self._running = FlowQuery(run.apply(writer).start(), sink, stopped)
                query_listener.started(self._running)
                interactive.started(self._settings.bootstrap_servers, self._names.transactional_id, self._running)
            except AnalysisException as error:
                stopped()
                raise UnsupportedQueryError(
                    "Spark refuses the query",
                    flow=self.name,
                    detail=str(error).splitlines()[0],
                    next_step="see Spark's Structured Streaming guide for what output_mode the query's operators allow",
                ) from error
            except BaseException:
                stopped()
                raise
            return self._running

    def close(self) -> None:
        """Stop the running query, if there is one, and close the connections. The flow can be read again."""
        with self._lock:
            if self._running is not None and self._running.isActive:
                self._running.stop()
            if self._hold is not None:
                self._release(self._hold)

    def _runs(self) -> bool:
        """Whether the last query is active. One that has ended by itself gives back here what it holds."""
        if self._running is not None and not self._running.isActive:
            self._running.release()
            if self._hold is not None:
                self._release(self._hold)  # another thread may be about to, and must not close what is opened now
            self._running = None
        return self._running is not None

    def _release(self, hold: DriverSession) -> None:
        """Close the connections of one run. Those of a newer run of this flow are its own, and stay."""
        with self._lock:
            hold.cluster.close()
            if self._hold is not hold:
                return
            self._hold = self._committed = None
            self._sources = {}
            self._steps = {}
            self._fresh = False

    def __enter__(self) -> Flow:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connected(self) -> Cluster:
        return self._held().cluster

    def _held(self) -> DriverSession:
        if self._hold is None:
            raise OptionError("Nothing was read yet", flow=self.name, next_step="call Flow.read first")
        return self._hold


class FlowWriter:
    """A write that is checked and not started yet."""

    def __init__(self, flow: Flow, df: DataFrame, options: SinkOptions, columns: Columns, run: RunOptions) -> None:
        self._flow = flow
        self._arguments: tuple[Any, ...] = (df, options, columns, run)

    def start(self) -> FlowQuery:
        """Start the query.

        Raises:
            OnceflowError: the flow runs already, the output topic is missing, a newer driver has taken over, the
                checkpoint and the flow's progress do not belong together, Spark refuses the query, tasks cannot
                import what the processors or functions of the query need.
        """
        return self._flow._start(*self._arguments)
