"""Checks of a query and of a session, made before anything is written."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession

from onceflow.errors import EnvironmentUnusableError, OptionError, UnsupportedQueryError
from onceflow.interactive import again
from onceflow.spark import jvm, versions
from onceflow.spark.query_facts import QueryFacts, SourceNode, facts_of

_WRITE, _EXTERNAL = "Flow.write", "Flow.write_external"

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


def check_query(
    df: DataFrame, flow: str, *, checkpoint: bool = False, call: str = _WRITE, columns: bool = True
) -> QueryFacts:
    """The facts of a query. Refuse queries that cannot continue from progress in Kafka and, if there is one, from a
    checkpoint.

    Args:
        checkpoint: whether there is one.
        call: what has got the DataFrame, for errors. Only ``Flow.write`` takes a checkpoint.
        columns: see `facts_of`.

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
    facts = facts_of(df, columns=columns)
    if facts.state and not checkpoint:  # before sources: with a checkpoint, there may be others
        raise _needs_checkpoint(facts, flow, call)
    for source in facts.sources:
        _check_source(source, flow, checkpoint, call)
    return facts


def _needs_checkpoint(facts: QueryFacts, flow: str, call: str) -> UnsupportedQueryError:
    what = facts.state
    if facts.has_step:
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


def _check_source(source: SourceNode, flow: str, checkpoint: bool, call: str) -> None:
    if source.flow is None and checkpoint and source.name and "kafka" not in source.name.lower():
        return  # files, rate, ...: their position is in the checkpoint
    if source.flow != flow:
        of_other = f"flow {source.flow!r}" if source.flow else "spark.readStream"
        raise UnsupportedQueryError(
            f"The query reads a stream that was made by {of_other}",
            flow=flow,
            next_step="read every topic with Flow.read of the flow that writes it; other sources (files, rate) "
            + (
                "need checkpoint=..." if call == _WRITE else "go to a topic first, with Flow.write(..., checkpoint=...)"
            ),
        )
