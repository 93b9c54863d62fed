"""The first minutes as a new user has them: a wheel, an empty virtual environment, and what the README says."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onceflow.broker.local import free_ports

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PORT = "9092"

Run = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, timeout=120)
    (built,) = folder.glob("onceflow-*.whl")
    return built


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """What a line in a shell says, with an empty virtual environment that is active. The line must succeed."""
    folder = tmp_path_factory.mktemp("first-hour")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=120)
    # A session of this process has set PYSPARK_PYTHON to its own Python.
    strangers = ("ONCEFLOW_", "PYTHON", "PYSPARK_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(strangers)}
    environment |= {
        "PATH": f"{venv / 'bin'}{os.pathsep}{environment['PATH']}",
        "VIRTUAL_ENV": str(venv),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        # Nothing of the user's own is touched but the caches of pip and of jars.
        "ONCEFLOW_HOME": str(folder / "home"),
        "ONCEFLOW_STATE_DIR": str(folder / "state"),
    }

    def line(command: str, **more: str) -> str:
        answer = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env={**environment, **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        assert answer.returncode == 0, f"{command}\n{answer.stdout}"
        print(f"$ {command}\n{answer.stdout}")
        return answer.stdout

    try:
        yield line
    finally:
        if (venv / "bin" / "onceflow").exists():
            line("onceflow broker stop")
        shutil.rmtree(folder)  # gigabytes


def port() -> str:
    """The port of the README, or another one where somebody has it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(PORT)))
        except OSError:
            return str(free_ports(1)[0])
    return PORT


def blocks(language: str) -> list[str]:
    section = re.search(r"^## Quick start\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    assert section
    return re.findall(rf"^```{language}\n(.*?)^```", section[1], re.MULTILINE | re.DOTALL)


def test_the_quick_start_as_written(run: Run, wheel: Path) -> None:
    """But for the checkout, in whose place is the wheel. The fifth command commits, the sixth looks."""
    own = port()
    commands = [line for block in blocks("sh") for line in block.replace(PORT, own).splitlines()]
    (program,), (shown,) = blocks("python"), blocks("text")
    (file,) = re.findall(r"in a\sfile\s`(\w+\.py)`", README)
    assert (commands[0], commands[4]) == ("pip install .", f"python {file}")
    assert len(commands) == 6
    folder = Path(run("pwd").strip())
    (folder / file).write_text(program.replace(PORT, own))

    run(commands[0].replace(" .", f" {wheel}"))
    for command in commands[1:4]:
        run(command)
    # Spark's log is on stderr.
    assert "batch 1: 3 records in one transaction\n" in run(commands[4])
    assert run(commands[5]) == shown


def test_a_new_project_of_the_wheel(run: Run, wheel: Path, onceflow_broker: str) -> None:
    """It gets onceflow from the wheel, which is in no package index, and its tests pass as they are."""
    run(f"pip install {wheel}")
    folder = Path(run("pwd").strip()) / "first-orders"
    (next_step,) = re.findall(r"^Next: (.*)$", run("onceflow new first-orders"), re.MULTILINE)
    said = run(next_step, ONCEFLOW_TEST_BOOTSTRAP=onceflow_broker)
    assert re.search(r"^=+ \d+ passed in", said, re.MULTILINE), said
    assert (folder / ".venv" / "bin" / "onceflow").exists()
