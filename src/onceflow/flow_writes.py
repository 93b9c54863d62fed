"""The writes of a ``Flow``: to topics, and to other systems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from onceflow.arguments import known_arguments
from onceflow.client.settings import ClientSettings
from onceflow.direct.run import DirectRun, direct_run, external_run
from onceflow.driver.external_run import prepare_external
from onceflow.driver.run import Run, prepare_query, spark_run
from onceflow.driver.startup import Startup
from onceflow.engine_query import DIRECT
from onceflow.external.postgres import PostgresSink
from onceflow.external.sink import ExternalSink
from onceflow.flow_runs import FlowRuns
from onceflow.flow_writer import FlowWriter
from onceflow.planning.external_write import ExternalOptions, check_external
from onceflow.planning.write_options import CheckedWrite, WriteOptions, check_write


class FlowWrites:
    """What a flow does with a DataFrame at its end.

    Args:
        name: of the flow. runs: its runs, one after the other.
    """

    def __init__(self, name: str, spark: SparkSession, settings: ClientSettings, runs: FlowRuns) -> None:
        self._name = name
        self._spark = spark
        self._settings = settings
        self._runs = runs

    @property
    def name(self) -> str:
        return self._name

    @known_arguments
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
        late: str = "drop",
        once: bool = False,
        engine: str = "auto",
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
                After ``Flow.process`` this includes changes of state, and older drivers are fenced.
                ``at_most_once``: progress first, then rows; a crash or a failure in between loses rows.
            partitioner: ``key`` chooses partitions as the Java client does. ``source`` keeps the partition a row was
                read from, without a shuffle. ``round_robin`` fills partitions evenly, without a shuffle; the records of
                a key lose their order.
            checkpoint: folder of Spark's checkpoint, which must be kept. Needed for queries with state in Spark
                (aggregations, stream-stream joins, de-duplication, transformWithState) and for sources that are not
                topics. With a local master it may be a local path, otherwise all executors must be able to write there
                (``s3a://...``). None: the flow has no checkpoint, its progress is in Kafka alone.
            output_mode: Spark's ``append``, ``update`` or ``complete``; the last two need checkpoint=.
            on_checkpoint_conflict: what happens when the checkpoint and the flow's progress in Kafka do not belong
                together. ``refuse``: ProgressConflictError. ``resume``: an empty checkpoint is accepted, and the flow
                continues at its committed offsets with empty Spark state.
            transaction_timeout: the broker aborts a batch whose transaction is open for longer. It can be at most
                ``transaction.max.timeout.ms`` of the brokers (15 minutes by default).
            compression: none, gzip, snappy, lz4 or zstd.
            late: what happens to rows that Spark drops because they are later than the watermark of a query with state.
                ``drop``: they are counted (``BatchSummary.dropped``), and a warning says so. ``fail``: LateRowsError,
                and the batch is not committed; needs ``guarantee="exactly_once"``.
            once: process what is in the sources now, in bounded batches, then stop (Spark's availableNow).
            engine: what reads, processes and writes the batches. ``driver``: the driver alone. ``tasks``: Spark jobs,
                whose tasks read the topics by themselves. ``auto``: the driver, and with a backlog tasks, see
                ``docs/performance.md``; the start-up log and ``FlowQuery.engine_reason`` say what and why. With
                checkpoint=, Spark's micro-batches run the query: then ``auto`` lets the driver write small batches.

        Raises:
            OptionError, SchemaError, UnsupportedQueryError, UnknownTopicError, ProgressConflictError: raised here or in
                ``start()``, before anything is written.
        """
        given = WriteOptions(
            topic, trigger, guarantee, partitioner, checkpoint, output_mode, on_checkpoint_conflict,
            transaction_timeout, compression, late, once, engine,
        )  # fmt: skip
        write = check_write(df, given, self._runs.startup.own_topics, self.name)
        return FlowWriter(lambda: self._runs.start(lambda startup: self._prepared(startup, write)))

    def _prepared(self, startup: Startup, write: CheckedWrite) -> Run | DirectRun:
        prepared = prepare_query(self._spark, startup, write)
        return direct_run(prepared) if prepared.choice.engine == DIRECT else spark_run(prepared)

    @known_arguments
    def write_external(
        self,
        df: DataFrame,
        sink: ExternalSink,
        *,
        trigger: str | None = None,
        dead_letter_topic: str | None = None,
        max_dead_letters: int | float | None = None,
        once: bool = False,
        engine: str = "auto",
    ) -> FlowWriter:
        """Prepare to write a streaming DataFrame to a system other than Kafka, exactly once; ``.start()`` runs it.

        The rows of a batch and the flow's progress are in one transaction of that system, which decides where the flow
        is. Progress in Kafka and the consumer group follow.

        Args:
            df: made from ``Flow.read`` of this flow, without process steps and without state in Spark. Its columns are
                those that the sink takes.
            sink: what is written, for example ``PostgresSink(dsn, "ledger")``.
            trigger: as of `write`.
            dead_letter_topic: the topic for rows that the system does not take, for example because of a unique index.
                It must exist. None: such a row stops the flow. Columns of Spark's Kafka source (key, value, headers,
                topic, partition, offset, timestamp) that the table lacks are those of the dead letter. Without a value
                it is the row in JSON.
            max_dead_letters: stop the flow when one run has more of them: a count, or a share of the rows, as of
                ``Flow.process``. The batch that exceeds it is not committed. None: no limit.
            once, engine: as of `write`.

        Raises:
            OptionError, SchemaError, UnsupportedQueryError, ProgressConflictError: raised here or in ``start()``,
                before anything is written.
        """
        self._runs.check_may_run()
        given = ExternalOptions(trigger, dead_letter_topic, max_dead_letters, once, engine)
        write = check_external(df, sink, given, self.name)
        return FlowWriter(
            lambda: self._runs.start(lambda startup: external_run(prepare_external(self._spark, startup, write)))
        )

    @known_arguments
    def write_postgres(
        self,
        df: DataFrame,
        *,
        table: str,
        dsn: str,
        mode: str = "insert",
        key: Sequence[str] = (),
        flag: str = "deleted",
        trigger: str | None = None,
        dead_letter_topic: str | None = None,
        max_dead_letters: int | float | None = None,
        once: bool = False,
        engine: str = "auto",
    ) -> FlowWriter:
        """As `write_external` with a `PostgresSink`: rows go to a table of a PostgreSQL database, exactly once."""
        sink = PostgresSink(dsn, table, mode=mode, key=key, flag=flag)
        return self.write_external(
            df,
            sink,
            trigger=trigger,
            dead_letter_topic=dead_letter_topic,
            max_dead_letters=max_dead_letters,
            once=once,
            engine=engine,
        )
