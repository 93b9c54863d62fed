"""Tasks that look after the local copies of a host, outside of batches (``driver/step/homes.py``)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from onceflow.errors import EnvironmentUnusableError, OnceflowError
from onceflow.messages import PrepareOrder
from onceflow.state.local.catch_up import BEHIND
from onceflow.state.local.opening import remove_store
from onceflow.state.prepare import Prepared, held
from onceflow.state.spec import ProcessSpec
from onceflow.task.preparing import PrepareTask

#: Names the rack or zone of a host, in the environment of its executors.
RACK = "ONCEFLOW_RACK"


@dataclass(frozen=True)
class CopiesFound:
    """What is where an executor keeps its copies.

    Args:
        task, stage: numbers of the task and of its stage.
        locations: by table, see `ProcessSpec.location`.
        rack: a label of its rack or zone; empty: none.
        copies: by table and partition, up to which offsets of the two topics the copy goes. A table is missing if that
            was known.
    """

    task: int
    stage: int
    locations: Mapping[str, str]
    rack: str
    copies: Mapping[str, Mapping[int, tuple[int, int]]]


class LookTask:
    """Finds the copies where an executor keeps them. Given to `PlacedJobs.run`.

    Args:
        orders: of all tables.
        known: locations whose copies are known. They may be in use.
    """

    def __init__(self, orders: tuple[PrepareOrder, ...], known: frozenset[str] = frozenset()) -> None:
        self.orders = orders
        self.known = known

    def __call__(self, numbers: Iterable[int]) -> Iterator[CopiesFound]:
        from pyspark import TaskContext

        context = TaskContext.get()
        for number in numbers:
            yield CopiesFound(
                number,
                -1 if context is None else context.stageId(),
                {order.spec.table: order.spec.location() for order in self.orders},
                os.environ.get(RACK, ""),
                {order.spec.table: _copies(order) for order in self.orders if order.spec.location() not in self.known},
            )


def _copies(order: PrepareOrder) -> dict[int, tuple[int, int]]:
    found = {}
    for partition in range(order.spec.topics.partitions):
        try:
            ends = held(order.spec, order.moment, partition)
        except EnvironmentUnusableError:  # a restore there says so
            return {}
        if ends is not None:
            found[partition] = ends
    return found


@dataclass(frozen=True)
class CopyOrder:
    """All that a task needs to bring copies of one table up to what is committed, and to remove others.

    Args:
        locations: where each task shall run.
        partitions: of each task, in this order.
        surplus: partitions whose copies each task removes.
        limit_s: how long a task may take; what is not done then is left.
    """

    prepare: PrepareOrder
    locations: tuple[str, ...]
    partitions: tuple[tuple[int, ...], ...]
    surplus: tuple[tuple[int, ...], ...]
    limit_s: float


@dataclass(frozen=True)
class CopyReport:
    """What a task of a `CopyOrder` has done.

    Args:
        location: where it has run. It does nothing where it was not wanted.
        prepared: the copies that it has brought up, at least in part.
        removed: partitions whose copies it has removed.
        error: why it has failed.
    """

    task: int
    location: str
    prepared: tuple[Prepared, ...] = ()
    removed: tuple[int, ...] = ()
    error: OnceflowError | None = None


class CopyTask:
    """Brings copies up. Given to `PlacedJobs.run`."""

    def __init__(self, order: CopyOrder) -> None:
        self.order = order

    def __call__(self, numbers: Iterable[int]) -> Iterator[CopyReport]:
        for number in numbers:
            yield self._run(number)

    def _run(self, number: int) -> CopyReport:
        order, spec = self.order, self.order.prepare.spec
        location = spec.location()
        if location != order.locations[number]:
            return CopyReport(number, location)
        until = time.monotonic() + order.limit_s
        try:
            removed = tuple(_removed(spec, order.surplus[number]))
        except OnceflowError as problem:
            return CopyReport(number, location, error=problem)
        prepare = PrepareTask(order.prepare, is_over=lambda: time.monotonic() > until)
        done: list[Prepared] = []
        for partition in order.partitions[number]:
            if done and time.monotonic() > until:
                break
            found = prepare(partition)
            if isinstance(found, OnceflowError):
                return CopyReport(number, location, tuple(done), removed, found)
            done.append(found)
            if found.how == BEHIND:
                break
        return CopyReport(number, location, tuple(done), removed)


def _removed(spec: ProcessSpec, partitions: Iterable[int]) -> Iterator[int]:
    for partition in partitions:
        remove_store(spec.folder(partition), spec.store)
        yield partition
