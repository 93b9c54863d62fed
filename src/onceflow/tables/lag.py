"""How far a table is, and how far behind its topic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onceflow.errors import OnceflowError


@dataclass(frozen=True)
class Restore:
    """How far a table is on its way to what was committed when it started.

    Args:
        done, total: in offsets, over all partitions. The number of records is smaller if the topic was compacted.
    """

    done: int
    total: int

    @property
    def running(self) -> bool:
        return self.done < self.total


@dataclass(frozen=True)
class Lag:
    """How far a table is behind its topic.

    Args:
        records: at most how many committed records were missing when brokers last answered, over all partitions; None:
            not known yet.
        ms: at most how long ago the table contained everything that was committed; None: never since it is here. A
            table that keeps up has some hundred milliseconds, because brokers answer that often if nothing happens.
    """

    records: int | None
    ms: int | None

    @classmethod
    def all_of(cls, parts: Iterable[Lag]) -> Lag:
        """Of several partitions together."""
        records: int | None = 0
        ms: int | None = 0
        for part in parts:
            records = None if records is None or part.records is None else records + part.records
            ms = None if ms is None or part.ms is None else max(ms, part.ms)
        return cls(records, ms)


@dataclass(frozen=True)
class Progress:
    """How far one partition of a table is.

    Args:
        position: all committed records below this offset are here.
        lag: as `Lag`, of this partition.
        restored: whether everything is here that was committed when the partition was opened.
        emptied: whether it was emptied because it was damaged, and has to be restored before it can be read.
        incomplete: whether rows were moved between partitions, and this one does not have all of its rows yet.
        problem: why it cannot be written at the moment; None: nothing is known to be wrong.
    """

    position: int
    lag: Lag
    restored: bool
    emptied: bool = False
    incomplete: bool = False
    problem: OnceflowError | None = None
