"""Serdes of a registry where they meet other features: tables, joins, windows, commands and audits."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import onceflow
from onceflow import Record, SchemaRegistry, windows
from onceflow.admin.verify.replayed_processor import load
from onceflow.testing import independent

pytestmark = pytest.mark.integration


def schema(title: str, **fields: Any) -> str:
    more = [{"name": each, **(kind if isinstance(kind, dict) else {"type": kind})} for each, kind in fields.items()]
    return json.dumps({"type": "record", "name": title, "fields": more})


PAYMENT = schema("Payment", id="long", cents="long", at="long")
NOTE = {"type": ["null", "string"], "default": None}
TIME_MS = 1_700_000_000_000


class World:
    """A registry in memory, a source with payments, and topics."""

    def __init__(self, broker: str, spark: Any, make_topic: Callable[..., str], state_dir: Path) -> None:
        self.broker, self.spark, self.state_dir = broker, spark, state_dir
        self.url = f"mock://{uuid.uuid4()}"
        self.registry = SchemaRegistry(self.url)
        self.make_topic = make_topic
        self.source, self.target, self.late = make_topic("in", 1), make_topic("out", 1), make_topic("late", 1)
        self.flow = f"flow-{self.source}"
        self.payment = self.registry.avro(f"{self.source}-value", PAYMENT, register=True)

    def fill(self, *payments: tuple[bytes, int, int, int]) -> None:
        """Key, id, cents and time."""
        found = [(key, self.payment.encode({"id": n, "cents": c, "at": at})) for key, n, c, at in payments]
        independent.fill(self.broker, self.source, found)

    def run(self, processor: Any, *, tables: Any = None, **step: Any) -> dict[bytes | None, list[Any]]:
        with onceflow.Flow(self.flow, self.spark, bootstrap_servers=self.broker) as flow:
            rows = flow.process(
                flow.read(self.source), processor, table=f"table-{self.source}", state_dir=self.state_dir,
                tables=tables, **step,
            )  # fmt: skip
            query = flow.write(rows, topic=self.target).start()
            query.processAllAvailable()
            query.stop()
        found: dict[bytes | None, list[Any]] = {}
        for each in independent.read_topic(self.broker, self.target, decided=True):
            found.setdefault(each.key, []).append(processor.output.decode(each.value or b""))
        return found


@pytest.fixture
def world(onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path) -> World:
    return World(onceflow_broker, onceflow_spark, make_topic, tmp_path)


class Counts(windows.WindowProcessor):
    """Sums of windows. Accumulators are an Avro array."""

    window = windows.Tumbling("10 seconds")
    allowed_lateness = 0
    key = onceflow.serdes.STRING

    def __init__(self, value: Any, state: Any, output: Any) -> None:
        self.value, self.state, self.output = value, state, output
        self.aggregates = {"count": windows.Count(), "cents": windows.Sum("cents")}

    def event_time(self, record: Record) -> int:
        return int(record.value["at"])


def test_windows_and_a_table_with_values_of_a_registry(world: World) -> None:
    state = world.registry.avro("state", '{"type": "array", "items": ["null", "long", "double"]}', register=True)
    result = schema("Result", start_ms="long", end_ms="long", count="long", cents=["null", "long"])
    output = world.registry.avro("result", result, register=True)
    processor = Counts(world.payment, state, output)
    world.fill((b"a", 1, 5, TIME_MS), (b"a", 2, 6, TIME_MS + 1), (b"b", 3, 7, TIME_MS))
    world.run(processor, late_topic=world.late, idle_timeout="1 second")
    world.fill((b"a", 4, 8, TIME_MS + 60_000), (b"b", 5, 9, TIME_MS + 60_000))
    found = world.run(processor, late_topic=world.late, idle_timeout="1 second")
    assert [(row["count"], row["cents"]) for row in found[b"a"]] == [(2, 11)]
    assert [(row["count"], row["cents"]) for row in found[b"b"]] == [(1, 7)]


class Named(onceflow.Processor):
    """Payments with the name of their account, from a table of another schema."""

    key = onceflow.serdes.STRING

    def __init__(self, value: Any, output: Any) -> None:
        self.value = value
        self.state = self.output = output

    def process(self, key: Any, records: Any, state: Any) -> Iterator[Record]:
        for record in records:
            account = state.table("accounts").get(key)
            row = {"cents": record.value["cents"] + (state.get() or {"cents": 0})["cents"], "name": account["name"]}
            state.put(row)
            yield Record(key, row)


def test_a_join_with_a_table_of_another_schema(world: World) -> None:
    accounts = world.registry.json_schema(
        "accounts", json.dumps({"type": "object", "required": ["name"]}), register=True
    )
    table = world.make_topic("accounts", 2, cleanup_policy="compact")
    independent.fill(world.broker, table, [(key, accounts.encode({"name": key.decode() * 3})) for key in (b"a", b"b")])
    output = world.registry.avro("named", schema("Named", cents="long", name="string"), register=True)
    joined = onceflow.JoinTable(table, key=onceflow.serdes.STRING, value=accounts)
    world.fill((b"a", 1, 5, 0), (b"b", 2, 6, 0), (b"a", 3, 7, 0))
    found = world.run(Named(world.payment, output), tables={"accounts": joined})
    assert found == {
        b"a": [{"cents": 5, "name": "aaa"}, {"cents": 12, "name": "aaa"}],
        b"b": [{"cents": 6, "name": "bbb"}],
    }
    with onceflow.Table(
        f"table-{world.source}", bootstrap_servers=world.broker, key=onceflow.serdes.STRING, value=output,
        state_dir=world.state_dir / "copy",
    ) as rows:  # fmt: skip
        assert rows.get("a") == {"cents": 12, "name": "aaa"}


PROGRAM = """
import onceflow

