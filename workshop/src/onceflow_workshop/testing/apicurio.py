"""A schema registry on this machine, for tests: Apicurio Registry, from a Maven repository."""

from __future__ import annotations

import contextlib
import subprocess
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onceflow.host import jars
from onceflow.host.java import find_java
from onceflow.testing.waiting import wait_until

#: The last version for Java 17; version 3 needs Java 21.
ARCHIVE = jars.Coordinate("io.apicurio", "apicurio-registry-app", "2.6.13.Final", archive="all.tar.gz")
START_TIMEOUT_S = 120


@dataclass(frozen=True)
class Apicurio:
    """A running registry, which keeps its schemas in memory.

    Args:
        url: of the REST interface that is Confluent's.
        process: of the server.
    """

    url: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def running_apicurio(folder: Path, port: int) -> Iterator[Apicurio]:
    """A new registry.

    Args:
        folder: an empty one, for its files.
        port: on 127.0.0.1.

    Raises:
        EnvironmentUnusableError: it cannot be downloaded.
        WaitedInVainError: it does not answer.
    """
    (archive,) = jars.resolve([ARCHIVE], transitive=False)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    (runner,) = folder.glob("*-runner.jar")
    command = [
        str(find_java()), "-Xmx512m", "-XX:TieredStopAtLevel=1", "-Dquarkus.http.host=127.0.0.1",
        f"-Dquarkus.http.port={port}", "-jar", runner.name,
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        registry = Apicurio(f"http://127.0.0.1:{port}/apis/ccompat/v7", process)
        _wait_for(registry, folder / "log")
        yield registry
    finally:
        process.kill()
        process.wait()


def _wait_for(registry: Apicurio, log: Path) -> None:
    def answers() -> bool:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{registry.url}/subjects", timeout=5).close()
            return True
        return False

    def said() -> str:
        return f"Apicurio answers; its log ends with {log.read_text()[-1000:]}"

    wait_until(answers, START_TIMEOUT_S, said, useless=lambda: registry.process.poll() is not None, poll_s=0.2)
