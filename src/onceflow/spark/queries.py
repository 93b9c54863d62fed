"""Checks of a query and of a session, made before anything is written."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from onceflow.errors import EnvironmentUnusableError, OptionError, UnsupportedQueryError
from onceflow.interactive import again
from onceflow.spark import jvm, versions

#: An option on the source that says which flow read it; Spark's Kafka source ignores what it does not know.
MARK = "onceflow.flow"
_WRITE, _EXTERNAL = "Flow.write", "Flow.write_external"

#: Logical operators that keep state between micro-batches when their input is a stream, and what users call them
#: (Spark: UnsupportedOperationChecker, and the stateful operators of IncrementalExecution).
STATEFUL = {
    "Aggregate": "an aggregation",
    "Deduplicate": "dropDuplicates",
    "DeduplicateWithinWatermark": "dropDuplicatesWithinWatermark",
    "Distinct": "distinct",
    "Except": "subtract",
    "Intersect": "intersect",
    "FlatMapGroupsWithState": "flatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState": "applyInPandasWithState",
    "TransformWithState": "transformWithState",
    "TransformWithStateInPySpark": "transformWithState",
    "TransformWithStateInPandas": "transformWithStateInPandas",
    "GlobalLimit": "limit",
    "Limit": "limit",
    "Tail": "tail",
}
_READER_OWNED = {
    "subscribe": "give the topic to Flow.read",
    "subscribepattern": "Flow.read takes one topic; call it once for each",
    "assign": "Flow.read takes whole topics",
    "startingoffsets": "use starting_offsets of Flow.read",
    "startingtimestamp": "use starting_offsets of Flow.read",
    "startingoffsetsbytimestamp": "use starting_offsets of Flow.read",
    "failondataloss": "use fail_on_data_loss of Flow.read",
    "includeheaders": "use include_headers of Flow.read",
    "maxoffsetspertrigger": "use max_records_per_batch of Flow.read",
    "kafka.isolation.level": "sources are always read with read_committed",
}
_READER_KNOWN = {
    "minpartitions",
    "maxrecordsperpartition",
    "minoffsetspertrigger",
    "maxtriggerdelay",
    "groupidprefix",
    "kafkaconsumer.polltimeoutms",
    "fetchoffset.numretries",
    "fetchoffset.retryintervalms",
}
# With these options several tasks may read one partition.
_SPLITTING = ("minPartitions", "maxRecordsPerPartition")


def reader_options(options: Mapping[str, str], flow: str) -> dict[str, str]:
    """Options for Spark's Kafka source that a user may set.

    Raises:
        OptionError: an option is unknown, or onceflow sets it itself.
    """
    for name in options:
        lower = name.lower()
        if lower in _READER_OWNED:
            raise OptionError(
                f"option {name!r} of Flow.read is set by onceflow itself", flow=flow, next_step=_READER_OWNED[lower]
            )
        if lower not in _READER_KNOWN:
            raise OptionError(
                f"unknown option {name!r} of Flow.read",
                flow=flow,
                next_step=f"{_similar_option(lower)}known: {', '.join(sorted(_READER_KNOWN))}; connection options "
                "belong to Flow(options=...)",
            )
    return {name: str(value) for name, value in options.items()}


def _similar_option(name: str) -> str:
    """What an unknown option of Flow.read may have been meant to be; empty: nothing known is similar."""
    plain = "".join(each for each in name if each.isalnum() or each == ".")
    close = difflib.get_close_matches(plain, {*_READER_KNOWN, *_READER_OWNED}, 1, 0.75)
    if not close:
        return ""
    return f"did you mean {close[0]}? {_READER_OWNED.get(close[0], 'Spark ignores the case of its options')}; "


def starting_offsets_json(topic: str, offsets: Mapping[int, int]) -> str:
    return json.dumps({topic: {str(partition): offset for partition, offset in sorted(offsets.items())}})


def check_session(spark: SparkSession, flow: str) -> None:
    """Refuse a Spark that is not supported, and settings that would break a guarantee for any query."""
    if not hasattr(spark, "_jsparkSession"):
        raise UnsupportedQueryError(
            "Spark Connect is not supported: foreachBatch runs in another process there",
            flow=flow,
            next_step=f'{again()}use a classic session: onceflow.session(master="...")',
        )
    versions.check_running(spark.version)
    if str(spark.conf.get("spark.speculation", "false")).lower() == "true":
        raise UnsupportedQueryError(
            "spark.speculation is on: two attempts of a task would write under one producer epoch",
            flow=flow,
            next_step="set spark.speculation=false for sessions that run flows",
        )


def check_connector(spark: SparkSession, flow: str) -> None:
    """Refuse a session that cannot read topics. Called before the flow is taken over from another driver.

    Raises:
        EnvironmentUnusableError: Spark's Kafka connector is not on its class path, or incomplete.
    """
    problem = jvm.why_no_connector(spark)
    if problem:
        raise EnvironmentUnusableError(
            "This Spark session has no usable Kafka connector",
            flow=flow,
            detail=problem,
            next_step=f"{again()}make the session with onceflow.session(), before anything else in the process starts "
            f"Spark; or give Spark the package {jvm.connector_package(spark)}, by --packages or spark.jars.packages",
        )


# Prefix of the name of a process step in a query plan.
_STEP_NAME = "onceflow_state_"
# Prefix of the name of a join with a table.
_JOIN_NAME = "onceflow_join_"
# Prefix of all of onceflow's own functions. They are process steps, or make one row from each row.
_OUR_NAMES = "onceflow_"
# Prefix of the name of a function of ``Flow.map``.
_MAP_NAME = "onceflow_map_"
# They contain functions of the user's, so they are none of onceflow's own.
_CALLS_NAME, _CALLS_WITH_DEAD_LETTERS = "calls_", "calls_with_dead_letters_"
# mapInArrow and mapInPandas.
_FREE = ("MapInArrow", "MapInPandas")
# Operators that look at one row at a time, and do the same in whichever task they run.
_ROW_BY_ROW = {"StreamingRelationV2", "Project", "Filter", "Generate", "Union", "SubqueryAlias", "View"}
_ROW_BY_ROW |= {"WithCTE", "CTERelationDef", "CTERelationRef"}  # names for parts of a query: what is in them counts


def step_name(table: str) -> str:
    """The name of a process step's function in a query plan."""
    return _STEP_NAME + table


