"""How many tasks share the partitions of a table."""

from __future__ import annotations

import pytest

from onceflow.planning.placement import table_tasks


@pytest.mark.parametrize(
    "partitions, wanted, tasks",
    [
        (8, 8, 8),
        (12, 8, 12),  # somewhat more tasks than cores
        (16, 8, 8),
        (4, 8, 4),  # not more than there are partitions
        (64, 1, 1),
        (1, 8, 1),
        (37, 1, 1),
        (37, 8, 37),  # a prime number: every partition is a task, not one task for all of them
        (74, 8, 37),
        (101, 8, 101),
        (37, 2, 1),  # half of the cores, and outputs stay where they are
        (1009, 8, 8),  # too many to be tasks: unequal shares
        (1009, 100, 1009),
    ],
)
def test_tasks(partitions: int, wanted: int, tasks: int) -> None:
    assert table_tasks(partitions, wanted) == tasks


def test_always_enough_and_never_too_many() -> None:
    for partitions in range(1, 300):
        for wanted in (1, 2, 3, 8, 16, 64, 400):
            tasks = table_tasks(partitions, wanted)
            least = min(partitions, wanted)
            assert least / 2 <= tasks <= max(least, min(partitions, 16 * least))
