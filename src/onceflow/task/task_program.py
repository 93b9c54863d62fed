"""How tasks, and the driver, make rows of the records of topics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa

from onceflow.task.row_operators import SOURCE_TYPES, RowOperator, batch_of, through

_HEADERS = "headers"


@dataclass(frozen=True)
class TopicRead:
    """How a topic is read.

    Args:
        include_headers, fail_on_data_loss: as given to ``Flow.read``.
        max_records: most records of the topic in one batch; None: any number.
    """

    topic: str
    include_headers: bool
    fail_on_data_loss: bool
    max_records: int | None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of its records."""
        return tuple(name for name in SOURCE_TYPES if name != _HEADERS or self.include_headers)

    def joined(self, other: TopicRead) -> TopicRead:
        """How the topic is read for both."""
        limits = [each.max_records for each in (self, other) if each.max_records is not None]
        return replace(
            self,
            include_headers=self.include_headers or other.include_headers,
            fail_on_data_loss=self.fail_on_data_loss or other.fail_on_data_loss,
            max_records=min(limits, default=None),
        )


@dataclass(frozen=True)
class TopicProgram:
    """What is done with the records of one topic.

    Args:
        operators: the first one takes the columns of the topic's records.
    """

    read: TopicRead
    operators: tuple[RowOperator, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that come out."""
        return self.operators[-1].names if self.operators else self.read.columns

    @cached_property
    def needed(self) -> tuple[str, ...]:
        """The columns of the records that are used. The others need not be built."""
        wanted = frozenset(range(len(self.columns)))
        for operator in reversed(self.operators):
            wanted = operator.used(wanted)
        return tuple(name for at, name in enumerate(self.read.columns) if at in wanted)

    def apply(self, records: Mapping[str, pa.Array], count: int) -> Iterator[pa.RecordBatch]:
        """The rows that these records become, mostly in one batch.

        Args:
            records: columns of the topic's records, at least those of ``needed``, each with its type of `SOURCE_TYPES`.
                There may be none: a query of constants makes a row of each record.
            count: how many records there are.

        Raises:
            OnceflowError: a function of ``Flow.map`` has failed, or has returned something else than its schema says.
            PySparkException: an operator of Spark fails for a row.
        """
        wanted = set(self.needed)
        columns = [records[name] if name in wanted else None for name in self.read.columns]
        for made, rows in through(self.operators, columns, count):
            yield batch_of(made, self.columns, rows)


@dataclass(frozen=True)
class TaskProgram:
    """What is done with the records of all topics.

    Args:
        topics: several may be of one topic: its records become rows of each.
        columns: names of the columns that come out.
    """

    topics: tuple[TopicProgram, ...]
    columns: tuple[str, ...]

    @cached_property
    def reads(self) -> dict[str, TopicRead]:
        """How each topic is read."""
        return reads_of(each.read for each in self.topics)

    def needed(self, topic: str) -> tuple[str, ...]:
        """The columns of a topic that are used. The others need not be built."""
        used = {name for each in self.topics if each.read.topic == topic for name in each.needed}
        return tuple(name for name in SOURCE_TYPES if name in used)

    def rows(self, topic: str, records: Mapping[str, pa.Array], count: int) -> Iterator[pa.RecordBatch]:
        """The rows that records of a topic become. Arguments and errors as of `TopicProgram.apply`."""
        for each in self.topics:
            if each.read.topic == topic:
                yield from each.apply(records, count)


def reads_of(reads: Iterable[TopicRead]) -> dict[str, TopicRead]:
    """How each topic is read for all of these."""
    found: dict[str, TopicRead] = {}
    for read in reads:
        found[read.topic] = found.get(read.topic, read).joined(read)
    return found
