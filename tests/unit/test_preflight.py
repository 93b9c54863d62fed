"""scripts/preflight.sh and the Makefile around it: one line and exit 2 when Java or Python will not do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "preflight.sh"


class Machine:
    """A PATH that has only what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"PATH": str(folder)}
        for tool in ("sh", "sed", "head"):
            found = shutil.which(tool)
            assert found
            (folder / tool).symlink_to(found)

    def script(self, name: str, body: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    def java(self, version: str, name: str = "java") -> Path:
        return self.script(name, f"echo 'openjdk version \"{version}\" 2025-01-01' >&2")

    def python(self) -> None:
        self.script("python3", f'exec "{sys.executable}" "$@"')

    def old_python(self, name: str = "python3") -> Path:
        # Exit 3 is what the version check in the script answers; the second call asks for the version.
        return self.script(name, 'case "$2" in *stdout*) printf 3.8 ;; *) exit 3 ;; esac')

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", str(SCRIPT)],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    folder = tmp_path / "bin"
    folder.mkdir()
    return Machine(folder)


def refused(answer: subprocess.CompletedProcess[str], *words: str) -> None:
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert len(answer.stderr.splitlines()) == 1, answer.stderr
    for word in words:
        assert word in answer.stderr


def test_a_good_machine_gets_its_python_printed(machine: Machine) -> None:
    machine.python()
    machine.java("17.0.15")
    answer = machine.run()
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.strip() == str(machine.folder / "python3")


@pytest.mark.parametrize("version", ["17", "21.0.1", "22-ea", "25.0.1+9"])
def test_java_versions_that_will_do(machine: Machine, version: str) -> None:
    machine.python()
    machine.java(version)
    assert machine.run().returncode == 0


@pytest.mark.parametrize("version", ["1.8.0_392", "11.0.20", "16"])
def test_java_too_old(machine: Machine, version: str) -> None:
    machine.python()
    machine.java(version)
    refused(machine.run(), "Java 17", version)


def test_java_missing(machine: Machine) -> None:
    machine.python()
    refused(machine.run(), "Java 17", "not found")


def test_java_that_does_not_run(machine: Machine) -> None:
    machine.python()
    machine.script("java", "echo 'Unable to locate a Java Runtime.' >&2; exit 1")
    refused(machine.run(), "Java 17", "does not run")


def test_java_home_wins_over_path(machine: Machine) -> None:
    machine.python()
    machine.java("17.0.1")
    machine.java("11.0.1", "old/bin/java")
    refused(machine.run(JAVA_HOME=str(machine.folder / "old")), "11.0.1", "JAVA_HOME")
    refused(machine.run(JAVA_HOME=str(machine.folder / "none")), "has no bin/java")


def test_options_that_java_reports_first_are_skipped(machine: Machine) -> None:
    machine.python()
    machine.script("java", "echo 'Picked up JAVA_TOOL_OPTIONS: -Xmx1g' >&2; echo 'openjdk version \"21\"' >&2")
    assert machine.run().returncode == 0


def test_python_missing(machine: Machine) -> None:
    machine.java("17")
    refused(machine.run(), "Python 3.10", "not found")


def test_python_too_old(machine: Machine) -> None:
    machine.old_python()
    machine.java("17")
    refused(machine.run(), "Python 3.10", "3.8")


def test_a_newer_python_beside_the_old_one_is_found(machine: Machine) -> None:
    machine.old_python()
    machine.script("python3.11", f'exec "{sys.executable}" "$@"')
    machine.java("17")
    assert machine.run().stdout.strip() == str(machine.folder / "python3.11")


def test_the_python_variable_decides(machine: Machine) -> None:
    machine.python()
    machine.java("17")
    refused(machine.run(PYTHON="no-such-python"), "PYTHON=no-such-python")
    old = machine.old_python("old-python")
    refused(machine.run(PYTHON=str(old)), "3.8", "PYTHON")


def test_make_says_it_in_one_line_and_makes_nothing(machine: Machine, tmp_path: Path) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    machine.python()
    machine.java("11.0.2")
    for name in ("Makefile", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    answer = subprocess.run(
        [make, "test"],
        cwd=tmp_path,
        env={**machine.environment, "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    refused(answer, "Java 17", "11.0.2")
    assert not (tmp_path / ".venv").exists()
