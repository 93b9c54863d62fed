"""The program of the driver: it makes the rows of a query of the records that the driver has fetched.

It is a plan of the direct engine (``planning/direct_plan.py``) whose operators are bound: to the functions of the flow,
and to Spark's programs for its operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from onceflow.planning.direct_plan import DirectPlan, Function, PlanOperator, SparkOperators
from onceflow.spark.plans import Path
from onceflow.task.row_operators import (
    Arrays,
    ArrowFunction,
    ArrowRows,
    MapRows,
    RowOperator,
    Select,
    batch_of,
    plain,
    through,
)
from onceflow.task.sink_form import Form
from onceflow.task.source_rows import QueryRows
from onceflow.task.task_program import TaskProgram, TopicProgram

#: Functions of ``Flow.map``, by their names in plans.
Maps = Mapping[str, Callable[[pa.RecordBatch], pa.RecordBatch]]


class Program(Protocol):
    """Operators of Spark, applied to rows that the driver has (``spark/row_program.py``, ``spark/row_program.py``)."""

    @property
    def needed(self) -> frozenset[int]:
        """The places of the input columns that are looked at, or passed on in each row."""
        ...

    @property
    def job(self) -> str:
        """Why it is a Spark job, such as ``BroadcastHashJoin``; empty: it is none."""
        ...

    def rows(self, columns: Arrays, count: int) -> Iterator[tuple[list[pa.Array], int]]:
        """The rows that become of these, as columns, and how many they are. Columns that are not needed may be None.
        Many rows come in several parts."""
        ...


class Evaluate(Protocol):
    """Makes the program for operators of Spark."""

    def __call__(self, plan: Any, path: Path, base: Path) -> Program | str:
        """The program for the operator at a path and those down to the one at a path from there, which is not part of
        it; or why there is none."""
        ...


@dataclass(frozen=True)
class Functions:
    """What a run of a flow has for the operators of its query.

    Args:
        maps: its functions of ``Flow.map``.
        arrow: those of ``Flow.join_table`` and ``Flow.enrich``, by their names in plans.
        evaluate: for operators of Spark; None: the driver runs no program.
    """

    maps: Maps
    arrow: Mapping[str, ArrowFunction]
    evaluate: Evaluate | None

    @property
    def names(self) -> frozenset[str]:
        """The names of the functions."""
        return frozenset((*self.maps, *self.arrow))


@dataclass(frozen=True)
class SparkRows:
    """Operators that Spark itself evaluates.

    Args:
        names: of the columns that come out.
    """

    names: tuple[str, ...]
    program: Program

    def used(self, wanted: frozenset[int]) -> frozenset[int]:
        """The places of the input columns that they need, whatever is wanted of the result."""
        return self.program.needed

    def apply(self, columns: Arrays, rows: int) -> Iterator[tuple[Arrays, int]]:
        for made, count in self.program.rows(columns, rows):
            yield [plain(column) for column in made], count


@dataclass(frozen=True)
class StepProgram:
    """A process step, and what is done with its rows.

    Args:
        table: of the step. It is run by whoever runs the program, see ``driver/step/chain.py``.
        input: makes the rows that go into it.
        names: of the columns of its rows that are used.
        columns: those that come out.
    """

    table: str
    input: DriverProgram
    names: tuple[str, ...]
    columns: tuple[str, ...]
    operators: tuple[RowOperator, ...]

    def apply(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The rows of the query that rows of the step become."""
        columns = [rows.column(name) for name in self.names]
        for made, count in through(self.operators, columns, rows.num_rows):
            yield batch_of(made, self.columns, count)


@dataclass(frozen=True)
class DriverProgram:
    """What the driver makes of records that it has fetched.

    Args:
        query: makes rows of the records of topics.
        steps: process steps whose rows are rows of the query.
        job: why each batch has a Spark job of its own, such as ``BroadcastHashJoin``; empty: none is needed.
    """

    query: QueryRows
    steps: tuple[StepProgram, ...] = ()
    job: str = ""


class _RefusedError(Exception):
    """Why operators cannot be evaluated."""


def driver_program(plan: DirectPlan, node: Any, functions: Functions, form: Form | None) -> DriverProgram | str:
    """Bind a plan.

    Args:
        node: the query's analyzed plan, to which the paths in the plan belong.
        form: of the sink; None: the rows go to a process step.

    Returns:
        The program; or why Spark cannot evaluate an operator.
    """
    try:
        return _Binder(node, functions).program(plan, form)
    except _RefusedError as reason:
        return str(reason)


class _Binder:
    def __init__(self, node: Any, functions: Functions) -> None:
        self._node = node
        self._functions = functions
        self._job = ""
        self._known: dict[SparkOperators, SparkRows] = {}  # operators above a union are those of each of its sides

    def program(self, plan: DirectPlan, form: Form | None) -> DriverProgram:
        topics = tuple(TopicProgram(source.read, self._bound(source.operators)) for source in plan.sources)
        steps = tuple(
            StepProgram(
                each.table, self.program(each.input, None), each.names, each.columns, self._bound(each.operators)
            )
            for each in plan.steps
        )
        query = QueryRows(TaskProgram(topics, plan.columns), form, costly=plan.needs_frame)
        return DriverProgram(query, steps, self._job)

    def _bound(self, operators: Sequence[PlanOperator]) -> tuple[RowOperator, ...]:
        return tuple(map(self._operator, operators))

    def _operator(self, operator: PlanOperator) -> RowOperator:
        if isinstance(operator, Select):
            return operator
        if isinstance(operator, Function):
            if operator.name in self._functions.maps:
                return MapRows(operator.input, operator.names, self._functions.maps[operator.name])
            return ArrowRows(operator.input, operator.names, self._functions.arrow[operator.name])
        return self._evaluated(operator)

    def _evaluated(self, operator: SparkOperators) -> SparkRows:
        if operator in self._known:
            return self._known[operator]
        if self._functions.evaluate is None:
            raise RuntimeError("nothing evaluates Spark's operators")
        program = self._functions.evaluate(self._node, operator.path, operator.base)
        if isinstance(program, str):
            raise _RefusedError(program)
        self._job = self._job or program.job
        found = self._known[operator] = SparkRows(operator.names, program)
        return found


def described(plan: DirectPlan, program: DriverProgram, *, extended: bool = False) -> str:
    """The plan as text, a line for each topic.

    Args:
        program: the plan, bound.
        extended: also which columns are fetched.
    """
    return "\n".join(["== Direct plan ==", *_lines(plan, program, extended=extended)])


def _lines(plan: DirectPlan, program: DriverProgram, *, extended: bool) -> Iterator[str]:
    for source, topic in zip(plan.sources, program.query.program.topics, strict=True):
        yield " -> ".join([f"topic {source.read.topic}", *map(_described, source.operators)])
        if extended:
            yield f"  columns of the topic that are used: {', '.join(topic.needed)}"
    for step, bound in zip(plan.steps, program.steps, strict=True):
        yield " -> ".join([f"process step of table {step.table}", *map(_described, step.operators)])
        yield from (f"  {line}" for line in _lines(step.input, bound.input, extended=extended))


def _described(operator: PlanOperator) -> str:
    names = ", ".join(operator.names)
    if isinstance(operator, Select):
        return f"select {names}"
    if isinstance(operator, SparkOperators):
        return f"Spark's operators, to {names}"
    return f"{'function' if operator.moves_rows else 'map'} to {names}"
