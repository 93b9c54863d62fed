"""What is sent to tasks about the tables that a flow joins with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.options.arguments import with_checked_arguments
from onceflow.state.api import serdes
from onceflow.state.local.format import Goal, default_state_dir, partition_folder
from onceflow.state.stores.base import Store

Ends = Mapping[str, Mapping[int, int]]
"""Topic, then partition, then the offset after the last record that a batch sees."""


@with_checked_arguments
@dataclass(frozen=True)
class JoinTable:
    """A table that a flow joins with.

    Args:
        topic: any compacted topic, but no table of the same flow.
        key: serde of its keys; None: keys are bytes or text.
        value: serde of its values.
        co_partitioned: whether its keys are in the partitions of the flow's table; else every host has a copy of the
            whole topic.
        store, state_dir: as of `Flow.process`.
    """

    topic: str
    key: Any = None
    value: Any = serdes.BYTES
    co_partitioned: bool = False
    store: str | type[Store] = "lmdb"
    state_dir: str | Path | None = None


@dataclass(frozen=True)
class JoinSpec:
    """A joined table as it is in Kafka, and how tasks keep it.

    Args:
        name: by which user code asks for it.
        topic_id: a topic that was deleted and created again has a new id.
        flow_key: the flow's name with its prefix. Local folders are named after it.
        run: identifies the run of the driver. A copy is verified once in each run and host.
        tombstone_ms: how long compaction keeps a tombstone (``delete.retention.ms``).
    """

    name: str
    topic: str
    topic_id: str
    partitions: int
    key: Any
    value: Any
    co_partitioned: bool
    store: type[Store]
    flow_key: str
    run: str
    state_dir: Path | None
    tombstone_ms: int

    def folder(self, partition: int) -> Path:
        """The folder of a partition's copy on this host."""
        state_dir = default_state_dir() if self.state_dir is None else self.state_dir
        return partition_folder(state_dir, self.flow_key, self.topic, partition)

    def goal(self, partition: int, end: int) -> Goal:
        """What the copy must contain before a batch reads from it."""
        return Goal(self.flow_key, self.topic, partition, self.topic_id, "", table_end=end, internal_end=0)
