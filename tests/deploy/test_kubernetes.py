"""Kubernetes: its own API server and controllers, Helm, and Spark's own backend, with the files and commands of this
repository. Containers are processes of this machine (``pod_runner.py``). Executors and drivers are killed."""

from __future__ import annotations

import base64
import copy
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from onceflow.host import jars
from onceflow.host.java import find_java
from onceflow.testing.waiting import wait_until

sys.path.insert(0, str(Path(__file__).parent))
try:
    import go_programs
    from flow_watch import COMMIT_S, FlowWatch
    from hosts import (
        ROOT,
        SPARK_HOME,
        Feeder,
        clean_environment,
        command_of_the_page,
        copy_service,
        end_processes_in,
        install_environment,
        replaced,
    )
    from kubernetes_cluster import KubernetesCluster, RefusedError, names
    from pod_runner import STATE, Container, Image, PodRunner
finally:
    sys.path.pop(0)

# The first one of them builds the control plane.
pytestmark = [
    pytest.mark.integration,
    pytest.mark.faults,
    pytest.mark.long,
    pytest.mark.timeout(go_programs.BUILD_S + 900),
]

NAMESPACE = "streams"
CHART = ROOT / "deploy" / "helm" / "onceflow"
MANIFEST = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
QUICK = "-XX:TieredStopAtLevel=1"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KubernetesCluster]:
    with KubernetesCluster(tmp_path, NAMESPACE) as running:
        yield running


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """What deploy/Dockerfile makes, in a folder, with the service on top."""
    folder = tmp_path_factory.mktemp("image")
    text = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
    (extra,) = re.findall(r' "/src\[(\w+)\]" ', text)
    install_environment(folder / "onceflow", folder / "wheel", extra)
    spark = folder / "spark"
    (spark / "jars").mkdir(parents=True)
    for place in (*SPARK_HOME.iterdir(), *(SPARK_HOME / "jars").iterdir(), *jars.cluster_jars()):
        target = (spark / "jars" if place.suffix == ".jar" else spark) / place.name
        if not target.exists():
            target.symlink_to(place)
    (folder / "service").mkdir()
    copy_service(folder / "service")
    tini = folder / "onceflow" / "bin" / "tini"
    tini.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    tini.chmod(0o755)
    java = find_java().resolve().parent.parent
    (line,) = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    environment = dict(word.split("=", 1) for word in line.split())
    places = {"/opt/onceflow": folder / "onceflow", "/opt/spark": spark, "/opt/java": java}
    for name, value in environment.items():
        for path, place in places.items():
            value = value.replace(path, str(place))
        environment[name] = value.replace("$PATH", os.environ["PATH"])
    return Image(ROOT / "deploy" / "entrypoint.sh", environment, {**places, "/opt/service": folder / "service"})


@pytest.fixture
def runner(cluster: KubernetesCluster, image: Image, short_folder: Path) -> Iterator[PodRunner]:
    with PodRunner(cluster, short_folder / "pods", image) as running:
        yield running


class Service(FlowWatch):
    """The flow that runs in the cluster."""

    def __init__(self, pipe: Any, cluster: KubernetesCluster, runner: PodRunner) -> None:
        super().__init__(pipe, lambda: f"{cluster.logs()}\n{runner.logs()}", lambda: runner.problem)
        self.cluster = cluster
        self.runner = runner

    def running(self, role: str) -> list[Container]:
        """Containers of pods of this role that run."""
        labels = {"app": "balances-driver"} if role == "driver" else {"spark_role": "executor"}
        found = [pod for pod in self.cluster.items("Pod", **labels) if pod["status"]["phase"] == "Running"]
        return [self.runner.containers[name] for name in names(found)]

    def lose_an_executor(self) -> tuple[Container, Container]:
        """One that is killed, and the one that Spark asks for in its place."""
        self.await_true(lambda: len(self.running("executor")) == 2, "two executors")
        before = self.running("executor")
        os.kill(before[0].pid, signal.SIGKILL)
        self.await_true(lambda: {*self.running("executor")} - {*before}, "another executor in its place")
        (new,) = {*self.running("executor")} - {*before}
        return before[0], new


