"""The options of ``Flow.write_external``, and their checks that need neither Kafka nor the external system."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame

from onceflow.errors import OptionError, UnsupportedQueryError
from onceflow.external.sink import ExternalSink
from onceflow.planning.dead_letter_limit import check_limit
from onceflow.planning.engine import AUTO, ENGINES
from onceflow.planning.options import SinkOptions, check_known
from onceflow.planning.record_order import check_order
from onceflow.planning.write_options import trigger_seconds
from onceflow.spark import queries
from onceflow.spark.query_facts import QueryFacts

# How long a batch may take has no limit of Kafka's: its transaction is in another system.
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ExternalWrite:
    """A write to an external sink that may be started."""

    df: DataFrame
    facts: QueryFacts
    sink: ExternalSink
    options: SinkOptions
    dead_letter_topic: str | None
    max_dead_letters: float | None


@dataclass(frozen=True)
class ExternalOptions:
    """The options of ``Flow.write_external`` as they were given."""

    trigger: str | float | None = None
    dead_letter_topic: str | None = None
    max_dead_letters: float | None = None
    once: bool = False
    engine: str = AUTO


def check_external(df: DataFrame, sink: ExternalSink, given: ExternalOptions, flow: str) -> ExternalWrite:
    """Check what can be checked at once.

    Raises:
        OptionError, UnsupportedQueryError: see their texts.
    """
    if not isinstance(sink, ExternalSink):
        raise OptionError(
            f"Flow.write_external takes an ExternalSink, not {type(sink).__name__}",
            flow=flow,
            next_step='give an instance, for example onceflow.PostgresSink(dsn, "ledger")',
        )
    check_known("engine", given.engine, ENGINES, flow)
    trigger_s = trigger_seconds(given.trigger, once=given.once, flow=flow)
    check_limit(given.max_dead_letters, flow)
    if given.max_dead_letters is not None and given.dead_letter_topic is None:
        raise OptionError(
            "max_dead_letters= is given, but the flow has no dead letters",
            flow=flow,
            next_step="give dead_letter_topic= as well, or leave it out",
        )
    facts = queries.check_query(df, flow, call="Flow.write_external")
    if facts.dead_letters != "none":
        raise UnsupportedQueryError(
            "Flow.write_external cannot write what Flow.enrich returns: its dead letters go to a topic",
            flow=flow,
            next_step="leave dead_letter_topic out, or write a topic that a second flow reads",
        )
    if facts.has_step:
        raise UnsupportedQueryError(
            "Flow.write_external cannot write what Flow.process yields: its state is in Kafka, in another transaction",
            flow=flow,
            next_step="write the rows to a topic with Flow.write, and that topic with a second flow",
        )
    check_order("Flow.write_external", facts, flow)
    options = SinkOptions(
        None, "source", "none", _TIMEOUT_S, trigger_s=trigger_s or 0.0, once=given.once, engine=given.engine
    )
    return ExternalWrite(df, facts, sink, options, given.dead_letter_topic, given.max_dead_letters)
