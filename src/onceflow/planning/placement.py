"""Where the process steps of a batch run. This is decided again for every batch.

`place` is a pure function of three things: the query (`QueryShape`, fixed at its start), what earlier batches have
shown (`Learnt`), and this batch and the current cluster (`BatchFacts`). The code that runs a step follows the
`Placement` and decides nothing. There are three ways:

- by the *driver*, when the batch is small and the master local;
- *fused*: the tasks of the step write its outputs themselves, when the outputs are written unchanged and go to
  partitions that no other task writes;
- *two-stage*: the outputs are rows again, operators may follow, and write tasks write them.

The tasks of a step own whole partitions of its table. They get their rows in one of three ways, see `Move`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from onceflow.messages import NotColocatedError, NotCopartitionedError, Writes

#: Rows for each task of a process step, about.
TASK_ROWS = 10_000
#: For so many rows the driver needs less time than two Python tasks. (For plain writes there are fewer: no stores to
#: open.)
SMALL_BATCH_ROWS = 10_000
_MAX_SPREAD, _MAX_TASKS = 4, 16

Way = Literal["driver", "fused", "two-stage"]
#: How rows get to the tasks that own their partition of the table. Source and table are *co-partitioned*: tasks take
#: whole source partitions, without a shuffle. Or there is only *one task*. Or a *shuffle* by the partition of the key.
Move = Literal["co-partitioned", "one task", "shuffle"]


@dataclass(frozen=True)
class StepShape:
    """A process step of a query.

    Args:
        table, partitions: its table, and how many partitions the table has.
        from_stream: whether its input comes from the streaming query, without another step in between.
        co_partitionable: whether source and table may be co-partitioned: the step reads one topic with equally many
            partitions, and the keys are those of the source. Only the rows show whether the keys are in the right
            partitions.
    """

    table: str
    partitions: int
    from_stream: bool = True
    co_partitionable: bool = False


@dataclass(frozen=True)
class QueryShape:
    """The properties of a query that decide where its steps run.

    Args:
        written_as_is: whether the outputs of its only step are written unchanged: then the step's tasks may write them.
        needs_exchange: whether, in two stages, the rows of a step must go through a shuffle before any operator sees
            them. Otherwise operators could run the step more than once or merge several of its tasks into one, or
            write tasks could write the topics of side outputs.
        local: whether tasks run on this machine, so that the driver may do their work.
        small_batch_rows: the driver may do the work of batches with at most so many rows.
        clock: whether the query has a clock for timers: then the plan of some batches contains the clock's source,
            which has no rows.
    """

    steps: tuple[StepShape, ...]
    written_as_is: bool
    needs_exchange: bool = False
    local: bool = True
    small_batch_rows: int = SMALL_BATCH_ROWS
    clock: bool = False

    @property
    def co_partitionable(self) -> bool:
        """Whether any step may take source partitions without a shuffle."""
        return any(step.co_partitionable for step in self.steps)


@dataclass(frozen=True)
class Learnt:
    """What batches of this run have shown, especially failed attempts.

    Args:
        outputs_elsewhere: outputs belonged to partitions of other tasks (`NotColocatedError`).
        keys_elsewhere: keys were not where Kafka's default partitioner puts them (`NotCopartitionedError`).
        partitions_mixed: the plan mixes source partitions: a shuffle, or a union.
        partitions_kept: the plan of a batch gave every source partition to one task. A batch whose plan has the clock's
            source does not set it.
        step_seen: the optimizer has kept the step in the plan of a batch.
        step_left_out: the optimizer has removed the step, because the query needs none of its rows. Its state and its
            side outputs are needed.
    """

    outputs_elsewhere: bool = False
    keys_elsewhere: bool = False
    partitions_mixed: bool = False
    partitions_kept: bool = False
    step_seen: bool = False
    step_left_out: bool = False

    def after(self, problem: BaseException) -> Learnt:
        """An attempt has failed."""
        if isinstance(problem, NotColocatedError):
            return replace(self, outputs_elsewhere=True)
        if isinstance(problem, NotCopartitionedError):
            return replace(self, keys_elsewhere=True)
        return self

    def looked(self, read: tuple[int, ...] | None, *, clock: bool) -> Learnt:
        """The plan of a batch was inspected, see `BatchFacts.read`."""
        if read is not None:
            return replace(self, partitions_kept=True)
        # With the clock's source the plan is a union. The plan of another batch may not have it.
        return self if clock or self.partitions_kept else replace(self, partitions_mixed=True)


@dataclass(frozen=True)
class BatchFacts:
    """Facts about a batch, and about the cluster at this moment.

    Args:
        rows: most source records that it can have; 0: it only fires timers.
        driver_may: whether the driver may do a batch with few rows: not after a failed attempt, nor with large rows.
        cores: how many tasks can run at once; determined only if tasks run.
        due: per table, partitions to open even if they have no rows.
        read: the source partition that each task of the batch's plan reads; None: the plan was not inspected, or its
            tasks do not read one partition each.
    """

    rows: int
    driver_may: bool = True
    cores: int = 1
    due: Mapping[str, frozenset[int]] = field(default_factory=dict)
    read: tuple[int, ...] | None = None


@dataclass(frozen=True)
class StepPlacement:
    """How the tasks of a step get their rows.

    Args:
        tasks: how many tasks there are. If co-partitioned: at most so many, and never more than source partitions.
        modulus: the task of a partition is the partition number modulo this. If co-partitioned, any partition may be
            in any task; then outputs belong to the table partition that they come from.
        read: the source partition of each task before tasks are merged, if co-partitioned and partitions are due.
    """

    table: str
    move: Move
    tasks: int
    modulus: int
    read: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Where everything of a batch runs.

    Args:
        steps: by table; empty if the driver does everything.
        writes: what the tasks of the steps write themselves.
        exchanged: in two stages, whether the rows of each step go through a shuffle before any operator sees them.
        branch_tasks: number of tasks for a streaming query that has several branches.
    """

    way: Way
    writes: Writes
    steps: Mapping[str, StepPlacement] = field(default_factory=dict)
    exchanged: bool = False
    branch_tasks: int = 1


