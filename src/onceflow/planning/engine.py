"""Which loop runs a query: onceflow's own, which reads the sources by itself, or Spark's micro-batches.

Spark's micro-batches run what has a checkpoint with Spark's state, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from onceflow.engine_query import DIRECT, SPARK
from onceflow.errors import UnsupportedQueryError
from onceflow.planning.direct_plan import DirectPlan

#: Values of ``engine=``: what reads, processes and writes batches.
AUTO, DRIVER, TASKS = "auto", "driver", "tasks"
ENGINES = (AUTO, DRIVER, TASKS)


@dataclass(frozen=True)
class EngineChoice:
    """The engine of one run.

    Args:
        engine: ``direct`` or ``spark``. reason: why, for logs.
        place: one of ``ENGINES``: what reads, processes and writes the batches of the direct engine.
    """

    engine: str
    reason: str
    place: str = AUTO


def choose(
    wanted: str,
    plan: DirectPlan | str,
    job: str = "",
    *,
    checkpoint: bool | None,
    stateful: bool,
    local: bool,
    flow: str,
) -> EngineChoice:
    """Decide.

    Args:
        wanted: one of ``ENGINES``.
        plan: the query as the direct engine runs it, or why it cannot.
        job: why the driver needs a Spark job for each batch; empty: it needs none.
        checkpoint: whether there is one; None: there cannot be one. stateful: whether the query has a process step.
        local: whether tasks run on this machine.

    Raises:
        UnsupportedQueryError: the query cannot be run in this way.
    """
    if checkpoint:
        if wanted == DRIVER:
            raise UnsupportedQueryError(
                f"engine={DRIVER!r} cannot be combined with checkpoint=: Spark's state is where tasks run",
                flow=flow,
                next_step="leave one of them out",
            )
        return EngineChoice(SPARK, "checkpoint= keeps Spark's own state and offsets", wanted)
    if isinstance(plan, str):
        may_keep = checkpoint is not None and not stateful
        kept = "give checkpoint=, a folder that is kept: Spark's micro-batches run the query then; or change it"
        divided = "change the query, or divide it into two flows: one writes a topic that the other one reads"
        raise UnsupportedQueryError(
            f"The query cannot be run{' without checkpoint=' if may_keep else ''}: {plan}",
            flow=flow,
            next_step=kept if may_keep else divided,
        )
    if wanted == AUTO and stateful and not local:
        why = "its state is where tasks run, on other machines; engine='driver' moves it"
        return EngineChoice(DIRECT, f"tasks run all batches: {why}", TASKS)
    return EngineChoice(DIRECT, ("" if wanted == AUTO else f"engine={wanted!r}: ") + _how(plan, job, wanted), wanted)


def _how(plan: DirectPlan, job: str, place: str) -> str:
    if place == TASKS:
        return "each of its batches is a Spark job; one takes 0.1 seconds or more, however few records it has"
    if job:
        cheaper = "; F.broadcast() around a small DataFrame makes it cheaper" if "join" in job else ""
        return f"each of its batches is a small Spark job, because of {job}; one takes 0.1 seconds or more{cheaper}"
    if plan.by_spark:
        return "Spark evaluates its rows in the driver, without a job; that takes some 10 ms a batch, 50 with Python"
    return "its plan needs no Spark job"
