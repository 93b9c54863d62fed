"""`onceflow verify` on flows of every kind: it runs their processors again, and looks at their tables and copies."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark import cloudpickle

from onceflow import Flow
from onceflow.cli.main import cli
from onceflow.testing import independent

pytestmark = [pytest.mark.integration, pytest.mark.long]

LEDGER = Path(__file__).parents[1] / "faults" / "ledger.py"
PROCESSORS = """
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import onceflow
from onceflow.state.api.json_columns import parse_json


class Columns(onceflow.ColumnProcessor):
    state_fields = {"total": "int64"}

    def process(self, records, states, context):
        parsed = parse_json(records["value"], pa.schema([("n", pa.int64())]))
        sums = np.zeros(states.num_rows, dtype=np.int64)
        np.add.at(sums, records["state"].to_numpy(), parsed["n"].to_numpy())
        total = pc.add(pc.fill_null(states["total"], 0), pa.array(sums))
        return records.select(["key", "value"]), pa.table({"key": states["key"], "total": total})


class Fading(onceflow.Processor):
    ttl = "1 hour"

    def process(self, key, records, state):
        state.put(b"%d" % (int(state.get(b"0")) + len(records)))
        yield onceflow.Record(key, b"last", headers=[("offset", b"%d" % records[-1].offset)])
"""


@pytest.fixture
def processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of a user; tasks get it with the code."""
    Path(tmp_path, "kinds_service.py").write_text(PROCESSORS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kinds_service", raising=False)
    module = __import__("kinds_service")
    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.parametrize(
    "kind", ["Columns", "Fading", "Quiet", "Hops", "Visits", "no changelog", "rocksdb", "deduplicate"]
)
def test_a_flow_of_each_kind(
    kind: str,
    make_state_pipe: Callable[..., Any],
    make_topic: Callable[..., str],
    verify: Any,
    processors: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(LEDGER.parent))
    dedup_ledger: Any = __import__("dedup_ledger")
    pipe, late = make_state_pipe(partitions=2), make_topic("late", 1)
    process: dict[str, Any] = {
        "no changelog": {"changelog": False},
        "rocksdb": {"store": "rocksdb"},
    }.get(kind, {})
    options: dict[str, Any] = {"process": process}
    name = f"{LEDGER}:Ledger"
    if kind in ("Columns", "Fading"):
        process["processor"], name = getattr(processors, kind)(), f"kinds_service:{kind}"
    if kind in ("Quiet", "Hops", "Visits"):
        process["processor"], name = getattr(pipe.ledger, kind)(), f"{LEDGER}:{kind}"
        if kind != "Quiet":
            process["late_topic"] = late
    if kind == "deduplicate":
        options = {"deduplicate": dedup_ledger.OPTIONS}
    for n in range(3):
        if kind == "deduplicate":
            dedup_ledger.fill(pipe, 800)
        elif "late_topic" in process or kind == "Quiet":
            independent.fill(pipe.bootstrap, pipe.source, pipe.ledger.alarm_inputs(n * 100, 100))
        else:
            pipe.fill(150)
        pipe.run(**options)
    found, last = verify(pipe.flow, "--tables", "--state-dir", str(pipe.state_dir))
    assert (found, last["checked"]["local copies"]) == ([], 2)
    assert all("no changelog" in text for text in [*last["notes"], *last["unjudged"]])
    if kind == "deduplicate":
        return
    # Its timers may fire in the replay as they did in the flow: then nothing differs.
    code = None if kind == "Quiet" else 2 if kind == "no changelog" else 0
    found, last = verify(pipe.flow, "--replay", name, "--output", pipe.target, "--dead-letter", late, code=code)
    assert found == []
    assert last["checked"]["replayed records"] == (300 if kind in ("Quiet", "Hops", "Visits") else 450)
    assert last["checked"]["output records"] > 100 or kind == "Quiet"
    unjudged = " ".join(last["unjudged"])
    assert ("has no changelog" in unjudged) == (kind == "no changelog")
    if kind != "Quiet" or unjudged:
        assert ("that differ from the replay: the processor uses processing time" in unjudged) == (kind == "Quiet")


def test_rows_that_a_flow_has_adopted_and_a_table_that_was_added_later(
    make_state_pipe: Callable[..., Any], verify: Any, tmp_path: Path
) -> None:
    pipe = make_state_pipe(partitions=1)
    pipe.fill(100)
    flow = Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap)
    query = flow.write(flow.read(pipe.source).select("key", "value"), topic=pipe.target).start()
    query.processAllAvailable()
    query.stop()
    other = make_state_pipe(partitions=1)
    other.fill(100)
    other.run()
    # A table of a flow that is still there is refused.
    reset = CliRunner().invoke(cli, ["reset", other.flow, "--yes", "--bootstrap-servers", pipe.bootstrap])
    assert reset.exit_code == 0, reset.output
    pipe.table = other.table
    pipe.fill(100)
    pipe.run(process={"adopt_existing": True})
    found, last = verify(pipe.flow, "--replay", f"{LEDGER}:Ledger", code=2)
    assert (found, last["checked"]["replayed records"]) == ([], 100), "those before were read without the step"
    assert last["unjudged"] == ["100 outputs that differ from the replay: they may be from before the replay begins"]
    value = json.loads(independent.read_topic(pipe.bootstrap, pipe.target)[-1].value or b"")
    assert value["count"] > 3, "the adopted rows count"


@pytest.mark.parametrize("kind", ["Ledger", "Hops"])
def test_a_fork(make_state_pipe: Callable[..., Any], make_topic: Callable[..., str], verify: Any, kind: str) -> None:
    """It begins with the state and the position of the flow that it is a copy of. Windows have maps and timers only."""
    pipe = make_state_pipe(partitions=2)
    process: dict[str, Any] = {"processor": getattr(pipe.ledger, kind)()}
    if kind == "Hops":
        process["late_topic"] = make_topic("late", 1)
    replay = ["--replay", f"{LEDGER}:{kind}"]

    def fill(first: int, count: int) -> None:
        if kind == "Ledger":
            pipe.fill(count)
        else:
            independent.fill(pipe.bootstrap, pipe.source, pipe.ledger.alarm_inputs(first, count))

    fill(0, 100)
    pipe.run(process=process)
    fill(100, 100)
    pipe.run(process=process)  # closes windows that the first run has left
    new = f"{pipe.flow}-new"
    command = ["fork", pipe.flow, new, "--table", f"{pipe.table}={pipe.table}-new", "--yes"]
    answer = CliRunner().invoke(cli, [*command, "--bootstrap-servers", pipe.bootstrap], standalone_mode=False)
    assert answer.exception is None, answer.exception
    found, last = verify(new, *replay, "--tables-only")
    assert (found, last["notes"], last["checked"]["replayed records"]) == ([], [], 0), "as it was copied"
    if kind == "Hops":
        last = verify(pipe.flow, "--id", "$.n", code=2)[1]
        assert (last["found"], last["exact"], last["checked"]["source records"]) == ({}, False, 200)
        assert "no output has $.n, so this flow does not pass it on" in last["not_checked"][0]
    fill(200, 150)
    pipe.flow, pipe.table, pipe.target = new, f"{pipe.table}-new", make_topic("out", 2)
    pipe.run(process=process)
    for arguments in (replay, ["--tables", "--state-dir", str(pipe.state_dir)]):
        found, last = verify(new, *arguments)
        assert (found, last["notes"]) == ([], [])
    assert verify(new, *replay)[1]["checked"]["replayed records"] == 150
