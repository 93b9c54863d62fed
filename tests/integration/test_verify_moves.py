"""`onceflow verify` after `onceflow reset` and `onceflow promote`: what people have moved is no finding."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer
from pyspark import cloudpickle

from onceflow.admin.verify.replayed_processor import load
from onceflow.cli.main import cli
from onceflow.testing import independent

pytestmark = pytest.mark.integration

LEDGER = Path(__file__).parents[1] / "faults" / "ledger.py"

SECOND = """
import sys
sys.path.insert(0, {folder!r})
from ledger import Ledger
import onceflow

class Second(Ledger):
    \"\"\"The outputs of the new version are others.\"\"\"
    def process(self, key, records, state):
        for record in super().process(key, records, state):
            yield onceflow.Record(key, {{**record.value, "version": 2}})

class Loses(Second):
    \"\"\"As if one output of the old version were lost, and one of the new one.\"\"\"
    def process(self, key, records, state):
        for record in super().process(key, records, state):
            yield record
            if record.value["n"] in (250, 400):
                yield onceflow.Record(key, {{"n": "lost"}})
"""


@pytest.fixture
def call(onceflow_broker: str) -> Callable[..., None]:
    def run(*arguments: str) -> None:
        given = [*arguments, "--yes", "--bootstrap-servers", onceflow_broker]
        answer = CliRunner().invoke(cli, given, standalone_mode=False)
        assert answer.exception is None, (answer.exception, answer.output)

    return run


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """Another version of the processor, which tasks get by value."""
    path = tmp_path / "second_ledger.py"
    path.write_text(SECOND.format(folder=str(LEDGER.parent)))
    load(f"{path}:Second")
    cloudpickle.register_pickle_by_value(sys.modules["second_ledger"])
    return path


@pytest.mark.long
def test_after_a_promotion(
    make_state_pipe: Callable[..., Any], make_topic: Callable[..., str], verify: Any, call: Any, second: Path
) -> None:
    """The old version has written the outputs of what the new one has processed without writing."""
    pipe = make_state_pipe(partitions=2)
    pipe.fill(200)
    pipe.run()
    name = f"{pipe.flow}-next"
    call("fork", pipe.flow, name)
    pipe.fill(150)
    pipe.run()
    call("promote", name, "--replaces", pipe.flow)
    ids = ["--id", "$.n", "--output", pipe.target]
    ours = ["--replay", f"{second}:Second", "--output", pipe.target]
    found, last = verify(pipe.flow, *ids)
    assert (found, last["checked"]["source records"]) == ([], 350), "before the new version has run"
    found, last = verify(pipe.flow, *ours, code=2)
    assert (found, last["checked"]["replayed records"]) == ([], 0)

    pipe.fill(100)
    after = replace(pipe, table=f"{name}-{pipe.table}", sent=pipe.sent)
    after.run(process={"processor": load(f"{second}:Second")})
    found, last = verify(pipe.flow, *ids)
    assert (found, last["notes"], last["checked"]["source records"]) == ([], [], 450)
    found, last = verify(pipe.flow, *ours, code=2)
    assert (found, last["checked"]["replayed records"], last["checked"]["output records"]) == ([], 250, 450)
    assert last["unjudged"] == [
        f"what the earlier version of this flow has written, whose place {name} has taken",
        "350 outputs that differ from the replay: they may be from before the replay begins",
    ]
    ((lost,), _) = verify(pipe.flow, "--replay", f"{second}:Loses", "--output", pipe.target, code=1)
    assert lost["kind"] == "lost", "the one that the new version had to write"


def test_after_resets(make_pipe: Callable[..., Any], verify: Any, call: Any, onceflow_broker: str) -> None:
    pipe = make_pipe(partitions=2)
    pipe.fill(100)
    pipe.run()
    call("reset", pipe.flow, "--to", f"offsets={pipe.source}:0=10,{pipe.source}:1=20")
    pipe.run()
    found, last = verify(pipe.flow, "--id", "record")
    assert (found, last["checked"]["source records"], last["checked"]["output records"]) == ([], 100, 170)
    again = "the flow was reset, and has read 70 offsets again: outputs of these may be there again"
    assert last["notes"] == [again]
    pipe.fill(30)
    call("reset", pipe.flow, "--to", "latest")
    pipe.fill(40)
    pipe.run()
    found, last = verify(pipe.flow, "--id", "record")
    assert (found, last["checked"]["source records"], last["checked"]["output records"]) == ([], 140, 210)
    assert last["notes"] == [again, "the flow was reset, and has skipped 30 offsets: no outputs are expected"]

    producer = Producer({"bootstrap.servers": onceflow_broker})
    copied = independent.read_topic(onceflow_broker, pipe.target)
    for record in (copied[-1], copied[-1], copied[0]):
        producer.produce(pipe.target, record.value, record.key, partition=record.partition)
    producer.produce(pipe.target, b"made up", copied[0].key, partition=copied[0].partition)
    assert producer.flush(30) == 0
    found, last = verify(pipe.flow, "--id", "record", "--unordered", code=1)
    assert last["found"]["foreign"] == 1
    assert last["found"]["doubled"] >= 1, "more often than it was read"


@pytest.mark.long
def test_without_progress(make_state_pipe: Callable[..., Any], verify: Any, call: Any) -> None:
    """The flow forgets what it has read, and keeps its rows: the first outputs have other sums."""
    pipe = make_state_pipe(partitions=2)
    pipe.fill(60)
    pipe.run()
    call("reset", pipe.flow)
    pipe.run(process={"adopt_existing": True})
    found, last = verify(pipe.flow, "--replay", f"{LEDGER}:Ledger", code=2)
    assert (found, last["checked"]["replayed records"], last["checked"]["output records"]) == ([], 60, 120)
    assert last["unjudged"][-1].endswith("that differ from the replay: they may be from before the flow was reset")
    assert not last["exact"]
    assert verify(pipe.flow, "--replay", f"{LEDGER}:Ledger", "--allow-unjudged", code=0)[0] == []
    found, last = verify(pipe.flow, "--id", "$.n")
    assert (found, last["notes"]) == (
        [],
        ["the flow was reset, and has read 60 offsets again: outputs of these may be there again"],
    )


@pytest.mark.long
def test_rows_that_a_reset_has_deleted(make_state_pipe: Callable[..., Any], verify: Any, call: Any) -> None:
    pipe = make_state_pipe(partitions=2)
    pipe.fill(60)
    pipe.run()
    call("reset", pipe.flow, "--to", "latest", "--state", "delete")
    pipe.fill(60)
    pipe.run()
    found, last = verify(pipe.flow, "--replay", f"{LEDGER}:Ledger", code=2)
    assert found == []
    assert any("`onceflow reset` has deleted or changed rows of the table" in text for text in last["unjudged"])
    call("reset", pipe.flow, "--to", "earliest", "--state", "delete")
    pipe.run()
    found, last = verify(pipe.flow, "--replay", f"{LEDGER}:Ledger", code=2)
    assert found == []
    assert any("has read records twice" in text for text in last["unjudged"])
