"""What the tests of the examples share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def run_demo(onceflow_broker: str) -> Callable[..., dict[str, Any]]:
    """``run_demo(name, *arguments, records=.., kills=..)``: a demo on the broker of the tests; its last line."""

    def run(name: str, *arguments: str, records: int, kills: int, timeout: float = 170.0) -> dict[str, Any]:
        command = [sys.executable, "-m", "onceflow.cli.main", "demo", name, "--bootstrap-servers", onceflow_broker]
        command += ["--records", str(records), "--kills", str(kills), "--timeout", str(timeout - 5), *arguments]
        # A driver that lives for seconds spends most of them compiling: with the quick compiler alone it is up sooner.
        environment = {**os.environ, "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1"}
        answer = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        result: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
        assert result["demo"] == name
        assert (result["lost"], result["duplicated"], result["wrong"], result["verdict"]) == (0, 0, 0, "passed")
        assert answer.stderr.count("SIGKILL after step") == result["kills"] >= min(2, kills)
        return result

    return run
