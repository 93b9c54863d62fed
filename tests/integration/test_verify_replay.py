"""`onceflow verify --replay` on a real Kafka: a flow with state, run again from nothing or from an export."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from confluent_kafka import Producer
from pyspark import cloudpickle

from onceflow.admin.records import letter_replay
from onceflow.admin.verify.replayed_processor import load
from onceflow.cli.main import cli
from onceflow.client.settings import ClientSettings
from onceflow.errors import OnceflowError, ProcessorError
from onceflow.protocol.partitioners import key_partitions
from onceflow.testing import independent

pytestmark = pytest.mark.integration

LEDGER = Path(__file__).parents[1] / "faults" / "ledger.py"

MUTANTS = '''
import sys
sys.path.insert(0, {folder!r})
from ledger import Ledger
import onceflow

class Yields(Ledger):
    """As if an output had been lost, and as if another had been changed."""
    def process(self, key, records, state):
        for record in super().process(key, records, state):
            if record.value["n"] == 7:
                yield onceflow.Record(key, {{"n": "lost"}})
            yield onceflow.Record(key, {{"n": "changed"}}) if record.value["n"] == 8 else record

class Keeps(Ledger):
    """As if an entry of a map had been lost."""
    def process(self, key, records, state):
        yield from super().process(key, records, state)
        if key == b"key-001":
            state.map("more").put("mine", 1)
'''

NEWER = """
import json, sys
sys.path.insert(0, {folder!r})
from ledger import Ledger

class Newer(Ledger):
    version = 1
    def migrate(self, payload, from_version):
        return {{**json.loads(payload), "format": 1}} if b"sum" in payload else json.loads(payload)
    def process(self, key, records, state):
        yield from super().process(key, records, state)
        if known := state.get():
            state.put({{**known, "format": 1}})
