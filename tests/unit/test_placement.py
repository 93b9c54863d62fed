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
    believed,
    place,
)
from onceflow.planning.step_tree import changes_nothing
from onceflow.spark.plan_columns import ComputedColumn, TakenColumn
from onceflow.spark.query_facts import Node

FIRST = StepShape("first", 8)
SECOND = StepShape("second", 6, from_stream=False)
PLAIN = QueryShape((FIRST,), written_as_is=True)  # what Flow.process returns is what is written
BEHIND = QueryShape((FIRST,), written_as_is=False)  # operators behind the step
JOINED = QueryShape((FIRST,), written_as_is=False, needs_exchange=True)
CHAIN = QueryShape((SECOND, FIRST), written_as_is=False, needs_exchange=True)

MANY = BatchFacts(1_000_000, cores=4)
FEW = BatchFacts(300, cores=4)
TIMERS = BatchFacts(0, cores=4)


def step(move: Any, tasks: int, table: str = "first") -> StepPlacement:
    return StepPlacement(table, move, tasks)


SHUFFLE_4 = step("shuffle", 4)


def fused(how: StepPlacement) -> Placement:
    return Placement("fused", "everything", {how.table: how}, branch_tasks=4)


def staged(writes: Any, *how: StepPlacement, exchanged: bool = False) -> Placement:
    return Placement("two-stage", writes, {each.table: each for each in how}, exchanged, 4)


@pytest.mark.parametrize(
    "shape, learnt, batch, expected",
    [
        (PLAIN, Learnt(), FEW, fused(step("one task", 1))),
        # Timers only: there may be no task that could be taken.
        (PLAIN, Learnt(), TIMERS, fused(step("shuffle", 1))),
        (PLAIN, Learnt(), MANY, fused(SHUFFLE_4)),
        (PLAIN, Learnt(keys_elsewhere=True), MANY, fused(SHUFFLE_4)),
        # The cluster as it is now.
        (
            PLAIN,
            Learnt(),
            replace(MANY, cores=2),
            Placement("fused", "everything", {"first": step("shuffle", 2)}, branch_tasks=2),
        ),
        (PLAIN, Learnt(), replace(MANY, rows=25_000), fused(SHUFFLE_4)),
        (PLAIN, Learnt(), replace(MANY, rows=15_000), fused(step("shuffle", 2))),
        # In two stages.
        (PLAIN, Learnt(outputs_elsewhere=True), FEW, staged("nothing", step("one task", 1))),
        (PLAIN, Learnt(outputs_elsewhere=True, step_left_out=True), MANY, staged("nothing", SHUFFLE_4)),
        (BEHIND, Learnt(), MANY, staged("side outputs", SHUFFLE_4)),
        (BEHIND, Learnt(step_seen=True), FEW, staged("side outputs", step("one task", 1))),
        (BEHIND, Learnt(outputs_elsewhere=True), MANY, staged("nothing", SHUFFLE_4, exchanged=True)),
        (BEHIND, Learnt(step_left_out=True), MANY, staged("nothing", SHUFFLE_4, exchanged=True)),
        (JOINED, Learnt(), MANY, staged("nothing", SHUFFLE_4, exchanged=True)),
        (CHAIN, Learnt(), MANY, staged("nothing", step("shuffle", 6, "second"), SHUFFLE_4, exchanged=True)),
        (CHAIN, Learnt(), FEW, staged("nothing", step("shuffle", 1, "second"), step("one task", 1), exchanged=True)),
    ],
)
def test_place(shape: QueryShape, learnt: Learnt, batch: BatchFacts, expected: Placement) -> None:
    assert place(shape, learnt, batch) == expected


def test_what_failures_teach() -> None:
    learnt = Learnt(step_seen=True)
    assert learnt.after(TransactionTimeoutError("late", next_step="none")) is learnt
    moved = learnt.after(NotCopartitionedError("keys", next_step="none"))
    assert moved == Learnt(step_seen=True, keys_elsewhere=True)
    both = moved.after(NotColocatedError("outputs", next_step="none"))
    assert both == Learnt(step_seen=True, keys_elsewhere=True, outputs_elsewhere=True)
    assert learnt.believing({"keys": 7, "outputs": 9}) == both
    assert both.believing({"outputs": 9}) == Learnt(step_seen=True, outputs_elsewhere=True)


def test_what_is_believed() -> None:
    """For a day, also of a driver whose clock is a little ahead."""
    now, day = 1_700_000_000_000, 86_400_000
    found = {"keys": now - day + 1, "outputs": now - day, "of a later version": now + 5}
    assert believed(found, now) == {"keys": now - day + 1, "of a later version": now + 5}
    assert believed({"keys": now + day}, now) == {}


def test_the_decision_knows_nothing_of_spark() -> None:
    tree = ast.parse(Path(placement.__file__).read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert not {name for name in imported if name.startswith(("pyspark", "py4j", "onceflow.spark"))}


# ---- operators that change nothing -------------------------------------------------------------------

STEP = (("key", 1), ("value", 2), ("topic", 3), ("headers", 4), ("timestamp", 5))
KEEP_ALL = Node("Filter", (), STEP, keeps_all=True)


def project(*columns: tuple[str, int, int | None]) -> Node:
    """Of name, id, and the id of what each column is."""
    made = tuple(ComputedColumn(n) if taken is None else TakenColumn(n, taken, None) for n, _, taken in columns)
    return Node("Project", (), tuple((n, i) for n, i, _ in columns), projected=made)


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
        ([Node("SubqueryAlias", (), STEP)], True),
        ([SAME, Node("SubqueryAlias", (), STEP), KEEP_ALL, NAMED_ANEW], True),
        ([Node("View", (), STEP)], True),
        ([Node("View", (), ((("key", 99)), *STEP[1:]))], False),
        ([Node("Filter", (), STEP)], False),
        ([SAME, Node("Filter", (), STEP), SAME], False),
        ([Node("Repartition", (), STEP)], False),
        ([Node("Union", (), STEP)], False),
        ([Node("MapInArrow", (), STEP)], False),
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
def test_operators_that_change_nothing(above: list[Node], expected: bool) -> None:
    assert changes_nothing(STEP, above) is expected