def on_driver(shape: QueryShape, learnt: Learnt, batch: BatchFacts) -> bool:
    """Whether the driver processes the batch. Then no other facts about it are needed."""
    fused = shape.written_as_is and not learnt.outputs_elsewhere
    return fused and shape.local and batch.driver_may and batch.rows <= shape.small_batch_rows


def must_look(shape: QueryShape, learnt: Learnt, batch: BatchFacts) -> bool:
    """Whether `BatchFacts.read` is needed: once, and whenever partitions are due. It takes a few milliseconds."""
    if not _may_co_partition(shape, learnt, batch) or on_driver(shape, learnt, batch):
        return False
    due = any(batch.due.get(step.table) for step in shape.steps if step.co_partitionable)
    return due or not learnt.partitions_kept


def place(shape: QueryShape, learnt: Learnt, batch: BatchFacts) -> Placement:
    """Where the steps of a batch run."""
    if on_driver(shape, learnt, batch):
        return Placement("driver", "everything")
    steps = {step.table: _place_step(step, shape, learnt, batch) for step in shape.steps}
    branch_tasks = max(1, batch.cores)
    if shape.written_as_is and not learnt.outputs_elsewhere:
        return Placement("fused", "everything", steps, branch_tasks=branch_tasks)
    # Operators after a step never see side outputs. Without operators, side outputs are rows like all others.
    exchanged = not shape.written_as_is and (shape.needs_exchange or learnt.outputs_elsewhere or learnt.step_left_out)
    writes: Writes = "nothing" if shape.written_as_is or exchanged else "side outputs"
    return Placement("two-stage", writes, steps, exchanged, branch_tasks)


def _place_step(step: StepShape, shape: QueryShape, learnt: Learnt, batch: BatchFacts) -> StepPlacement:
    wanted = max(1, min(batch.cores, round(batch.rows / TASK_ROWS + 0.5)))
    if step.co_partitionable and _may_co_partition(shape, learnt, batch):
        due = batch.due.get(step.table, frozenset())
        # Partitions that are due but not read by the batch need a task, too: only a shuffle has one for each partition.
        if due <= set(batch.read or ()) and (learnt.partitions_kept or batch.read is not None):
            read = (batch.read or ()) if due else ()
            return StepPlacement(step.table, "co-partitioned", wanted, step.partitions, read)
    tasks = task_count(step.partitions, wanted)
    # Without rows the plan may have no task at all.
    move: Move = "one task" if tasks == 1 and batch.rows and step.from_stream else "shuffle"
    return StepPlacement(step.table, move, tasks, tasks)


def _may_co_partition(shape: QueryShape, learnt: Learnt, batch: BatchFacts) -> bool:
    return shape.co_partitionable and batch.rows > 0 and not (learnt.keys_elsewhere or learnt.partitions_mixed)


def task_count(partitions: int, wanted: int) -> int:
    """How many tasks share the partitions of a table.

    A divisor of the partition count is taken if one is near the wanted number. Then equal keys of all topics whose
    partition count is a multiple of it belong to the same task, and the step's tasks write the outputs themselves. A
    prime number has no such divisor. Then every partition gets a task, or, if these would be too many, tasks have
    unequal numbers of partitions and the outputs go through a stage of their own.
    """
    wanted = max(1, min(wanted, partitions))
    divisors = [n for n in range(1, partitions + 1) if partitions % n == 0]
    above = next(n for n in divisors if n >= wanted)
    below = max(n for n in divisors if n <= wanted)
    if above <= _MAX_SPREAD * wanted:
        return above
    if 2 * below >= wanted:
        return below
    return above if above <= _MAX_TASKS * wanted else wanted
