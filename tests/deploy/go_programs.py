"""Programs in Go that these tests run: built from their sources by the Go command, once, into the cache of onceflow."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from onceflow.host import jars
from onceflow.host.file_lock import locked

HELM = "helm.sh/helm/v3/cmd/helm@v3.22.0"
BUILD_S = 3600


def helm() -> Path:
    """The one in PATH, else one that is built, which takes two minutes."""
    found = shutil.which("helm")
    return Path(found) if found else go_install(f"helm-{HELM.rpartition('@')[2]}", [HELM]) / "helm"


def control_plane(version: str) -> Path:
    """A folder with Kubernetes' programs and etcd: ``server``. This takes ten minutes, and 4 GB of Go's caches."""
    return go_install(f"kubernetes-{version}", ["tool"], Path(__file__).with_name("control_plane.mod"))


def go_install(name: str, arguments: list[str], module: Path | None = None) -> Path:
    """A folder with the programs that ``go install`` makes of these arguments, from the cache.

    A machine without Go fails the test: not to have run it is no success.

    Args:
        name: of the folder; it has the versions in it. module: a ``go.mod`` that pins them.
    """
    made = jars.cache_dir() / "go" / name
    made.parent.mkdir(parents=True, exist_ok=True)
    with locked(made.parent / f"{name}.lock", BUILD_S, busy=f"{name} is being built.", next_step="Look for `go`."):
        if made.is_dir():
            return made
        go = shutil.which("go")
        if go is None:
            pytest.fail(f"NOT TESTED: this needs Go in PATH, to build {name}")
        with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
            # Without `go.sum`, Go asks its checksum database, and writes the file.
            environment = {**os.environ, "GOBIN": f"{scratch}/bin", "CGO_ENABLED": "0"}
            command = [go, "install", "-trimpath", "-ldflags=-s -w", *arguments]
            if module is not None:
                shutil.copyfile(module, Path(scratch, "go.mod"))
                environment["GOFLAGS"] = "-mod=mod"
            done = subprocess.run(
                command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=BUILD_S, check=False
            )
            if done.returncode:
                pytest.fail(f"{' '.join(command)}: {done.stderr[-3000:]}")
            Path(scratch, "bin").rename(made)
    return made