def join_name(topic: str) -> str:
    """The name in a query plan of the function that joins rows with a table."""
    return _JOIN_NAME + topic


def is_join(name: str) -> bool:
    """Whether a function in a plan, by its name, joins rows with a table. It contains the user's serdes."""
    return name.startswith(_JOIN_NAME)


def calls_name(function: str, *, dead_letters: bool) -> str:
    """The name in a query plan of the function that calls another service for each row.

    Args:
        dead_letters: whether some of its rows are dead letters.
    """
    return (_CALLS_WITH_DEAD_LETTERS if dead_letters else _CALLS_NAME) + function


def is_calls(name: str) -> bool:
    """Whether a function in a plan, by its name, calls another service for each row."""
    return name.startswith(_CALLS_NAME)


def map_name(number: int, function: str) -> str:
    """The name in a query plan of a function of ``Flow.map``.

    Args:
        number: of the function in its flow. Two functions may have the same name.
    """
    return f"{_MAP_NAME}{number}_{function}"


def is_map(name: str) -> bool:
    """Whether a function in a plan, by its name, is from ``Flow.map``. It contains a function of the user's."""
    return name.startswith(_MAP_NAME)


def function_of_map(name: str) -> str:
    """The user's function, from the name that `map_name` has made; any other name is returned as it is."""
    return name.removeprefix(_MAP_NAME).partition("_")[2] if is_map(name) else name


