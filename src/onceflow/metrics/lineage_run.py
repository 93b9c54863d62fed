"""One run of a query, as its lineage sees it: what it reads and writes, and how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from onceflow.planning.options import BatchSummary

#: How a query has ended (``onceflow.query``).
COMPLETE, STOPPED, FAILED = "complete", "stopped", "failed"

Dataset = tuple[str, str]
"""Namespace and name, as OpenLineage's specification of names says."""


class LineageQuery(Protocol):
    """What is asked of a query (`onceflow.query.FlowQuery`)."""

    @property
    def flow(self) -> str:
        """The name of its flow."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether it has ended, has failed or is being stopped."""
        ...

    @property
    def outcome(self) -> str:
        """How it has ended; one of the words above."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """The error with which it was stopped."""
        ...

    @property
    def datasets(self) -> tuple[Mapping[str, Dataset], Mapping[str, Dataset]]:
        """What it reads and what it writes, as far as that is known at its start, by the names in `BatchSummary`."""
        ...

    @property
    def kafka(self) -> str:
        """Namespace of the topics of its cluster."""
        ...


@dataclass
class LineageRun:
    """One run of a query.

    Args:
        inputs, outputs: datasets by the names in `BatchSummary`.
        read: offsets of each input. written: records and bytes of each output. Both since the start of the run.
        told_at: when its last event was made, in monotonic seconds.
    """

    run_id: str
    query: LineageQuery
    inputs: dict[str, Dataset]
    outputs: dict[str, Dataset]
    told_at: float
    read: dict[str, int] = field(default_factory=dict)
    written: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, batch: BatchSummary) -> None:
        """Count a committed batch."""
        for topic, offsets in batch.read.items():
            self.inputs.setdefault(topic, (self.query.kafka, topic))
            self.read[topic] = self.read.get(topic, 0) + offsets
        for name, (records, nbytes) in batch.written.items():
            self.outputs.setdefault(name, (self.query.kafka, name))
            before = self.written.get(name, (0, 0))
            self.written[name] = before[0] + records, before[1] + nbytes
