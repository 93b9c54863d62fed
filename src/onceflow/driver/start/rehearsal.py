"""A rehearsal of a start, while a standby waits: queries are planned, and thrown away.

The first query of a process takes seconds to plan: Spark loads thousands of classes and generates code, and Python
imports modules. The second one takes a fraction of that. The query of the user is not known before ``Flow.read``
returns, so the rehearsed ones are of common kinds: with a process step, and with operators of Spark. Nothing is read,
and nothing is written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from onceflow.client.settings import ClientSettings
from onceflow.driver.batch.driver_program import Functions
from onceflow.driver.start.streamed_query import divide
from onceflow.logs import log_context
from onceflow.planning import process, step_query, table_plan
from onceflow.planning.options import EXACTLY_ONCE
from onceflow.planning.process import Step, StepOptions
from onceflow.planning.read_options import ReadOptions, source_options
from onceflow.planning.step_frames import state_columns
from onceflow.planning.write_options import WriteOptions, check_write
from onceflow.protocol.names import INTERNAL_SUFFIX, OwnTopics
from onceflow.protocol.progress import Progress
from onceflow.protocol.record_columns import RecordColumns
from onceflow.spark.kafka_source import load_source
from onceflow.spark.master import is_local
from onceflow.spark.pickling import pickled
from onceflow.spark.row_program import RowPrograms
from onceflow.state.api.processor import Processor
from onceflow.state.changelog.topics import TableTopics

log = logging.getLogger("onceflow")

_ROUNDS = 3  # Java compiles what runs often
_TABLE = "rehearsal"
_PARTITIONS = 4
_OPERATORS = ("key", "concat(cast(value as string), '') as value", "topic", "partition", "offset", "timestamp")
_TOPICS = TableTopics(_TABLE, _TABLE + INTERNAL_SUFFIX, "", "", _PARTITIONS, 0, 1 << 20)

_NO_PROGRESS = Progress(_TABLE, 0, {}, {}, 0)
_RECORD = RecordColumns(
    pa.array([b"key"]), pa.array([b"value"]), np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int32)
)


class _Nothing(Processor):
    """A processor that does nothing."""


class Rehearsal:
    """One rehearsal, in a thread. What goes wrong in it is only logged: the start itself will tell.

    Args:
        given: of the read that waits.
    """

    def __init__(self, spark: SparkSession, settings: ClientSettings, given: ReadOptions, flow: str) -> None:
        self._spark = spark
        self._settings = settings
        self._given = given
        self._flow = flow
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin, unless it has begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name=f"onceflow-rehearsal-{self._flow}")
            self._thread.start()

    def end(self) -> None:
        """Begin nothing more: the start itself needs the machine."""
        self._over.set()

    @property
    def is_over(self) -> bool:
        """Whether all is done, or will not be."""
        return self._thread is not None and not self._thread.is_alive()

    def _run(self) -> None:
        log_context.add(flow=self._flow)
        try:
            for _ in range(_ROUNDS):
                for rows in self._common():
                    if self._over.is_set():
                        return
                    self._plan(rows, {}, _NO_PROGRESS)
                    self._plan_step(state_columns(rows, self._flow, one_topic=True))
        except Exception as problem:
            log.debug("flow %s: the start could not be rehearsed: %s", self._flow, problem)

    def _common(self) -> Iterator[DataFrame]:
        """Rows as they are read, and as operators make them."""
        options = source_options(self._given, dict.fromkeys(range(_PARTITIONS), 0), self._flow)
        read = load_source(self._spark, self._settings, options, partitions=_PARTITIONS)
        yield read
        yield read.selectExpr(*_OPERATORS).where("key is not null")

    def _plan_step(self, rows: DataFrame) -> None:
        processor = _Nothing()
        options = StepOptions(_TABLE, None, "fail", None, None, None, "lmdb", None, False, "30 seconds")
        pickled(processor, flow=self._flow)
        spec = process.make_spec(
            options,
            processor,
            _TOPICS,
            flow=self._flow,
            flow_key=self._flow,
            source_topic=self._given.topic,
            local=is_local(self._spark),
        )
        ends = {topic: dict.fromkeys(range(_PARTITIONS), 0) for topic in _TOPICS.ids}
        progress = table_plan.plan_table(options, processor, _TOPICS, ends, _NO_PROGRESS)
        step = Step(spec=spec, lateness_ms=None, idle_s=30.0)
        self._plan(step_query.step_frame(rows, _TABLE, processor), {_TABLE: step}, progress)

    def _plan(self, df: DataFrame, steps: Mapping[str, Step], progress: Progress) -> None:
        """Plan a query, and run its program with one record."""
        write = check_write(df.select("key", "value"), _written(), OwnTopics(), self._flow)
        programs = RowPrograms(self._spark)
        try:
            query = divide(
                write,
                steps,
                progress,
                flow=self._flow,
                source_partitions={self._given.topic: list(range(_PARTITIONS))},
                functions=Functions({}, {}, programs.evaluate),
            )
            if query.program is not None:
                for _ in query.program.query.of([((self._given.topic, 0), _RECORD)]):
                    pass
        finally:
            programs.close()


def _written() -> WriteOptions:
    return WriteOptions(
        topic=_TABLE,
        trigger=None,
        guarantee=EXACTLY_ONCE,
        partitioner="key",
        checkpoint=None,
        output_mode="append",
        on_checkpoint_conflict="refuse",
        transaction_timeout="60 seconds",
        compression="none",
        late="drop",
        once=False,
        engine="auto",
    )
