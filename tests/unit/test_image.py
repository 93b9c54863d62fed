"""The image for Kubernetes: its entry point runs what Spark asks for, and what the Dockerfile copies is there. And the
manifest of a driver: its probes and its patience are those of `onceflow.serve`."""

from __future__ import annotations

import fnmatch
import inspect
import os
import re
import shlex
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement

import onceflow
from onceflow.options.durations import duration_ms

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
# What Spark 4.2 puts into the environment of an executor's pod.
EXECUTOR = {
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@driver:7078",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_EXECUTOR_MEMORY": "2g",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.7",
    "SPARK_EXECUTOR_POD_NAME": "balances-exec-1",
    "SPARK_EXECUTOR_ID": "1",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_JAVA_OPT_10": "-Dlast=1",
    "SPARK_JAVA_OPT_0": "-Dfirst=with space",
    "SPARK_JAVA_OPT_2": "-Dsecond=*",
}


def entry_point(tmp_path: Path, *arguments: str, **environment: str) -> list[str]:
    """The command that it would run, with its arguments."""
    tini = tmp_path / "tini"
    tini.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    tini.chmod(0o755)
    done = subprocess.run(
        [ROOT / "deploy" / "entrypoint.sh", *arguments],
        env={
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "SPARK_HOME": "/opt/spark",
            "JAVA_HOME": "/opt/java",
            **environment,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second, *command = done.stdout.splitlines()
    assert (first, second) == ("-s", "--")
    return command


def test_executor(tmp_path: Path) -> None:
    command = entry_point(tmp_path, "executor", **EXECUTOR, SPARK_CONF_DIR="/opt/spark/conf")
    java, *options = command[: command.index("-cp")]
    assert java == "/opt/java/bin/java"
    assert options == ["-Dfirst=with space", "-Dsecond=*", "-Dlast=1", "-Xms2g", "-Xmx2g"]
    class_path, main, *given = command[command.index("-cp") + 1 :]
    assert class_path == "/opt/spark/conf:/opt/spark/jars/*"
    assert main == "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
    assert dict(zip(given[::2], given[1::2], strict=True)) == {
        "--driver-url": EXECUTOR["SPARK_DRIVER_URL"],
        "--executor-id": "1",
        "--cores": "2",
        "--app-id": "spark-1",
        "--hostname": "10.0.0.7",
        "--resourceProfileId": "0",
        "--podName": "balances-exec-1",
    }


def test_driver(tmp_path: Path) -> None:
    given = ["--properties-file", "/opt/spark/conf/spark.properties", "local:///opt/service/service.py", "an argument"]
    command = entry_point(tmp_path, "driver", *given, SPARK_DRIVER_BIND_ADDRESS="10.0.0.6")
    submit = ["/opt/spark/bin/spark-submit", "--deploy-mode", "client"]
    assert command == [*submit, "--conf", "spark.driver.bindAddress=10.0.0.6", *given]


def test_any_other_command(tmp_path: Path) -> None:
    assert entry_point(tmp_path, "onceflow", "reset", "balances") == ["onceflow", "reset", "balances"]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    let_through = [rule[1:] for rule in rules if rule.startswith("!")]
    copies = [shlex.split(line)[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")]
    sources = [source for words in copies for source in words if not source.startswith("--")]
    assert len(sources) >= 6
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, rule) for rule in let_through), f"{source} is in .dockerignore"


def test_it_has_what_the_manifest_asks_of_a_service() -> None:
    """`onceflow.serve(metrics_port=...)` needs an extra of the package."""
    (container,) = manifest()["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert [port["name"] for port in container["ports"]] == ["metrics"]
    (installed,) = re.findall(r"/pip install .* \"/src\[(.*)\]\"", DOCKERFILE)
    assert installed == "metrics"


def test_constraints_are_the_pinned_versions() -> None:
    """The image's own ``sed`` makes them of the list with hashes."""
    (command,) = re.findall(r"^RUN (sed .*) > \S+ \\$", DOCKERFILE, re.MULTILINE)
    program = shlex.split(command)[2]
    answer = subprocess.run(
        ["sed", "-E", program, ROOT / "requirements" / "dev.txt"], capture_output=True, text=True, check=True
    )
    pinned = {Requirement(line).name: str(Requirement(line).specifier) for line in answer.stdout.splitlines()}
    assert pinned["pyspark"] == "==4.2.0"
    assert all(version.startswith("==") for version in pinned.values())
    assert {"pandas", "pyarrow", "kafka-python", "lmdb"} <= set(pinned)


def manifest() -> dict[str, dict[str, Any]]:
    documents = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
    return {document["kind"]: document for document in documents}


def status_of(endpoint: onceflow.MetricsEndpoint, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}{path}", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_probes_of_the_manifest_are_answered() -> None:
    pod = manifest()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (port,) = container["ports"]
    service = {each["name"]: each["port"] for each in manifest()["Service"]["spec"]["ports"]}
    assert service[port["name"]] == port["containerPort"]
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {name: get["path"] for name, get in probes.items()} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    assert {get["port"] for get in probes.values()} == {port["name"]}
    with onceflow.serve_metrics(0) as endpoint:
        assert {path: status_of(endpoint, path) for path in ("/healthz", "/readyz")} == {
            "/healthz": 200,
            "/readyz": 503,  # no query was started
        }
    # What the service has to call is in the manifest and on the page.
    call = f'metrics_port={port["containerPort"]}, metrics_host="0.0.0.0"'
    assert call in (ROOT / "deploy" / "kubernetes.yaml").read_text()
    assert call in (ROOT / "docs" / "deploy.md").read_text()


def test_kubernetes_waits_longer_than_serve() -> None:
    limit_s = duration_ms(inspect.signature(onceflow.serve).parameters["stop_timeout"].default) / 1000
    pod = manifest()["Deployment"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= limit_s + 15
