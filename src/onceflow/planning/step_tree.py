"""Where the process steps of a query are in its plan, and which rows the streaming query must supply to them.

The plan is a tree. Its root is what is written, below it are process steps, and below the innermost steps there are
*branches*, the parts of the plan that Spark's streaming query runs. With one branch the streaming query is that branch.
With several (a union after a step, two steps) it is a union of them, and every row contains the number of its branch.
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
        table: the table of the step, which identifies it.
        path: its position, from the root of the tree that contains it.
        narrow: whether all operators above it, up to that root, keep its tasks as they are (`plans.NARROW`).
        input: the tree of its input.
    """

    table: str
    path: plans.Path
    narrow: bool
    input: Tree


@dataclass(frozen=True)
class Tree:
    """The plan of a DataFrame, and its parts that are replaced in every batch: steps and branches.

    Args:
        steps: the steps that have no other step of this tree above them.
        branches: path and number of each branch that is not below one of these steps.
    """

    plan: Any
    steps: tuple[StepNode, ...]
    branches: tuple[tuple[plans.Path, int], ...]

    @property
    def branch(self) -> int | None:
        """The number of the branch, if the whole tree is one."""
        return self.branches[0][1] if self.branches and self.branches[0][0] == () else None

    @property
    def step(self) -> StepNode | None:
        """The step, if it is the root of the tree."""
        return self.steps[0] if self.steps and self.steps[0].path == () else None

    def all_steps(self) -> Iterator[StepNode]:
        """Every step, also those below others; a step comes before those below it."""
        for node in self.steps:
            yield node
            yield from node.input.all_steps()


@dataclass(frozen=True)
class StepQuery:
    """The process steps of one query, and their places in its plan.

    Args:
        tree, branches: see `tree_of`.
        written_as_is: whether the outputs of its only step are written unchanged.
        topic: where outputs go that name no topic.
        topic_has_side_outputs: whether side outputs go there, too.
        columns: of the query's DataFrame.
        collected: per table, the accumulator for the reports of tasks that yield rows.
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
        UnsupportedQueryError: the query has a step of another run, or the same step twice.
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


# Operators that pass all rows on unchanged. (A projection or a filter may do so, too.)
_NAMES_ONLY = ("SubqueryAlias", "View")
# The columns of a step that the sink always writes. A step's topic column is null in every row.
_WRITTEN = ("key", "value", "headers", "timestamp")


def stripped(spark: SparkSession, tree: Tree) -> Tree:
    """The tree without the operators above its only step, if none of them changes anything; otherwise the tree."""
    if len(tree.steps) != 1 or tree.branches:
        return tree
    (node,) = tree.steps
    step, *above = plans.operators(spark, tree.plan, node.path)
    if not changes_nothing(step.columns, above):
        return tree
    return Tree(plans.at(tree.plan, node.path), (replace(node, path=(), narrow=True),), ())


def changes_nothing(columns: Sequence[tuple[str, int]], above: Sequence[plans.Operator]) -> bool:
    """Whether the sink would write the same without these operators: they only pass on the columns of a step.

    Args:
        columns: name and id of each column of the step.
        above: the operators after the step, the first one first.
    """
    origins = {number: name for name, number in columns}  # the step's column of each id
    for operator in above:
        if operator.kind == "Project":
            named = zip(operator.columns, operator.taken, strict=True)
            origins = {number: origins[taken] for (_, number), taken in named if taken in origins}
        if any(number not in origins for _, number in operator.columns):
            return False  # something is computed, even if it is not used
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
    """The streaming query: its only branch, or a union of all branches, every row marked with its branch."""
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
        tasks: number of tasks that several branches are divided among.
    """
    if len(branches) == 1:
        return [df]
    shared = plans.exchanged(df, tasks)  # otherwise the rows of all branches would be computed once for each branch
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
