"""Process steps in tasks: in one stage, whose tasks also write the outputs, or in two stages.

In two stages, process steps yield rows, operators may follow, and write tasks write the result. Dead letters, late
records and records that name a topic of their own are side outputs: no operator after a step ever sees them. The
step's tasks write those to partitions that they own, the driver writes few others. Otherwise they go to the write
tasks, past the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from onceflow.client.cluster import Cluster
from onceflow.driver.batch.audit import Part
from onceflow.driver.step.in_driver import parts_of
from onceflow.messages import REPORT_SPARK_SCHEMA, Owners, StateOrder, TaskReport, decoded, from_rows
from onceflow.planning.ownership import Outgoing, check_columns
from onceflow.planning.placement import Placement, StepPlacement
from onceflow.planning.step_frames import partition_of_key, sink_columns, with_default_topic
from onceflow.planning.step_tree import StepNode, StepQuery, Tree, branch_frames
from onceflow.spark import function_names, plans
from onceflow.spark.placed_jobs import PlacedJobs
from onceflow.spark.task_shuffle import repartition_by_task
from onceflow.task.state_tasks import FusedTask, RowsTask
from onceflow.task.step_outputs import FURTHER_COLUMNS, rows_schema


def placed(
    df: DataFrame, order: StateOrder, step: StepPlacement, jobs: PlacedJobs | None = None
) -> tuple[DataFrame, int, StateOrder]:
    """The rows, moved to the tasks of their table partitions, the number of tasks, and their order.

    Args:
        jobs: for tasks that run where the copies are.
    """
    owners = Owners.by_number(step.tasks) if step.homes is None else step.homes.owners
    order = replace(order, owners=owners)
    if step.move == "one task":
        return df.coalesce(1), 1, order
    partition = partition_of_key(df, order.spec.topics.partitions)
    moved = repartition_by_task(df, step.tasks, _task_of(partition, owners))
    if step.homes is None or jobs is None:
        return moved, step.tasks, order
    return jobs.moved(moved, step.homes.executors), step.tasks, replace(order, locations=step.homes.locations)


def _task_of(partition: Column, owners: Owners) -> Column:
    """The task that has a partition, as `Owners.task_of`."""
    group = partition % F.lit(owners.groups)
    if owners.tasks == tuple(range(owners.groups)):
        return group.cast("int")
    # One literal in place of one for each group. Spark divides it once, when it optimizes the plan.
    tasks = F.split(F.lit(",".join(map(str, owners.tasks))), ",")
    return F.element_at(tasks, group.cast("int") + 1).cast("int")


def run_fused(
    df: DataFrame, order: StateOrder, step: StepPlacement, cluster: Cluster, jobs: PlacedJobs | None
) -> tuple[TaskReport, list[Part], int]:
    """Process the batch and write what comes out. Returns the report, what is to be audited, and how many tasks ran."""
    moved, tasks, order = placed(df, order, step, jobs)
    report = from_rows(moved.mapInArrow(FusedTask(order), REPORT_SPARK_SCHEMA).collect())
    return report, parts_of(report, tasks, order.write, cluster, shuffled=True), tasks


class Stages:
    """The process steps of a query in one attempt of a batch: their tasks run when the sink writes what comes out.

    Args:
        df: the rows of the batch.
        order: that of the tasks of a table's step, as far as it does not depend on where they run.
        jobs: for tasks that run where the copies are.
    """

    def __init__(
        self,
        query: StepQuery,
        placement: Placement,
        df: DataFrame,
        order: Callable[[str], StateOrder],
        jobs: PlacedJobs | None = None,
    ) -> None:
        self._query = query
        self._placement = placement
        self._inputs = branch_frames(df, query.branches, placement.branch_tasks)
        self._order = order
        self._jobs = jobs
        self._sides: list[DataFrame] = []  # side outputs that no task of a step writes
        self.tasks: dict[str, int] = {}  # how many tasks the step of each table has

    def outgoing(self, flow: str) -> Outgoing:
        """The rows that the sink is to write."""
        query = self._query
        rows = self._frame(query.tree)
        in_front = " + ".join(str(number) for number in self.tasks.values())
        if query.written_as_is:
            outputs = with_default_topic(rows, query.topic)
        elif not self._placement.exchanged:
            return Outgoing(rows, query.columns, query.topic, in_front)
        else:
            outputs = sink_columns(rows, query.columns, query.topic)
            for side in self._sides:
                outputs = outputs.unionByName(side, allowMissingColumns=True)
        return Outgoing(outputs, check_columns(outputs.schema, topic=None, flow=flow), None, in_front)

    def reports(self) -> dict[str, TaskReport]:
        """What the tasks of each table's step have done, when the sink has written."""
        found = {}
        for table in self.tasks:
            collected = self._query.collected[table]
            found[table] = decoded(collected.value)
            collected.value = []
        return found

    def _frame(self, tree: Tree) -> DataFrame:
        if tree.branch is not None:
            return self._inputs[tree.branch]
        if tree.step is not None:
            return self._rows(tree.step)
        spark, plan = self._inputs[0].sparkSession, self._query.plan
        found = [(step.node, self._rows(step)) for step in tree.steps]
        found += [(node, self._inputs[branch]) for node, branch in tree.branches]
        new = {tree.root.path_to(node): plans.named_as(rows, plans.at(plan, node.path)) for node, rows in found}
        return plans.frame(spark, plans.grafted(spark, plans.at(plan, tree.root.path), new))

    def _rows(self, node: StepNode) -> DataFrame:
        """The rows of a step that operators after it see."""
        step = self._placement.steps[node.table]
        order = self._order(node.table)
        if self._query.topic_has_side_outputs:
            order = replace(order, topic=None)  # a record that names it may be a dead letter
        moved, tasks, order = placed(self._frame(node.input), order, step, self._jobs)
        collected = self._query.collected[node.table]
        collected.value = []
        self.tasks[node.table] = tasks
        rows = moved.mapInArrow(RowsTask(order, collected), rows_schema(order.spec.processor))
        if not self._placement.exchanged:
            return rows
        rows = plans.exchanged(rows, tasks)
        self._sides.append(rows.where("topic IS NOT NULL").drop(*FURTHER_COLUMNS))
        return rows.where("topic IS NULL")


def runs_step_once(df: DataFrame) -> bool:
    """Whether the optimizer has left the one process step of a DataFrame in its plan."""
    return sum(map(function_names.is_step, plans.arrow_functions(plans.optimized(df)))) == 1
