"""The manifest keeps to the schemas of Kubernetes. The values of the Helm chart, their schema, its templates and the
manifest agree. Helm itself is run by tests/deploy/test_helm.py, of `make test-long`."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

import onceflow
from onceflow.options.durations import duration_ms
from onceflow.session import submit_settings

ROOT = Path(__file__).parents[2]
MANIFEST = {d["kind"]: d for d in yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())}
CHART = ROOT / "deploy" / "helm" / "onceflow"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = "".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
# Of Kubernetes: an old one, and the newest that the package knows.
VERSIONS = ["1.30", "1.34", "1.37"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifest_keeps_to_the_schemas(version: str) -> None:
    for document in MANIFEST.values():
        assert kubernetes_validate.validate(document, version, strict=True) == version


@pytest.mark.parametrize("mistake", ["unknown field", "wrong type"])
def test_a_mistake_does_not_keep_to_the_schemas(mistake: str) -> None:
    wrong = copy.deepcopy(MANIFEST["Deployment"])
    pod = wrong["spec"]["template"]["spec"]
    if mistake == "unknown field":
        pod["terminationGracePeriod"] = 75
    else:
        pod["terminationGracePeriodSeconds"] = "75"
    with pytest.raises(kubernetes_validate.ValidationError, match=r"75|terminationGracePeriod"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all values; those that users fill with names of their own end there."""
    for name, value in values.items():
        if isinstance(value, dict) and value and (*path, name) != ("driver", "resources"):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def test_the_default_values_keep_to_their_schema() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica": 1},
        {"replicas": 2},
        {"executors": {"instance": 4}},
        {"executors": {"memory": "2Gi"}},  # Spark would refuse it when the driver starts
        {"state": {"size": "20g"}},
        {"metrics": {"port": "9404"}},
        {"env": {"NUMBER": 1}},
        {"env": {"no-name": "1"}},
        {"sparkConf": {"spark.decommission.enabled": True}},
        {"sparkConf": {"executor.cores": "1"}},
        {"secretEnv": {"PASSWORD": {"secret": "kafka"}}},
        {"secretFiles": {"kafka-tls": "relative"}},
        {"probes": {"liveness": {"periodSeconds": 10, "httpGet": {}}}},
    ],
    ids=json.dumps,
)
def test_a_wrong_value_does_not(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


def test_templates_use_every_value_and_no_other() -> None:
    known = {".".join(path) for path in leaves(VALUES)}
    inside = re.search(r"{{- with \.Values\.state }}\n(.*?)\n{{- end }}\n{{- range", TEMPLATES, re.DOTALL)
    assert inside is not None
    used = {f"state.{name}" for name in re.findall(r"[ (]\.(\w+)", inside[1])}
    used |= set(re.findall(r"\.Values\.([\w.]+)", TEMPLATES)) - {"state"}
    blocks = {name for name in used if any(leaf.startswith(f"{name}.") for leaf in known)}
    assert used - blocks <= known
    missing = {leaf for leaf in known - used if not any(leaf.startswith(f"{block}.") for block in blocks)}
    assert not missing


def test_the_default_values_are_those_of_the_manifest() -> None:
    deployment = MANIFEST["Deployment"]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    submit = {entry["name"]: entry.get("value") for entry in container["env"]}["PYSPARK_SUBMIT_ARGS"]
    settings = submit_settings(submit)
    probes = {name: dict(container[f"{name}Probe"]) for name in ("startup", "liveness", "readiness")}
    for probe in probes.values():
        del probe["httpGet"]
    assert VALUES["replicas"] == deployment["replicas"]
    assert VALUES["terminationGracePeriodSeconds"] == pod["terminationGracePeriodSeconds"]
    assert VALUES["serviceAccount"]["name"] == pod["serviceAccountName"]
    assert VALUES["args"] == container["args"]
    assert VALUES["probes"] == probes
    assert VALUES["metrics"]["port"] == container["ports"][0]["containerPort"]
    assert VALUES["driver"] == {"memory": settings["spark.driver.memory"], "resources": container["resources"]}
    executors = {name: str(VALUES["executors"][name]) for name in ("instances", "cores", "memory", "memoryOverhead")}
    assert executors == {name: settings[f"spark.executor.{name}"] for name in executors}
    # Whatever else is set there is set by the templates, too.
    for name in settings:
        assert name in TEMPLATES or name in ("spark.master", "spark.driver.memory"), name


def test_a_driver_starts_with_the_timeouts_of_the_manifest() -> None:
    """Spark refuses to start when it would look for silent executors less often than their timeout."""
    (container,) = MANIFEST["Deployment"]["spec"]["template"]["spec"]["containers"]
    settings = submit_settings({entry["name"]: entry.get("value") for entry in container["env"]}["PYSPARK_SUBMIT_ARGS"])
    names = ("spark.executor.heartbeatInterval", "spark.network.timeoutInterval", "spark.network.timeout")
    beat, look, timeout = (duration_ms(settings[name].replace("s", " seconds")) for name in names)
    assert beat < look <= timeout
    table = (ROOT / "docs" / "deploy.md").read_text()
    assert [name for name in names if f"| `{name}` | `{settings[name]}` |" not in table] == []


def test_state_is_where_the_image_has_it() -> None:
    image = (ROOT / "deploy" / "Dockerfile").read_text()
    assert f"ONCEFLOW_STATE_DIR={VALUES['state']['mountPath']}\n" in image


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == onceflow.__version__
