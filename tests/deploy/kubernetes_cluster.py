"""A control plane of Kubernetes on 127.0.0.1: its own API server, controllers and etcd, built from their sources.

There is no scheduler and no kubelet: see ``pod_runner.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import trustme
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from onceflow.broker.local import free_ports
from onceflow.testing.waiting import wait_until

sys.path.insert(0, str(Path(__file__).parent))
try:
    import go_programs
finally:
    sys.path.pop(0)

VERSION = "1.36.3"
START_S = 120.0
ADMINISTRATOR = "the-administrator"
CONTROLLERS = (
    "deployment-controller",
    "replicaset-controller",
    "garbage-collector-controller",
    "serviceaccount-controller",
    "root-ca-certificate-publisher-controller",
    "persistentvolumeclaim-protection-controller",  # deletes volumes that no pod uses any more
)
# In paths of the API: the group, and the plural of the kind.
PLACES = {
    "Namespace": ("api/v1", "namespaces"),
    "ServiceAccount": ("api/v1", "serviceaccounts"),
    "Service": ("api/v1", "services"),
    "ConfigMap": ("api/v1", "configmaps"),
    "Secret": ("api/v1", "secrets"),
    "Pod": ("api/v1", "pods"),
    "PersistentVolumeClaim": ("api/v1", "persistentvolumeclaims"),
    "Role": ("apis/rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "Deployment": ("apis/apps/v1", "deployments"),
    "ReplicaSet": ("apis/apps/v1", "replicasets"),
}


class RefusedError(AssertionError):
    """The API server has answered with an error. ``code`` is that of HTTP."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class KubernetesCluster:
    """A context manager. Everything that it writes is in ``folder``, of a process each in its log."""

    def __init__(self, folder: Path, namespace: str) -> None:
        self.folder = folder
        self.namespace = namespace
        self._processes: list[subprocess.Popen[bytes]] = []
        self.port, self._etcd_port, self._peer_port = free_ports(3)
        self.url = f"https://127.0.0.1:{self.port}"
        self.kubeconfig = folder / "kubeconfig"
        self.ca_file = folder / "ca.pem"

    def __enter__(self) -> KubernetesCluster:
        programs = go_programs.control_plane(VERSION)
        self._write_keys()
        etcd, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, self._peer_port))
        try:
            self._start(
                *(programs / "server", "--data-dir=etcd", "--unsafe-no-fsync", f"--listen-client-urls={etcd}"),
                *(f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peer}"),
                *(f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}"),
            )
            self._start(
                *(programs / "kube-apiserver", f"--etcd-servers={etcd}", "--bind-address=127.0.0.1"),
                *(f"--secure-port={self.port}", "--tls-cert-file=server.pem", "--tls-private-key-file=server.pem"),
                *("--service-account-key-file=accounts.pem", "--service-account-signing-key-file=accounts.pem"),
                *("--service-account-issuer=https://kubernetes.default.svc", "--token-auth-file=tokens.csv"),
                *("--authorization-mode=RBAC", "--service-cluster-ip-range=10.0.0.0/24"),
            )
            self._await(lambda: self.request("GET", "readyz") == "ok", "the API server is ready")
            self._start(
                *(programs / "kube-controller-manager", "--kubeconfig=kubeconfig", "--leader-elect=false"),
                *(f"--controllers={','.join(CONTROLLERS)}", "--root-ca-file=ca.pem", "--bind-address=127.0.0.1"),
                *("--secure-port=0", "--service-account-private-key-file=accounts.pem"),
            )
            self.create({"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": self.namespace}})
            self._await(lambda: self.items("ServiceAccount"), "the controllers run")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._processes = []

    def request(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """The answer, decoded if it is JSON.

        Raises:
            RefusedError: the server has answered with an error.
        """
        headers = {"Authorization": f"Bearer {ADMINISTRATOR}", "Content-Type": kind}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30, context=self._tls) as answer:
                text = answer.read().decode()
                return json.loads(text) if answer.headers.get_content_type() == "application/json" else text
        except urllib.error.HTTPError as error:
            with error:
                raise RefusedError(error.code, error.read().decode()) from None

    def path(self, kind: str, name: str = "") -> str:
        group, plural = PLACES[kind]
        place = [group, *([] if kind == "Namespace" else ["namespaces", self.namespace]), plural]
        return "/".join([*place, name] if name else place)

    def create(self, document: dict[str, Any], *, dry_run: bool = False) -> Any:
        """As ``kubectl create`` does, which refuses fields that Kubernetes does not know."""
        how = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        return self.request("POST", f"{self.path(document['kind'])}?{urllib.parse.urlencode(how)}", document)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        return dict(self.request("GET", self.path(kind, name)))

    def items(self, kind: str, **labels: str) -> list[dict[str, Any]]:
        """Those of the namespace, the oldest first, with these labels (``_`` for ``-``)."""
        wanted = ",".join(f"{name.replace('_', '-')}={value}" for name, value in labels.items())
        found = self.request("GET", f"{self.path(kind)}?{urllib.parse.urlencode({'labelSelector': wanted})}")["items"]
        return sorted(found, key=lambda item: (item["metadata"]["creationTimestamp"], item["metadata"]["name"]))

    def patch(self, kind: str, name: str, change: dict[str, Any], part: str = "") -> None:
        path = self.path(kind, name) + (f"/{part}" if part else "")
        self.request("PATCH", path, change, "application/merge-patch+json")

    def delete(self, kind: str, name: str, *, grace_s: int | None = None) -> None:
        more = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        self.request("DELETE", self.path(kind, name), {"kind": "DeleteOptions", "apiVersion": "v1", **more})

    def token_of(self, account: str) -> str:
        """A token of a service account, as its pods get one."""
        asked = {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": {}}
        answer = self.request("POST", self.path("ServiceAccount", account) + "/token", asked)
        return str(answer["status"]["token"])

    def logs(self) -> str:
        """The end of each log."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{file.name}:\n{file.read_text(errors='replace')[-2000:]}" for file in files)

    def _write_keys(self) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.ca_file)
        server = authority.issue_cert("127.0.0.1", "kubernetes.default.svc")
        server.private_key_and_cert_chain_pem.write_to_path(self.folder / "server.pem")
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        form = serialization.PrivateFormat.TraditionalOpenSSL
        pem = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        (self.folder / "accounts.pem").write_bytes(pem)
        (self.folder / "tokens.csv").write_text(f"{ADMINISTRATOR},admin,admin,system:masters\n")
        cluster = {"server": self.url, "certificate-authority": str(self.ca_file)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": ADMINISTRATOR}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "admin"}}],
            "current-context": "here",
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))

    @property
    def _tls(self) -> Any:
        import ssl

        return ssl.create_default_context(cafile=str(self.ca_file))

    def _start(self, program: Path, *arguments: str) -> None:
        with (self.folder / f"{program.name}.log").open("wb") as log:
            process = subprocess.Popen(
                [program, *arguments],
                cwd=self.folder,
                env={"PATH": os.environ["PATH"], "HOME": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)

    def _await(self, condition: Any, what: str) -> None:
        def holds() -> bool:
            try:
                return bool(condition())
            except (OSError, RefusedError):
                return False

        def ended() -> str:
            return "one of its processes has ended" if any(p.poll() is not None for p in self._processes) else ""

        wait_until(holds, START_S, lambda: f"{what}\n{self.logs()}", useless=ended, poll_s=0.2)


def names(items: Sequence[dict[str, Any]]) -> list[str]:
    return [item["metadata"]["name"] for item in items]
