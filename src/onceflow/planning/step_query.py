"""A process step in a query: its place in the plan, and the queries in which it is allowed."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame

from onceflow.errors import UnsupportedQueryError
from onceflow.planning.options import AT_MOST_ONCE
from onceflow.planning.process import Step
from onceflow.planning.step_tree import tree_of
from onceflow.spark.query_facts import QueryFacts
from onceflow.task.state_tasks import StepPlaceholder
from onceflow.task.step_outputs import rows_schema


def step_frame(rows: DataFrame, table: str, processor: object) -> DataFrame:
    """What ``Flow.process`` returns: a placeholder for the step in the plan, with the columns of its outputs."""
    return rows.mapInArrow(StepPlaceholder(table), rows_schema(processor))


def check_goes_with(
    facts: QueryFacts, steps: Mapping[str, Step], guarantee: str, checkpoint: str | None, *, flow: str
) -> None:
    """Refuse process steps in queries that cannot give their guarantees.

    Raises:
        UnsupportedQueryError: the query has a weaker guarantee, or state in Spark.
    """
    if not steps or tree_of(facts, steps, flow) is None:
        return
    if guarantee == AT_MOST_ONCE:
        raise UnsupportedQueryError(
            f"Flow.process cannot be combined with guarantee={guarantee!r}",
            flow=flow,
            detail="it would move progress before the state has changed",
            next_step='leave guarantee out, or give "at_least_once"',
        )
    if checkpoint is not None:
        raise UnsupportedQueryError(
            "Flow.process cannot be combined with checkpoint=: its state is in Kafka, Spark's in the checkpoint",
            flow=flow,
            next_step="divide the query into two flows: one writes a topic that the other one reads",
        )
