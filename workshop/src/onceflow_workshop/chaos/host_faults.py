"""The kinds of faults of hosts with a disk each: they are lost, come, leave and hang, and copies are being restored."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

from onceflow.hooks import RESTORE
from onceflow.testing.faults import fault
from onceflow_workshop.chaos.hosts import Hosts
from onceflow_workshop.chaos.test_bed import Setup, TestBed

_FEWEST, _MOST = 2, 4  # hosts
_RESTORE_S = 60.0
_PAUSED_S = 40.0


def has_hosts(setup: Setup) -> bool:
    """Whether each worker has a disk of its own."""
    return setup.own_hosts


def host_lost(bed: TestBed, rng: random.Random) -> str:
    """A host is lost with its disk. Another one comes instead of it, sooner or later than the driver waits for it."""
    hosts = _hosts(bed)
    name = rng.choice(hosts.workers)
    hosts.lose(name)
    seconds = rng.choice((0.0, rng.uniform(0, 5), rng.uniform(8, 20)))
    time.sleep(seconds)
    return f"{name} lost with its disk, {hosts.add_worker()} instead of it after {seconds:.1f} s"


def host_joins(bed: TestBed, rng: random.Random) -> str:
    """A host comes, and stays. If there are many, one is lost for good before."""
    hosts, lost = _hosts(bed), ""
    if len(hosts.workers) >= _MOST:
        lost = rng.choice(hosts.workers)
        hosts.lose(lost)
    return f"{hosts.add_worker()} joins" + (f", {lost} is lost for good" if lost else "")


def host_leaves(bed: TestBed, rng: random.Random) -> str:
    """A host is decommissioned: its executors end their tasks, and it is gone."""
    hosts = _hosts(bed)
    new = f", after {hosts.add_worker()} has come" if len(hosts.workers) <= _FEWEST else ""
    name = rng.choice(hosts.workers)
    in_order = hosts.leave(name)
    return f"{name} decommissioned{new}" + ("" if in_order else ", and killed at last")


def host_away(bed: TestBed, rng: random.Random) -> str:
    """A host ends, and comes back with the copies that it had."""
    hosts = _hosts(bed)
    name, seconds = rng.choice(hosts.workers), rng.choice((rng.uniform(0, 4), rng.uniform(8, 20)))
    hosts.kill_worker(name)
    time.sleep(seconds)
    hosts.add_worker(name)
    return f"{name} away for {seconds:.1f} s"


def executor_hangs(bed: TestBed, rng: random.Random) -> str:
    """It may be given up meanwhile, and go on later. Or only its Python workers hang."""
    hosts = _hosts(bed)
    name, seconds = rng.choice(hosts.workers), rng.choice((rng.uniform(1, 6), rng.uniform(6, 25)))
    executors, workers = hosts.executors(name), hosts.python_workers(name)
    what, pids = rng.choice(
        (("JVM", executors), ("Python workers", workers), ("JVM and Python workers", executors + workers))
    )
    hosts.hang(pids, seconds)
    return f"SIGSTOP to the {what} of {name}, {seconds:.1f} s"


def disk_unusable(bed: TestBed, rng: random.Random) -> str:
    """The state folder of a host cannot be used for a while. Its old copies come back, or do not."""
    hosts = _hosts(bed)
    end = time.monotonic() + _RESTORE_S
    while not all(hosts.python_workers(name) for name in hosts.workers):  # a flow without any usable host would end
        if time.monotonic() > end:
            return "no state folder was touched: not all hosts have worked"
        time.sleep(0.2)
    name, seconds, keeps = rng.choice(hosts.workers), rng.uniform(1, 12), rng.random() < 0.5
    hosts.spoil_disk(name)
    time.sleep(seconds)
    hosts.mend_disk(name, keep=keeps)
    return f"state folder of {name} unusable for {seconds:.1f} s" + ("" if keeps else ", and empty then")


def restore_killed(bed: TestBed, rng: random.Random) -> str:
    """A Python worker is killed while it restores a copy."""
    name, mark = _begin_restore(bed, rng, "kill")
    return f"disk of {name} lost, SIGKILL to a task that restores" + ("" if mark.exists() else " (not reached)")


def driver_killed_in_restore(bed: TestBed, rng: random.Random) -> str:
    """The driver is killed while a task restores a copy. The task goes on when the next driver restores it, too."""
    until = bed.names.folder / f"go-on-{bed.driver.starts}"
    name, mark = _begin_restore(bed, rng, "pause", seconds=_PAUSED_S, until=str(until))
    bed.driver.kill()
    bed.driver.start()
    time.sleep(rng.uniform(0, 8))
    until.touch()
    return f"disk of {name} lost, SIGKILL to the driver while a task restores" + (
        "" if mark.exists() else " (not reached)"
    )


def _begin_restore(bed: TestBed, rng: random.Random, action: str, **fields: object) -> tuple[str, Path]:
    """A host has lost its copies when a driver starts, and something happens to the task that restores the first one.

    Returns:
        The host, and the file that is there if it has happened.
    """
    hosts = _hosts(bed)
    name, mark = rng.choice(hosts.workers), bed.names.folder / f"restore-{bed.driver.starts}"
    bed.driver.kill()
    hosts.lose_disk(name)
    bed.driver.choices = replace(bed.driver.choices, tasks=True)
    bed.driver.start(fault(RESTORE, action, where="task", once_file=str(mark), **fields))
    end = time.monotonic() + _RESTORE_S
    while not mark.exists() and bed.driver.running.exit_code is None and time.monotonic() < end:
        time.sleep(0.05)
    return name, mark


def _hosts(bed: TestBed) -> Hosts:
    if not isinstance(bed.spark_cluster, Hosts):
        raise ValueError("this setup has no hosts of its own")
    return bed.spark_cluster
