"""Hosts that share nothing but the network, for services that are submitted by the commands of docs/deploy.md."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyspark
from packaging.requirements import Requirement

from onceflow.host.java import find_java
from onceflow.testing.waiting import wait_until

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy.md"
SPARK_HOME = Path(pyspark.__file__).parent
RECORDS_EVERY_S = 0.25


def command_of_the_page(containing: str) -> str:
    found = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in found if containing in block]
    return str(block)


def replaced(command: str, values: Mapping[str, str]) -> str:
    """The command with other values; each of these is in it once."""
    for here, there in values.items():
        assert command.count(here) == 1, here
        command = command.replace(here, there)
    return command


def copy_service(folder: Path) -> None:
    """``service.py`` with its module ``ledger.py``, as the page calls them."""
    shutil.copyfile(Path(__file__).with_name("cluster_service.py"), folder / "service.py")
    shutil.copyfile(ROOT / "tests" / "faults" / "ledger.py", folder / "ledger.py")


def pack_environment(folder: Path, environment: Mapping[str, str]) -> None:
    """``environment`` and its archive. What the page gets from a registry is copied from what runs this test."""
    install_environment(folder / "environment", folder / "wheel")
    (pack,) = re.findall(r"^environment/bin/(venv-pack .*)$", PAGE.read_text(), re.MULTILINE)
    done = subprocess.run(
        ["bash", "-euc", pack],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def clean_environment(folder: Path) -> dict[str, str]:
    """Of one host: nothing of this process but where Java, Spark and the tools are."""
    (folder / "home").mkdir(parents=True, exist_ok=True)
    (folder / "tmp").mkdir(exist_ok=True)
    java = find_java()
    path = [SPARK_HOME / "bin", Path(sys.executable).parent, java.parent, os.environ["PATH"]]
    return {
        "PATH": os.pathsep.join(map(str, path)),
        "LANG": "C.UTF-8",
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JAVA_HOME": str(java.parent.parent),
        "JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={folder / 'tmp'}",
    }


def install_environment(environment: Path, wheels: Path, extra: str = "") -> None:
    """A virtual environment with a wheel of this checkout and, copied, what it depends on; but Spark's jars.

    Args:
        extra: the name of one of its extras, which is installed, too.
    """
    run = [sys.executable, "-m"]
    subprocess.run([*run, "venv", "--without-pip", environment], check=True)
    build = [*run, "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, ROOT]
    subprocess.run(build, check=True)
    (site,) = environment.glob("lib/python3*/site-packages")
    for name in dependencies("onceflow", extra):
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or []:
            found = Path(str(distribution.locate_file(file)))
            left_out = file.parts[0] == ".." or "__pycache__" in file.parts or file.parts[:2] == ("pyspark", "jars")
            if not left_out and found.is_file():
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(found, site / file)
    (wheel,) = wheels.glob("onceflow-*.whl")
    into = ["--python", environment / "bin/python", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*run, "pip", *into, wheel], check=True)


def dependencies(package: str, extra: str = "") -> set[str]:
    """All that a package needs to run, with one of its extras."""
    found: set[str] = set()
    waiting = [package]
    while waiting:
        for text in importlib.metadata.distribution(waiting.pop()).requires or []:
            wanted = Requirement(text)
            applies = wanted.marker is None or wanted.marker.evaluate({"extra": extra})
            if applies and wanted.name not in found:
                found.add(wanted.name)
                waiting.append(wanted.name)
        extra = ""
    return found


class Feeder:
    """Produces records until it is stopped."""

    def __init__(self, pipe: Any, each: int = 60) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(pipe, each), daemon=True)
        self._thread.start()

    def _run(self, pipe: Any, each: int) -> None:
        while not self._stop.wait(RECORDS_EVERY_S):
            pipe.fill(each)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def processes_in(folder: Path) -> dict[int, str]:
    """Command lines of all processes whose working folder is this one or below it, by pid."""
    found: dict[int, str] = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if (place / "cwd").readlink().is_relative_to(folder):
                line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(place.name)] = line
        except OSError:
            continue  # it has ended meanwhile, or is not ours
    return found


def end_processes_in(folder: Path) -> None:
    """SIGKILL, until there are none."""

    def none_left() -> bool:
        found = processes_in(folder)
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return not found

    wait_until(none_left, 30, f"no process is left in {folder}")
