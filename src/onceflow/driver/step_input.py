"""Brings the rows of a batch to the tasks of a process step, as its placement says."""

from __future__ import annotations

from dataclasses import replace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from onceflow.messages import StateOrder
from onceflow.planning.placement import StepPlacement
from onceflow.planning.step_frames import partition_of_key
from onceflow.spark.task_shuffle import repartition_by_task


def placed(df: DataFrame, order: StateOrder, step: StepPlacement) -> tuple[DataFrame, int, StateOrder]:
    """The rows, moved to the tasks of their table partitions, the number of tasks, and their order."""
    order = replace(order, modulus=step.tasks)
    if step.move == "one task":
        return df.coalesce(1), 1, order
    task: Column = partition_of_key(df, order.spec.topics.partitions) % F.lit(step.tasks)
    return repartition_by_task(df, step.tasks, task.cast("int")), step.tasks, order
