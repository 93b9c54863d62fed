"""A service that is stopped as `timeout` does it: SIGTERM to the process, and then to its group, with Spark's JVM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

SERVICE = """
import sys
import onceflow

servers, source, target = sys.argv[1:]
spark = onceflow.session("stopping", "local[1]")
flow = onceflow.Flow("stopping-" + source, spark, bootstrap_servers=servers)
onceflow.serve(flow.write(flow.read(source).select("key", "value"), topic=target).start())
"""


def test_sigterm_to_the_process_and_its_group(make_topic: Any, onceflow_broker: str, tmp_path: Path) -> None:
    source, target = make_topic("in", 1), make_topic("out", 1)
    independent.fill(onceflow_broker, source, [(b"k", b"v")])
    said = tmp_path / "said"
    with said.open("w") as file:
        service = subprocess.Popen(
            [sys.executable, "-c", SERVICE, onceflow_broker, source, target],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: '"batch": 1' in said.read_text() or service.poll() is not None, 90, said.read_text)
        assert service.poll() is None, said.read_text()
        os.kill(service.pid, signal.SIGTERM)
        os.killpg(service.pid, signal.SIGTERM)
        assert service.wait(60) == 0, said.read_text()
    finally:
        if service.poll() is None:
            os.killpg(service.pid, signal.SIGKILL)
            service.wait()
    assert "Traceback" not in said.read_text()
    assert "Error" not in said.read_text()
    assert said.read_text().count("is being stopped") == 1
