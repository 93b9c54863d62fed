"""Where process steps stand in a query, and what the streaming query has to bring to them.

A query is a tree: its root is what is written, below are process steps, and below the innermost steps there are
*branches*, the parts of the plan that Spark's streaming query runs. With one branch the streaming query is that branch;
with several (a union behind a step, two steps) it is a union of them, and every row says where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from onceflow.errors import UnsupportedQueryError
from onceflow.planning.ownership import SINK_COLUMNS, Columns
from onceflow.spark import jvm, plans, queries

_BRANCH = "__onceflow_branch"


@dataclass(frozen=True)
class StepNode:
    """A process step in a tree.

    Args:
        table: names the step.
        path: from the root of the tree that it stands in.
        narrow: whether all operators above it, up to that root, keep its tasks as they are (`plans.NARROW`).
        input: what goes into it.
    """

    table: str
    path: plans.Path
    narrow: bool
    input: Tree


@dataclass(frozen=True)
class Tree:
    """The plan of a DataFrame, with what in it cannot be run as it is.

    Args:
        steps: those that no other step of this tree stands above.
        branches: the path and the number of each branch that stands beside them.
    """

    plan: Any
    steps: tuple[StepNode, ...]
    branches: tuple[tuple[plans.Path, int], ...]

    @property
    def branch(self) -> int | None:
        """The number of the branch that this tree is as a whole."""
        return self.branches[0][1] if self.branches and self.branches[0][0] == () else None

    @property
    def step(self) -> StepNode | None:
        """The step that this tree is as a whole."""
        return self.steps[0] if self.steps and self.steps[0].path == () else None

    def all_steps(self) -> Iterator[StepNode]:
        """Every step, also those below others; a step comes before those below it."""
        for node in self.steps:
            yield node
            yield from node.input.all_steps()


@dataclass(frozen=True)
class StepQuery:
    """The process steps of one query, as they stand in its plan.

    Args:
        tree, branches: see `tree_of`.
        written_as_is: whether the outputs of its only step are what is written.
        topic: where outputs go that name no topic.
        topic_has_side_outputs: whether side outputs go there, too.
        columns: of the query's DataFrame.
        collected: per table, the accumulator for the reports of tasks whose rows go on.
    """

    tree: Tree
    branches: list[Any]
    written_as_is: bool
    topic: str | None
    topic_has_side_outputs: bool
    columns: Columns
    collected: Mapping[str, Any]


def tree_of(df: DataFrame, tables: Mapping[str, Any], flow: str) -> tuple[Tree, list[Any]] | None:
    """The tree of a query and the plans of its branches; None: it has no process step.

    Args:
        tables: the steps of this run, by table.

    Raises:
        UnsupportedQueryError: a step of another run, or one that is there twice.
    """
    plan = plans.analyzed(df)
    if not _has_step(plan):
        return None
    if any(jvm.kind(node) == "WithCTE" for node in jvm.nodes(plan)):
        raise UnsupportedQueryError(
            "The query has a WITH clause and a process step",
            flow=flow,
            next_step="write it without WITH: a subquery, or DataFrame operators",
        )
    branches: list[Any] = []
    tree = _tree(plan, branches)
    seen: set[str] = set()
    for node in tree.all_steps():
        if node.table not in tables or node.table in seen:
            raise UnsupportedQueryError(
                f"The query has the process step of table {node.table!r} "
                + ("twice: its state would be written twice" if node.table in tables else "of another run or flow"),
                flow=flow,
                next_step="call Flow.read and Flow.process again for this run, and use every step once: a "
                "processor may yield several records, and Record(topic=...) goes to another topic",
            )
        seen.add(node.table)
    return tree, branches


# Operators that hand all rows on as they are. (A projection or a filter may do so, too.)
_NAMES_ONLY = ("SubqueryAlias", "View")
# What the sink writes of the columns of a step, whatever else a query has. A step's topic is null in every row.
_WRITTEN = ("key", "value", "headers", "timestamp")


def stripped(spark: SparkSession, tree: Tree) -> Tree:
    """The tree without operators that change nothing, where only such ones stand above its only step."""
    if len(tree.steps) != 1 or tree.branches:
        return tree
    (node,) = tree.steps
    step, *above = plans.operators(spark, tree.plan, node.path)
    if not changes_nothing(step.columns, above):
        return tree
    return Tree(plans.at(tree.plan, node.path), (replace(node, path=(), narrow=True),), ())


def changes_nothing(columns: Sequence[tuple[str, int]], above: Sequence[plans.Operator]) -> bool:
    """Whether the sink would write the same without these operators: they only hand the columns of a step on.

    Args:
        columns: name and id of each column of the step.
        above: the operators behind the step, the first one first.
    """
    origins = {number: name for name, number in columns}  # of an id, the step's column that it is
    for operator in above:
        if operator.kind == "Project":
            named = zip(operator.columns, operator.taken, strict=True)
            origins = {number: origins[taken] for (_, number), taken in named if taken in origins}
        if any(number not in origins for _, number in operator.columns):
            return False  # something is computed, even if nobody wants it
        if operator.kind != "Project" and operator.kind not in _NAMES_ONLY and not operator.keeps_all:
            return False
    last = above[-1].columns if above else columns
    found = {name: origins[number] for name, number in last}
    wanted = {name: name for name in _WRITTEN}
    own = {name: origin for name, origin in found.items() if name in SINK_COLUMNS}
    return own in (wanted, {**wanted, "topic": "topic"})


def _tree(plan: Any, branches: list[Any]) -> Tree:
    steps: list[StepNode] = []
    beside: list[tuple[plans.Path, int]] = []

    def walk(node: Any, path: plans.Path, narrow: bool) -> None:
        table = queries.step_table(node)
        if table is not None:
            steps.append(StepNode(table, path, narrow, _tree(node.child(), branches)))
        elif _has_step(node):
            narrow = narrow and jvm.kind(node) in plans.NARROW
            for i, child in enumerate(plans.children(node)):
                walk(child, (*path, i), narrow)
        elif node.isStreaming():
            beside.append((path, len(branches)))
            branches.append(node)

    walk(plan, (), True)
    return Tree(plan, tuple(steps), tuple(beside))


def _has_step(plan: Any) -> bool:
    return any(queries.step_table(node) is not None for node in jvm.nodes(plan))


def source_frame(spark: SparkSession, branches: Sequence[Any]) -> DataFrame:
    """What the streaming query is: its only branch, or all of them, every row marked with its branch."""
    frames = [plans.frame(spark, plan) for plan in branches]
    if len(frames) == 1:
        return frames[0]
    # By position: a plan may have several columns of one name.
    frames = [each.toDF(*_positions(each)) for each in frames]
    packed = [F.struct(*_positions(each)).alias(_field(i)) for i, each in enumerate(frames)]
    types = [each.select(packed[i]).schema[0].dataType for i, each in enumerate(frames)]
    marked = [
        each.select(
            F.lit(i).alias(_BRANCH),
            *[packed[i] if j == i else F.lit(None).cast(kind).alias(_field(j)) for j, kind in enumerate(types)],
        )
        for i, each in enumerate(frames)
    ]
    united = marked[0]
    for each in marked[1:]:
        united = united.union(each)
    return united


def branch_frames(df: DataFrame, branches: Sequence[Any], tasks: int) -> list[DataFrame]:
    """The rows of a batch, branch by branch, with the names of their columns.

    Args:
        df: of the batch, made from `source_frame`.
        tasks: that several branches are divided among.
    """
    if len(branches) == 1:
        return [df]
    shared = plans.exchanged(df, tasks)  # else every branch would run what is in front of all of them
    frames = []
    for i, plan in enumerate(branches):
        mine = shared.where(F.col(_BRANCH) == i).select(F.col(f"{_field(i)}.*"))
        output = plan.output()
        frames.append(mine.toDF(*[str(output.apply(j).name()) for j in range(output.size())]))
    return frames


def _positions(df: DataFrame) -> list[str]:
    return [f"c{i}" for i in range(len(df.columns))]


def _field(branch: int) -> str:
    return f"in{branch}"
