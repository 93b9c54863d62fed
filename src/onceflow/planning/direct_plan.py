"""The plan of the direct engine: what is done with the records of each source topic, and with the rows of each step.

It is data alone. Its program is the same with functions in it (``driver/batch/driver_program.py``). If nothing in it
needs Spark, tasks that read by themselves get a part of that program (``task/task_program.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from onceflow.spark.function_names import is_map
from onceflow.spark.plans import Path
from onceflow.task.row_operators import Attribute, Select
from onceflow.task.task_program import TopicRead, reads_of


@dataclass(frozen=True)
class Function:
    """A function of the flow over batches: of ``Flow.map``, ``Flow.join_table`` or ``Flow.enrich``.

    Args:
        name: its name in the query's plan.
        input: names of the columns that it takes.
        names: names of the columns that come out.
    """

    name: str
    input: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def moves_rows(self) -> bool:
        """Whether tasks run it on rows that were moved to them: only those of ``Flow.map`` depend on each row alone."""
        return not is_map(self.name)


@dataclass(frozen=True)
class SparkOperators:
    """Filters, computed columns and the like, which Spark itself evaluates.

    Args:
        names: of the columns that come out.
        path: of the last of them in the query's plan.
        base: the path from there to the operator whose rows the first one takes.
    """

    names: tuple[str, ...]
    path: Path
    base: Path


PlanOperator = Select | Function | SparkOperators


@dataclass(frozen=True)
class DirectSource:
    """One topic of a plan, and what is done with its rows.

    Args:
        operators: the first one takes the columns of the topic's records.
    """

    read: TopicRead
    operators: tuple[PlanOperator, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that come out."""
        return self.operators[-1].names if self.operators else self.read.columns

    def then(self, operator: PlanOperator) -> DirectSource:
        """The same with one more operator."""
        return replace(self, operators=(*self.operators, operator))


@dataclass(frozen=True)
class StepSource:
    """A process step, and what is done with its rows.

    Args:
        table: of the step.
        input: the rows that go into it.
        names: of the columns of its rows that operators after it use, or the sink.
    """

    table: str
    input: DirectPlan
    names: tuple[str, ...]
    operators: tuple[PlanOperator, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that come out."""
        return self.operators[-1].names if self.operators else self.names

    def then(self, operator: PlanOperator) -> StepSource:
        """The same with one more operator."""
        return replace(self, operators=(*self.operators, operator))


@dataclass(frozen=True)
class DirectPlan:
    """How the records of each source topic, and the rows of each process step, become the rows of a query.

    Args:
        sources: several may be of one topic: its records become rows of each.
        columns: names of the columns of the query.
        steps: process steps whose rows are rows of the query, maybe behind operators. A step that only writes what it
            yields is none of them: then the plan is that of its input.
    """

    sources: tuple[DirectSource, ...]
    columns: tuple[str, ...]
    steps: tuple[StepSource, ...] = ()

    @cached_property
    def by_spark(self) -> bool:
        """Whether it has operators that only Spark can apply, in the driver's JVM or in a job."""
        return any(isinstance(each, SparkOperators) for each in self._operators())

    @cached_property
    def needs_frame(self) -> bool:
        """Whether tasks that read need a DataFrame of Spark: for Spark's operators, and to move rows to steps behind
        operators or to the functions of ``Flow.join_table`` and ``Flow.enrich``."""
        functions = (each for source in self.sources for each in source.operators if isinstance(each, Function))
        return self.by_spark or bool(self.steps) or any(each.moves_rows for each in functions)

    @cached_property
    def reads(self) -> dict[str, TopicRead]:
        """How each topic is read."""
        below = [read for step in self.steps for read in step.input.reads.values()]
        return reads_of([*(source.read for source in self.sources), *below])

    def _operators(self) -> Iterator[PlanOperator]:
        for source in self.sources:
            yield from source.operators
        for step in self.steps:
            yield from step.operators
            yield from step.input._operators()

    def only(self, names: Sequence[str]) -> DirectPlan:
        """The plan with these columns of it only, in this order: then less is needed of the sources.

        Args:
            names: of columns whose names are unique.
        """
        if tuple(names) == self.columns:
            return self
        select = Select(tuple(Attribute(name, self.columns.index(name)) for name in names))
        return DirectPlan(
            tuple(source.then(select) for source in self.sources),
            tuple(names),
            tuple(step.then(select) for step in self.steps),
        )
