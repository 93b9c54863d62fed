"""``clock_after``: windows close by the clock when nothing comes any more, each once, also if the driver is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onceflow import hooks
from onceflow.testing import independent
from onceflow.testing.broker import create_topic
from onceflow.testing.faults import value_of
from onceflow.testing.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.faults]

KEYS, WINDOWS, WINDOW_MS = 5, 6, 1_000

PROGRAM = """
import sys
import onceflow
from onceflow import serdes, windows

servers, source, out, folder = sys.argv[1:]

class Counted(windows.WindowProcessor):
    key, value = serdes.STRING, serdes.JSON
    allowed_lateness = "1 second"
    window = windows.Tumbling("1 second")
    aggregates = {"count": windows.Count()}

    def event_time(self, record):
        return record.value["at"]

spark = onceflow.session("window-clock", master="local[1]")
flow = onceflow.Flow(f"flow-{source}", spark, bootstrap_servers=servers)
counted = flow.process(
    flow.read(source), Counted(), table=f"table-{source}", late_topic=f"{out}-late", state_dir=folder,
    clock_after="1 second", idle_timeout="1 second",
)
onceflow.serve(flow.write(counted, topic=out, trigger="100 milliseconds"))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "step", ["", "progress", *(pytest.param(step, marks=pytest.mark.long) for step in ("write", "end"))]
)
def test_windows_close_when_nothing_comes(
    onceflow_broker: str, make_topic: Callable[..., str], tmp_path: Path, step: str
) -> None:
    source, out = make_topic("in", 2), make_topic("out", 2)
    create_topic(onceflow_broker, f"{out}-late", 1)
    program = tmp_path / "service.py"
    program.write_text(PROGRAM)
    # Windows of the last seconds. None of them is over by event time alone: its latest time is that of a record.
    now_ms = int(time.time() * 1000)
    times = [now_ms - 1_000 * n for n in range(WINDOWS)]
    records = [(f"k{n % KEYS}".encode(), json.dumps({"at": at}).encode()) for at in times for n in range(3 * KEYS)]
    independent.fill(onceflow_broker, source, records)
    killed = tmp_path / "killed"
    # The first batch reads everything. Those that follow have no records: the clock alone closes windows.
    rule = value_of({"step": step, "action": "kill", "batch": 2, "once_file": str(killed)}) if step else ""
    command = [sys.executable, str(program), onceflow_broker, source, out, str(tmp_path / "state")]

    def results() -> Counter[tuple[str, int]]:
        found: Counter[tuple[str, int]] = Counter()
        for seen in independent.read_topic(onceflow_broker, out):
            value = json.loads(seen.value or b"")
            assert value["count"] >= 1
            found[(seen.key or b"").decode(), value["start_ms"]] += 1
        return found

    wanted = {(f"k{n}", at // WINDOW_MS * WINDOW_MS) for n in range(KEYS) for at in times}
    for attempt in range(2):
        environment: dict[str, Any] = {**os.environ, **({hooks.VARIABLE: rule} if rule else {})}
        with (tmp_path / "log").open("ab") as log:
            service = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            if step and not attempt:
                service.wait(120)
                assert killed.exists(), (tmp_path / "log").read_text()[-3_000:]
                continue
            wait_until(
                lambda: set(results()) == wanted, 90, lambda: f"{results()} {(tmp_path / 'log').read_text()[-2_000:]}"
            )
        finally:
            service.terminate()
            service.wait(60)
        break
    assert set(results().values()) == {1}
    assert sum(json.loads(seen.value or b"")["count"] for seen in independent.read_topic(onceflow_broker, out)) == len(
        records
    )
    assert independent.read_topic(onceflow_broker, f"{out}-late", decided=True) == []
