"""Where process steps run: a function of the query, of what batches have shown, of the batch and of the cluster now."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onceflow.errors import TransactionTimeoutError
from onceflow.messages import NotColocatedError, NotCopartitionedError
from onceflow.planning import placement
from onceflow.planning.placement import (
    BatchFacts,
    Learnt,
    Placement,
    QueryShape,
    StepPlacement,
    StepShape,
    must_look,
    on_driver,
    place,
)
from onceflow.planning.step_tree import changes_nothing
from onceflow.spark.plans import Operator

FIRST = StepShape("first", 8, co_partitionable=True)
SECOND = StepShape("second", 6, from_stream=False)
PLAIN = QueryShape((FIRST,), written_as_is=True)  # what Flow.process returns is what is written
SHUFFLED = QueryShape((replace(FIRST, co_partitionable=False),), written_as_is=True)
BEHIND = QueryShape((FIRST,), written_as_is=False)  # operators behind the step
JOINED = QueryShape((FIRST,), written_as_is=False, needs_exchange=True)
CHAIN = QueryShape((SECOND, FIRST), written_as_is=False, needs_exchange=True)
CLOCKED = replace(PLAIN, clock=True)

KEPT = Learnt(partitions_kept=True)
MANY = BatchFacts(1_000_000, cores=4)
LOOKED = replace(MANY, read=(0, 1, 2, 3, 4, 5, 6, 7))
FEW = BatchFacts(300, cores=4)
TIMERS = BatchFacts(0, cores=4, due={"first": frozenset({3})})


def due(facts: BatchFacts, *partitions: int) -> BatchFacts:
    return replace(facts, due={"first": frozenset(partitions)})


def step(move: Any, tasks: int, modulus: int, read: tuple[int, ...] = (), table: str = "first") -> StepPlacement:
    return StepPlacement(table, move, tasks, modulus, read)


COALESCED, SHUFFLE_4 = step("co-partitioned", 4, 8), step("shuffle", 4, 4)
BY_DRIVER = Placement("driver", "everything")


def fused(how: StepPlacement) -> Placement:
    return Placement("fused", "everything", {how.table: how}, branch_tasks=4)


def staged(writes: Any, *how: StepPlacement, exchanged: bool = False) -> Placement:
    return Placement("two-stage", writes, {each.table: each for each in how}, exchanged, 4)


@pytest.mark.parametrize(
    "shape, learnt, batch, expected",
    [
        # By the driver: small batches of a local master, if the step's tasks could write everything.
        (PLAIN, Learnt(), FEW, BY_DRIVER),
        (PLAIN, Learnt(keys_elsewhere=True), FEW, BY_DRIVER),
        (PLAIN, Learnt(), replace(FEW, rows=placement.SMALL_BATCH_ROWS), BY_DRIVER),
        (PLAIN, Learnt(), TIMERS, BY_DRIVER),
        (replace(PLAIN, small_batch_rows=0), Learnt(), TIMERS, BY_DRIVER),
        (PLAIN, Learnt(), replace(FEW, driver_may=False, read=(0, 1)), fused(step("co-partitioned", 1, 8))),
        (SHUFFLED, Learnt(), replace(FEW, driver_may=False), fused(step("one task", 1, 1))),
        (replace(SHUFFLED, local=False), Learnt(), FEW, fused(step("one task", 1, 1))),
        (replace(SHUFFLED, small_batch_rows=299), Learnt(), FEW, fused(step("one task", 1, 1))),
        # Timers only: there may be no task that could be taken.
        (replace(PLAIN, local=False), KEPT, TIMERS, fused(step("shuffle", 1, 1))),
        # Fused, with a shuffle or without.
        (PLAIN, Learnt(), LOOKED, fused(COALESCED)),
        (PLAIN, KEPT, MANY, fused(COALESCED)),
        (PLAIN, KEPT, due(LOOKED, 3), fused(replace(COALESCED, read=(0, 1, 2, 3, 4, 5, 6, 7)))),
        (PLAIN, KEPT, due(replace(LOOKED, read=(2, 5)), 3), fused(SHUFFLE_4)),  # nobody reads partition 3
        (PLAIN, KEPT, due(MANY, 3), fused(SHUFFLE_4)),  # this plan has the clock's rows
        (PLAIN, Learnt(), MANY, fused(SHUFFLE_4)),
        (PLAIN, Learnt(keys_elsewhere=True, partitions_kept=True), LOOKED, fused(SHUFFLE_4)),
        (PLAIN, Learnt(partitions_mixed=True), MANY, fused(SHUFFLE_4)),
        (SHUFFLED, Learnt(), MANY, fused(SHUFFLE_4)),
        # The cluster as it is now.
        (
            SHUFFLED,
            Learnt(),
            replace(MANY, cores=2),
            Placement("fused", "everything", {"first": step("shuffle", 2, 2)}, branch_tasks=2),
        ),
        (SHUFFLED, Learnt(), replace(MANY, rows=25_000), fused(step("shuffle", 4, 4))),
        (SHUFFLED, Learnt(), replace(MANY, rows=15_000), fused(step("shuffle", 2, 2))),
        # In two stages.
        (PLAIN, Learnt(outputs_elsewhere=True), FEW, staged("nothing", step("one task", 1, 1))),
        (PLAIN, Learnt(outputs_elsewhere=True, partitions_kept=True), MANY, staged("nothing", COALESCED)),
        (PLAIN, Learnt(outputs_elsewhere=True, step_left_out=True), MANY, staged("nothing", SHUFFLE_4)),
        (BEHIND, KEPT, MANY, staged("side outputs", COALESCED)),
        (BEHIND, Learnt(step_seen=True), FEW, staged("side outputs", step("one task", 1, 1))),
        (BEHIND, Learnt(outputs_elsewhere=True), MANY, staged("nothing", SHUFFLE_4, exchanged=True)),
        (BEHIND, Learnt(step_left_out=True), MANY, staged("nothing", SHUFFLE_4, exchanged=True)),
        (JOINED, KEPT, MANY, staged("nothing", COALESCED, exchanged=True)),
        (CHAIN, KEPT, MANY, staged("nothing", step("shuffle", 6, 6, table="second"), COALESCED, exchanged=True)),
        (
            CHAIN,
            KEPT,
            FEW,
            staged("nothing", step("shuffle", 1, 1, table="second"), step("co-partitioned", 1, 8), exchanged=True),
        ),
    ],
)
def test_place(shape: QueryShape, learnt: Learnt, batch: BatchFacts, expected: Placement) -> None:
    assert place(shape, learnt, batch) == expected
    assert on_driver(shape, learnt, batch) is (expected.way == "driver")


@pytest.mark.parametrize(
    "shape, learnt, batch, expected",
    [
        (PLAIN, Learnt(), MANY, True),
        (BEHIND, Learnt(), MANY, True),
        (PLAIN, KEPT, MANY, False),  # once is enough
        (PLAIN, KEPT, due(MANY, 3), True),  # which task reads what is due?
        (PLAIN, Learnt(), FEW, False),  # by the driver
        (PLAIN, Learnt(), TIMERS, False),
        (replace(PLAIN, local=False), Learnt(), TIMERS, False),
        (SHUFFLED, Learnt(), MANY, False),
        (PLAIN, Learnt(keys_elsewhere=True), MANY, False),
        (PLAIN, Learnt(partitions_mixed=True), due(MANY, 3), False),
        (CHAIN, KEPT, replace(MANY, due={"second": frozenset({1})}), False),  # that one is not co-partitioned
    ],
)
def test_when_the_plan_of_a_batch_is_looked_at(
    shape: QueryShape, learnt: Learnt, batch: BatchFacts, expected: bool
) -> None:
    assert must_look(shape, learnt, batch) is expected


def test_what_failures_teach() -> None:
    learnt = Learnt(partitions_kept=True)
    assert learnt.after(TransactionTimeoutError("late", next_step="none")) is learnt
    moved = learnt.after(NotCopartitionedError("keys", next_step="none"))
    assert moved == Learnt(partitions_kept=True, keys_elsewhere=True)
    both = moved.after(NotColocatedError("outputs", next_step="none"))
    assert both == Learnt(partitions_kept=True, keys_elsewhere=True, outputs_elsewhere=True)


def test_what_a_look_teaches() -> None:
    assert Learnt().looked((0, 1), clock=False) == KEPT
    assert Learnt().looked((0, 1), clock=True) == KEPT
    assert Learnt().looked(None, clock=False) == Learnt(partitions_mixed=True)
    assert Learnt().looked(None, clock=True) == Learnt(), "another batch's plan may be without the clock's rows"
    assert KEPT.looked(None, clock=True) is KEPT


def test_the_decision_knows_nothing_of_spark() -> None:
    tree = ast.parse(Path(placement.__file__).read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert not {name for name in imported if name.startswith(("pyspark", "py4j", "onceflow.spark"))}


# ---- operators that change nothing -------------------------------------------------------------------

STEP = (("key", 1), ("value", 2), ("topic", 3), ("headers", 4), ("timestamp", 5))
KEEP_ALL = Operator("Filter", STEP, keeps_all=True)


def project(*columns: tuple[str, int, int | None]) -> Operator:
    """Of name, id, and the id of what each column is."""
    return Operator("Project", tuple((n, i) for n, i, _ in columns), tuple(taken for *_, taken in columns))


SAME = project(*((name, number, number) for name, number in STEP))
NAMED_ANEW = project(*((name, 10 + number, number) for name, number in STEP))
TURNED = project(*((name, number, number) for name, number in reversed(STEP)))
NO_TOPIC = project(*((name, number, number) for name, number in STEP if name != "topic"))


@pytest.mark.parametrize(
    "above, expected",
    [
        ([], True),
        ([KEEP_ALL], True),
        ([SAME], True),
        ([NAMED_ANEW], True),
        ([TURNED], True),
        ([NO_TOPIC], True),  # it is null in every row
        ([Operator("SubqueryAlias", STEP)], True),
        ([SAME, Operator("SubqueryAlias", STEP), KEEP_ALL, NAMED_ANEW], True),
        ([Operator("View", STEP)], True),
        ([Operator("View", ((("key", 99)), *STEP[1:]))], False),
        ([Operator("Filter", STEP)], False),
        ([SAME, Operator("Filter", STEP), SAME], False),
        ([Operator("Repartition", STEP)], False),
        ([Operator("Union", STEP)], False),
        ([Operator("MapInArrow", STEP)], False),
        ([project(("key", 1, 1), ("value", 2, 2))], False),  # headers and timestamps are wanted
        ([project(*((n, i, i) for n, i in STEP if n != "value"), ("value", 9, None))], False),
        ([project(*((n, i, i) for n, i in STEP), ("more", 9, None))], False),  # it may fail
        ([project(*((n, i, i) for n, i in STEP if n != "topic"), ("topic", 9, None))], False),
        ([project(*((n, i, i) for n, i in STEP), ("partition", 9, 1))], False),
        ([project(*((n, i, i) for n, i in STEP), ("copy", 9, 1))], True),  # the sink does not know this one
        # Key and value have changed places, and once more.
        ([project(("key", 2, 2), ("value", 1, 1), *((n, i, i) for n, i in STEP[2:]))], False),
        (
            [
                project(("value", 6, 1), ("key", 7, 2), *((n, i, i) for n, i in STEP[2:])),
                project(("key", 8, 6), ("value", 9, 7), *((n, i, i) for n, i in STEP[2:])),
            ],
            True,
        ),
    ],
)
def test_operators_that_change_nothing(above: list[Operator], expected: bool) -> None:
    assert changes_nothing(STEP, above) is expected
