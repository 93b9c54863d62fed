"""`onceflow compare` on a real broker: two versions that agree, and every kind of difference between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from confluent_kafka import Producer

import onceflow
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

Compare = Callable[..., tuple[list[dict[str, Any]], dict[str, Any]]]


@pytest.fixture
def compare(call: Callable[..., Result], tmp_path: Path) -> Compare:
    """Runs the command; returns the differences and its last line."""

    def run(*arguments: str, code: int = 0) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        answer = call("compare", *arguments, "--scratch", str(tmp_path), "--json")
        if answer.exception is not None:
            raise answer.exception
        *found, last = [json.loads(line) for line in answer.stdout.splitlines()]
        assert answer.return_value == code, (found, last)
        return found, last

    return run


def copied(pipe: Any, call: Callable[..., Result], target: str, table: str = "") -> Any:
    flow = f"{pipe.flow}-next"
    answer = call("fork", pipe.flow, flow, "--yes", *(["--table", f"{pipe.table}={table}"] if table else []))
    assert answer.exception is None, answer.exception
    return replace(pipe, flow=flow, table=table or f"{flow}-{pipe.table}", target=target, sent=pipe.sent)


def processors(module: Any) -> tuple[type, type]:
    """Another version of the processor, with errors in its outputs for some numbers; and one that loses a row."""

    class Wrong(module.Ledger):  # type: ignore[misc, name-defined]
        def process(self, key: bytes, records: Sequence[Any], state: Any) -> Iterator[Any]:
            for record in super().process(key, records, state):
                if record.value["n"] == 407:
                    record.value["sum"] += 1
                if record.value["n"] != 409:
                    yield record

    class Forgetful(module.Ledger):  # type: ignore[misc, name-defined]
        def process(self, key: bytes, records: Sequence[Any], state: Any) -> Iterator[Any]:
            yield from super().process(key, records, state)
            if any(record.value["n"] == 409 for record in records):
                state.delete()

    return Wrong, Forgetful


def test_two_versions(make_state_pipe: Any, make_topic: Any, call: Callable[..., Result], compare: Compare) -> None:
    pipe = make_state_pipe(partitions=2)
    pipe.fill(400)
    pipe.run()
    copy = copied(pipe, call, make_topic("out", 3))
    both = (pipe.flow, copy.flow)
    pipe.fill(100)
    pipe.run()
    # At different positions.
    with pytest.raises(onceflow.ProgressConflictError, match="not at the same position"):
        compare(*both, "--wait", "0")
    found, last = compare(*both, "--id", "$.n", "--output", f"{pipe.target}={copy.target}", code=2)
    assert (found, last["equal"], last["checked"]["source records"]) == ([], False, 0), "nothing was compared"
    assert any("tables are not compared" in note for note in last["notes"])
    assert f"Start {copy.flow}, and compare" in last["not_checked"][0]
    copy.run()
    # No output has such an id. Tables are the same, but what was asked for was not compared.
    found, last = compare(*both, "--id", "$.typo", code=2)
    assert (found, last["equal"], last["checked"]["source records"]) == ([], False, 100)
    assert last["checked"]["rows of tables"] > 50
    assert last["not_checked"][0].startswith("outputs: none of the 100 source records that")
    assert "output records" not in last["checked"], "records without an id are equal if they are copies of the source"
    assert call("compare", *both, "--id", "$.typo").stdout.splitlines()[-1].endswith("not known whether they are equal")
    for more in ((), ("--id", "$.n")):
        found, last = compare(*both, *more)
        assert (found, last["equal"], last["found"]) == ([], True, {})
        assert last["checked"]["output records"] == last["checked"]["output records of the copy"] == 100
        assert last["checked"]["rows of tables"] > 50
    # The copy is forgotten, and made once more: what it wrote before is still in its output.
    assert call("reset", copy.flow, "--yes").exception is None
    copy = copied(pipe, call, copy.target, table=f"{pipe.table}-again")
    pipe.fill(50)
    pipe.run()
    copy.run()
    found, last = compare(*both)
    assert (found, last["equal"]) == ([], True)
    assert last["checked"]["output records"] == last["checked"]["output records of the copy"] == 50
    assert any("that an earlier flow with the name" in note for note in last["notes"])
    # What others did to the outputs: a double, and a foreign record.
    producer = Producer({"bootstrap.servers": pipe.bootstrap})
    double = independent.read_topic(pipe.bootstrap, copy.target, decided=True)[-1]
    producer.produce(copy.target, double.value, double.key, partition=double.partition)
    producer.produce(copy.target, b'{"n": -1}', b"k", partition=0)
    assert producer.flush(30) == 0
    found, last = compare(*both, code=1)
    assert last["found"] == {"output": 2}
    found, last = compare(*both, "--id", "$.n", code=1)
    assert last["found"] == {"output": 1}, "no source record has the other one's id"
    assert any(note.startswith(f"1 output of {copy.flow} left out") for note in last["notes"])
    assert "has it once" in found[0]["text"]
    assert [place["topic"] for place in found[0]["places"]] == [pipe.target, copy.target, copy.target]
    answer = call("compare", *both, "--id", "$.n")
    assert f"{copy.target}-{double.partition}@{double.offset}" in answer.stdout
    assert answer.stdout.splitlines()[-1].endswith("differences: 1 of output")


@pytest.mark.long
@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_version_with_an_error(
    make_state_pipe: Any, make_topic: Any, call: Callable[..., Result], compare: Compare, ledger: Any, which: int
) -> None:
    """Both run while they are compared by an id; then tables, too, when both are done."""
    pipe = make_state_pipe(partitions=2)
    pipe.fill(400)
    pipe.run()
    copy = copied(pipe, call, make_topic("out", 2))
    wrong = processors(ledger)[which]()
    old, new = pipe.start(), copy.start(process={"processor": wrong})
    both = (pipe.flow, copy.flow)
    try:
        pipe.fill(5)
        wait_until(lambda: old.batches and new.batches, 60, "batches of both")
        for query in (old, new):
            query.processAllAvailable()
        assert compare(*both, "--id", "$.n")[1]["equal"]
        pipe.fill(60)
        for query in (old, new):
            query.processAllAvailable()
        found, last = compare(*both, "--wait", "30", code=1)
    finally:
        old.stop()
        new.stop()
    if which:
        assert last["found"]["table"] >= 1, "a row that the copy has lost"
        assert {place["topic"] for each in found for place in each["places"]} >= {pipe.table}
        return
    assert last["found"] == {"output": 3}, "407 on both sides, and 409"
    assert compare(*both, "--id", "$.n", code=1)[1]["found"] == {"output": 3}
    lost = [each for each in found if each["text"].endswith("0 times") and len(each["places"]) == 1]
    assert {place["topic"] for each in lost for place in each["places"]} == {pipe.target}


@pytest.mark.long
def test_what_is_refused(make_pipe: Any, make_topic: Any, call: Callable[..., Result], compare: Compare) -> None:
    pipe = make_pipe(partitions=1)
    pipe.fill(10)
    pipe.run()
    with pytest.raises(onceflow.ProgressConflictError, match="no progress"):
        compare(pipe.flow, f"{pipe.flow}-next")
    other = make_pipe(partitions=1)
    other.run()
    with pytest.raises(onceflow.ProgressConflictError, match="is not a copy of"):
        compare(pipe.flow, other.flow)
    copy = replace(pipe, flow=f"{pipe.flow}-next", target=make_topic("out", 1))
    assert call("fork", pipe.flow, copy.flow, "--yes").exception is None
    last = compare(pipe.flow, copy.flow, code=2)[1]
    assert any("outputs are not compared" in note for note in last["notes"])
    assert "name them with --output OLD=NEW" in last["not_checked"][0]
    last = compare(pipe.flow, copy.flow, "--output", f"{pipe.target}={copy.target}", code=2)[1]
    assert last["not_checked"] == [
        f"outputs: neither {pipe.flow} nor {copy.flow} has written any since the copy was made. Compare when both have"
    ]
    with pytest.raises(onceflow.UnknownTopicError) as raised:
        compare(pipe.flow, copy.flow, "--output", f"{pipe.target}x={copy.target}")
    assert f"did you mean {pipe.target}?" in raised.value.next_step
    with pytest.raises(onceflow.OptionError, match=f"where {pipe.source} stood"):
        compare(pipe.flow, copy.flow, "--output", f"{pipe.source}={copy.target}")
    with pytest.raises(onceflow.OptionError, match="is a table of neither flow"):
        compare(pipe.flow, copy.flow, "--table", "a=b")
    assert "without --id" in str(call("compare", pipe.flow, copy.flow, "--id", "record").exception)
