"""YARN in cluster mode, by the command of docs/deploy.md: Hadoop's own managers of resources and nodes, which start
driver and executors in containers that are processes of this machine. An executor and the master are killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from onceflow.host import jars
from onceflow.host.java import find_java
from onceflow.testing.waiting import wait_until

sys.path.insert(0, str(Path(__file__).parent))
try:
    from flow_watch import COMMIT_S, FlowWatch
    from hosts import (
        SPARK_HOME,
        Feeder,
        clean_environment,
        command_of_the_page,
        copy_service,
        end_processes_in,
        pack_environment,
        processes_in,
        replaced,
    )
finally:
    sys.path.pop(0)

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.long]

START_S = 120.0
NODES = 2
MASTER = "org.apache.spark.deploy.yarn.ApplicationMaster"
EXECUTOR = "org.apache.spark.executor.YarnCoarseGrainedExecutorBackend"
# What the jar of Hadoop's clusters for tests needs beside Spark's jars, and does not have in it.
BESIDE = [
    jars.Coordinate("org.junit.jupiter", "junit-jupiter-api", "5.13.3"),
    jars.Coordinate("org.junit.platform", "junit-platform-commons", "1.13.3"),
    jars.Coordinate("org.opentest4j", "opentest4j", "1.3.0"),
    jars.Coordinate("org.bouncycastle", "bcprov-jdk18on", "1.82"),
    jars.Coordinate("org.bouncycastle", "bcpkix-jdk18on", "1.82"),
    jars.Coordinate("org.bouncycastle", "bcutil-jdk18on", "1.82"),
]


class Yarn:
    """A cluster that runs, see YarnCluster.java."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.process = process

    @property
    def settings(self) -> dict[str, str]:
        """What clients are told."""
        tree = ElementTree.parse(self.folder / "yarn-site.xml")
        return {p.findtext("name", ""): p.findtext("value", "") for p in tree.iter("property")}

    def ask(self, path: str) -> Any:
        """Of the resource manager."""
        address = self.settings["yarn.resourcemanager.webapp.address"]
        with urllib.request.urlopen(f"http://{address}/ws/v1/cluster/{path}", timeout=10) as answer:
            return json.load(answer)

    def application(self) -> dict[str, Any]:
        """The only one."""
        (found,) = self.ask("apps")["apps"]["app"]
        return dict(found)

    def end_application(self) -> None:
        address = self.settings["yarn.resourcemanager.webapp.address"]
        request = urllib.request.Request(
            f"http://{address}/ws/v1/cluster/apps/{self.application()['id']}/state",
            data=b'{"state": "KILLED"}',
            headers={"Content-Type": "application/json"},
            method="PUT",
        )
        urllib.request.urlopen(request, timeout=30).close()

    def containers(self, main_class: str) -> list[int]:
        """Pids of the JVMs with this main class, without the shells that have started them."""
        found = processes_in(self.folder)
        return [pid for pid, line in found.items() if main_class in line and "/java" in line.split()[0]]

    def logs(self) -> str:
        """The end of what all containers have said."""
        files = sorted(self.folder.rglob("container_*/std*"), key=lambda file: file.stat().st_mtime)
        return "\n".join(f"{file}:\n{file.read_text(errors='replace')[-3000:]}" for file in files if file.is_file())


