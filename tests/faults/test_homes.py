"""State on a standalone cluster whose hosts have a disk each: it stays where it is, and a lost host costs its part."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onceflow import hooks
from onceflow.host.identity import host_identity
from onceflow.testing import faults, independent
from onceflow.testing.waiting import wait_until
from onceflow_workshop.chaos.hosts import Hosts
from onceflow_workshop.chaos.verify import Findings, check_hosts

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.timeout(600)]

SERVICE = Path(__file__).with_name("homes_service.py")
PARTITIONS = 6
WAIT_S = 180.0


class Service:
    """The running service, and the lines that it has printed."""

    def __init__(self, pipe: Any, process: subprocess.Popen[str]) -> None:
        self.pipe = pipe
        self.process = process
        self.lines: list[str] = []
        self.batches: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("{"):
                self.batches.append(json.JSONDecoder().raw_decode(line)[0])

    @property
    def is_in_batch(self) -> bool:
        """Whether a batch has begun, and is not committed yet."""
        begun = [int(line.split()[1]) for line in self.lines if line.startswith("begin ")]
        return max(begun, default=0) > self.last["batch"]

    @property
    def jobs(self) -> int:
        """How many jobs run, if the service tells of them."""
        return [0, *(int(line.split()[1]) for line in self.lines if line.startswith("jobs "))][-1]

    @property
    def last(self) -> dict[str, Any]:
        return self.batches[-1]

    @property
    def copies(self) -> dict[str, int]:
        return dict(self.last["copies"])

    def feed_until(self, done: Callable[[], bool], what: str) -> None:
        """Records keep coming until something has happened."""
        sent = len(self.batches)

        def holds() -> bool:
            nonlocal sent
            if len(self.batches) >= sent:
                self.pipe.fill(200)
                sent = len(self.batches) + 1
            return bool(self.batches) and done()

        def ended() -> str:
            return "" if self.process.poll() is None else "".join(self.lines)[-5000:] or "the driver has ended"

        wait_until(holds, WAIT_S, lambda: f"{what}; {''.join(self.lines[-20:])}", useless=ended, poll_s=0.1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def end(self) -> None:
        """Wait until all records are processed, and stop it."""
        bootstrap, flow = self.pipe.bootstrap, self.pipe.flow
        ends = independent.end_offsets(bootstrap, self.pipe.source)
        wait_until(lambda: independent.committed_offsets(bootstrap, flow) == ends, WAIT_S, "all records", poll_s=0.2)
        os.kill(self.process.pid, signal.SIGTERM)
        assert self.process.wait(60) == 0, "".join(self.lines)[-5000:]

    def feed_until_placed(self, hosts: int, standby: int) -> None:
        """Records keep coming until so many hosts have homes, no copy is on its way, and standby copies are level."""

        def placed() -> bool:
            now = self.copies
            return (now["hosts"], now["standby"], now["lacking"]) == (hosts, standby, 0)

        self.feed_until(placed, f"the copies of {hosts} hosts")

    def feed_batches(self, count: int) -> None:
        wanted = len(self.batches) + count
        self.feed_until(lambda: len(self.batches) >= wanted, f"{count} more batches")


class Mutants(Hosts):
    """Their Python workers can import the modules beside this file."""

    def environment(self, name: str) -> dict[str, str]:
        path = os.pathsep.join([str(SERVICE.parent), os.environ.get("PYTHONPATH", "")])
        return {**super().environment(name), "PYTHONPATH": path}


def arguments_of(pipe: Any, cluster: Hosts, copies: int, *, shuffled: bool = False) -> dict[str, Any]:
    """Of the service."""
    return {
        "flow": pipe.flow,
        "bootstrap": pipe.bootstrap,
        "source": pipe.source,
        "target": pipe.target,
        "table": pipe.table,
        "master": cluster.master,
        "config": cluster.settings,
        "copies": copies,
        "shuffled": shuffled,
    }


@pytest.mark.parametrize(
    "copies, shuffled",
    [
        pytest.param(2, False, id="two copies", marks=pytest.mark.short_form),
        pytest.param(1, False, id="one copy", marks=pytest.mark.long),
        pytest.param(2, True, id="two copies, behind a shuffle", marks=pytest.mark.long),
    ],
)
def test_hosts_are_lost_and_join(
    make_state_pipe: Any, driver_process: Any, tmp_path: Path, copies: int, shuffled: bool
) -> None:
    pipe = make_state_pipe(partitions=PARTITIONS)
    pipe.fill(600)
    with Hosts(tmp_path / "cluster", workers=2) as cluster:
        arguments = arguments_of(pipe, cluster, copies, shuffled=shuffled)
        service = Service(pipe, driver_process(SERVICE, None, arguments))
        standby = PARTITIONS * (copies - 1)
        service.feed_until_placed(2, standby)

        # In steady state, each host has its share, nothing moves, and only standby copies are read.
        moved, restored = service.copies["moved"], service.last["restored"]
        service.feed_batches(6)
        assert service.copies["moved"] == moved
        if copies == 1:
            assert service.last["restored"] == restored
            homes = [cluster.partitions(name) for name in cluster.workers]
            assert [len(each) for each in homes] == [3, 3]
            assert set.union(*homes) == set(range(PARTITIONS))
        else:
            assert all(cluster.partitions(name) == set(range(PARTITIONS)) for name in cluster.workers)

        # A host joins: no batch is run again for it.
        before = service.last["batch"]
        third = cluster.add_worker()
        service.feed_until_placed(3, standby)
        service.feed_batches(2)
        attempts = {int(batch): count for batch, count in service.last["attempts"].items()}
        assert {count for batch, count in attempts.items() if batch > before} == {1}
        wait_until(lambda: cluster.copies() == PARTITIONS * copies, WAIT_S, "the end of superfluous copies")
        assert 2 <= len(cluster.partitions(third)) <= 2 * copies

        # A host is lost with its disk: only its partitions move.
        moved, lost = service.copies["moved"], PARTITIONS // 3
        cluster.lose(cluster.workers[0])
        service.feed_until(lambda: service.copies["hosts"] == 2, "the hosts that are left")
        service.feed_batches(2)
        assert lost <= service.copies["moved"] - moved <= lost + 1  # one more for the balance
        assert (service.copies["waiting"], service.copies["lacking"]) == (0, 0)

        # The driver is killed. The next one finds the copies where they are.
        service.kill()
        pipe.fill(100)
        service = Service(pipe, driver_process(SERVICE, None, arguments))
        service.feed_until(lambda: service.copies["hosts"] == 2, "the homes of before")
        service.feed_batches(2)
        service.end()
    pipe.check(local=False)


@pytest.mark.long
@pytest.mark.parametrize("killed, copies", [("task", 1), ("task", 2), ("driver", 1), ("driver", 2)])
def test_killed_while_a_copy_is_restored(
    make_state_pipe: Any, driver_process: Any, tmp_path: Path, killed: str, copies: int
) -> None:
    """With one copy, batches wait for the restore; with two, it is beside them."""
    pipe = make_state_pipe(partitions=PARTITIONS)
    pipe.fill(600)
    standby = PARTITIONS * (copies - 1)
    with Hosts(tmp_path / "cluster", workers=2) as cluster:
        arguments = arguments_of(pipe, cluster, copies)
        service = Service(pipe, driver_process(SERVICE, None, arguments))
        service.feed_until_placed(2, standby)
        service.feed_batches(3)
        service.kill()
        cluster.lose_disk(cluster.workers[0])
        restoring, go_on = tmp_path / "restoring", tmp_path / "go-on"
        happens = {"action": "kill"} if killed == "task" else {"action": "pause", "seconds": 60, "until": str(go_on)}
        rule = faults.value_of({"step": hooks.RESTORE, "where": "task", "once_file": str(restoring), **happens})
        service = Service(pipe, driver_process(SERVICE, rule, arguments))
        wait_until(restoring.exists, WAIT_S, lambda: f"a restore; {''.join(service.lines)[-3000:]}")
        if killed == "driver":
            service.kill()
            service = Service(pipe, driver_process(SERVICE, None, arguments))
            go_on.touch()  # what is left of the task goes on beside the next restore
        service.feed_until_placed(2, standby)
        service.feed_until(lambda: cluster.copies() == PARTITIONS * copies, "no superfluous copies")
        service.end()
        found = Findings()
        check_hosts(pipe.bootstrap, pipe.flow, cluster.states, found)
    assert found.host_copies == PARTITIONS * copies
    assert (found.others, found.examples) == ({}, [])
    pipe.check(local=False)


@pytest.mark.long
@pytest.mark.parametrize("copies", [1, 2])
def test_a_host_whose_state_folder_cannot_be_used(
    make_state_pipe: Any, driver_process: Any, tmp_path: Path, copies: int
) -> None:
    """Its executors live. The other host takes over, and when the folder can be used again, the work is shared."""
    pipe = make_state_pipe(partitions=PARTITIONS)
    pipe.fill(600)
    standby = PARTITIONS * (copies - 1)
    with Hosts(tmp_path / "cluster", workers=2) as cluster:
        service = Service(pipe, driver_process(SERVICE, None, arguments_of(pipe, cluster, copies)))
        service.feed_until_placed(2, standby)
        cluster.spoil_disk(cluster.workers[0])
        service.feed_until(lambda: service.copies["hosts"] == 1, "the host that is left")
        service.feed_batches(3)
        assert f"have no home at {host_identity()}:{cluster.state(cluster.workers[0])}: " in "".join(service.lines)
        cluster.mend_disk(cluster.workers[0], keep=True)
        service.feed_until_placed(2, standby)
        service.feed_batches(2)
        service.end()
    pipe.check(local=False)


@pytest.mark.long
def test_tasks_do_not_wait_for_an_executor_that_is_gone(
    make_state_pipe: Any, driver_process: Any, tmp_path: Path
) -> None:
    """The executors are busy with standby copies when a batch begins, and one of them is lost."""
    pipe = make_state_pipe(partitions=PARTITIONS)
    pipe.fill(600)
    with Hosts(tmp_path / "cluster", workers=2) as cluster:
        busy, go_on = [tmp_path / "busy", tmp_path / "busy too"], tmp_path / "go-on"
        rule = {"step": hooks.RESTORE, "where": "task", "action": "pause", "seconds": 200, "until": str(go_on)}
        rules = faults.value_of(*({**rule, "once_file": str(each)} for each in busy))
        # Both are there when the flow begins: else the first one has all homes, and nothing to restore.
        both = {
            "spark.cores.max": "2",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        }
        arguments = {**arguments_of(pipe, cluster, copies=2), "tells_of_jobs": True}
        arguments["config"] = {**cluster.settings, **both}
        service = Service(pipe, driver_process(SERVICE, rules, arguments))
        service.feed_until(lambda: all(each.exists() for each in busy), "executors that are busy")
        service.feed_until(lambda: service.is_in_batch and service.jobs == 2, "a batch waits for them")
        cluster.lose(cluster.workers[0])
        go_on.touch()
        said = "An executor is gone before a task has begun"
        wait_until(lambda: said in "".join(service.lines), WAIT_S, lambda: f"{said}; {''.join(service.lines[-20:])}")
        service.feed_batches(2)
        service.end()
    pipe.check(local=False)


@pytest.mark.long
def test_a_standby_copy_that_is_behind_and_says_it_is_not_is_found_out(
    make_state_pipe: Any, driver_process: Any, tmp_path: Path
) -> None:
    """The mutant does not read the last changes, and is taken over from."""
    pipe = make_state_pipe(partitions=PARTITIONS)
    pipe.fill(600)
    with Mutants(tmp_path / "cluster", workers=2) as cluster:
        config = {**cluster.settings, "spark.python.daemon.module": "homes_mutant"}
        service = Service(
            pipe, driver_process(SERVICE, None, {**arguments_of(pipe, cluster, copies=2), "config": config})
        )
        service.feed_until_placed(2, PARTITIONS)
        service.feed_batches(10)
        cluster.lose(cluster.workers[0])
        service.feed_until(lambda: service.copies["hosts"] == 1, "the host that is left")
        service.feed_batches(2)
        service.end()
    with pytest.raises(AssertionError):
        pipe.check(local=False)