def _has_dead_letters(node: Any) -> bool:
    return jvm.kind(node) == "MapInArrow" and str(node.functionExpr().name()).startswith(_CALLS_WITH_DEAD_LETTERS)


def step_table(node: Any) -> str | None:
    """The table of a process step; None if the node of a plan is not a process step."""
    if jvm.kind(node) != "MapInArrow":
        return None
    name = str(node.functionExpr().name())
    return name.removeprefix(_STEP_NAME) if is_step(name) else None


def is_step(name: str) -> bool:
    """Whether a function in a plan, by its name, is a process step."""
    return name.startswith(_STEP_NAME)


def is_ours(name: str) -> bool:
    """Whether a Python function in a plan, by its name, is onceflow's own. Those of ``Flow.map`` are the user's."""
    return name.startswith(_OUR_NAMES) and not is_map(name)


def topics_read(plan: Any) -> set[str]:
    """The topics that the streams of a plan read."""
    found = set()
    for node in jvm.nodes(plan):
        if jvm.kind(node) == "StreamingRelationV2" and node.extraOptions().get("subscribe"):
            found.add(str(node.extraOptions().get("subscribe")))
    return found


@dataclass(frozen=True)
class PlanFacts:
    """Facts about a query, from its plan.

    Args:
        topics: whether it reads topics with ``Flow.read``.
        others: whether it has other sources, whose position is in the checkpoint only.
        stateful: whether Spark keeps state for it.
        watermark: whether it has one of Spark's watermarks, by which operators with state drop late rows.
        has_step: whether rows come out of a process step.
        dealt_out: whether rows go to tasks in turn (``repartition(n)`` without columns): the order of a key is lost.
        splitting: an option by which several tasks may read one partition, and its topic; None: there is none.
        dead_letters: whether dead letters are among the rows (`Flow.enrich`), and if they go through operators:
            ``none``, ``written`` or ``processed``.
    """

    topics: bool
    others: bool
    stateful: bool
    watermark: bool
    has_step: bool
    dealt_out: bool
    splitting: tuple[str, str] | None
    dead_letters: str = "none"


def check_plan(df: DataFrame, flow: str, *, checkpoint: bool = False, call: str = _WRITE) -> PlanFacts:
    """Refuse queries that cannot continue from progress in Kafka and, if there is one, from a checkpoint.

    Args:
        checkpoint: whether there is one.
        call: what has got the DataFrame, for errors. Only ``Flow.write`` takes a checkpoint.

    Raises:
        UnsupportedQueryError: it is not a stream, has a foreign source, or has state in Spark without a checkpoint.
    """
    if not isinstance(df, DataFrame):
        raise UnsupportedQueryError(
            f"{call} takes a DataFrame, not {type(df).__name__}", flow=flow, next_step="give a streaming DataFrame"
        )
    if not df.isStreaming:
        raise UnsupportedQueryError(
            "The DataFrame is not a stream", flow=flow, next_step="make it from Flow.read of this flow"
        )
    topics = others = stateful = watermark = has_step = dealt_out = False
    splitting = None
    plan = df._jdf.queryExecution().analyzed()
    letters = "none"
    for node in jvm.nodes(plan):
        if not node.isStreaming():
            continue
        kind = jvm.kind(node)
        if kind in ("StreamingRelationV2", "StreamingRelation", "StreamingExecutionRelation"):
            ours = _check_source(node, kind, flow, checkpoint, call)
            topics, others = topics or ours, others or not ours
            splitting = splitting or (_splitting(node) if ours else None)
        has_step = has_step or step_table(node) is not None
        if _has_dead_letters(node):
            letters = "written" if _has_dead_letters(plan) and letters == "none" else "processed"
        watermark = watermark or kind == "EventTimeWatermark"
        dealt_out = dealt_out or (kind == "Repartition" and bool(node.shuffle()))
        what = STATEFUL.get(kind)
        if kind == "Join" and node.left().isStreaming() and node.right().isStreaming():
            what = "a join of two streams"
        stateful = stateful or what is not None
        if what is not None and not checkpoint:
            raise _needs_checkpoint(what, df, flow, call)
    return PlanFacts(topics, others, stateful, watermark, has_step, dealt_out, splitting, letters)