@contextmanager
def running_yarn(folder: Path) -> Iterator[Yarn]:
    version = next(name for name in jars.spark_jars() if name.startswith("hadoop-client-api-")).split("-")[-1][:-4]
    cluster = jars.Coordinate("org.apache.hadoop", "hadoop-client-minicluster", version)
    class_path = [SPARK_HOME / "jars" / "*", *jars.resolve([cluster, *BESIDE], transitive=False)]
    command = [str(find_java()), "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    command += ["-cp", os.pathsep.join(map(str, class_path))]
    command += [str(Path(__file__).with_name("YarnCluster.java")), str(folder), str(NODES)]
    with (folder / "yarn.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=clean_environment(folder),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(
            lambda: (folder / "yarn-site.xml").exists(),
            START_S,
            lambda: "YARN runs\n" + (folder / "yarn.log").read_text()[-3000:],
            useless=lambda: process.poll() is not None and "it has ended",
        )
        yield Yarn(folder, process)
    finally:
        end_processes_in(folder)
        process.communicate()


# Of the command, what is for a larger cluster. The connector comes by the other way of the page, without a repository.
SMALLER = {
    "--packages org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0": '--jars "$(environment/bin/onceflow setup --jars)"',
    "--num-executors 4": "--num-executors 2",
    "--executor-cores 2": "--executor-cores 1",
    "--executor-memory 2g": "--executor-memory 512m",
    "--driver-memory 2g": "--driver-memory 700m",
    "memoryOverhead=2g": "memoryOverhead=384m",
}


def submit(folder: Path, yarn: Yarn, arguments: list[str]) -> subprocess.Popen[bytes]:
    """By the command of the page, on a host of its own with the configuration of the cluster."""
    conf = folder / "conf"
    conf.mkdir()
    shutil.copyfile(yarn.folder / "yarn-site.xml", conf / "yarn-site.xml")
    settings = {
        # Clusters have Spark's jars in one place. Otherwise each submission would upload them.
        "spark.yarn.jars": f"local:{SPARK_HOME}/jars/*",
        "spark.yarn.stagingDir": f"file:{folder / 'staging'}",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.yarn.appMasterEnv.SPARK_LOCAL_IP": "127.0.0.1",
        "spark.executorEnv.SPARK_LOCAL_IP": "127.0.0.1",
    }
    (conf / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    environment = clean_environment(folder) | {
        "ONCEFLOW_CACHE": str(jars.cache_dir()),
        "SPARK_CONF_DIR": str(conf),
        "HADOOP_CONF_DIR": str(conf),
    }
    copy_service(folder)
    pack_environment(folder, environment)
    command = replaced(
        command_of_the_page("--master yarn"),
        {
            **SMALLER,
            "appMasterEnv.ONCEFLOW_STATE_DIR=/data/onceflow": f"appMasterEnv.ONCEFLOW_STATE_DIR={folder / 'state'}",
            "executorEnv.ONCEFLOW_STATE_DIR=/data/onceflow": f"executorEnv.ONCEFLOW_STATE_DIR={folder / 'state'}",
            "\n    service.py": "\n    " + " ".join(["service.py", *arguments]),
        },
    )
    with (folder / "submit.log").open("wb") as log:
        return subprocess.Popen(
            ["bash", "-euc", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.fixture
def yarn(short_folder: Path) -> Iterator[Yarn]:
    (short_folder / "yarn").mkdir()
    with running_yarn(short_folder / "yarn") as cluster:
        yield cluster


@pytest.mark.timeout(900)
def test_the_application_master_and_an_executor_are_killed(
    make_state_pipe: Callable[..., Any], yarn: Yarn, short_folder: Path
) -> None:
    pipe = make_state_pipe(spark=False)
    pipe.fill(500)
    host = short_folder / "host"
    host.mkdir()
    client = submit(host, yarn, [pipe.bootstrap, pipe.flow, pipe.source, pipe.target, pipe.table])

    def told() -> str:
        return f"{(host / 'submit.log').read_text()[-3000:]}\n{yarn.logs()}"

    watch = FlowWatch(pipe, told, lambda: client.poll() is not None and "it has ended")
    feeder = Feeder(pipe)
    try:
        watch.await_commits()
        (first,) = yarn.containers(MASTER)
        watch.await_true(lambda: len(yarn.containers(EXECUTOR)) == 2, "two executors")
        killed = yarn.containers(EXECUTOR)[0]
        os.kill(killed, signal.SIGKILL)
        watch.await_true(lambda: len(set(yarn.containers(EXECUTOR)) - {killed}) == 2, "another executor in its place")
        watch.await_commits()
        os.kill(first, signal.SIGKILL)
        watch.await_true(lambda: set(yarn.containers(MASTER)) - {first}, "another application master")
        watch.await_commits()
        feeder.stop()
        watch.await_end()
        application = yarn.application()
        attempts = yarn.ask(f"apps/{application['id']}/appattempts")["appAttempts"]["appAttempt"]
        assert (application["state"], len(attempts)) == ("RUNNING", 2)
        yarn.end_application()
        wait_until(lambda: client.poll() is not None, COMMIT_S, "spark-submit ends with the application")
    finally:
        feeder.stop()
        end_processes_in(host)
    pipe.check(local=False)
    assert list((host / "state").rglob("data.mdb")), "state is where the command says"
