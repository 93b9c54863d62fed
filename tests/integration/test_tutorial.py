"""The tutorial runs as written, command by command, in a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"

pytestmark = [pytest.mark.integration, pytest.mark.long]


def test_it_runs_as_written(onceflow_broker: str, tmp_path: Path) -> None:
    """Programs are written to the file that the page names, commands run in bash, and their output is what is shown."""
    environment = {
        **os.environ,
        "ONCEFLOW_BOOTSTRAP_SERVERS": onceflow_broker,
        "ONCEFLOW_STATE_DIR": str(tmp_path / "state"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    output, shown, tests = "", 0, 0
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        if language == "python" and "def test_" in block:
            (tmp_path / "test_accounts.py").write_text(block)
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_accounts.py"]
            subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)
            tests += 1
        elif language == "python" and block.startswith("import onceflow"):
            (tmp_path / "accounts.py").write_text(block.replace("localhost:9092", onceflow_broker))
        elif language == "sh":
            ran = subprocess.run(
                ["bash", "-ec", block], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
            )
            assert ran.returncode == 0, ran.stdout + ran.stderr
            output = ran.stdout
        elif language == "text":
            assert output.endswith(block), output
            shown += 1
    assert (shown, tests) == (3, 1)
