"""The demo `postgres`: what it generates, what it expects, and that its audits see what is wrong."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pytest
from ledger_table import TABLE

from onceflow.client.deadline import Deadline
from onceflow.errors import OptionError
from onceflow_workshop.demos import postgres_data as data
from onceflow_workshop.demos.audit import Message, Origin
from onceflow_workshop.demos.chain import Audit
from onceflow_workshop.demos.postgres import Postgres, PostgresChoices
from onceflow_workshop.demos.postgres_server import Database

COUNT = 400


def test_a_seed_gives_the_same_records_again() -> None:
    one = list(data.generate(3, COUNT))
    assert one == list(data.generate(3, COUNT)) != list(data.generate(4, COUNT))
    assert {each.note for each in one} == set(data._NOTES)


def test_a_fold_of_the_topic() -> None:
    made = list(data.generate(3, COUNT))
    sums = data.fold(Message(0, n, each.account.encode(), each.value) for n, each in enumerate(made))
    assert sum(each.cents for each in sums.values()) == sum(each.cents for each in made)
    assert sum(each.number for each in sums.values()) == COUNT


class Shown:
    def say(self, text: str) -> None:
        pass


class Run(Postgres):
    """All records are where the broker would have put them, and the topic is not read."""

    origins: ClassVar[dict[str, Origin]] = {  # type: ignore[assignment]
        each.id: Origin("deposits", n % 4, n // 4) for n, each in enumerate(data.generate(3, COUNT))
    }


@pytest.fixture(scope="module")
def database() -> Iterator[Database]:
    with (
        tempfile.TemporaryDirectory(prefix="onceflow-") as folder,
        Database(None, Path(folder), "ledger-1", "deposits", batches=1, kills=0, rng=random.Random(1)) as found,
    ):
        yield found


@pytest.fixture
def audited(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Audit]:
    """Fill the table, damage it, and look."""

    def audit(*damage: str) -> Audit:
        with database.connect() as connection:
            connection.execute("DROP TABLE IF EXISTS ledger")
            connection.execute(TABLE)
            rows = [
                (each.id, each.account, each.cents, each.made_ms, each.note, *Run.origins[each.id][1:])
                for each in data.generate(3, COUNT)
            ]
            connection.cursor().executemany(
                "INSERT INTO ledger VALUES (%s, %s, %s / 100.0, to_timestamp(%s / 1000.0), %s, %s, %s)", rows
            )
            for statement in damage:
                connection.execute(statement)
        chain = Run(PostgresChoices(COUNT, 3, 0), "localhost:1", tmp_path, Deadline(60, "the test"))
        chain.database = database
        messages = [Message(0, 0, each.account.encode(), each.value) for each in chain.deposits()]
        monkeypatch.setattr("onceflow_workshop.demos.postgres.read_topic", lambda *_: messages)
        found = chain.audit(Shown())  # type: ignore[arg-type]
        chain._generator._producer.purge()
        return found

    return audit


def test_a_right_table_passes(audited: Callable[..., Audit]) -> None:
    found = audited()
    assert found.problems == []
    assert found.topics[0].holds
    assert (found.facts["out"], found.facts["wrong_sums"]) == (COUNT, 0)


@pytest.mark.parametrize(
    "damage, kind",
    [
        ("DELETE FROM ledger WHERE id = 'dep-000000007'", "lost"),
        ("INSERT INTO ledger SELECT * FROM ledger WHERE id = 'dep-000000007'", "duplicated"),
        ("UPDATE ledger SET amount = amount + 0.01 WHERE id = 'dep-000000007'", "wrong"),
        ("UPDATE ledger SET note = coalesce(note, '') || ' ' WHERE id = 'dep-000000007'", "wrong"),
        ('UPDATE ledger SET "offset" = 0, "partition" = 0 WHERE id = \'dep-000000007\'', "wrong"),
        ("UPDATE ledger SET made = made + interval '1 ms' WHERE id = 'dep-000000007'", "wrong"),
        ("UPDATE ledger SET id = 'x' WHERE id = 'dep-000000007'", "unexpected"),
    ],
)
def test_damage_is_seen(audited: Callable[..., Audit], damage: str, kind: str) -> None:
    found = audited(damage)
    assert found.topics[0].counts[kind] == 1
    assert found.problems


def test_sums_are_compared_with_the_topic(audited: Callable[..., Audit]) -> None:
    found = audited("UPDATE ledger SET amount = amount + 1 WHERE id = 'dep-000000003'")
    assert found.facts["wrong_sums"] == 1
    assert "in the topic" in " ".join(found.problems)


def test_a_look_sees_rows_without_progress(database: Database, audited: Callable[..., Audit]) -> None:
    database.finish()
    audited()
    with database.connect() as connection:
        connection.execute("CREATE TABLE onceflow_progress (flow text, generation bigint, owner text, progress text)")
        row = '{"batch_id": 4, "offsets": {"deposits": {"0": 100, "1": 100, "2": 100, "3": 100, "4": 0}}}'
        connection.execute("INSERT INTO onceflow_progress VALUES ('onceflow.ledger-1@c', 1, 'o', %s)", [row])
    assert database._look() == 4
    assert database.torn == 0
    with database.connect() as connection:
        connection.execute("DELETE FROM ledger WHERE id = 'dep-000000007'")
    database._look()
    assert database.torn == 1
    assert "rows by partition" in database.problems[-1]
    database.problems.clear()
    database._close()


@pytest.mark.parametrize(
    "dsn, message", [("ada@localhost", "not understood"), ("host=127.0.0.1 port=1", "cannot be used")]
)
def test_a_server_that_cannot_be_used(tmp_path: Path, dsn: str, message: str) -> None:
    def enter() -> Any:
        with Database(dsn, tmp_path, "ledger-1", "d", batches=1, kills=0, rng=random.Random(1)):
            pass

    with pytest.raises(OptionError, match=message):
        enter()


def test_a_schema_of_its_own(database: Database) -> None:
    assert database.server is not None
    with psycopg.connect(database.dsn) as connection:
        assert connection.execute("SHOW search_path").fetchone() == ("onceflow_demo_1",)
