"""Side outputs through kills: every dead letter, late record and output once, with every operator after the step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from onceflow.testing import faults, independent

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.long, pytest.mark.timeout(1500)]

COUNT = 100_000
# The watermark is known after the first batch, so that one must end before records may be late.
BATCH = 3_000
OPERATORS = ["select", "where", "withColumn", "union", "mapInArrow", "static join", "second step"]
# Each kill is planned in one flow, at a step and a batch of its own, and hits all others wherever they are.
KILLS = ["begin", "write", "audit", "progress", "end", "settle"]


@pytest.mark.parametrize("task_rows", [1_000_000, 2_500], ids=["one task", "several tasks"])
def test_killed_six_times(
    onceflow_broker: str,
    make_topic: Callable[..., str],
    side_outputs: Any,
    driver_process: Any,
    tmp_path: Path,
    task_rows: int,
) -> None:
    flows = {}
    for operator in OPERATORS:
        topics = side_outputs.make_topics(make_topic)
        flows[f"flow-{topics.source}"] = (operator, topics)
    sent, sent_beside = side_outputs.inputs(0, COUNT), side_outputs.beside(0, 2_000)
    for _, topics in flows.values():
        independent.fill(onceflow_broker, topics.source, sent)
        independent.fill(onceflow_broker, topics.beside, sent_beside)
    rules = [
        {"step": step, "action": "kill", "flow": flow, "batch_from": 3 + 2 * n, "once_file": str(tmp_path / step)}
        for n, (step, flow) in enumerate(zip(KILLS, flows, strict=False))
    ]
    arguments = {
        "bootstrap": onceflow_broker,
        "flows": {name: (operator, asdict(topics)) for name, (operator, topics) in flows.items()},
        "records_per_batch": BATCH,
        "task_rows": task_rows,
        "folder": str(tmp_path / "state"),
    }
    script = Path(__file__).with_name("side_outputs_driver.py")
    for _ in range(len(KILLS) + 1):
        process = driver_process(script, faults.value_of(*rules), arguments)
        output = process.communicate(timeout=600)[0]
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, output[-5000:]
    assert process.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} >= set(KILLS), "not every kill has happened"
    for operator, topics in flows.values():
        side_outputs.check(onceflow_broker, topics, side_outputs.expected(operator, sent, sent_beside))
