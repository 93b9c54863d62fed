"""Where the process steps of a batch run: one decision, made anew for every batch.

`place` is a pure function of three things: what the query is (`QueryShape`, fixed at its start), what batches so far
have shown (`Learnt`), and what this batch and the cluster are now (`BatchFacts`). The code that runs a step does what
the `Placement` says, and decides nothing. There are three ways:

- by the *driver*, when the batch is small and the master local;
- *fused*: the tasks of the step write its outputs themselves, when these are written as they are and go to partitions
  that nobody else writes;
- *two-stage*: the outputs are rows again, operators may follow, and write tasks write them.

The tasks of a step own whole partitions of its table. They get the rows of these in one of three ways, see `Move`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from onceflow.messages import NotColocatedError, NotCopartitionedError, Writes

#: About as many rows are worth a task of a process step.
TASK_ROWS = 10_000
#: Two Python tasks cost more than the driver needs for so many rows (more than for a plain write: opening stores).
SMALL_BATCH_ROWS = 10_000
_MAX_SPREAD, _MAX_TASKS = 4, 16

Way = Literal["driver", "fused", "two-stage"]
#: How rows come to the tasks that own their partition of the table: source and table are *co-partitioned*, so tasks
#: take whole source partitions, without a shuffle; there is *one task*; or a *shuffle* by the partition of the key.
Move = Literal["co-partitioned", "one task", "shuffle"]


@dataclass(frozen=True)
class StepShape:
    """A process step of a query.

    Args:
        table, partitions: its table, and how many partitions that has.
        from_stream: whether its input is that of the streaming query, with no other step in between.
        co_partitionable: whether source partitions may be those of the table: it reads one topic with as many, and the
            keys are the source's. Where the keys really are, only the rows show.
    """

    table: str
    partitions: int
    from_stream: bool = True
    co_partitionable: bool = False


@dataclass(frozen=True)
class QueryShape:
    """What a query is, as far as it decides where its steps run.

    Args:
        written_as_is: whether the outputs of its only step are what is written: then the step's tasks may do it.
        needs_exchange: whether, in two stages, the rows of a step have to go through a shuffle before any operator sees
            them: operators would run the step more than once, or several tasks of it as one, or write tasks may write
            the topics that side outputs go to.
        local: whether tasks run on this machine, so that the driver may do their work.
        small_batch_rows: with how many rows at most.
        clock: whether the query is woken up for timers: then some batches have the clock's rows (none) in their plan.
    """

    steps: tuple[StepShape, ...]
    written_as_is: bool
    needs_exchange: bool = False
    local: bool = True
    small_batch_rows: int = SMALL_BATCH_ROWS
    clock: bool = False

    @property
    def co_partitionable(self) -> bool:
        """Whether any step may take source partitions as they are."""
        return any(step.co_partitionable for step in self.steps)


@dataclass(frozen=True)
class Learnt:
    """What batches of this run have shown, failed attempts above all.

    Args:
        outputs_elsewhere: outputs belonged to partitions of other tasks (`NotColocatedError`).
        keys_elsewhere: keys were not where Kafka's default partitioner puts them (`NotCopartitionedError`).
        partitions_mixed: the plan mixes source partitions: a shuffle, or a union.
        partitions_kept: the plan of a batch gave every source partition to one task. Not so with the clock's rows.
        step_seen: the optimizer has left the step in the plan of a batch.
        step_left_out: it has not, for nothing that the step yields was wanted. Its state and its side outputs are.
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
        """The plan of a batch was looked at, see `BatchFacts.read`."""
        if read is not None:
            return replace(self, partitions_kept=True)
        # With the clock's rows the plan is a union; that of another batch may be none.
        return self if clock or self.partitions_kept else replace(self, partitions_mixed=True)


@dataclass(frozen=True)
class BatchFacts:
    """What a batch is, and the cluster at this moment.

    Args:
        rows: source records that it has at most; 0: it fires timers only.
        driver_may: whether the driver may do it if there are few rows: not after a failed attempt, nor with large rows.
        cores: how many tasks run at once; asked for only if tasks run.
        due: per table, partitions to open even if they have no rows.
        read: the source partition that each task of the batch's plan reads; None: not looked at, or not one each.
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
        tasks: how many there are; co-partitioned: at most so many, never more than source partitions.
        modulus: a partition belongs to the task whose number is its remainder by this. Co-partitioned, any partition
            may be in any task: then outputs are owned by the partition of the table that they come from.
        read: co-partitioned and something due: the source partition of each task before they are merged.
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
        steps: by table; none if the driver does it all.
        writes: what the tasks of the steps write themselves.
        exchanged: in two stages, whether the rows of each step go through a shuffle before any operator sees them.
        branch_tasks: what several branches of a streaming query are divided among.
    """

    way: Way
    writes: Writes
    steps: Mapping[str, StepPlacement] = field(default_factory=dict)
    exchanged: bool = False
    branch_tasks: int = 1


def on_driver(shape: QueryShape, learnt: Learnt, batch: BatchFacts) -> bool:
    """Whether the driver does the batch. If so, nothing else has to be known of it."""
    fused = shape.written_as_is and not learnt.outputs_elsewhere
    return fused and shape.local and batch.driver_may and batch.rows <= shape.small_batch_rows


def must_look(shape: QueryShape, learnt: Learnt, batch: BatchFacts) -> bool:
    """Whether `BatchFacts.read` is needed, which takes a few milliseconds: once, and when something is due."""
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
    # Operators behind a step never see side outputs. With none, these are rows like all others until they are written.
    exchanged = not shape.written_as_is and (shape.needs_exchange or learnt.outputs_elsewhere or learnt.step_left_out)
    writes: Writes = "nothing" if shape.written_as_is or exchanged else "side outputs"
    return Placement("two-stage", writes, steps, exchanged, branch_tasks)


def _place_step(step: StepShape, shape: QueryShape, learnt: Learnt, batch: BatchFacts) -> StepPlacement:
    wanted = max(1, min(batch.cores, round(batch.rows / TASK_ROWS + 0.5)))
    if step.co_partitionable and _may_co_partition(shape, learnt, batch):
        due = batch.due.get(step.table, frozenset())
        # What is due in partitions that the batch does not read needs a task, too: only a shuffle has one for each.
        if due <= set(batch.read or ()) and (learnt.partitions_kept or batch.read is not None):
            read = (batch.read or ()) if due else ()
            return StepPlacement(step.table, "co-partitioned", wanted, step.partitions, read)
    tasks = task_count(step.partitions, wanted)
    # Without rows there may be no task to merge.
    move: Move = "one task" if tasks == 1 and batch.rows and step.from_stream else "shuffle"
    return StepPlacement(step.table, move, tasks, tasks)


def _may_co_partition(shape: QueryShape, learnt: Learnt, batch: BatchFacts) -> bool:
    return shape.co_partitionable and batch.rows > 0 and not (learnt.keys_elsewhere or learnt.partitions_mixed)


def task_count(partitions: int, wanted: int) -> int:
    """How many tasks share the partitions of a table.

    A divisor of their number, where one is near: then equal keys of topics with a multiple of it fall to the same task,
    and outputs are written by the step's own tasks. A prime number has none; then every partition is a task, or, where
    those would be too many, tasks have unequal numbers of partitions and outputs go through a stage of their own.
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
