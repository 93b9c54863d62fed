"""How a query is run."""

from __future__ import annotations

from dataclasses import dataclass

from onceflow.spark.query_facts import QueryFacts

OUTPUT_MODES = ("append", "update", "complete")


@dataclass(frozen=True)
class RunOptions:
    """Options of ``Flow.write`` for the query as a whole.

    Args:
        trigger: as a text that Spark understands; None: a batch begins as soon as the previous one is done.
        once: process what is in the sources now, then stop (Spark's availableNow).
        checkpoint: a folder that is kept, for Spark's micro-batches; None: the direct engine runs the query.
        output_mode: one of ``OUTPUT_MODES``.
        on_conflict: one of ``checkpoints.ON_CONFLICT``.
        facts: facts from the query's plan.
        engine: one of ``engine.ENGINES``, as it was asked for.
    """

    trigger: str | None
    once: bool
    checkpoint: str | None
    output_mode: str
    on_conflict: str
    facts: QueryFacts
    engine: str = "auto"
