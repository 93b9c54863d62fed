"""What a person sees on the console when a service fails: one error, once, without stack traces of Java."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import onceflow
from onceflow.testing import independent

pytestmark = pytest.mark.integration

# A Python worker of Spark that ends after its task has failed may find its socket closed, and says so. That is chance.
OF_A_WORKER = re.compile(
    r"Traceback \(most recent call last\):\n(  File \"[^\"]*/pyspark/daemon\.py\".*\n)+BrokenPipeError: .*\n"
)
OF_THE_JVM = re.compile(r"Picked up |WARNING: Using incubator|Setting |To adjust|\d\d/\d\d/\d\d \d\d:\d\d:\d\d WARN ")
SERVICE = """
import sys
import onceflow
from pyspark.sql import functions as F

servers, source, target = sys.argv[1:]
spark = onceflow.session("noise", "local[1]")
flow = onceflow.Flow("noise-" + source, spark, bootstrap_servers=servers)

@F.udf("string")
def amount(value):
    raise ValueError("no amount")

rows = flow.read(source).select("key", amount("value").alias("value"))
onceflow.serve(flow.write(rows, topic=target, engine="tasks").start())
"""


@pytest.mark.long
def test_a_service_that_fails(make_topic: Any, onceflow_broker: str, tmp_path: Path) -> None:
    """It is run as users run it, two attempts of the batch fail in tasks, and cause and record are told."""
    source, target = make_topic("in", 1), make_topic("out", 1)
    independent.fill(onceflow_broker, source, [(b"k", b"v")])
    script = tmp_path / "service.py"
    script.write_text(SERVICE)
    done = subprocess.run(
        [sys.executable, str(script), onceflow_broker, source, target],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert said.count("BatchAbortedError") == 1, said
    cause = "ValueError: no amount (raised in amount, service.py:12)"
    assert cause in said, said
    assert [line for line in said.splitlines() if cause in line][-1].startswith("  detail: ")
    assert said.count(cause) == 2, "the attempt that is done again, and the error"
    assert f"record {source}-0@0; {cause}" in said, said
    assert "\tat " not in said, "a stack trace of Java"
    assert len(OF_A_WORKER.sub("", said).splitlines()) < 35, said
    (log,) = tmp_path.glob("onceflow-*/onceflow-spark-pid*.log")
    assert "\tat org.apache.spark" in log.read_text()


def test_the_server_of_accumulators_in_a_session_of_the_user(make_pipe: Any) -> None:
    """When the JVM ends, it prints a traceback, unless the start of a query has muted that."""
    pipe = make_pipe(partitions=1)
    server = pipe.spark.sparkContext._accumulatorServer
    assert vars(server).pop("handle_error", None), "onceflow.session has muted it"
    pipe.fill(10)
    pipe.run(engine="tasks")
    assert "handle_error" in vars(server)


def test_a_query_that_no_flow_writes(make_pipe: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = make_pipe(partitions=1)
    pipe.fill(10)
    pipe.run()
    assert "is not written by Flow.write" not in caplog.text
    with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
        rows = flow.read(pipe.source).select("key", "value")
        query = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "own")).start()
        query.stop()
    assert f"a query reads the topics of flow {pipe.flow} and is not written by Flow.write" in caplog.text


COUNTING = """
import logging
import sys
import onceflow

class Count(onceflow.Processor):
    def process(self, key, records, state):
        logging.getLogger("shop").warning("counting %s", key.decode())
        yield onceflow.Record(key=key, value=str(len(records)).encode())

servers, source, target, table = sys.argv[1:]
spark = onceflow.session("noise", "local[1]")
flow = onceflow.Flow("noise-" + source, spark, bootstrap_servers=servers)
rows = flow.process(flow.read(source), Count(), table=table, state_dir="state")
onceflow.serve(flow.write(rows, topic=target, engine="tasks", once=True))
"""


@pytest.mark.long
def test_a_service_whose_log_lines_are_json(make_topic: Any, onceflow_broker: str, tmp_path: Path) -> None:
    """Those of tasks, too. Only Spark's JVM writes something else."""
    source, target = make_topic("in", 1), make_topic("out", 1)
    independent.fill(onceflow_broker, source, [(b"a", b"1"), (b"b", b"2")])
    script = tmp_path / "service.py"
    script.write_text(COUNTING)
    done = subprocess.run(
        [sys.executable, str(script), onceflow_broker, source, target, source.replace("in-", "table-")],
        env={**os.environ, "TMPDIR": str(tmp_path), "ONCEFLOW_LOG_FORMAT": "json"},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    others = [line for line in OF_A_WORKER.sub("", done.stderr).splitlines() if not line.startswith("{")]
    assert not [line for line in others if not OF_THE_JVM.match(line)]
    (start,) = [line for line in lines if "start" in line]
    counted = [line for line in lines if line["logger"] == "shop"]
    assert sorted(line["message"] for line in counted) == ["counting a", "counting b"]
    known = {"flow": f"noise-{source}", "batch": 1, "task": 0, "producer_id": start["start"]["producer_id"]}
    assert all(known.items() <= line.items() for line in counted), counted
    assert json.loads(done.stdout)["records"] == 2
