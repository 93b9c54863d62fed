"""The options of a sink, and its summary of each batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onceflow.errors import OptionError

EXACTLY_ONCE, AT_LEAST_ONCE, AT_MOST_ONCE = "exactly_once", "at_least_once", "at_most_once"
GUARANTEES = (EXACTLY_ONCE, AT_LEAST_ONCE, AT_MOST_ONCE)
#: What happens when Spark drops rows as later than its watermark.
DROP, FAIL = "drop", "fail"
LATE = (DROP, FAIL)
#: See `SinkOptions.driver_rows`.
DRIVER_ROWS = 8_000
OUTPUT_MODES = ("append", "update", "complete")


def check_whole(name: str, value: Any, least: int, none_means: str, flow: str) -> None:
    """Check an argument that is a whole number, or None.

    Args:
        none_means: what None stands for.

    Raises:
        OptionError: it is something else, or less than ``least``.
    """
    if value is not None and not is_whole(value, least):
        raise OptionError(
            f"{name}={value!r} is not a whole number of at least {least}",
            flow=flow,
            next_step=f"give such a number, None for {none_means}, or leave it out",
        )


def is_whole(value: Any, least: int) -> bool:
    """Whether it is a whole number, and not less than ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_known(name: str, value: Any, known: Sequence[str], flow: str) -> None:
    """Check an argument that is one of several words.

    Raises:
        OptionError: it is none of them.
    """
    if value not in known:
        raise OptionError(f"{name}={value!r} is unknown", flow=flow, next_step=f"use one of {', '.join(known)}")


@dataclass(frozen=True)
class SinkOptions:
    """Options of a write, checked, and what follows from the facts of its query.

    Args:
        once: process what is in the sources now, then stop (Spark's availableNow).
        checkpoint: a folder that is kept, for Spark's micro-batches; None: the direct engine runs the query.
        output_mode: one of ``OUTPUT_MODES``. on_conflict: one of ``checkpoints.ON_CONFLICT``.
        engine: one of ``engine.ENGINES``, as it was asked for.
        stateful: whether Spark keeps state for the query: then a batch may have more rows than its source range.
        late: ``drop`` or ``fail``: what happens when Spark drops rows of a batch as late; None: it drops none.
        trigger_s: how often a batch is to begin; 0: as soon as the last one is done.
        timers_s: how long batches that only fire timers may delay the next batch with records.
        driver_rows: the driver writes a micro-batch of Spark that is expected to have at most so many rows.
        reads_little: whether few source records mean little work for Spark, see ``QueryFacts.reads_little``.
        merges_tasks: whether one task may read several source partitions, see ``QueryFacts.may_merge_tasks``.
    """

    topic: str | None
    partitioner: str
    compression: str
    transaction_timeout_s: float
    driver_rows: int = DRIVER_ROWS
    max_attempts: int = 4
    guarantee: str = "exactly_once"
    stateful: bool = False
    reads_little: bool = False
    merges_tasks: bool = False
    trigger_s: float = 0.0
    timers_s: float = 1.0
    late: str | None = None
    once: bool = False
    checkpoint: str | None = None
    output_mode: str = "append"
    on_conflict: str = "refuse"
    engine: str = "auto"


@dataclass
class BatchSummary:
    """Summary of one committed batch, for users and benchmarks: seconds per step, sizes, attempts.

    Args:
        records: how many records were written to the outputs, without state, dead letters, late records and
            duplicates.
        dead_letters: how many records became dead letters.
        late: how many records were late: they went to the topic of late records, or were dropped.
        duplicates: how many records were duplicates: they went to the topic of duplicates, or were dropped.
        timers_fired: how many timers have fired. expired: how many rows of state have expired.
        dropped: how many rows Spark dropped because they were later than its watermark.
        nbytes: size of all that was written, including state, dead letters, late records and duplicates.
        written: records and bytes by topic, also of state, dead letters, late records and duplicates. With an external
            sink it has the rows under the name of the target, without its dead letters.
        read: how many offsets of each source topic the batch has read (transaction markers and aborted records count).
        lost: with at_most_once: whether rows of the batch were lost.
        state_lost: how many partitions of tables without a changelog began empty, although they had state.
    """

    batch: int
    max_rows: int
    path: str = ""
    attempts: int = 0
    records: int = 0
    dead_letters: int = 0
    late: int = 0
    duplicates: int = 0
    timers_fired: int = 0
    expired: int = 0
    dropped: int = 0
    nbytes: int = 0
    max_rss_kib: int = 0
    lost: bool = False
    state_lost: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    written: dict[str, tuple[int, int]] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
