"""What Helm makes of the chart: by default the content of deploy/kubernetes.yaml, and of every value what it says."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from onceflow.session import submit_settings

sys.path.insert(0, str(Path(__file__).parent))
try:
    import go_programs
finally:
    sys.path.pop(0)

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "onceflow"
IMAGE = "registry.example/balances:1"
KUBERNETES = "1.37"
EVERY_VALUE = {
    "image": "registry.example/balances:2",
    "imagePullPolicy": "Always",
    "imagePullSecrets": ["registry"],
    "args": ["python", "-m", "service"],
    "replicas": 0,
    "terminationGracePeriodSeconds": 90,
    "serviceAccount": {"create": False, "name": "other"},
    "driver": {"memory": "1g", "resources": {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"memory": "2Gi"}}},
    "executors": {
        "instances": 3,
        "cores": 1,
        "memory": "1g",
        "memoryOverhead": "1g",
        "podTemplate": {"apiVersion": "v1", "kind": "Pod", "spec": {"securityContext": {"fsGroup": 185}}},
    },
    "state": {"size": "20Gi", "storageClass": "fast"},
    "env": {"ONCEFLOW_BOOTSTRAP_SERVERS": "one:9092,two:9092", "GREETING": """it's "a word" of  $HOME"""},
    "secretEnv": {"PASSWORD": {"secret": "kafka", "key": "password"}},
    "secretFiles": {"kafka-tls": "/etc/kafka"},
    "metrics": {"port": 9000},
    "probes": {"startup": {"failureThreshold": 120}},
    "sparkConf": {"spark.network.timeout": "60s", "spark.decommission.enabled": "true"},
    "podAnnotations": {"a": "b"},
    "podSecurityContext": {"fsGroup": 185},
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "a", "operator": "Exists"}],
}


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(go_programs.helm()), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def rendered(*arguments: str) -> list[dict[str, Any]]:
    done = helm("template", "balances", str(CHART), "--namespace", "streams", *arguments)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def comparable(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By kind. The settings of Spark are compared as such, since their order says nothing."""
    found = {document["kind"]: document for document in documents}
    assert len(found) == len(documents)
    for entry in driver(found)["env"]:
        if entry["name"] == "PYSPARK_SUBMIT_ARGS":
            words = shlex.split(entry["value"])
            entry["value"] = [sorted(zip(words[:-1:2], words[1::2], strict=True)), words[-1]]
    return found


def driver(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_the_chart_is_linted(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(EVERY_VALUE))
    for arguments in (["--set", f"image={IMAGE}"], ["--values", str(values)]):
        done = helm("lint", "--strict", str(CHART), *arguments)
        assert done.returncode == 0, done.stdout
        assert "[WARNING]" not in done.stdout


def test_default_values_are_the_manifest() -> None:
    manifest = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
    assert comparable(rendered("--set", f"image={IMAGE}")) == comparable(manifest)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "image is missing"),
        (["--set", f"image={IMAGE}", "--set", "state.size=1Gi"], "state.storageClass is missing"),
        (["--set", f"image={IMAGE}", "--set", "replicas=2"], "at '/replicas'"),
        (["--set", f"image={IMAGE}", "--set", "executors.instance=2"], "'instance' not allowed"),
        (["--set", f"image={IMAGE}", "--set-json", 'secretFiles={"kafka.tls": "/etc/tls"}'], "'kafka.tls'"),
        (["--set", f"image={IMAGE}", "--set", "env.ONCEFLOW_STATE_DIR=/data"], "the state folder is state.mountPath"),
        (["--set", f"image={IMAGE}", "--set", "env.POD_IP=a"], "POD_IP is set by the chart itself"),
        (["--set", f"image={IMAGE}", "--set", "metrics.port=4040"], "at '/metrics/port'"),
        (["--set", f"image={IMAGE}", "--set", "driver=null"], "driver"),
        (["--set", f"image={IMAGE}", "--set", "executors.cores=null"], "at '/executors'"),
        (
            ["--set", f"image={IMAGE}", "--set", "env.A=b", "--set-json", 'secretEnv={"A": {"secret":"s","key":"k"}}'],
            "A is in env and in secretEnv",
        ),
    ],
    ids=[
        *("no image", "no storage class", "two drivers", "misspelt", "secret with dots", "state folder in env"),
        *("variable of the chart", "port of Spark", "no driver", "no cores", "twice"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], said: str) -> None:
    done = helm("template", "balances", str(CHART), *arguments)
    assert done.returncode != 0
    assert said in done.stderr


def test_what_is_null_is_left_out() -> None:
    found = comparable(
        rendered("--set", f"image={IMAGE}", "--set", "probes.readiness=null", "--set", "driver.resources=null")
    )
    container = driver(found)
    assert "livenessProbe" in container
    assert not {"readinessProbe", "resources"} & container.keys()


def test_state_is_on_its_volume() -> None:
    """Another path is that of the volume, and the one that onceflow uses."""
    values = ["--set", f"image={IMAGE}", "--set", "state.size=1Gi,state.storageClass=fast,state.mountPath=/data"]
    container = driver({document["kind"]: document for document in rendered(*values)})
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env["ONCEFLOW_STATE_DIR"] == "/data"
    settings = submit_settings(str(env["PYSPARK_SUBMIT_ARGS"]))
    assert settings["spark.executorEnv.ONCEFLOW_STATE_DIR"] == "/data"
    assert settings["spark.kubernetes.executor.volumes.persistentVolumeClaim.state.mount.path"] == "/data"


def test_every_value_is_used(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(EVERY_VALUE))
    documents = rendered("--values", str(values))
    for document in documents:
        assert kubernetes_validate.validate(document, KUBERNETES, strict=True) == KUBERNETES
    found = {document["kind"]: document for document in documents}
    assert sorted(found) == ["ConfigMap", "Deployment", "Service"], "the account is not created"
    assert yaml.safe_load(found["ConfigMap"]["data"]["pod.yaml"]) == EVERY_VALUE["executors"]["podTemplate"]
    assert found["Service"]["spec"]["ports"][-1] == {"name": "metrics", "port": 9000}
    assert found["Deployment"]["spec"]["replicas"] == 0
    template = found["Deployment"]["spec"]["template"]
    assert template["metadata"]["annotations"] == {"a": "b"}
    pod = template["spec"]
    assert pod["serviceAccountName"] == "other"
    assert pod["terminationGracePeriodSeconds"] == 90
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["securityContext"] == {"fsGroup": 185}
    assert pod["nodeSelector"] == {"disk": "fast"}
    assert pod["tolerations"] == EVERY_VALUE["tolerations"]
    assert {volume["name"]: volume for volume in pod["volumes"]} == {
        "executor": {"name": "executor", "configMap": {"name": found["ConfigMap"]["metadata"]["name"]}},
        "kafka-tls-volume": {"name": "kafka-tls-volume", "secret": {"secretName": "kafka-tls"}},
    }
    container = driver(found)
    assert (container["image"], container["imagePullPolicy"]) == (EVERY_VALUE["image"], "Always")
    assert container["args"] == EVERY_VALUE["args"]
    assert container["resources"] == EVERY_VALUE["driver"]["resources"]
    assert container["ports"] == [{"name": "metrics", "containerPort": 9000}]
    assert container["startupProbe"]["failureThreshold"] == 120
    assert {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]} == {
        "executor": "/opt/executor",
        "kafka-tls-volume": "/etc/kafka",
    }
    env = {entry["name"]: entry for entry in container["env"]}
    assert env["GREETING"]["value"] == EVERY_VALUE["env"]["GREETING"]
    assert env["PASSWORD"]["valueFrom"] == {"secretKeyRef": {"name": "kafka", "key": "password"}}
    check_settings(submit_settings(env["PYSPARK_SUBMIT_ARGS"]["value"]))


def check_settings(settings: dict[str, str]) -> None:
    claim = "spark.kubernetes.executor.volumes.persistentVolumeClaim.state"
    expected = {
        "spark.driver.memory": "1g",
        "spark.executor.instances": "3",
        "spark.executor.cores": "1",
        "spark.executor.memory": "1g",
        "spark.executor.memoryOverhead": "1g",
        "spark.executorEnv.GREETING": EVERY_VALUE["env"]["GREETING"],
        "spark.executorEnv.ONCEFLOW_BOOTSTRAP_SERVERS": "one:9092,two:9092",
        "spark.kubernetes.container.image": EVERY_VALUE["image"],
        "spark.kubernetes.container.image.pullPolicy": "Always",
        "spark.kubernetes.container.image.pullSecrets": "registry",
        "spark.kubernetes.executor.podTemplateFile": "/opt/executor/pod.yaml",
        "spark.kubernetes.executor.secretKeyRef.PASSWORD": "kafka:password",
        "spark.kubernetes.executor.secrets.kafka-tls": "/etc/kafka",
        f"{claim}.options.claimName": "OnDemand",
        f"{claim}.options.sizeLimit": "20Gi",
        f"{claim}.options.storageClass": "fast",
        f"{claim}.mount.path": "/var/lib/onceflow",
        "spark.kubernetes.driver.ownPersistentVolumeClaim": "true",
        "spark.kubernetes.driver.reusePersistentVolumeClaim": "true",
        "spark.kubernetes.driver.waitToReusePersistentVolumeClaim": "true",
        "spark.kubernetes.allocation.executor.timeout": "60s",
        "spark.network.timeout": "60s",
        "spark.decommission.enabled": "true",
    }
    assert {name: settings.get(name) for name in expected} == expected
