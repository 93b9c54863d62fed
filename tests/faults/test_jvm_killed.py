"""The JVM under a driver's Python is killed while the query runs SQL in it: the driver ends, and says why."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.faults]

#: The same value, by Spark's own code.
COLUMNS = ["key", "unhex(hex(value)) AS value"]
#: Each record takes long, and leaves a file in the JVM's folder for such.
SLOW = [
    "key",
    (
        "unhex(concat(hex(value), left(reflect('java.io.File', 'createTempFile', 'called', 'sql'), 0), "
        "left(reflect('java.lang.Thread', 'sleep', 100L), 0))) AS value"
    ),
]


def jvm_of(driver: subprocess.Popen[str]) -> int:
    """Process id of the JVM that a driver has started."""
    for each in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == driver.pid and os.readlink(each / "exe").endswith("/java"):
                return int(each.name)
        except OSError:
            continue
    raise AssertionError("the driver has no JVM")


WAYS = [{}, pytest.param({"engine": "tasks"}, marks=pytest.mark.long)]


def killed(pipe: Any, columns: list[str], write: dict[str, Any], is_time: Callable[[], bool]) -> None:
    """The JVM is killed when it is time, and then the driver ends and says so."""
    options = f"-XX:TieredStopAtLevel=1 -Djava.io.tmpdir={pipe.tmp_path}"
    process = pipe.driver(forever=True, columns=columns, write=write, spark={"spark.driver.extraJavaOptions": options})
    try:
        wait_until(
            is_time, 90, "the query runs", useless=lambda: process.poll() is not None and process.communicate()[0]
        )
        os.kill(jvm_of(process), signal.SIGKILL)
        pipe.fill(300)
        text, _ = process.communicate(timeout=90)
    finally:
        pipe.end_driver(process)
    assert process.returncode == 1
    assert "onceflow.errors.EnvironmentUnusableError: Spark's JVM has ended" in text
    assert "next step: start the driver again" in text
    assert text.count("Traceback (most recent call last)") == 1, text


@pytest.mark.long
@pytest.mark.parametrize("write", WAYS, ids=["driver", "tasks"])
def test_between_two_batches(make_pipe: Any, write: dict[str, Any]) -> None:
    pipe = make_pipe()
    pipe.fill(300)
    killed(pipe, COLUMNS, write, lambda: len(independent.read_topic(pipe.bootstrap, pipe.target)) == 300)
    pipe.run()
    pipe.check()


@pytest.mark.long
@pytest.mark.parametrize("write", WAYS, ids=["driver", "tasks"])
def test_in_a_batch(make_pipe: Any, write: dict[str, Any]) -> None:
    """Nothing of it is visible, and the next start writes it."""
    pipe = make_pipe()
    pipe.fill(300)
    killed(pipe, SLOW, write, lambda: any(pipe.tmp_path.glob("called*")))
    assert independent.read_topic(pipe.bootstrap, pipe.target, decided=True) == []
    pipe.run()
    pipe.check()