def test_the_manifest_is_accepted(cluster: KubernetesCluster) -> None:
    for document in MANIFEST:
        cluster.create(document)
    assert names(cluster.items("Deployment")) == ["balances-driver"]
    pods = lambda: cluster.items("Pod", app="balances-driver")  # noqa: E731
    wait_until(pods, 60, lambda: f"a pod\n{cluster.logs()}", poll_s=0.2)
    wrong = copy.deepcopy(MANIFEST[-1])
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 75
    with pytest.raises(RefusedError, match="unknown field"):
        cluster.create(wrong, dry_run=True)


def test_a_release_of_the_chart(
    make_state_pipe: Callable[..., Any], cluster: KubernetesCluster, runner: PodRunner
) -> None:
    pipe = make_state_pipe(spark=False)
    pipe.fill(500)
    service = Service(pipe, cluster, runner)
    secret = {"password": base64.b64encode(b"a secret").decode()}
    cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "kafka"}, "data": secret})
    values = {
        "image": "registry.example/balances:1",
        "args": ["python", "/opt/service/service.py", pipe.bootstrap, pipe.flow, pipe.source, pipe.target, pipe.table],
        "driver": {"memory": "700m"},
        "executors": {"instances": 2, "cores": 1, "memory": "512m", "memoryOverhead": "384m"},
        "state": {"size": "1Gi", "storageClass": "standard"},
        "secretEnv": {"PASSWORD": {"secret": "kafka", "key": "password"}},
        "secretFiles": {"kafka": "/etc/kafka"},
        "sparkConf": {"spark.driver.extraJavaOptions": QUICK, "spark.executor.extraJavaOptions": QUICK},
    }
    helm(cluster, "install", values)
    feeder = Feeder(pipe)
    try:
        service.await_commits()
        available = lambda: cluster.get("Deployment", "balances-driver")["status"].get("availableReplicas")  # noqa: E731
        service.await_true(lambda: available() == 1, "the driver is ready")
        assert len(cluster.items("PersistentVolumeClaim")) == 2
        service.lose_an_executor()
        service.await_commits()
        for container in (*service.running("driver"), *service.running("executor")):
            assert (container.replaced["/etc/kafka"] / "password").read_text() == "a secret"
        check_restart_of_the_container(service)
        check_another_pod(service)
        feeder.stop()
        service.await_end()
        (driver,) = service.running("driver")
        helm(cluster, "upgrade", {**values, "replicas": 0})
        service.await_true(lambda: not cluster.items("Pod"), "driver and executors are gone")
        assert driver.exit_codes == [0], driver.log()[-3000:]
        service.await_true(lambda: not cluster.items("PersistentVolumeClaim"), "their volumes are gone, too")
    finally:
        feeder.stop()
    pipe.check(local=False)


def check_restart_of_the_container(service: Service) -> None:
    """The driver is killed, and the pod stays."""
    (driver,) = service.running("driver")
    os.kill(driver.pid, signal.SIGKILL)
    service.await_true(lambda: driver.restarts == 1, "the container is started again")
    service.await_commits()
    assert service.running("driver") == [driver]


def check_another_pod(service: Service) -> None:
    """The driver's node is lost with it."""
    (driver,) = service.running("driver")
    executors = {container.name for container in service.running("executor")}
    service.cluster.delete("Pod", driver.name, grace_s=0)
    service.await_true(lambda: {*service.running("driver")} - {driver}, "another pod for the driver")
    service.await_commits()
    service.await_true(lambda: not executors & {*names(service.cluster.items("Pod"))}, "its executors are gone")


