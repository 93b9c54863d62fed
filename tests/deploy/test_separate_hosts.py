"""A standalone cluster whose hosts share nothing but the network, by the commands of docs/deploy.md.

Driver and workers have a folder each: home, working folder, temporary files, state, and what they unpack of the
archived Python environment. The commands of the page make that archive and submit the service.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onceflow.broker.local import free_ports
from onceflow.host import jars
from onceflow.testing import independent
from onceflow.testing.processes import descendants
from onceflow.testing.waiting import wait_until
from onceflow_workshop.chaos.spark_cluster import SparkCluster

sys.path.insert(0, str(Path(__file__).parent))
try:
    from flow_watch import COMMIT_S
    from hosts import (
        ROOT,
        SPARK_HOME,
        Feeder,
        clean_environment,
        command_of_the_page,
        copy_service,
        pack_environment,
        replaced,
    )
finally:
    sys.path.pop(0)

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.long]

KILLS = 10
DRIVER_KILLED_AFTER = 5  # kills of executors
LATE_WORKER_AFTER = 2
KILLED_AFTER_S = (0.2, 1.2)  # of a commit
FIRST_WORK_S = 120.0


class SeparateHosts(SparkCluster):
    """Each worker has a home and folders of its own; none has onceflow."""

    def environment(self, name: str) -> dict[str, str]:
        return clean_environment(self.folder / name)

    def state_files(self, worker: str) -> list[Path]:
        return list((self.folder / worker / "home/.local/state/onceflow").rglob("data.mdb"))

    def python_workers(self, worker: str) -> list[int]:
        """Python processes of its executors that live at the moment."""
        below = (descendants(executor) for executor in self.executors(worker))
        return [pid for found in below for pid, line in found.items() if "pyspark" in line]


class Host:
    """Where the driver runs: its environment from the page's commands, and one submission after another."""

    def __init__(self, folder: Path, master: str, service_arguments: list[str]) -> None:
        self.folder = folder
        self.master = master
        self.arguments = service_arguments
        self.environment = clean_environment(folder) | {
            "ONCEFLOW_CACHE": str(jars.cache_dir()),
            "SPARK_CONF_DIR": str(folder / "conf"),
        }
        self.batch = 0
        self.attempts: dict[int, int] = {}
        self._process: subprocess.Popen[str] | None = None
        (self.ui_port,) = free_ports(1)
        settings = {
            "spark.driver.memory": "700m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            "spark.ui.port": str(self.ui_port),
        }
        (folder / "conf").mkdir()
        lines = [f"{key} {value}\n" for key, value in settings.items()]
        (folder / "conf" / "spark-defaults.conf").write_text("".join(lines))
        copy_service(folder)

    def submit(self) -> None:
        command = replaced(
            command_of_the_page("--master spark://"),
            {
                "spark://spark-master:7077": self.master,
                "--executor-memory 2g": "--executor-memory 512m",
                "service.py": " ".join(["service.py", *self.arguments]),
            },
        )
        with (self.folder / "driver.log").open("a") as log:
            self._process = subprocess.Popen(
                ["bash", "-euc", command],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line.startswith("{"):
                    told = json.loads(line)
                    self.attempts.update({int(batch): count for batch, count in told["attempts"].items()})
                    self.batch = max(self.batch, told["batch"])

    def await_commits(self, count: int = 1) -> None:
        after = self.batch
        self.await_true(lambda: self.batch >= after + count, COMMIT_S, f"{count} commits after batch {after}")

    def await_true(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        def tail() -> str:
            log = (self.folder / "driver.log").read_text(errors="replace").splitlines()
            return "\n".join([line for line in log if "falling behind" not in line][-60:])

        def ended() -> str:
            running = self._process is not None and self._process.poll() is None
            return "" if running else "the driver has ended"

        wait_until(holds, seconds, lambda: f"{what}\n{tail()}", useless=ended, poll_s=0.1)

    def executors(self) -> list[dict[str, Any]]:
        """As Spark's UI tells."""
        address = f"http://127.0.0.1:{self.ui_port}/api/v1/applications"
        with urllib.request.urlopen(address, timeout=10) as answer:
            (application,) = json.load(answer)
        with urllib.request.urlopen(f"{address}/{application['id']}/executors", timeout=10) as answer:
            return [executor for executor in json.load(answer) if executor["id"] != "driver"]

    def stop(self) -> int:
        """SIGTERM to the service, as a service manager sends it; its exit code."""
        assert self._process is not None
        for pid, line in descendants(self._process.pid).items():
            if re.search(r"python\S* \S*service\.py", line):
                os.kill(pid, signal.SIGTERM)
        return self._process.wait(COMMIT_S)

    def kill(self) -> None:
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()


@pytest.mark.timeout(1800)
def test_ten_executor_kills_a_driver_restart_and_a_late_worker(
    make_state_pipe: Callable[..., Any], short_folder: Path
) -> None:
    pipe = make_state_pipe(spark=False)
    pipe.fill(500)
    rng = random.Random(13)
    (short_folder / "driver").mkdir()
    with SeparateHosts(short_folder, workers=2) as cluster:
        arguments = [pipe.bootstrap, pipe.flow, pipe.source, pipe.target, pipe.table]
        host = Host(short_folder / "driver", cluster.master, arguments)
        pack_environment(host.folder, host.environment)
        host.submit()
        feeder = Feeder(pipe)
        try:
            host.await_commits(3)
            workers = ["worker-0", "worker-1"]
            for kill in range(1, KILLS + 1):
                # Somewhere in the course of batches: the moment after a commit is between two of them.
                time.sleep(rng.uniform(*KILLED_AFTER_S))
                host.await_true(lambda: kill_executor(cluster, rng), COMMIT_S, "an executor to kill")
                host.await_commits()
                if kill == LATE_WORKER_AFTER:
                    workers.append(add_worker(cluster, host))
                if kill == DRIVER_KILLED_AFTER:
                    host.kill()
                    host.submit()
                    host.await_commits()
            feeder.stop()
            ends = independent.end_offsets(pipe.bootstrap, pipe.source)
            host.await_true(
                lambda: independent.committed_offsets(pipe.bootstrap, pipe.flow) == ends, COMMIT_S, "all is read"
            )
            check_that_nothing_is_shared(cluster, workers)
            assert host.stop() == 0
        finally:
            feeder.stop()
            host.kill()
        pipe.check(local=False)
        assert max(host.attempts.values()) > 1, "no kill has hit a batch"
        for worker in workers:
            assert cluster.state_files(worker), f"{worker} has no state of its own"
        state = host.folder / "home/.local/state"
        assert not [path for path in state.rglob("*") if path.is_file()], "tasks wrote on the driver's host"


def kill_executor(cluster: SeparateHosts, rng: random.Random) -> bool:
    found = cluster.executors()
    if not found:
        return False
    try:
        os.kill(rng.choice(found), signal.SIGKILL)
    except ProcessLookupError:
        return False  # it has just ended by itself
    return True


def add_worker(cluster: SeparateHosts, host: Host) -> str:
    """It gets work within a minute, and no batch is run again for that."""
    # What the executor that was killed last has cost is over when all executors are back.
    host.await_true(lambda: len(cluster.executors()) == 2, COMMIT_S, "two executors")
    host.await_commits(2)
    before = host.batch
    worker = cluster.add_worker()

    def works() -> bool:
        ids = {place.name for place in (cluster.folder / worker).glob("app-*/*")}
        return any(e["id"] in ids and e["completedTasks"] > 0 for e in host.executors())

    host.await_true(works, FIRST_WORK_S, "work for the late worker")
    host.await_true(lambda: bool(cluster.state_files(worker)), FIRST_WORK_S, "state in the late worker's folder")
    host.await_commits(2)
    again = {batch: count for batch, count in host.attempts.items() if batch > before and count > 1}
    assert not again, f"batches with more than one attempt: {again}"
    return worker


def check_that_nothing_is_shared(cluster: SeparateHosts, workers: list[str]) -> None:
    """Python of executors has mapped libraries and stores of its own host, and none of the environment of the tests."""
    mapped = 0
    for worker in workers:
        own = str(cluster.folder / worker) + "/"
        for pid in cluster.python_workers(worker):
            try:
                maps = Path(f"/proc/{pid}/maps").read_text()
            except OSError:
                continue  # it has ended
            files = set(re.findall(r"(/\S+)$", maps, re.MULTILINE))
            mapped += sum(file.startswith(own) for file in files)
            foreign = [
                file
                for file in files
                if not file.startswith(own) and file.startswith((str(cluster.folder), str(ROOT), sys.prefix))
            ]
            assert not foreign, f"{worker} uses {foreign[:3]}"
    assert mapped > 0


def test_python_programs_have_no_cluster_mode(tmp_path: Path) -> None:
    """Of a standalone cluster: ``spark-submit`` ends before it asks the master."""
    done = subprocess.run(
        [
            SPARK_HOME / "bin" / "spark-submit",
            "--master",
            "spark://127.0.0.1:1",
            "--deploy-mode",
            "cluster",
            "service.py",
        ],
        env=clean_environment(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert (
        "Cluster deploy mode is currently not supported for python applications on standalone clusters" in done.stderr
    )
