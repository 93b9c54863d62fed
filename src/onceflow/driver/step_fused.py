"""A batch whose step writes its outputs itself: one stage of tasks does everything."""

from __future__ import annotations

from pyspark.sql import DataFrame

from onceflow.client.cluster import Cluster
from onceflow.driver.audit import Part
from onceflow.driver.step_input import placed
from onceflow.driver.step_on_driver import parts_of
from onceflow.messages import REPORT_SPARK_SCHEMA, StateOrder, TaskReport, from_rows
from onceflow.planning.placement import StepPlacement
from onceflow.task.state_tasks import FusedTask


def run(df: DataFrame, order: StateOrder, step: StepPlacement, cluster: Cluster) -> tuple[TaskReport, list[Part], int]:
    """Process the batch and write what comes out. Returns the report, what is to be audited, and how many tasks ran."""
    moved, tasks, order = placed(df, order, step)
    report = from_rows(moved.mapInArrow(FusedTask(order), REPORT_SPARK_SCHEMA).collect())
    return report, parts_of(report, tasks, order.write, cluster, shuffled=True), tasks