def helm(cluster: KubernetesCluster, command: str, values: dict[str, Any]) -> None:
    file = cluster.folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    done = subprocess.run(
        [go_programs.helm(), command, "balances", CHART, "--namespace", NAMESPACE, "--values", file],
        env={"PATH": os.environ["PATH"], "HOME": str(cluster.folder), "KUBECONFIG": str(cluster.kubeconfig)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_submission_in_cluster_mode(
    make_state_pipe: Callable[..., Any], cluster: KubernetesCluster, runner: PodRunner, short_folder: Path
) -> None:
    pipe = make_state_pipe(spark=False)
    pipe.fill(500)
    service = Service(pipe, cluster, runner)
    for document in MANIFEST:
        if document["kind"] in ("ServiceAccount", "Role", "RoleBinding"):
            cluster.create(document)
    (short_folder / "host").mkdir()
    client = submit(short_folder / "host", cluster, [pipe.bootstrap, pipe.flow, pipe.source, pipe.target, pipe.table])
    feeder = Feeder(pipe)
    try:
        service.await_commits()
        check_driver(service)
        lost, new = service.lose_an_executor()
        assert new.replaced[STATE] == lost.replaced[STATE], "it takes over the volume"
        service.await_commits()
        assert list(new.replaced[STATE].rglob("data.mdb")), "state is in the volume"
        feeder.stop()
        service.await_end()
        (driver,) = cluster.items("Pod", spark_role="driver")
        cluster.delete("Pod", driver["metadata"]["name"])
        service.await_true(lambda: not cluster.items("Pod"), "driver and executors are gone")
        wait_until(lambda: client.poll() is not None, COMMIT_S, "spark-submit ends with the driver")
    finally:
        feeder.stop()
        end_processes_in(short_folder / "host")
        client.wait()
    pipe.check(local=False)


def check_driver(service: Service) -> None:
    """What Spark has made of the command."""
    (pod,) = service.cluster.items("Pod", spark_role="driver")
    spec = pod["spec"]
    (container,) = spec["containers"]
    assert (spec["serviceAccountName"], spec["restartPolicy"]) == ("spark", "Never")
    assert "ownerReferences" not in pod["metadata"], "nothing starts it again"
    assert container["image"] == "registry.example/balances:1"
    assert pod["metadata"]["labels"]["spark-app-name"] == "balances"
    assert container["args"][0] == "driver"
    executors = service.cluster.items("Pod", spark_role="executor")
    claims = {claim["metadata"]["name"]: claim for claim in service.cluster.items("PersistentVolumeClaim")}
    assert len(executors) == len(claims) == 2
    assert {claim["spec"]["resources"]["requests"]["storage"] for claim in claims.values()} == {"20Gi"}
    assert {claim["spec"]["storageClassName"] for claim in claims.values()} == {"standard"}
    for executor in executors:
        (owner,) = executor["metadata"]["ownerReferences"]
        assert owner["name"] == pod["metadata"]["name"]
        (container,) = executor["spec"]["containers"]
        assert container["image"] == "registry.example/balances:1"
        (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == STATE]
        volumes = {volume["name"]: volume for volume in executor["spec"]["volumes"]}
        assert volumes[mount["name"]]["persistentVolumeClaim"]["claimName"] in claims
        assert container["resources"]["requests"]["memory"] == "896Mi", "memory and memoryOverhead"


def submit(folder: Path, cluster: KubernetesCluster, arguments: list[str]) -> subprocess.Popen[bytes]:
    """By the command of the page, on a host that has Spark and may talk to the API server."""
    conf = folder / "conf"
    conf.mkdir()
    settings = {
        "spark.driver.extraJavaOptions": QUICK,
        "spark.executor.extraJavaOptions": QUICK,
        # Port 443, the default, is for root.
        "spark.kubernetes.driver.master": f"https://kubernetes.default.svc:{cluster.port}",
    }
    (conf / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    command = replaced(
        command_of_the_page("--master k8s://"),
        {
            "https://kubernetes.example:6443": cluster.url,
            "--num-executors 4": "--num-executors 2",
            "--executor-cores 2": "--executor-cores 1",
            "--executor-memory 2g": "--executor-memory 512m",
            "--driver-memory 2g": "--driver-memory 700m",
            "memoryOverhead=2g": "memoryOverhead=384m",
            "local:///opt/service/service.py": " ".join(["local:///opt/service/service.py", *arguments]),
        },
    )
    environment = clean_environment(folder) | {"SPARK_CONF_DIR": str(conf), "KUBECONFIG": str(cluster.kubeconfig)}
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
