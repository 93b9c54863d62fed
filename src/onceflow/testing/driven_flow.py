"""``DrivenFlow``: a flow on a `MemoryBroker`, whose batches run when a test says so.

It is a real `Flow`. Only where it keeps local stores, and which thread runs its batches, is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from onceflow.direct.query import DirectQuery
from onceflow.direct.run import DirectRun
from onceflow.driver.start.run import MicroBatchRun
from onceflow.driver.start.startup import Startup
from onceflow.engine_query import EngineQuery
from onceflow.errors import UnsupportedQueryError
from onceflow.flow import Flow
from onceflow.planning.engine import DRIVER
from onceflow.planning.external_write import ExternalWrite
from onceflow.planning.process import StepOptions
from onceflow.planning.write_options import CheckedWrite
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.joins.spec import JoinTable
from onceflow.testing.memory_broker import MemoryBroker

COMPACTED = {"cleanup.policy": "compact"}
_ON_DISK = ("lmdb", "rocksdb")


@dataclass
class World:
    """What the flows of one test share.

    Args:
        folder: for local stores.
        partitions: of topics that come to be because a flow names them; None: all topics are there already.

    Attributes:
        read: topics that flows read. joined: tables that they join with. tables: tables of their own, without those
            that have no topics. queries: that run.
    """

    broker: MemoryBroker
    folder: Path
    partitions: int | None
    read: set[str] = field(default_factory=set)
    joined: set[str] = field(default_factory=set)
    tables: set[str] = field(default_factory=set)
    queries: list[DirectQuery] = field(default_factory=list)

    def make(self, topic: str) -> None:
        """A flow asks for a topic that does not exist."""
        own = {*self.tables, *(table + INTERNAL_SUFFIX for table in self.tables)}
        if self.partitions is not None and topic not in own and not topic.startswith("__"):
            self.broker.create(topic, self.partitions, COMPACTED if topic in self.joined else None)

    def begin(self, query: EngineQuery) -> None:
        """A query was started."""
        assert isinstance(query, DirectQuery)  # `DrivenFlow` starts no others
        self.queries.append(query)


class DrivenFlow(Flow):
    """One flow of a test.

    Args:
        world: what it shares with the others.
    """

    def __init__(self, name: str, spark: SparkSession, world: World) -> None:
        super().__init__(name, spark, bootstrap_servers=world.broker.address)
        self._world = world
        self._runs.begin = world.begin

    def read(self, topic: str, **options: Any) -> DataFrame:
        self._world.read.add(topic)
        return super().read(topic, **options)

    def join_table(self, df: DataFrame, table: str | JoinTable, **options: Any) -> DataFrame:
        return super().join_table(df, self._in_memory(table), **options)

    def _second(self, name: str) -> Flow:
        return DrivenFlow(name, self._spark, self._world)

    def _step(
        self,
        df: DataFrame,
        options: StepOptions,
        processor: Processor | ColumnProcessor,
        columns: Callable[..., DataFrame],
        *,
        tables: Mapping[str, str | JoinTable] | None = None,
        **more: Any,
    ) -> DataFrame:
        self._world.tables.add(options.table)
        joined = None if tables is None else {name: self._in_memory(table) for name, table in tables.items()}
        # Without a changelog, the store is all there is of the state. A class of the user's own is a part of the test.
        quick = options.changelog and options.store in _ON_DISK
        kept = replace(options, store="memory" if quick else options.store, state_dir=self._world.folder)
        return super()._step(df, kept, processor, columns, tables=joined, **more)

    def _in_memory(self, table: str | JoinTable) -> JoinTable:
        found = table if isinstance(table, JoinTable) else JoinTable(table)
        self._world.joined.add(found.topic)
        return replace(found, store="memory", state_dir=self._world.folder)

    def _prepared(self, startup: Startup, write: CheckedWrite) -> MicroBatchRun | DirectRun:
        if write.sink.checkpoint is not None:
            raise UnsupportedQueryError(
                "FlowDriver cannot run a query with checkpoint=: Spark's micro-batches read from real brokers",
                flow=self.name,
                next_step="test it on a broker: the fixtures onceflow_broker and onceflow_spark start one",
            )
        driven = replace(write.sink, once=False, engine=DRIVER)
        return super()._prepared(startup, replace(write, sink=driven))

    def _prepared_external(self, startup: Startup, write: ExternalWrite) -> DirectRun:
        driven = replace(write.options, once=False, engine=DRIVER)
        return super()._prepared_external(startup, replace(write, options=driven))


DrivenFlow.__name__ = Flow.__name__  # in messages
