"""`onceflow verify` on a real Kafka: an exact flow, and what an outsider has lost, doubled, misplaced and made up."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from onceflow.errors import OptionError
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

LEDGER = Path(__file__).parents[1] / "faults" / "ledger.py"


def test_what_others_did_to_the_outputs_of_an_exact_flow(
    make_pipe: Callable[..., Any], verify: Any, onceflow_broker: str
) -> None:
    pipe = make_pipe(partitions=2, target_partitions=3)
    pipe.fill(200)
    pipe.run()
    found, last = verify(pipe.flow, "--id", "record")
    assert (found, last["exact"], last["found"]) == ([], True, {})
    assert last["checked"]["source records"] == last["checked"]["output records"] == 200
    assert last["checked"]["group offsets"] == 2
    pipe.fill(50)  # records that no batch has read are not lost
    assert verify(pipe.flow, "--id", "record")[1]["exact"]
    assert verify(pipe.flow)[1]["exact"], "without an id, progress and group are looked at"

    producer = Producer({"bootstrap.servers": onceflow_broker})
    copied = independent.read_topic(onceflow_broker, pipe.target)[0]
    producer.produce(pipe.target, copied.value, copied.key, partition=copied.partition)
    producer.produce(pipe.target, b"made up", b"k", partition=0)
    assert producer.flush(30) == 0
    found, last = verify(pipe.flow, "--id", "record", "--partitioner", "any", code=1)
    assert last["found"] == {"doubled": 1, "foreign": 1}
    (doubled,) = [each for each in found if each["kind"] == "doubled"]
    assert [place["topic"] for place in doubled["places"]] == [pipe.source, pipe.target, pipe.target]


def test_a_flow_that_is_not_there(verify: Any) -> None:
    with pytest.raises(OptionError, match="has no progress") as raised:
        verify("no-flow-has-this-name")
    assert "onceflow status" in raised.value.next_step


def test_a_flow_that_has_begun_behind_the_first_records(make_pipe: Callable[..., Any], verify: Any) -> None:
    pipe = make_pipe(partitions=2)
    pipe.fill(100)
    pipe.run(read={"starting_offsets": "latest"})
    pipe.fill(50)
    pipe.run()
    found, last = verify(pipe.flow, "--id", "record")
    assert (found, last["notes"]) == ([], [])
    assert (last["checked"]["source records"], last["checked"]["output records"]) == (50, 50)
    assert verify(pipe.flow, "--id", "record", "--from", "earliest", code=1)[1]["found"] == {"lost": 100}
    ends = independent.end_offsets(pipe.bootstrap, pipe.source)
    place = "offsets=" + ",".join(f"{topic}:{partition}={end}" for (topic, partition), end in ends.items())
    found, last = verify(pipe.flow, "--id", "record", "--from", place)
    assert last["checked"]["source records"] == 0


@pytest.mark.long
def test_beside_a_flow_that_runs_all_the_time(
    make_state_pipe: Callable[..., Any], verify: Any, command: Callable[..., Any]
) -> None:
    """It never takes what is under way for a mistake, and it does not stop the flow."""
    pipe = make_state_pipe(partitions=2)
    pipe.fill(100)
    over = threading.Event()

    def fill() -> None:
        while not over.wait(0.02):
            pipe.fill(25)

    query = pipe.start(trigger="50 milliseconds")
    query.processAllAvailable()
    filler = threading.Thread(target=fill)
    filler.start()
    ways = [["--id", "$.n", "--tables"], ["--replay", f"{LEDGER}:Ledger"]]
    checked = []
    try:
        for number in range(4):
            found, last = verify(pipe.flow, *ways[number % 2], code=None)
            assert (found, last["found"]) == ([], {})
            assert all("commits too often" in text for text in [*last["notes"], *last["unjudged"]]), last
            checked.append(last["checked"])
        # Another process, which may not have the files of a copy open for writing.
        copies = ["--state-dir", str(pipe.state_dir), "--json", "--bootstrap-servers", pipe.bootstrap]
        for _ in range(2):
            with command("verify", pipe.flow, *copies) as process:
                said, errors = process.communicate(timeout=60)
            last = json.loads(said)
            assert last["found"] == {}, (said, errors)
            assert all("commits too often" in text for text in last["unjudged"]), last
            assert process.returncode == (2 if last["unjudged"] else 0), (said, errors)
            assert last["checked"]["local copies"] == 2
    finally:
        over.set()
        filler.join(30)
        query.processAllAvailable()
        query.stop()
    assert checked[2]["source records"] > checked[0]["source records"], "the flow has run on"
    assert checked[3]["replayed records"] > checked[1]["replayed records"]
    pipe.check()


def test_ctrl_c(
    make_pipe: Callable[..., Any], command: Callable[..., Any], onceflow_broker: str, tmp_path: Path
) -> None:
    """Also while it waits for a transaction that stays open."""
    pipe = make_pipe(partitions=1)
    pipe.fill(20)
    pipe.run()
    open_ = Producer({"bootstrap.servers": onceflow_broker, "transactional.id": f"open-{pipe.target}"})
    open_.init_transactions(30)
    open_.begin_transaction()
    open_.produce(pipe.target, b"not yet", b"k", partition=0)
    open_.flush(30)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    options = ["--scratch", str(scratch), "--bootstrap-servers", onceflow_broker]
    with command("verify", pipe.flow, "--id", "record", *options) as process:
        wait_until(lambda: list(scratch.iterdir()), 30, lambda: f"it has begun: {process.poll()}")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130, process.stderr.read()
    assert list(scratch.iterdir()) == []
    open_.abort_transaction(30)