def _needs_checkpoint(what: str, df: DataFrame, flow: str, call: str) -> UnsupportedQueryError:
    if any(step_table(node) is not None for node in jvm.nodes(df._jdf.queryExecution().analyzed())):
        # A checkpoint would be refused next: see step_query.check_goes_with.
        return UnsupportedQueryError(
            f"The query keeps state in Spark ({what}) after Flow.process, whose state is in Kafka",
            flow=flow,
            next_step="divide it into two flows: one writes what the processor yields to a topic, the other reads it",
        )
    if call != _WRITE:
        both = "Flow.write_chain(..., checkpoint=...) sets both up. " if call == _EXTERNAL else ""
        return UnsupportedQueryError(
            f"{call} cannot take a query that keeps state in Spark ({what}): it takes no checkpoint",
            flow=flow,
            next_step="divide it into two flows: one writes a topic, with Flow.write(..., checkpoint=...), "
            f"the other one reads it. {both}Or use Flow.process in place of state in Spark",
        )
    return UnsupportedQueryError(
        f"The query keeps state in Spark ({what}), which needs a checkpoint",
        flow=flow,
        next_step="give Flow.write a folder that outlives the driver: checkpoint=...; without it the state would start "
        "empty after every restart",
    )


def _splitting(source: Any) -> tuple[str, str] | None:
    options = source.extraOptions()
    return next(((name, str(options.get("subscribe"))) for name in _SPLITTING if options.containsKey(name)), None)


def _check_source(node: Any, kind: str, flow: str, checkpoint: bool, call: str) -> bool:
    """Whether a source is a topic of this flow."""
    marked = node.extraOptions().get(MARK) if kind == "StreamingRelationV2" else None
    named = kind != "StreamingExecutionRelation"
    if marked is None and checkpoint and named and "kafka" not in str(node.sourceName()).lower():
        return False  # files, rate, ...: their position is in the checkpoint
    if marked != flow:
        of_other = f"flow {marked!r}" if marked else "spark.readStream"
        raise UnsupportedQueryError(
            f"The query reads a stream that was made by {of_other}",
            flow=flow,
            next_step="read every topic with Flow.read of the flow that writes it; other sources (files, rate) "
            + (
                "need checkpoint=..." if call == _WRITE else "go to a topic first, with Flow.write(..., checkpoint=...)"
            ),
        )
    return True


def reads_little(df: DataFrame) -> bool:
    """Whether few source records mean little work for Spark: the query reads nothing else and keeps no state."""
    for node in jvm.nodes(df._jdf.queryExecution().analyzed()):
        kind = jvm.kind(node)
        if not node.isStreaming() or kind == "Join" or kind in STATEFUL:
            return False
    return True


def may_merge_tasks(df: DataFrame) -> bool:
    """Whether one task may read several source partitions, one after the other: the query has nothing but projections,
    filters and unions. Functions over Arrow batches may count on one partition for each task."""
    return all(jvm.kind(node) in _ROW_BY_ROW for node in jvm.nodes(df._jdf.queryExecution().analyzed()))


def may_make_many(df: DataFrame) -> bool:
    """Whether user code may make many rows from one, for example the rows of a file from a link to it."""
    for node in jvm.nodes(df._jdf.queryExecution().analyzed()):
        kind = jvm.kind(node)
        if kind in _FREE and not is_ours(str(node.functionExpr().name())):
            return True
    return False


def attribute(plan: Any, name: str) -> int | None:
    """Expression id of an output column of a plan. Spark keeps it as long as the column is passed on unchanged."""
    output = plan.output()
    found = [int(a.exprId().id()) for a in map(output.apply, range(output.size())) if str(a.name()) == name]
    return found[0] if found else None
