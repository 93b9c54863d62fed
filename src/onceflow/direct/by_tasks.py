"""What a run of the direct engine needs so that, with a backlog, tasks of Spark read by themselves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from pyspark.sql import SparkSession
from pyspark.sql import types as T

from onceflow.direct.backlog import Backlog
from onceflow.driver.batch.range_rows import RangeSource
from onceflow.driver.start.startup import Startup
from onceflow.driver.start.streamed_query import StreamedQuery
from onceflow.errors import EnvironmentUnusableError, OptionError
from onceflow.planning.engine import TASKS, EngineChoice
from onceflow.spark.imports import ImportCheck
from onceflow.spark.jvm import SPARK_ERRORS
from onceflow.spark.master import current_cores, is_local
from onceflow.spark.pickling import pickled
from onceflow.spark.row_program import RowPrograms
from onceflow.state.table_facts import TableFacts

log = logging.getLogger("onceflow")

# On this machine, the driver and its tasks share the cores, often with the broker. With fewer cores tasks do not help.
_LOCAL_CORES_MIN, _CORES_MIN = 3, 2
_PATIENCE_S = 30.0


def range_source(
    spark: SparkSession,
    startup: Startup,
    query: StreamedQuery,
    choice: EngineChoice,
    topic_ids: Mapping[str, str],
    programs: RowPrograms,
) -> RangeSource:
    """What tasks are told that read by themselves."""
    plan, program = query.planned()
    return RangeSource(
        flow=startup.flow,
        settings=startup.takeover.settings,
        topic_ids=topic_ids,
        plan=plan,
        program=program,
        schema=T.StructType([query.df.schema[name] for name in plan.columns if name in query.df.columns]),
        deadline_s=max(query.options.transaction_timeout_s, _PATIENCE_S),
        spark=spark,
        programs=programs,
        node=query.node,
        all_batches=choice.place == TASKS and not is_local(spark),
    )


def backlog_of(
    spark: SparkSession, startup: Startup, query: StreamedQuery, choice: EngineChoice, imports: ImportCheck
) -> Backlog:
    """Decides who reads, the driver or tasks.

    Raises:
        EnvironmentUnusableError: tasks are sure to read, and lack a module.
    """
    state = query.state
    local, cores = is_local(spark), current_cores(spark)
    if choice.place == TASKS:
        imports.at_start()
    processors = [step.spec.processor for step in startup.steps.values()]
    ready = _Ready(imports, processors, startup.flow)
    return Backlog(
        startup.flow,
        choice.place,
        may_help=lambda: (
            not (state is not None and stays_in_memory(state.facts()))
            and _known(cores) >= (_LOCAL_CORES_MIN if local else _CORES_MIN)
            and ready()
        ),
        batch_s=query.options.transaction_timeout_s / 4,
    )


def _known(cores: Callable[[], int]) -> int:
    """How many tasks Spark can run; 0: its JVM has ended. The driver does not need it to read."""
    with contextlib.suppress(*SPARK_ERRORS, AttributeError, OSError):
        return cores()
    return 0


class _Ready:
    """Whether tasks can get what the query needs, and import it. Whether they can import it is found out once, when
    there is a backlog for the first time."""

    def __init__(self, imports: ImportCheck, processors: Sequence[object], flow: str) -> None:
        self._imports = imports
        self._processors = processors
        self._flow = flow
        self._known: bool | None = None

    def __call__(self) -> bool:
        if self._known is not False:
            try:
                if self._known is None:
                    self._imports.finish()
                for processor in self._processors:  # the driver has called them, which may have changed their variables
                    pickled(processor, flow=self._flow)
                self._known = True
            except (EnvironmentUnusableError, OptionError) as error:
                log.warning("flow %s: the driver reads its backlog alone, because tasks cannot: %s", self._flow, error)
                self._known = False
        return self._known


def stays_in_memory(tables: Iterable[TableFacts]) -> bool:
    """Whether some state is in the memory of the driver: every batch of tasks would have to restore it. Copies on the
    disk of this machine are where tasks run already."""
    return any(table.nbytes is None for table in tables)
