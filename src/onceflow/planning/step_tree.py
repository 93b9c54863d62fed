"""Where the process steps of a query are in its plan, and which rows the streaming query must supply to them.

The plan is a tree. Its root is what is written, below it are process steps, and below the innermost steps there are
*branches*, the parts of the plan that Spark's streaming query runs. With one branch the streaming query is that branch.
With several (a union after a step, two steps) it is a union of them, and every row contains the number of its branch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from onceflow.errors import UnsupportedQueryError
from onceflow.planning.ownership import SINK_COLUMNS, Columns
from onceflow.spark import plans
from onceflow.spark.plan_columns import PlanColumn, TakenColumn
from onceflow.spark.query_facts import Node, QueryFacts

_BRANCH = "__onceflow_branch"


@dataclass(frozen=True)
class StepNode:
    """A process step in a tree.

    Args:
        table: the table of the step, which identifies it.
        node: its place in the plan.
        narrow: whether all operators above it, up to the root of the tree that contains it, keep its tasks as they are
            (`Operator.narrow`).
        input: the tree of its input.
    """

    table: str
    node: Node
    narrow: bool
    input: Tree


@dataclass(frozen=True)
class Tree:
    """The plan of a query, or a part of it, and its parts that are replaced in every batch: steps and branches.

    Args:
        steps: the steps that have no other step of this tree above them.
        branches: each branch that is not below one of these steps, and its number.
    """

    root: Node
    steps: tuple[StepNode, ...]
    branches: tuple[tuple[Node, int], ...]

    @property
    def branch(self) -> int | None:
        """The number of the branch, if the whole tree is one."""
        return self.branches[0][1] if self.branches and self.branches[0][0] is self.root else None

    @property
    def step(self) -> StepNode | None:
        """The step, if it is the root of the tree."""
        return self.steps[0] if self.steps and self.steps[0].node is self.root else None

    def all_steps(self) -> Iterator[StepNode]:
        """Every step, also those below others; a step comes before those below it."""
        for step in self.steps:
            yield step
            yield from step.input.all_steps()


@dataclass(frozen=True)
class StepQuery:
    """The process steps of one query, and their places in its plan.

    Args:
        plan: the analyzed plan of the query.
        tree, branches: see `tree_of`.
        written_as_is: whether the outputs of its only step are written unchanged.
        topic: where outputs go that name no topic.
        topic_has_side_outputs: whether side outputs go there, too.
        columns: of the query's DataFrame.
        collected: per table, the accumulator for the reports of tasks that yield rows.
    """

    plan: Any
    tree: Tree
    branches: list[Node]
    written_as_is: bool
    topic: str | None
    topic_has_side_outputs: bool
    columns: Columns
    collected: Mapping[str, Any]


def tree_of(facts: QueryFacts, tables: Collection[str], flow: str) -> tuple[Tree, list[Node]] | None:
    """The tree of a query and its branches; None: it has no process step.

    Args:
        tables: those of the steps of this run.

    Raises:
        UnsupportedQueryError: the query has a step of another run, or the same step twice.
    """
    if not facts.has_step:
        return None
    if facts.has_with:
        raise UnsupportedQueryError(
            "The query has a WITH clause and a process step",
            flow=flow,
            next_step="write it without WITH: a subquery, or DataFrame operators",
        )
    branches: list[Node] = []
    tree = _tree(facts.root, branches)
    seen: set[str] = set()
    for step in tree.all_steps():
        if step.table not in tables or step.table in seen:
            raise UnsupportedQueryError(
                f"The query has the process step of table {step.table!r} "
                + ("twice: its state would be written twice" if step.table in tables else "of another run or flow"),
                flow=flow,
                next_step="call Flow.read and Flow.process again for this run, and use every step once: a "
                "processor may yield several records, and Record(topic=...) goes to another topic",
            )
        seen.add(step.table)
    return tree, branches


# The columns of a step that the sink always writes. A step's topic column is null in every row.
_WRITTEN = ("key", "value", "headers", "timestamp")


def stripped(tree: Tree) -> Tree:
    """The tree without the operators above its only step, if none of them changes anything; otherwise the tree."""
    if len(tree.steps) != 1 or tree.branches:
        return tree
    (step,) = tree.steps
    own, *above = reversed([*tree.root.down_to(step.node)])
    if not changes_nothing(own.columns, above):
        return tree
    return Tree(step.node, (replace(step, narrow=True),), ())


def changes_nothing(columns: Sequence[tuple[str, int]], above: Sequence[Node]) -> bool:
    """Whether the sink would write the same without these operators: they only pass on the columns of a step.

    Args:
        columns: name and id of each column of the step.
        above: the operators after the step, the first one first.
    """
    origins = {number: name for name, number in columns}  # the step's column of each id
    for node in above:
        if node.kind == "Project":
            named = zip(node.ids, map(_taken, node.projected), strict=True)
            origins = {number: origins[taken] for number, taken in named if taken in origins}
        if any(number not in origins for number in node.ids):
            return False  # something is computed, even if it is not used
        if node.kind != "Project" and not node.operator.names_only and not node.keeps_all:
            return False
    last = above[-1].columns if above else columns
    found = {name: origins[number] for name, number in last}
    wanted = {name: name for name in _WRITTEN}
    own = {name: origin for name, origin in found.items() if name in SINK_COLUMNS}
    return own in (wanted, {**wanted, "topic": "topic"})


def _taken(column: PlanColumn) -> int | None:
    """The id of the input column that a column is, with the same type; None: it is computed."""
    return column.expression if isinstance(column, TakenColumn) and column.cast is None else None


def _tree(root: Node, branches: list[Node]) -> Tree:
    steps: list[StepNode] = []
    beside: list[tuple[Node, int]] = []

    def walk(node: Node, narrow: bool) -> None:
        table = node.table
        if table is not None:
            steps.append(StepNode(table, node, narrow, _tree(node.children[0], branches)))
        elif any(each.table is not None for each in node.nodes()):
            for child in node.children:
                walk(child, narrow and node.operator.narrow)
        elif node.streaming:
            beside.append((node, len(branches)))
            branches.append(node)

    walk(root, True)
    return Tree(root, tuple(steps), tuple(beside))


def source_frame(spark: SparkSession, plan: Any, branches: Sequence[Node]) -> DataFrame:
    """The rows that go into the steps: those of the only branch, or a union of all branches, every row marked with its
    branch.

    Args:
        plan: the analyzed plan of the query.
    """
    frames = [plans.frame(spark, plans.at(plan, branch.path)) for branch in branches]
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


def branch_frames(df: DataFrame, branches: Sequence[Node], tasks: int) -> list[DataFrame]:
    """The rows of a batch, branch by branch, with the names of their columns.

    Args:
        df: of the batch, made from `source_frame`.
        tasks: number of tasks that several branches are divided among.
    """
    if len(branches) == 1:
        return [df]
    shared = plans.exchanged(df, tasks)  # otherwise the rows of all branches would be computed once for each branch
    frames = []
    for i, branch in enumerate(branches):
        mine = shared.where(F.col(_BRANCH) == i).select(F.col(f"{_field(i)}.*"))
        frames.append(mine.toDF(*branch.names))
    return frames


def _positions(df: DataFrame) -> list[str]:
    return [f"c{i}" for i in range(len(df.columns))]


def _field(branch: int) -> str:
    return f"in{branch}"
