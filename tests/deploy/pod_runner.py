"""Runs the containers of pods as processes of this machine: what scheduler, kubelet and DNS are in a real cluster.

Every pod gets an address of its own (127.1.0.n), a folder, its volumes, its service account, and its probes. An image
is a folder here: paths in it, and those of volumes, are replaced wherever they are named. Limits are ignored.
"""

from __future__ import annotations

import base64
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
try:
    from hosts import end_processes_in
    from kubernetes_cluster import KubernetesCluster, RefusedError
finally:
    sys.path.pop(0)

SETTINGS = "PYSPARK_SUBMIT_ARGS"
EVERY_S = 0.2
RESTART_S = 1.0
STATE = "/var/lib/onceflow"
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class Image:
    """What a container finds: ``replaced`` has folders of this machine by their paths in the image."""

    def __init__(self, entry_point: Path, environment: Mapping[str, str], replaced: Mapping[str, Path]) -> None:
        self.entry_point = entry_point
        self.environment = dict(environment)
        self.replaced = dict(replaced)


class PodRunner:
    """A context manager: it runs all pods of the cluster's namespace until it is left."""

    def __init__(self, cluster: KubernetesCluster, folder: Path, image: Image) -> None:
        self.cluster = cluster
        self.folder = folder
        self.image = image
        self.pods: dict[str, Container] = {}
        #: Everything that has run, by the names of the pods.
        self.containers: dict[str, Container] = {}
        self.hosts = folder / "hosts"
        self.problem = ""
        self.last_refusal = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        folder.mkdir()
        self._write_hosts()

    def __enter__(self) -> PodRunner:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        for container in self.pods.values():
            container.kill()

    def logs(self) -> str:
        """The end of what each container has said."""
        found = [f"{name}:\n{container.log()[-3000:]}" for name, container in self.containers.items()]
        return "\n".join([*found, self.last_refusal])

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            try:
                self._step()
            except RefusedError as refused:
                self.last_refusal = str(refused)
                if refused.code not in (404, 409):  # something has gone, has changed, or is not there yet
                    self.problem = str(refused)
            except Exception:  # the test has to see it
                self.problem = traceback.format_exc()

    def _step(self) -> None:
        pods = {pod["metadata"]["uid"]: pod for pod in self.cluster.items("Pod")}
        for gone in self.pods.keys() - pods.keys():
            self.pods.pop(gone).kill()  # deleted by force, as when a node is given up
        for uid, pod in pods.items():
            if uid not in self.pods and not pod["metadata"].get("deletionTimestamp"):
                self._take(uid, pod)
        self._write_hosts()
        for uid, pod in pods.items():
            if uid in self.pods:
                self.pods[uid].step(pod)

    def _take(self, uid: str, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        target = {"apiVersion": "v1", "kind": "Node", "name": "this-machine"}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        if not pod["spec"].get("nodeName"):
            self.cluster.request("POST", self.cluster.path("Pod", name) + "/binding", binding)
        self.pods[uid] = self.containers[name] = Container(self, pod, len(self.containers) + 10)

    def _write_hosts(self) -> None:
        """Names of services that have no address of their own, as a file that the JVM reads instead of asking a DNS."""
        lines = ["127.0.0.1 localhost kubernetes.default.svc"]
        for service in self.cluster.items("Service"):
            wanted = (service["spec"].get("selector") or {}).items()
            name = f"{service['metadata']['name']}.{self.cluster.namespace}.svc"
            for container in self.pods.values():
                if wanted and wanted <= container.labels.items():
                    lines.append(f"{container.address} {name} {name}.cluster.local")
        text = "\n".join(lines) + "\n"
        if not self.hosts.exists() or self.hosts.read_text() != text:
            written = self.hosts.with_suffix(".new")
            written.write_text(text)
            written.rename(self.hosts)


class Container:
    """The one container of a pod."""

    def __init__(self, runner: PodRunner, pod: dict[str, Any], number: int) -> None:
        self.runner = runner
        self.cluster = runner.cluster
        self.name: str = pod["metadata"]["name"]
        self.labels: dict[str, str] = pod["metadata"].get("labels") or {}
        self.address = f"127.1.{number // 250}.{number % 250}"
        # Short, because the address of a UNIX socket has to be short.
        self.folder = runner.folder / str(number)
        self.restarts = 0
        # A folder that no volume is mounted to is in the container.
        self.replaced = {**runner.image.replaced, STATE: self.folder / "state"}
        self.exit_codes: list[int] = []
        self.log_file = runner.folder / f"{self.name}.log"
        self._pod = pod
        (self._spec,) = pod["spec"]["containers"]
        self._probes = {kind: Probe(self, kind) for kind in ("startup", "liveness", "readiness")}
        self._told: Any = None
        self._asked_to_end_at = 0.0
        # A container that cannot be started yet is tried again: it waits for a volume, for example.
        self.folder.mkdir(exist_ok=True)
        self._mount_all()
        self.process = self._start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def step(self, pod: dict[str, Any]) -> None:
        """What a kubelet does for a pod from time to time."""
        code = self.process.poll()
        if pod["metadata"].get("deletionTimestamp"):
            self._end(pod, code)
            return
        if code is not None:
            code = self.kill()
            if pod["spec"]["restartPolicy"] != "Always":
                self._tell("Succeeded" if code == 0 else "Failed", code)
                return
            self._tell("Running", code)
            self.runner._stop.wait(RESTART_S)
            self.restarts += 1
            self._probes = {kind: Probe(self, kind) for kind in self._probes}
            self.process = self._start()
        elif self._probes["startup"].failed or (
            self._probes["startup"].passes() and not self._probes["liveness"].passes()
        ):
            self.process.kill()
        self._tell("Running")

    def kill(self) -> int:
        """All of its processes: nothing outlives the first one of a container. Returns its exit code."""
        if len(self.exit_codes) <= self.restarts:
            end_processes_in(self.folder)
            code = self.process.wait()
            self.exit_codes.append(code if code >= 0 else 128 - code)
        return self.exit_codes[-1]

    def _end(self, pod: dict[str, Any], code: int | None) -> None:
        now = time.monotonic()
        if code is None and not self._asked_to_end_at:
            self._asked_to_end_at = now
            self.process.send_signal(signal.SIGTERM)
        elif code is None and now - self._asked_to_end_at > pod["metadata"]["deletionGracePeriodSeconds"]:
            self.process.kill()
        elif code is not None:
            self.kill()
            self.cluster.delete("Pod", self.name, grace_s=0)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = self._environment()
        arguments = [self._local(expanded(text, environment)) for text in self._spec.get("args", [])]
        assert "command" not in self._spec
        with self.log_file.open("ab") as log:
            return subprocess.Popen(
                [self.runner.image.entry_point, *arguments],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        account = self.replaced[ACCOUNT]
        found = {name: self._local(value) for name, value in self.runner.image.environment.items()} | {
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
            "SPARK_LOCAL_IP": self.address,
            # What stands for the mount of the service account, and for the DNS.
            "KUBERNETES_AUTH_SERVICEACCOUNT_TOKEN": str(account / "token"),
            "KUBERNETES_CERTS_CA_FILE": str(account / "ca.crt"),
            "JAVA_TOOL_OPTIONS": f"-Djdk.net.hosts.file={self.runner.hosts} -Djava.io.tmpdir={self.folder / 'tmp'}",
        }
        for entry in self._spec.get("env", []):
            value = expanded(self._value(entry), found)
            found[entry["name"]] = self._settings(value) if entry["name"] == SETTINGS else self._local(value)
        return found

    def _value(self, entry: dict[str, Any]) -> str:
        source = entry.get("valueFrom")
        if not source:
            return str(entry.get("value", ""))
        if "fieldRef" in source:
            fields = {
                "metadata.name": self.name,
                "metadata.namespace": self.cluster.namespace,
                "status.podIP": self.address,
            }
            return fields[source["fieldRef"]["fieldPath"]]
        secret = self.cluster.get("Secret", source["secretKeyRef"]["name"])
        return base64.b64decode(secret["data"][source["secretKeyRef"]["key"]]).decode()

    def _local(self, text: str, paths: Collection[str] | None = None) -> str:
        """With paths of this machine, or with these of them."""
        for path in sorted(self.replaced if paths is None else paths, key=len, reverse=True):
            text = re.sub(rf"(?<![\w.-]){re.escape(path)}(?![\w.-])", str(self.replaced[path]), text)
        return text

    def _settings(self, text: str) -> str:
        """Settings of Spark, with what the driver uses itself; paths of volumes are for executors."""
        text = text.replace("https://kubernetes.default.svc", f"https://kubernetes.default.svc:{self.cluster.port}")
        volumes = {volume["name"] for volume in self._pod["spec"].get("volumes", []) if "configMap" in volume}
        return self._local(
            text, [mount["mountPath"] for mount in self._spec.get("volumeMounts", []) if mount["name"] in volumes]
        )

    def _mount_all(self) -> None:
        (self.folder / "tmp").mkdir(exist_ok=True)
        volumes = {volume["name"]: volume for volume in self._pod["spec"].get("volumes", [])}
        mounts = self._spec.get("volumeMounts", [])
        for mount in mounts:
            volume = volumes[mount["name"]]
            claim = volume.get("persistentVolumeClaim")
            if claim:
                self.cluster.get("PersistentVolumeClaim", claim["claimName"])  # it has to be there
            folder = self.folder / str(len(self.replaced))
            place = self.runner.folder / "claims" / claim["claimName"] if claim else folder
            place.mkdir(parents=True, exist_ok=True)
            self.replaced[mount["mountPath"]] = place
        for mount in mounts:
            for name, text in self._files(volumes[mount["name"]]).items():
                (self.replaced[mount["mountPath"]] / name).write_text(text)

    def _files(self, volume: dict[str, Any]) -> dict[str, str]:
        if "configMap" in volume:
            data = self.cluster.get("ConfigMap", volume["configMap"]["name"])["data"]
            return {name: self._settings(text) for name, text in data.items()}
        if "secret" in volume:
            data = self.cluster.get("Secret", volume["secret"]["secretName"])["data"]
            return {name: base64.b64decode(text).decode() for name, text in data.items()}
        if "projected" in volume:
            account = self._pod["spec"]["serviceAccountName"]
            ca = self.cluster.get("ConfigMap", "kube-root-ca.crt")["data"]["ca.crt"]
            return {"token": self.cluster.token_of(account), "ca.crt": ca, "namespace": self.cluster.namespace}
        assert volume.keys() & {"emptyDir", "persistentVolumeClaim"}, volume
        return {}

    def _tell(self, phase: str, code: int | None = None) -> None:
        """The API server gets to know what has changed."""
        ready = phase == "Running" and code is None and self._probes["readiness"].passes()
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        told = (phase, ready, self.restarts, code)
        if told == self._told:
            return
        self._told = told
        image = self._spec["image"]
        status = {
            "phase": phase,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [
                {
                    "name": self._spec["name"],
                    "ready": ready,
                    "restartCount": self.restarts,
                    "image": image,
                    "imageID": image,
                    "state": state,
                }
            ],
        }
        self.cluster.patch("Pod", self.name, {"status": status}, "status")


class Probe:
    """One of the probes of a container; one that is not there passes."""

    def __init__(self, container: Container, kind: str) -> None:
        self._container = container
        self._spec: dict[str, Any] | None = container._spec.get(f"{kind}Probe")
        self._next = 0.0
        self._passed = kind == "liveness"  # until it fails
        self._failures = 0

    @property
    def failed(self) -> bool:
        return self._spec is not None and self._failures >= self._spec["failureThreshold"]

    def passes(self) -> bool:
        """As asked last."""
        if self._spec is None:
            return True
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._spec["periodSeconds"]
            answered = self._ask()
            self._failures = 0 if answered else self._failures + 1
            self._passed = answered or (self._passed and not self.failed)
        return self._passed

    def _ask(self) -> bool:
        assert self._spec is not None
        get = self._spec["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in self._container._spec["ports"]}
        address = f"http://{self._container.address}:{ports[get['port']]}{get['path']}"
        try:
            with urllib.request.urlopen(address, timeout=self._spec["timeoutSeconds"]) as answer:
                return bool(200 <= answer.status < 400)
        except OSError:
            return False


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """With ``$(NAME)`` replaced as Kubernetes does."""
    return re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), text)
