"""Where the process steps of a batch run whose records tasks read. This is decided again for every batch.

`place` is a pure function of three things: the query (`QueryShape`, fixed at its start), what earlier batches have
shown (`Learnt`), and this batch and the current cluster (`BatchFacts`). The code that runs a step follows the
`Placement` and decides nothing. There are two ways:

- *fused*: the tasks of the step write its outputs themselves, when the outputs are written unchanged and go to
  partitions that no other task writes;
- *two-stage*: the outputs are rows again, operators may follow, and write tasks write them.

The tasks of a step own whole partitions of its table. They get their rows in one of two ways, see `Move`. (Where the
tasks that read can do everything, there is nothing to place, see ``range_tasks.py``.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from onceflow.messages import NotColocatedError, NotCopartitionedError, Owners, Writes

#: Rows for each task of a process step, about.
TASK_ROWS = 10_000
_MAX_SPREAD, _MAX_TASKS = 4, 16
#: What an attempt has found about keys or outputs is believed for so long (a day). Then one more attempt may fail for
#: it: it may have been a single record.
_BELIEVED_MS = 24 * 3_600_000
#: What `Progress.elsewhere` tells of.
KEYS, OUTPUTS = "keys", "outputs"

Way = Literal["fused", "two-stage"]
#: How rows get to the tasks that own their partition of the table: there is only *one task*, or a *shuffle* by the
#: partition of the key.
Move = Literal["one task", "shuffle"]


@dataclass(frozen=True)
class StepShape:
    """A process step of a query.

    Args:
        table, partitions: its table, and how many partitions the table has.
        from_stream: whether its input comes from the sources, without another step in between.
    """

    table: str
    partitions: int
    from_stream: bool = True


@dataclass(frozen=True)
class QueryShape:
    """The properties of a query that decide where its steps run.

    Args:
        written_as_is: whether the outputs of its only step are written unchanged: then the step's tasks may write them.
        needs_exchange: whether, in two stages, the rows of a step must go through a shuffle before any operator sees
            them. Otherwise operators could run the step more than once or merge several of its tasks into one, or
            write tasks could write the topics of side outputs.
        local: whether tasks run on this machine.
    """

    steps: tuple[StepShape, ...]
    written_as_is: bool
    needs_exchange: bool = False
    local: bool = True


@dataclass(frozen=True)
class Learnt:
    """What batches of this run have shown, especially failed attempts.

    Args:
        outputs_elsewhere: outputs belonged to partitions of other tasks (`NotColocatedError`).
        keys_elsewhere: keys were not where Kafka's default partitioner puts them (`NotCopartitionedError`).
        step_seen: the optimizer has kept the step in the plan of a batch.
        step_left_out: the optimizer has removed the step, because the query needs none of its rows. Its state and its
            side outputs are needed.
    """

    outputs_elsewhere: bool = False
    keys_elsewhere: bool = False
    step_seen: bool = False
    step_left_out: bool = False

    def after(self, problem: BaseException) -> Learnt:
        """An attempt has failed."""
        found = found_elsewhere(problem)
        if not found:
            return self
        return replace(
            self,
            outputs_elsewhere=self.outputs_elsewhere or OUTPUTS in found,
            keys_elsewhere=self.keys_elsewhere or KEYS in found,
        )

    def believing(self, found: Collection[str]) -> Learnt:
        """No more and no less than this was found to be elsewhere: `KEYS`, `OUTPUTS`, both, or nothing."""
        return replace(self, outputs_elsewhere=OUTPUTS in found, keys_elsewhere=KEYS in found)


def found_elsewhere(problem: BaseException) -> frozenset[str]:
    """What a failed attempt has found to be elsewhere than expected: `KEYS`, `OUTPUTS`, or nothing."""
    if isinstance(problem, NotColocatedError):
        return frozenset({OUTPUTS})
    return frozenset({KEYS}) if isinstance(problem, NotCopartitionedError) else frozenset()


def believed(elsewhere: Mapping[str, int], now_ms: int) -> dict[str, int]:
    """What earlier attempts have found that is still believed, in the form of `Progress.elsewhere`."""
    return {name: found_ms for name, found_ms in elsewhere.items() if abs(now_ms - found_ms) < _BELIEVED_MS}


@dataclass(frozen=True)
class BatchFacts:
    """Facts about a batch, and about the cluster at this moment.

    Args:
        rows: most source records that it can have; 0: it only fires timers.
        cores: how many tasks can run at once.
    """

    rows: int
    cores: int = 1


@dataclass(frozen=True)
class HomeTasks:
    """Tasks that run where the local copies of their partitions are.

    Args:
        owners: which task has which partitions.
        executors: which executor each task prefers (`Executor.preference`).
        locations: where each task has to run, see `StateOrder`.
    """

    owners: Owners
    executors: tuple[str, ...]
    locations: tuple[str, ...]


@dataclass(frozen=True)
class StepPlacement:
    """How the tasks of a step get their rows.

    Args:
        tasks: how many tasks there are. Without homes, the task of a partition is the partition number modulo this.
        homes: the tasks on a cluster, where each partition has a home; None: they run anywhere.
    """

    table: str
    move: Move
    tasks: int
    homes: HomeTasks | None = None

    def at_homes(self, homes: HomeTasks) -> StepPlacement:
        """The same step, whose tasks run where the partitions have their homes."""
        return StepPlacement(self.table, "shuffle", len(homes.executors), homes)


@dataclass(frozen=True)
class Placement:
    """Where everything of a batch runs.

    Args:
        steps: by table.
        writes: what the tasks of the steps write themselves.
        exchanged: in two stages, whether the rows of each step go through a shuffle before any operator sees them.
        branch_tasks: number of tasks for a query that has several branches.
    """

    way: Way
    writes: Writes
    steps: Mapping[str, StepPlacement] = field(default_factory=dict)
    exchanged: bool = False
    branch_tasks: int = 1


def place(shape: QueryShape, learnt: Learnt, batch: BatchFacts) -> Placement:
    """Where the steps of a batch run."""
    steps = {step.table: _place_step(step, batch) for step in shape.steps}
    branch_tasks = max(1, batch.cores)
    if shape.written_as_is and not learnt.outputs_elsewhere:
        return Placement("fused", "everything", steps, branch_tasks=branch_tasks)
    # Operators after a step never see side outputs. Without operators, side outputs are rows like all others.
    exchanged = not shape.written_as_is and (shape.needs_exchange or learnt.outputs_elsewhere or learnt.step_left_out)
    writes: Writes = "nothing" if shape.written_as_is or exchanged else "side outputs"
    return Placement("two-stage", writes, steps, exchanged, branch_tasks)


def _place_step(step: StepShape, batch: BatchFacts) -> StepPlacement:
    wanted = max(1, min(batch.cores, round(batch.rows / TASK_ROWS + 0.5)))
    tasks = table_tasks(step.partitions, wanted)
    # Without rows the plan may have no task at all.
    move: Move = "one task" if tasks == 1 and batch.rows and step.from_stream else "shuffle"
    return StepPlacement(step.table, move, tasks)


def table_tasks(partitions: int, wanted: int) -> int:
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
