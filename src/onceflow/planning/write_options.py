"""The options of ``Flow.write``, and their checks that need no Kafka."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame

from onceflow.errors import OptionError, UnsupportedQueryError
from onceflow.options.column_names import is_case_sensitive
from onceflow.options.durations import option_seconds
from onceflow.planning import checkpoints
from onceflow.planning.engine import ENGINES, TASKS
from onceflow.planning.options import (
    DRIVER_ROWS,
    EXACTLY_ONCE,
    FAIL,
    GUARANTEES,
    LATE,
    OUTPUT_MODES,
    SinkOptions,
    check_known,
)
from onceflow.planning.ownership import Columns, check_columns
from onceflow.planning.record_order import check_order
from onceflow.protocol.compression import CODES
from onceflow.protocol.names import OwnTopics
from onceflow.spark import queries
from onceflow.spark.query_facts import QueryFacts
from onceflow.state.api.deduplication import SOURCE_COLUMNS

log = logging.getLogger("onceflow")

PARTITIONERS = ("key", "source", "round_robin")


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """Arguments of ``Flow.write``, as given."""

    topic: str | None
    trigger: str | float | None
    guarantee: str
    partitioner: str
    checkpoint: str | Path | None
    output_mode: str
    on_checkpoint_conflict: str
    transaction_timeout: str | float
    compression: str
    late: str
    once: bool
    engine: str


@dataclass(frozen=True)
class CheckedWrite:
    """A write that may be started.

    Args:
        facts: of the query.
        columns: those of ``df`` that are written.
    """

    df: DataFrame
    facts: QueryFacts
    sink: SinkOptions
    columns: Columns


def check_write(df: DataFrame, given: WriteOptions, own: OwnTopics, flow: str) -> CheckedWrite:
    """Check what can be checked without Kafka.

    Args:
        own: topics of the flow that its output must not go to.

    Raises:
        OptionError, SchemaError, UnsupportedQueryError: see their texts.
    """
    _check_values(given, flow)
    timeout_s = option_seconds(given.transaction_timeout, "transaction_timeout", flow)
    trigger_s = trigger_seconds(given.trigger, once=given.once, flow=flow)
    facts = queries.check_query(df, flow, checkpoint=given.checkpoint is not None)
    _check_combinations(given, flow)
    if given.partitioner != "round_robin" and not facts.state:
        check_order(f'partitioner="{given.partitioner}"', facts, flow)
    check_dead_letters(facts, given.topic, flow)
    check_output(given.topic, own, flow)
    exact = is_case_sensitive(df.sparkSession)
    columns = check_columns(df.schema, topic=given.topic, flow=flow, case_sensitive=exact)
    if columns.partition and given.partitioner == "round_robin":
        raise OptionError(
            'partitioner="round_robin" and a partition column contradict each other',
            flow=flow,
            next_step='drop the column, or use partitioner="key", which follows it',
        )
    if ignored := [name for name in columns.ignored if name not in SOURCE_COLUMNS.values()]:
        log.info("flow %s: columns not written: %s", flow, ", ".join(ignored))
    sink = SinkOptions(
        given.topic,
        given.partitioner,
        given.compression,
        timeout_s,
        # If few rows may become any number of rows, no batch counts as small.
        0 if given.engine == TASKS or facts.may_make_many else DRIVER_ROWS,
        guarantee=given.guarantee,
        stateful=bool(facts.state),
        reads_little=facts.reads_little and not facts.others,
        merges_tasks=facts.may_merge_tasks and given.checkpoint is not None,
        trigger_s=trigger_s or 0.0,
        timers_s=math.inf if given.once else max(1.0, trigger_s or 0.0),
        late=given.late if facts.state and facts.watermark else None,
        once=given.once,
        checkpoint=None if given.checkpoint is None else str(given.checkpoint),
        output_mode=given.output_mode,
        on_conflict=given.on_checkpoint_conflict,
        engine=given.engine,
    )
    return CheckedWrite(df, facts, sink, columns)


def _check_values(given: WriteOptions, flow: str) -> None:
    """Check each argument by itself."""
    known_values: Mapping[str, tuple[str, ...]] = {
        "guarantee": GUARANTEES,
        "partitioner": PARTITIONERS,
        "output_mode": OUTPUT_MODES,
        "on_checkpoint_conflict": checkpoints.ON_CONFLICT,
        "late": LATE,
        "engine": ENGINES,
        "compression": tuple(CODES),
    }
    for name, known in known_values.items():
        check_known(name, getattr(given, name), known, flow)
    if given.checkpoint is not None and not str(given.checkpoint).strip():
        raise OptionError("checkpoint= is empty", flow=flow, next_step="give a folder, or leave it out")


def trigger_seconds(trigger: str | float | None, *, once: bool, flow: str) -> float | None:
    """Seconds from the start of one batch to the start of the next, in whole milliseconds.

    Raises:
        OptionError: it is no duration, or ``once`` is given, too.
    """
    if trigger is None:
        return None
    milliseconds = round(option_seconds(trigger, "trigger", flow, at_least=0.0) * 1000)
    if once:
        raise OptionError("trigger and once exclude each other", flow=flow, next_step="give one of them")
    return milliseconds / 1000


def _check_combinations(given: WriteOptions, flow: str) -> None:
    if given.output_mode != "append" and given.checkpoint is None:
        raise OptionError(
            f"output_mode={given.output_mode!r} needs a checkpoint",
            flow=flow,
            next_step="give checkpoint=, or leave output_mode out: without state in Spark all rows are appended",
        )
    if given.late == FAIL and given.guarantee != EXACTLY_ONCE:
        raise OptionError(
            f'late="fail" cannot be combined with guarantee={given.guarantee!r}: its rows are visible at once',
            flow=flow,
            next_step="leave one of them out",
        )


def check_no_dead_letters(facts: QueryFacts, what: str, flow: str) -> None:
    """Refuse a step behind `Flow.enrich` that would get its dead letters.

    Raises:
        UnsupportedQueryError: they are among its rows.
    """
    if facts.dead_letters != "none":
        raise UnsupportedQueryError(
            f"{what} would get the dead letters of Flow.enrich among its rows",
            flow=flow,
            next_step="write what Flow.enrich returns to a topic that a second flow reads; or leave dead_letter_topic "
            "out",
        )


def check_dead_letters(facts: QueryFacts, topic: str | None, flow: str) -> None:
    """Refuse what would lose or mistake the dead letters that `Flow.enrich` returns among its rows.

    Raises:
        OptionError: all rows go to one topic.
        UnsupportedQueryError: operators follow.
    """
    if facts.dead_letters == "processed":
        raise UnsupportedQueryError(
            "Operators follow Flow.enrich, which returns dead letters among its rows",
            flow=flow,
            next_step="put the operators in front of it and write what it returns; or leave dead_letter_topic out",
        )
    if facts.dead_letters == "written" and topic is not None:
        raise OptionError(
            f"topic={topic!r} would also get the dead letters of Flow.enrich",
            flow=flow,
            next_step="leave topic= of Flow.write out: the rows name their topics",
        )


def check_output(topic: str | None, own: OwnTopics, flow: str) -> None:
    """Refuse an output topic that is a source, a table or an internal topic.

    Raises:
        OptionError: it is one.
    """
    why = "" if topic is None else own.refusal(topic)
    if why:
        raise OptionError(f"The output topic {topic!r} {why}", flow=flow, next_step="give outputs a topic of their own")
