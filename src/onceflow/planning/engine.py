"""Which engine runs a query: the direct engine, which reads the sources by itself, or Spark's."""

from __future__ import annotations

from dataclasses import dataclass

from onceflow.engine_query import DIRECT, SPARK
from onceflow.errors import UnsupportedQueryError
from onceflow.task.direct_plan import DirectPlan

AUTO = "auto"
ENGINES = (AUTO, DIRECT, SPARK)


@dataclass(frozen=True)
class EngineChoice:
    """The engine of one run.

    Args:
        engine: ``direct`` or ``spark``. reason: why, for logs.
        plan: of the direct engine.
    """

    engine: str
    reason: str
    plan: DirectPlan | None = None


def choose(
    wanted: str,
    plan: DirectPlan | str,
    *,
    checkpoint: bool,
    stateful: bool,
    local: bool,
    small_batch_rows: int | None,
    flow: str,
) -> EngineChoice:
    """Decide.

    Args:
        wanted: one of ``ENGINES``.
        plan: the query as the direct engine runs it, or why it cannot.
        checkpoint: whether there is one. stateful: whether the query has a process step.
        local: whether tasks run on this machine.
        small_batch_rows: as given to ``Flow.write``.

    Raises:
        UnsupportedQueryError: the direct engine was asked for, and cannot run the query.
    """
    if wanted == SPARK:
        return EngineChoice(SPARK, f"engine={SPARK!r}")
    if checkpoint:
        why = "checkpoint= keeps Spark's own state and offsets"
    elif isinstance(plan, str):
        why = plan
    elif wanted == AUTO and small_batch_rows == 0:
        return EngineChoice(SPARK, "small_batch_rows=0: tasks write all batches")
    elif wanted == AUTO and stateful and not local:
        return EngineChoice(SPARK, "its state is where tasks run, on other machines; engine='direct' moves it")
    else:
        return EngineChoice(DIRECT, (f"engine={DIRECT!r}: " if wanted == DIRECT else "") + _how(plan), plan)
    if wanted == DIRECT:
        raise UnsupportedQueryError(
            f"The direct engine cannot run the query: {why}",
            flow=flow,
            next_step="leave engine out, then Spark runs it"
            + ("" if checkpoint else "; or compute columns with Flow.map or in Flow.process"),
        )
    return EngineChoice(SPARK, why)


def _how(plan: DirectPlan) -> str:
    if plan.job:
        return f"each of its batches is a small Spark job, because of {plan.job}"
    return "Spark evaluates its rows in the driver, without a job" if plan.by_spark else "its plan needs no Spark job"