class Sums(onceflow.Processor):
    key = onceflow.serdes.STRING
    registry = onceflow.SchemaRegistry({url!r})
    value = registry.avro({source!r} + "-value")
    state = output = registry.avro("sums")

    def process(self, key, records, state):
        row = state.get() or {{"cents": 0}}
        for record in records:
            row = {{**row, "cents": row["cents"] + record.value["cents"]}}
            yield onceflow.Record(key, row)
        state.put(row)
"""


def test_an_audit_of_values_with_schemas(world: World, verify: Any, tmp_path: Path) -> None:
    """Also when another version of the schema has written some of them."""
    path = tmp_path / f"sums_{uuid.uuid4().hex}.py"
    path.write_text(PROGRAM.format(url=world.url, source=world.source))
    ours = ["--replay", f"{path}:Sums", "--output", world.target]

    def run() -> None:
        sys.modules.pop(path.stem, None)
        world.run(load(f"{path}:Sums"))

    world.registry.avro("sums", schema("Sums", cents="long"), register=True).own()
    world.fill((b"a", 1, 5, 0), (b"b", 2, 6, 0))
    run()
    found, last = verify(world.flow, *ours)
    assert (found, last["exact"]) == ([], True)
    world.registry.avro("sums", schema("Sums", cents="long", note=NOTE), register=True).own()
    sys.modules.pop(path.stem, None)
    assert verify(world.flow, *ours)[1]["exact"], (
        "the rows of before are those that a replay writes with the new schema"
    )
    world.fill((b"a", 3, 7, 0), (b"c", 4, 8, 0))
    run()
    sys.modules.pop(path.stem, None)
    found, last = verify(world.flow, *ours)
    assert (found, last["exact"]) == ([], True)
    assert last["checked"]["replayed records"] == last["checked"]["output records"] == 4

    bad = path.with_name(f"{path.stem}_bad.py")
    bad.write_text(path.read_text().replace('row["cents"] + record', 'row["cents"] + 1 + record'))
    _, last = verify(world.flow, "--replay", f"{bad}:Sums", "--output", world.target, code=1)
    assert last["found"]["state"] == 3


def test_ids_inside_of_values_with_schemas(world: World, verify: Any) -> None:
    world.fill(*((b"k%d" % (n % 5), n, n, 0) for n in range(40)))
    with onceflow.Flow(world.flow, world.spark, bootstrap_servers=world.broker) as flow:
        query = flow.write(flow.read(world.source), topic=world.target).start()
        query.processAllAvailable()
        query.stop()
    found, last = verify(world.flow, "--id", "$.id", "--registry", world.url)
    assert (found, last["exact"], last["unjudged"]) == ([], True, [])
    independent.fill(world.broker, world.target, [(b"k1", world.payment.encode({"id": 1, "cents": 99, "at": 0}))])
    _, last = verify(world.flow, "--id", "$.id", "--registry", world.url, code=1)
    assert last["found"] == {"doubled": 1}


def test_lines_that_become_values_with_schemas(world: World, call: Callable[..., Result]) -> None:
    world.payment.own()
    where = ["--registry", world.url, "--value-subject", f"{world.source}-value"]
    lines = (
        b'{"key": "a", "value": {"id": 1, "cents": 5, "at": 0}, "headers": {"h": "x"}}\n{"key": "b", "value": null}\n'
    )
    answer = call("produce", world.source, "--json", *where, input=lines)
    assert answer.exception is None, answer.output
    seen = {each.key: each for each in independent.read_topic(world.broker, world.source, decided=True)}
    assert world.payment.decode(seen[b"a"].value or b"") == {"id": 1, "cents": 5, "at": 0}
    assert (seen[b"a"].headers, seen[b"b"].value) == ((("h", b"x"),), None)
    shown = call("consume", world.source, "--json", "--registry", world.url).stdout
    again = world.make_topic("again", 2)
    assert call("produce", again, "--json", *where, input=shown).exception is None
    copied = {each.key: each.value for each in independent.read_topic(world.broker, again, decided=True)}
    assert copied == {key: each.value for key, each in seen.items()}
    bad = b'{"id": 1, "cents": 5, "at": 0}\n{"id": "x", "cents": 5, "at": 0}\n'
    refused = call("produce", world.target, *where, input=bad)
    assert "Line 2 cannot be written: it does not fit the schema: id: 'x' is str" in str(refused.exception)
    assert len(independent.read_topic(world.broker, world.target, decided=True)) == 1
    for arguments, said in (
        (["--value-subject", "s"], "need --registry"),
        (["--registry", world.url], "needs --value-subject or --key-subject"),
        (["--registry", world.url, "--key-subject", "s"], "has no subject 's'"),
        (["--registry", world.url, "--value-message", "M"], "needs --value-subject"),
    ):
        assert said in str(call("produce", world.target, *arguments, input="x").exception)