"""


@pytest.fixture
def mutants(tmp_path: Path) -> Path:
    path = tmp_path / "broken_ledger.py"
    path.write_text(MUTANTS.format(folder=str(LEDGER.parent)))
    return path


def test_a_flow_with_state(
    make_state_pipe: Callable[..., Any], verify: Any, mutants: Path, onceflow_broker: str, tmp_path: Path
) -> None:
    pipe = make_state_pipe(partitions=3, target_partitions=2)
    pipe.fill(300)
    pipe.run(read={"max_records_per_batch": 150})
    export = tmp_path / "export.json"
    command = ["progress", "export", pipe.flow, "--bootstrap-servers", onceflow_broker]
    export.write_text(CliRunner().invoke(cli, command, standalone_mode=False).stdout)
    pipe.fill(200)
    pipe.run()
    pipe.fill(50)  # not read yet
    ours = ["--replay", f"{LEDGER}:Ledger"]
    found, last = verify(pipe.flow, *ours)
    assert (found, last["exact"], last["notes"]) == ([], True, [])
    assert last["checked"]["replayed records"] == last["checked"]["output records"] == 500
    assert last["checked"]["table rows"] >= 40, "values and entries of the map"
    found, last = verify(pipe.flow, *ours, "--since", str(export), code=2)
    assert (found, last["checked"]["replayed records"]) == ([], 200)
    assert last["unjudged"] == ["300 outputs that differ from the replay: they may be from before the replay begins"]

    _, last = verify(pipe.flow, "--replay", f"{mutants}:Yields", code=1)
    assert last["found"] == {"lost": 2, "foreign": 1}
    assert verify(pipe.flow, "--replay", f"{mutants}:Yields", "--tables-only")[1]["exact"]
    found, last = verify(pipe.flow, "--replay", f"{mutants}:Keeps", "--tables-only", code=1)
    assert last["found"] == {"state": 1}
    assert found[0]["text"].endswith("key b'key-001': an entry of map 'more' is not there")

    producer = Producer({"bootstrap.servers": onceflow_broker})
    producer.produce(pipe.target, b'{"n": "made up"}', b"key-001", partition=0)
    assert producer.flush(30) == 0
    ((found,), last) = verify(pipe.flow, *ours, code=1)
    assert (found["kind"], found["places"][0]["topic"]) == ("foreign", pipe.target)
    assert 'value {"n": "made up"}: no replay yields it' in found["text"]

    # A key of which another producer has written a record to another partition: the other keys are judged as before.
    (partition,) = key_partitions(pa.array([b"key-002"]), 3).tolist()
    producer.produce(pipe.source, b'{"n": 1000}', b"key-002", partition=(partition + 1) % 3)
    producer.produce(pipe.target, b'{"n": "made up, too"}', b"key-002", partition=0)
    assert producer.flush(30) == 0
    pipe.run()
    ((found,), last) = verify(pipe.flow, *ours, code=1)
    assert (found["kind"], found["places"][0]["topic"]) == ("foreign", pipe.target)
    assert 'value {"n": "made up"}' in found["text"]
    assert [each.partition(":")[0] for each in last["unjudged"]] == ["1 outputs that differ from the replay"]


def test_dead_letters_and_errors(
    make_state_pipe: Callable[..., Any], make_topic: Callable[..., str], verify: Any, onceflow_broker: str
) -> None:
    pipe, dead = make_state_pipe(partitions=2), make_topic("dead", 1)
    pipe.fill(60)
    producer = Producer({"bootstrap.servers": onceflow_broker})
    for n in range(3):
        producer.produce(pipe.source, json.dumps({"n": n, "op": "boom"}).encode(), b"key-bad", partition=n % 2)
    assert producer.flush(30) == 0
    pipe.run(process={"on_error": "dead-letter", "dead_letter_topic": dead})
    ours = ["--replay", f"{LEDGER}:Ledger", "--output", pipe.target]
    with pytest.raises(ProcessorError, match=r"The replay ends: .*boom at") as raised:
        verify(pipe.flow, *ours)
    assert f"name it: --dead-letter {dead}" in raised.value.next_step
    assert raised.value.batch is None
    # The letter of the second record is written before that of the first: letters have no order.
    producer.produce(pipe.source, json.dumps({"n": 60, "op": "boom"}).encode(), b"key-bad", partition=0)
    producer.produce(pipe.source, b"garbage", b"key-bad", partition=0)
    assert producer.flush(30) == 0
    pipe.run(process={"on_error": "dead-letter", "dead_letter_topic": dead})
    found, last = verify(pipe.flow, *ours, "--dead-letter", dead)
    assert (found, last["notes"], last["checked"]["letters"]) == ([], [], 5)
    # By an id, too, and without the name of their topic, which progress has.
    found, last = verify(pipe.flow, "--id", "$.n", "--partitioner", "any")
    assert (found, last["notes"], last["checked"]["letters"]) == ([], [], 5)
    letter_replay.replay(ClientSettings(onceflow_broker), dead, letter_replay.Wanted(to=make_topic("again", 1)))
    (note,) = verify(pipe.flow, *ours, "--dead-letter", dead)[1]["notes"]
    assert note.startswith(f"5 letters of {dead} replayed before: if the processor was changed")
    for arguments, text in (
        (["--table", "typo"], f"has no table typo: the flow has {pipe.table}"),
        (["--source", "typo"], "has not read typo"),
        (["--from", "latest"], "not where a flow has begun"),
        (["--from", "offsets=typo:0=1"], "typo-0"),
    ):
        with pytest.raises(OnceflowError, match=text):
            verify(pipe.flow, *ours, "--dead-letter", dead, *arguments)


def test_event_time(make_state_pipe: Callable[..., Any], make_topic: Callable[..., str], verify: Any) -> None:
    """Watermarks are those of the progress records. Late records are in a topic of their own."""
    pipe, late = make_state_pipe(partitions=1), make_topic("late", 1)
    ledger = pipe.ledger
    for sent in (ledger.alarm_inputs(0, 200), ledger.alarm_inputs(200, 20, at=3_000), ledger.alarm_inputs(220, 100)):
        independent.fill(pipe.bootstrap, pipe.source, sent)
        pipe.run(process={"processor": ledger.Alarms(), "late_topic": late})
    found, last = verify(pipe.flow, "--replay", f"{LEDGER}:Alarms", "--output", pipe.target, "--dead-letter", late)
    assert (found, last["notes"]) == ([], [])
    assert last["checked"]["letters"] == 20
    assert last["checked"]["output records"] > 80, "timers that have fired"


@pytest.mark.long
def test_after_a_migration(make_state_pipe: Callable[..., Any], verify: Any, tmp_path: Path) -> None:
    """Rows that an earlier version has written stay as they are until their key has records again."""
    path = tmp_path / "newer_ledger.py"
    path.write_text(NEWER.format(folder=str(LEDGER.parent)))
    newer = load(f"{path}:Newer")
    cloudpickle.register_pickle_by_value(sys.modules["newer_ledger"])
    pipe = make_state_pipe(partitions=1)
    pipe.fill(60)
    pipe.run()
    pipe.fill(10)
    pipe.run(process={"processor": newer})
    found, last = verify(pipe.flow, "--replay", f"{path}:Newer", "--output", pipe.target, code=2)
    assert found == []
    (text,) = last["unjudged"]
    assert text.endswith(
        "rows with other content than in the replay: an earlier version of the processor has written them"
    )
    assert int(text.split()[0]) > 20, "one for each key that had no records since"
