"""The kinds of faults that can be injected. Each function repairs what must be repaired, and returns what it did.

``FAULT_KINDS`` maps the name of a kind to its function and to the setups in which it makes sense. ``run.py`` checks
that all flows continue afterwards.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.driver.standby.heartbeats import read_tail
from onceflow.hooks import EXTERNAL_STEPS, STEPS
from onceflow.protocol.heartbeats import STANDBY
from onceflow.testing.faults import fault, python_workers
from onceflow.testing.postgres import LocalPostgres
from onceflow_workshop.chaos import external
from onceflow_workshop.chaos.driver_process import DriverProcess
from onceflow_workshop.chaos.flows import LEDGER, OPERATORS, UNLOGGED
from onceflow_workshop.chaos.host_faults import (
    disk_unusable,
    driver_killed_in_restore,
    executor_hangs,
    has_hosts,
    host_away,
    host_joins,
    host_leaves,
    host_lost,
    restore_killed,
)
from onceflow_workshop.chaos.replacing import flow_replaced, replaceable
from onceflow_workshop.chaos.spark_cluster import SparkCluster
from onceflow_workshop.chaos.test_bed import AHEAD_MS, Setup, TestBed
from onceflow_workshop.chaos.topic_changes import growing, has_letters, letters_replayed, table_repartitioned
from onceflow_workshop.testing.network import CUT, DELAY, DIRECTIONS, DROP, DUPLICATE, REORDER, REQUEST, Network, Rule

BEHIND_MS = 7_200_000
_APIS = ("Produce", "EndTxn", "InitProducerId", "AddPartitionsToTxn", "TxnOffsetCommit", "FindCoordinator", "Metadata")
_STEP_WAIT_S = 60.0
_STANDBY_WAIT_S = 120.0
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Args:
        inject: injects it; returns what it did in a few words.
        possible: whether it makes sense in a setup.
        weight: how often it is chosen, relative to the others.
    """

    inject: Callable[[TestBed, random.Random], str]
    possible: Callable[[Setup], bool] = lambda setup: True
    weight: int = 2


# ---- drivers and workers -----------------------------------------------------------------------------


def driver_kill(bed: TestBed, rng: random.Random) -> str:
    rest = rng.random() < 0.5
    bed.driver.kill(leave_rest=rest)
    _choose(bed, rng)
    bed.driver.start()
    return "SIGKILL to the driver" + (", its JVM and workers left to themselves" if rest else " and its JVM")


def jvm_kill(bed: TestBed, rng: random.Random) -> str:
    bed.driver.kill(jvm_only=True)
    return "SIGKILL to the driver's JVM"


def step_kill(bed: TestBed, rng: random.Random) -> str:
    """A driver that is killed right after a step, or raises there."""
    kind = rng.choice(bed.driver.kinds)
    step = rng.choice(EXTERNAL_STEPS if kind in external.KINDS else STEPS)
    action = rng.choice(("kill", "kill", "raise"))
    bed.driver.kill()
    flow = bed.names.flow(kind)
    mark = bed.names.folder / f"step-{bed.driver.starts}"
    where = {} if step == "init" else {"batch_from": bed.driver.commits.batches.get(flow, -1) + rng.randint(1, 4)}
    bed.driver.start(fault(step, action, flow=flow, once_file=str(mark), **where))
    end = time.monotonic() + _STEP_WAIT_S
    while bed.driver.running.exit_code is None and time.monotonic() < end:
        time.sleep(0.05)
    return f"{action} at step {step} of {flow}" + ("" if mark.exists() else " (not reached)")


def task_kill(bed: TestBed, rng: random.Random) -> str:
    """A Python worker that is killed when it has written the rows of its task. The batch is run again."""
    bed.driver.kill()
    flow = bed.names.flow(rng.choice(bed.driver.kinds))
    mark = bed.names.folder / f"task-{bed.driver.starts}"
    bed.driver.choices = replace(bed.driver.choices, tasks=True)
    batch = bed.driver.commits.batches.get(flow, -1) + rng.randint(1, 4)
    bed.driver.start(fault("write", "kill", where="task", flow=flow, once_file=str(mark), batch_from=batch))
    end = time.monotonic() + _STEP_WAIT_S
    while not mark.exists() and bed.driver.running.exit_code is None and time.monotonic() < end:
        time.sleep(0.05)
    return f"SIGKILL to a task of {flow} that has written" + ("" if mark.exists() else " (not reached)")


def driver_pause(bed: TestBed, rng: random.Random) -> str:
    seconds = rng.uniform(1, 6)
    process = bed.driver.running
    process.send(signal.SIGSTOP, whole=True)
    time.sleep(seconds)
    process.send(signal.SIGCONT, whole=True)
    return f"SIGSTOP to the driver, {seconds:.1f} s"


