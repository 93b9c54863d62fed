"""State that was kept with another schema: what can be read goes on, what cannot is refused at the start."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import onceflow
from onceflow import ProgressConflictError, Record, SchemaRegistry, windows
from onceflow.broker.folder import free_ports
from onceflow.testing import independent
from onceflow_workshop.testing.apicurio import Apicurio, running_apicurio

pytestmark = pytest.mark.integration


def balance(*fields: tuple[str, Any], **default: Any) -> str:
    """The schema of a balance with more fields."""
    more = [{"name": name, "type": kind, **default} for name, kind in fields]
    return json.dumps({"type": "record", "name": "Balance", "fields": [{"name": "cents", "type": "long"}, *more]})


FIRST = balance(("note", "string"))
SECOND = balance()
THIRD = balance(("note", "int"), default=0)
FIELDS = {FIRST: {"note": "x"}, SECOND: {}, THIRD: {"note": 5}}


class Balances(onceflow.Processor):
    """Sums in a state whose schema is given."""

    value = onceflow.serdes.LONG

    def __init__(self, state: Any, fields: Any) -> None:
        self.state, self.fields = state, fields

    def process(self, key: Any, records: Any, state: Any) -> Iterator[Record]:
        row = (state.get() or {"cents": 0})["cents"] + sum(record.value for record in records)
        state.put({"cents": row, **self.fields})
        yield Record(key, str(row).encode())


class Migrated(Balances):
    version = 1

    def migrate(self, payload: bytes, from_version: int) -> Any:
        return {"cents": self.old.decode(payload)["cents"], "note": 1}

    def __init__(self, state: Any, fields: Any, old: Any) -> None:
        super().__init__(state, fields)
        self.old = old


class World:
    """One flow and its table, run again and again with other processors."""

    def __init__(self, broker: str, spark: Any, make_topic: Callable[..., str], url: str, state_dir: Path) -> None:
        self.broker, self.spark, self.state_dir = broker, spark, state_dir
        self.registry = SchemaRegistry(url)
        self.source, self.target = make_topic("in", 1), make_topic("out", 1)
        self.read: dict[str, Any] = {}

    def serde(self, text: str) -> Any:
        return self.registry.avro(f"{self.source}-state", text, register=True)

    def run(self, processor: Any, *keys: bytes, place: str = "driver", **step: Any) -> dict[bytes | None, bytes | None]:
        """Add 1 to each key. Returns the sums of all keys."""
        one = onceflow.serdes.LONG.encode(1)
        independent.fill(self.broker, self.source, [(key, one) for key in keys])
        with onceflow.Flow(f"flow-{self.source}", self.spark, bootstrap_servers=self.broker) as flow:
            rows = flow.process(
                flow.read(self.source, **self.read),
                processor,
                table=f"table-{self.source}",
                state_dir=self.state_dir,
                **step,
            )
            query = flow.write(rows, topic=self.target, engine=place).start()
            query.processAllAvailable()
            query.stop()
        return {each.key: each.value for each in independent.read_topic(self.broker, self.target, decided=True)}

    def balances(self, text: str) -> Balances:
        return Balances(self.serde(text), FIELDS[text])


@pytest.fixture(scope="module")
def apicurio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apicurio]:
    (port,) = free_ports(1)
    with running_apicurio(tmp_path_factory.mktemp("apicurio"), port) as running:
        yield running


@pytest.fixture(params=["driver", "tasks"])
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def world(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path,
    request: pytest.FixtureRequest,
) -> World:  # fmt: skip
    mock = "place" not in request.fixturenames or request.getfixturevalue("place") == "driver"
    url = f"mock://{uuid.uuid4()}" if mock else request.getfixturevalue("apicurio").url
    return World(onceflow_broker, onceflow_spark, make_topic, url, tmp_path)


@pytest.mark.long_but("driver")
def test_a_row_that_cannot_be_read_is_refused_at_the_start_and_no_other(world: World, place: str) -> None:
    assert world.run(world.balances(FIRST), b"a", b"b", place=place) == {b"a": b"1", b"b": b"1"}
    assert world.run(world.balances(SECOND), b"a", place=place) == {b"a": b"2", b"b": b"1"}
    said = (
        rf"(?s)Table table-{world.source} has state that the AVRO of {world.source}-state cannot read.*"
        rf"the row of b'b' has the schema with id \d+ \(version 1 of {world.source}-state\): "
        r"note: string has become int.*raise the processor's `version` and define migrate"
    )
    with pytest.raises(ProgressConflictError, match=said):
        world.run(world.balances(THIRD), b"b", place=place)
    migrated = Migrated(world.serde(THIRD), FIELDS[THIRD], world.serde(SECOND))
    assert world.run(migrated, b"a", place=place) == {b"a": b"3", b"b": b"2"}
    # Rows of the version before go through migrate(), and those of this one can be read.
    assert world.run(migrated, b"b", place=place) == {b"a": b"3", b"b": b"3"}


def test_a_schema_without_rows_refuses_nothing(world: World) -> None:
    world.run(world.balances(FIRST), b"a", b"b")
    world.run(world.balances(SECOND), b"a", b"b")
    assert world.run(world.balances(THIRD), b"a") == {b"a": b"3", b"b": b"2"}
    assert world.run(world.balances(SECOND), b"b") == {b"a": b"3", b"b": b"3"}


def test_a_table_that_is_taken_over(world: World, call: Callable[..., Any]) -> None:
    """Nobody has noted the schemas of its rows: all versions of the subject are looked at."""
    world.run(world.balances(FIRST), b"a")
    world.run(world.balances(SECOND), b"b")
    reset = call("reset", f"flow-{world.source}", "--yes")
    assert reset.exception is None, reset.output
    world.read = {"starting_offsets": "latest"}
    with pytest.raises(ProgressConflictError, match=r"row of b'a' has .*note: string has become int"):
        world.run(world.balances(THIRD), adopt_existing=True)
    world.run(world.balances(SECOND), adopt_existing=True)
    with pytest.raises(ProgressConflictError, match=r"row of b'a' has .*note: string has become int"):
        world.run(world.balances(THIRD))


def test_without_a_changelog_a_warning_says_what_may_be_unreadable(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.run(world.balances(FIRST), b"a", changelog=False)
    with pytest.raises(onceflow.ProcessorError, match="note: string has become int"):
        world.run(world.balances(THIRD), b"a", changelog=False)
    assert "may have rows that cannot be read" in caplog.text
    assert "note: string has become int" in caplog.text


class Counts(windows.WindowProcessor):
    """Counts of windows that never close here, in a state with a schema."""

    window = windows.Tumbling("1 hour")

    def __init__(self, state: Any, emptied: Any) -> None:
        self.state, self.emptied = state, emptied

    def initial(self) -> Any:
        return self.emptied

    def add(self, accumulator: Any, record: Record) -> Any:
        return {**accumulator, "cents": accumulator["cents"] + 1}

    def result(self, key: Any, window: Any, accumulator: Any) -> Record:
        return Record(key, str(accumulator["cents"]).encode())


def test_windows_are_refused_as_well(world: World) -> None:
    world.run(Counts(world.serde(FIRST), {"cents": 0, "note": ""}), b"a", b"a", late_topic=world.target)
    world.run(Counts(world.serde(FIRST), {"cents": 0, "note": ""}), b"a", late_topic=world.target)
    with pytest.raises(ProgressConflictError, match=r"(?s)has the schema with id 1 \(.*note: string has become int"):
        world.run(Counts(world.serde(THIRD), {"cents": 0}), b"a", late_topic=world.target)
