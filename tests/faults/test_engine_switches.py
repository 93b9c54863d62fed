"""A flow goes from the driver to tasks and back, and every one of its drivers is killed (SIGKILL) at another step.

``test_driver_killed`` in test_crashes.py and test_state_crashes.py has one kill and one switch, at every step.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from onceflow import hooks
from onceflow.driver.record.progress_log import PROGRESS_PARTITIONS, partition_of
from onceflow.testing import independent

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.long]

#: Arguments of ``Flow.write``.
WAYS: tuple[dict[str, Any], ...] = ({"engine": "driver"}, {"engine": "tasks"})
#: Of flows without a step: as they are, and the same by Spark's own code.
COLUMNS = (["key", "value"], ["key", "unhex(hex(value)) AS value"])
KILLS = 3
# From kill to kill, a flow is killed so many steps further. With eight steps it meets different ones.
SHIFT = 3


def alone_in_its_partition(pipe: Any, partition: int) -> Any:
    """The flow with a name whose progress has no other flow of the test beside it.

    A driver that starts reads progress up to the last stable offset. A flow that waits at `progress` would hold it up.
    """
    names = (f"{pipe.flow}-{n}" for n in range(1000))
    pipe.flow = next(name for name in names if partition_of(name) == partition)
    return pipe


def check_visible(pipe: Any) -> None:
    """I1: a consumer sees the records that progress covers, and no others."""
    history = pipe.committed_progress()
    covered = sum(history[-1].offsets[pipe.source].values()) if history else 0
    assert len(independent.read_topic(pipe.bootstrap, pipe.target)) == covered


@pytest.mark.timeout(400)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("state", [False, True])
def test_every_driver_is_killed(
    make_pipe: Any, make_state_pipe: Any, killed_together: Any, first: int, state: bool
) -> None:
    """Eight flows. Each is killed three times, at another step each time, and every driver works in another way."""

    def way_of(n: int, kill: int) -> dict[str, Any]:
        return WAYS[(n + first + kill + n // len(WAYS)) % len(WAYS)]

    steps = hooks.STEPS
    assert len(steps) == PROGRESS_PARTITIONS
    make = make_state_pipe if state else make_pipe
    pipes = [alone_in_its_partition(make(), n) for n in range(len(steps))]
    for kill in range(KILLS):
        ways = [way_of(n, kill) for n in range(len(steps))]
        names = [f"{steps[(n + SHIFT * kill) % len(steps)]} {n} kill {kill}" for n in range(len(steps))]
        next_batches = []
        for pipe in pipes:
            pipe.fill(1500)
            history = pipe.committed_progress()
            next_batches.append(history[-1].batch_id + 2 if history else 2)
        options = [{"write": way, "records_per_batch": 500, "columns": COLUMNS[n % 2]} for n, way in enumerate(ways)]
        killed_together(
            dict(zip(names, pipes, strict=True)),
            dict(zip(names, options, strict=True)),
            batches=dict(zip(names, next_batches, strict=True)),
        )
        if not state:
            for pipe in pipes:
                check_visible(pipe)

    def recover(n: int) -> None:
        pipes[n].fill(500)
        way = way_of(n, KILLS)
        written_by = [batch.path for batch in pipes[n].run(**way).batches]
        assert written_by
        assert {path == "driver" for path in written_by} == {way["engine"] == "driver"}, written_by
        pipes[n].check()
        # Before its first batch, a start commits where it begins to read, and that a table is there.
        batches = [progress.batch_id for progress in pipes[n].committed_progress() if progress.batch_id]
        assert batches == list(range(1, len(batches) + 1))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(recover, range(len(pipes))))