def workers_kill(bed: TestBed, rng: random.Random) -> str:
    pids = python_workers(bed.driver.running.pid)
    if bed.spark_cluster is not None:
        pids += [pid for executor in bed.spark_cluster.executors() for pid in python_workers(executor)]
    _kill(pids)
    return f"SIGKILL to {len(pids)} Python workers"


def second_driver(bed: TestBed, rng: random.Random) -> str:
    # On a Spark cluster, a stopped application would keep its cores, and the second driver would get none.
    stopped = rng.random() < 0.5 and bed.spark_cluster is None
    first = bed.driver.running
    if stopped:
        first.send(signal.SIGSTOP, whole=True)
    since = time.monotonic()
    bed.driver.intrude()
    if stopped:
        bed.driver.await_commits(since, timeout_s=90)
        first.send(signal.SIGCONT, whole=True)
    return "a second driver" + (", while the first was stopped" if stopped else " beside the first")


def standby_takes_over(bed: TestBed, rng: random.Random) -> str:
    """Two drivers with ``standby=True``. The active one is killed or stopped, and the other one goes on by itself."""
    before = bed.driver.choices
    bed.driver.choices = replace(before, standby=True)
    bed.driver.kill()
    bed.driver.start()
    bed.driver.await_commits(time.monotonic(), timeout_s=_STANDBY_WAIT_S)
    first, standby = bed.driver.running, bed.driver.stand_by()
    bed.driver.choices = before
    _await_standby(bed, standby)
    since, stopped = time.monotonic(), rng.random() < 0.5
    if stopped:
        first.send(signal.SIGSTOP, whole=True)
        bed.driver.takes_over(standby)
    else:
        bed.driver.kill()
        bed.driver.process = standby
    took_s = bed.driver.await_commits(since, timeout_s=_STANDBY_WAIT_S)
    if bed.driver.running is not standby:
        return "a standby that did not take over by itself"
    if stopped:
        first.send(signal.SIGCONT, whole=True)
    return f"a standby took over from {'a stopped' if stopped else 'a killed'} driver, {took_s:.1f} s"


def _await_standby(bed: TestBed, standby: DriverProcess) -> None:
    """Until it says that it waits. It may die before that, if another fault goes on."""
    first_flow, end = bed.names.flow(bed.driver.kinds[0]), time.monotonic() + _STANDBY_WAIT_S
    with contextlib.closing(Cluster(ClientSettings(bed.bootstrap_servers, {}))) as cluster:
        while standby.exit_code is None and time.monotonic() < end:
            found, _, _ = read_tail(cluster, first_flow, Deadline(30, "looking for a standby"))
            if any(each.pid == standby.pid and each.role == STANDBY for each, _ in found):
                return
            time.sleep(0.2)


def state_deleted(bed: TestBed, rng: random.Random) -> str:
    bed.driver.kill()
    for folder in (bed.names.state, *bed.states):
        shutil.rmtree(folder, ignore_errors=True)
    with bed.names.deletions.open("a") as deletions:
        deletions.write("deleted\n")
    bed.driver.start()
    return "SIGKILL to the driver, local state deleted"


def clock_jump(bed: TestBed, rng: random.Random) -> str:
    ahead = rng.randint(-BEHIND_MS, AHEAD_MS)
    bed.names.clock.write_text(str(ahead))
    return f"the driver's clock is {ahead / 60_000:+.0f} minutes off"


# ---- PostgreSQL --------------------------------------------------------------------------------------


def postgres_kill(bed: TestBed, rng: random.Random) -> str:
    server, crash = _postgres(bed), rng.random() < 0.5
    (server.kill if crash else server.stop)()
    time.sleep(rng.uniform(0, 4))
    server.start()
    return "SIGKILL to PostgreSQL" if crash else "PostgreSQL stopped and started"


def postgres_pause(bed: TestBed, rng: random.Random) -> str:
    seconds = rng.uniform(1, 6)
    _postgres(bed).pause()
    time.sleep(seconds)
    _postgres(bed).resume()
    return f"SIGSTOP to PostgreSQL, {seconds:.1f} s"


# ---- executors ---------------------------------------------------------------------------------------


def executor_kill(bed: TestBed, rng: random.Random) -> str:
    cluster = _spark_cluster(bed)
    pids = cluster.executors()
    chosen = rng.sample(pids, min(len(pids), rng.choice((1, 1, 2))))
    _kill(chosen)
    return f"SIGKILL to {len(chosen)} of {len(pids)} executors"


def shuffle_lost(bed: TestBed, rng: random.Random) -> str:
    cluster = _spark_cluster(bed)
    mark = bed.names.folder / f"shuffle-{bed.driver.starts}"
    bed.driver.kill()
    bed.driver.choices = replace(bed.driver.choices, tasks=True)
    rule = fault("begin", "lose-shuffle", where="task", folder=str(cluster.local), once_file=str(mark))
    bed.driver.start(rule)
    end = time.monotonic() + _STEP_WAIT_S
    while not mark.exists() and time.monotonic() < end:
        bed.driver.revive()
        time.sleep(0.05)
    return "shuffle files deleted while tasks run" + ("" if mark.exists() else " (not reached)")


def worker_replaced(bed: TestBed, rng: random.Random) -> str:
    """A worker is lost, and another one replaces it a little later."""
    cluster = _spark_cluster(bed)
    name = rng.choice(cluster.workers)
    cluster.kill_worker(name)
    time.sleep(rng.uniform(0, 5))
    return f"SIGKILL to {name} with its executors, {cluster.add_worker()} instead of it"


def worker_added(bed: TestBed, rng: random.Random) -> str:
    """A third worker is added, and killed later."""
    cluster = _spark_cluster(bed)
    name = cluster.add_worker()
    time.sleep(rng.uniform(5, 15))
    cluster.kill_worker(name)
    return f"{name} came, and was killed"


def host_rebooted(bed: TestBed, rng: random.Random) -> str:
    """The executors' host reboots while the driver runs. LMDB is not synced, so it has lost some of its pages."""

    def torn() -> None:
        for file in sorted(bed.names.state.rglob("data.mdb")):
            if rng.random() < 0.5:
                _tear(file, rng)
        bed.names.boot.write_text(f"boot {rng.random()}")

    killed = _spark_cluster(bed).kill_executors(meanwhile=torn)
    return f"the host of {killed} executors rebooted, local state torn"


def _tear(file: Path, rng: random.Random) -> None:
    """Overwrite some pages of a file with random bytes, as if they had not been written."""
    with file.open("r+b") as pages:
        size = os.fstat(pages.fileno()).st_size
        for _ in range(4):
            pages.seek(rng.randrange(max(1, size // _PAGE_BYTES)) * _PAGE_BYTES)
            pages.write(rng.randbytes(_PAGE_BYTES))


# ---- query servers -----------------------------------------------------------------------------------


def server_kill(bed: TestBed, rng: random.Random) -> str:
    server = rng.choice(bed.servers.all)
    server.end()
    deleted = rng.random() < 0.3
    if deleted:
        bed.servers.delete_copies(server)
    time.sleep(rng.uniform(0, 8))  # shorter or longer than its session, which ends after 6 s
    bed.servers.start_one(server)
    return "SIGKILL to a query server" + (", its copies deleted" if deleted else "")


def server_pause(bed: TestBed, rng: random.Random) -> str:
    """It may continue when the others have replaced it."""
    server, seconds = rng.choice(bed.servers.all), rng.uniform(1, 9)
    server.send(signal.SIGSTOP)
    time.sleep(seconds)
    server.send(signal.SIGCONT)
    return f"SIGSTOP to a query server, {seconds:.1f} s"


# ---- brokers -----------------------------------------------------------------------------------------


def broker_kill(bed: TestBed, rng: random.Random) -> str:
    node = rng.choice(bed.node_ids)
    bed.broker.kill(node)
    time.sleep(rng.uniform(0, 6))  # shorter or longer than its session, which ends after 3 s
    bed.broker.start_node(node)
    return f"SIGKILL to broker {node}"


def broker_pause(bed: TestBed, rng: random.Random) -> str:
    node, seconds = rng.choice(bed.node_ids), rng.uniform(0.5, 5)
    bed.broker.pause(node)
    time.sleep(seconds)
    bed.broker.resume(node)
    return f"SIGSTOP to broker {node}, {seconds:.1f} s"


def idle(bed: TestBed, rng: random.Random) -> str:
    """Pause the source for so long that the brokers forget the flows' transactional ids."""
    seconds = rng.uniform(10, 14)
    bed.feeder.pause(seconds)
    return f"no records for {seconds:.1f} s"


def leaders_moved(bed: TestBed, rng: random.Random) -> str:
    bed.broker.move_leaders()
    return "leaders moved"


def rolling_restart(bed: TestBed, rng: random.Random) -> str:
    bed.broker.rolling_restart()
    return "rolling restart of the brokers"


# ---- network -----------------------------------------------------------------------------------------


def network(action: str) -> Callable[[TestBed, random.Random], str]:
    """A fault that applies an action to frames of some APIs for a while."""

    def inject(bed: TestBed, rng: random.Random) -> str:
        apis = tuple(rng.sample(_APIS, 3))
        probability, seconds = rng.choice((0.05, 0.2, 0.5)), rng.uniform(0.05, 1.0)
        directions = (REQUEST,) if action in (DUPLICATE, REORDER) else DIRECTIONS
        rules = [Rule(action, apis, way, probability=probability, seconds=seconds) for way in directions]
        faulty = Network(rng.randrange(2**32), rules)
        bed.proxies.faults(faulty)
        time.sleep(rng.uniform(2, 5))
        bed.proxies.faults(None)
        bed.frames.update(faulty.counts)
        return f"{action} of {', '.join(apis)} at {probability:.0%}: {sum(faulty.counts.values())} frames"

    return inject


def network_split(bed: TestBed, rng: random.Random) -> str:
    seconds = rng.uniform(0.5, 4)
    bed.proxies.pause()
    time.sleep(seconds)
    bed.proxies.resume()
    return f"no network between driver and brokers, {seconds:.1f} s"


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _choose(bed: TestBed, rng: random.Random) -> None:
    """Vary the options of the next drivers."""
    tasks = rng.choice((True, False, False))
    bed.driver.choices = replace(
        bed.driver.choices,
        tasks=tasks,
        records_per_batch=rng.choice((2_000, 10_000)),
        operator=rng.choice(OPERATORS),
    )


def _postgres(bed: TestBed) -> LocalPostgres:
    if bed.postgres is None:
        raise ValueError("this setup has no PostgreSQL")
    return bed.postgres


def _spark_cluster(bed: TestBed) -> SparkCluster:
    if bed.spark_cluster is None:
        raise ValueError("this setup has no Spark cluster")
    return bed.spark_cluster


FAULT_KINDS: dict[str, Fault] = {
    "driver killed": Fault(driver_kill, weight=3),
    "driver's JVM killed": Fault(jvm_kill, weight=1),
    "driver dies at a step": Fault(step_kill, weight=3),
    "task dies after writing": Fault(task_kill),
    "driver stopped for a while": Fault(driver_pause),
    "workers killed": Fault(workers_kill, weight=3),
    "second driver": Fault(second_driver),
    # A standby on a Spark cluster would wait for cores that the active driver has.
    "standby takes over": Fault(standby_takes_over, lambda setup: setup.workers == 0),
    "local state deleted": Fault(state_deleted, lambda setup: bool({LEDGER, UNLOGGED} & {*setup.flows}), weight=1),
    "clock jumps": Fault(clock_jump, lambda setup: LEDGER in setup.flows),
    "flow replaced": Fault(flow_replaced, lambda setup: bool(replaceable(setup)), weight=3),
    "letters replayed": Fault(letters_replayed, has_letters),
    "table repartitioned": Fault(table_repartitioned, lambda setup: bool(growing(setup))),
    "executor killed": Fault(executor_kill, lambda setup: setup.workers > 0, weight=6),
    "shuffle files lost": Fault(shuffle_lost, lambda setup: setup.workers > 0, weight=3),
    "worker replaced": Fault(worker_replaced, lambda setup: setup.workers > 0, weight=3),
    "worker comes and goes": Fault(worker_added, lambda setup: setup.workers > 0),
    "host rebooted": Fault(
        host_rebooted, lambda setup: setup.workers > 0 and not setup.own_hosts and LEDGER in setup.flows, weight=4
    ),
    "host lost": Fault(host_lost, has_hosts, weight=6),
    "host joins": Fault(host_joins, has_hosts, weight=4),
    "host decommissioned": Fault(host_leaves, has_hosts, weight=4),
    "host away": Fault(host_away, has_hosts, weight=4),
    "executor hangs": Fault(executor_hangs, has_hosts, weight=6),
    "state folder unusable": Fault(disk_unusable, has_hosts, weight=4),
    "task dies while it restores": Fault(restore_killed, has_hosts, weight=4),
    "driver killed while copies are restored": Fault(driver_killed_in_restore, has_hosts, weight=4),
    "idle until forgotten": Fault(idle, lambda setup: bool(setup.properties), weight=6),
    "query server killed": Fault(server_kill, lambda setup: setup.servers > 0, weight=3),
    "query server stopped for a while": Fault(server_pause, lambda setup: setup.servers > 0, weight=3),
    "PostgreSQL killed": Fault(postgres_kill, lambda setup: external.POSTGRES in setup.flows, weight=6),
    "PostgreSQL stopped for a while": Fault(postgres_pause, lambda setup: external.POSTGRES in setup.flows, weight=3),
    "broker killed": Fault(broker_kill, weight=2),
    "broker stopped for a while": Fault(broker_pause, weight=3),
    "leaders moved": Fault(leaders_moved, lambda setup: setup.nodes > 1 and setup.copies is None, weight=3),
    "rolling restart": Fault(rolling_restart, lambda setup: setup.nodes > 1, weight=1),
    "frames delayed": Fault(network(DELAY), weight=2),
    "frames doubled": Fault(network(DUPLICATE), weight=2),
    "frames reordered": Fault(network(REORDER), weight=2),
    "frames dropped": Fault(network(DROP), weight=2),
    "connections cut": Fault(network(CUT), weight=3),
    "network split": Fault(network_split, weight=2),
}
