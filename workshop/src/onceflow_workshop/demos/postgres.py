"""The demo ``postgres``: deposits into a table of a database, while the flow's driver and the server are killed.

generator -> deposits -> [ledger] -> PostgreSQL: ledger, and the progress row
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.table import Table

from onceflow.hooks import EXTERNAL_STEPS
from onceflow_workshop.demos import postgres_data as data
from onceflow_workshop.demos.audit import EXAMPLES_MAX, Expected, Findings, Message, compare
from onceflow_workshop.demos.chain import Audit, Chain, Choices, Link, run_chain
from onceflow_workshop.demos.display import Display
from onceflow_workshop.demos.generator import Input
from onceflow_workshop.demos.harness import Kill, plan_kills
from onceflow_workshop.demos.postgres_server import Database
from onceflow_workshop.demos.reading import read_topic
from onceflow_workshop.demos.service_files import service_file

SERVICE = service_file("postgres/ledger_table.py")
_ROWS = """SELECT id, account, (amount * 100)::bigint, (extract(epoch FROM made) * 1000)::bigint, note,
    "partition", "offset" FROM ledger"""
_SUMS = "SELECT account, (sum(amount) * 100)::bigint, count(*) FROM ledger GROUP BY account"
_DOUBLED = """SELECT coalesce(sum(number - 1), 0)::bigint FROM (
    SELECT count(*) AS number FROM ledger GROUP BY "partition", "offset") AS places"""


@dataclass(frozen=True)
class PostgresChoices(Choices):
    """Options of the command.

    Args:
        dsn: of a server that runs already.
    """

    dsn: str | None = None


class Postgres(Chain):
    """Write deposits to a table."""

    name = "postgres"
    choices: PostgresChoices
    partitions: ClassVar[Mapping[str, int]] = {"deposits": 4}
    links: ClassVar[Sequence[Link]] = (Link("ledger", ("deposits",), "written", SERVICE),)
    inputs_of = ("deposits",)
    outputs = ()

    def inputs(self) -> Iterator[Input]:
        for each in self.deposits():
            yield Input("deposits", each.account.encode(), each.value, each.id)

    def deposits(self) -> Iterator[data.Deposit]:
        """The same in every run with this seed."""
        return data.generate(self.choices.seed, self.choices.records)

    def plan(self, rng: random.Random, link: Link) -> list[Kill]:
        return plan_kills(self.choices.kills, batches=self.batches, rng=rng, steps=EXTERNAL_STEPS)

    def surroundings(self) -> Database:
        self.database = Database(
            self.choices.dsn,
            self.folder,
            self.services[0].flow,
            self.topics["deposits"],
            batches=self.batches,
            kills=self.choices.kills,
            rng=random.Random(f"server-{self.choices.seed}"),
        )
        return self.database

    def process(self, display: Display) -> None:
        self.database.say = display.say
        super().process(display)
        self.database.finish()

    # ---- audits --------------------------------------------------------------------------------------

    def expected(self) -> Mapping[str, Iterable[Expected]]:
        return {
            "ledger": (
                Expected(each.id, each.account.encode(), each.row(self.origins[each.id]), None, free=True)
                for each in self.deposits()
            )
        }

    def identify(self, topic: str, message: Message) -> str | None:
        return (dict(message.headers)["id"] or b"").decode()

    def compare(self, name: str, records: Iterable[Expected], found: Iterable[Message] | None = None) -> Findings:
        return compare(
            f"table {name}", records, self._rows(), partitions=1, identify=lambda each: self.identify(name, each)
        )

    def _rows(self) -> Iterator[Message]:
        with self.database.connect() as connection, connection.transaction(), connection.cursor("rows") as cursor:
            cursor.itersize = 10_000
            yield from map(data.row_of, cursor.execute(_ROWS))

    def look_further(self, audit: Audit, display: Display) -> None:
        folded = data.fold(read_topic(self.servers, self.topics["deposits"], self.deadline))
        with self.database.connect() as connection:
            in_table = {account: data.Sums(*sums) for account, *sums in connection.execute(_SUMS).fetchall()}
            doubled = connection.execute(_DOUBLED).fetchone()
        wrong = [
            f"account {account}: {in_table.get(account)} in the table, {folded.get(account)} in the topic"
            for account in sorted(folded.keys() | in_table.keys())
            if folded.get(account) != in_table.get(account)
        ]
        display.say(f"sums of {len(in_table):,} accounts compared with a fold of the topic")
        database = self.database
        audit.problems += [*wrong[:EXAMPLES_MAX], *database.problems]
        if doubled is None or doubled[0]:
            audit.problems.append(f"{doubled} rows have the place of another one")
        if database.kills < database.planned:
            audit.problems.append(f"the server was killed {database.kills} times, {database.planned} were planned")
        facts = {
            "accounts": len(in_table),
            "wrong_sums": len(wrong),
            "money": sum(each.cents for each in in_table.values()),
            "looks": database.looks,
            "torn": database.torn,
            "server_kills": database.kills,
        }
        audit.tables.append(_table(facts))
        audit.facts |= {"out": audit.topics[0].found, **facts}
        if not audit.problems and not any(audit.topics[0].counts.values()):
            database.clear()


def _table(facts: Mapping[str, int]) -> Table:
    caption = "money in cents. torn: at a look, the rows were not those of the progress row"
    table = Table(title="The ledger in SQL, and a fold of the topic", caption=caption)
    for name in facts:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_row(*(f"{number:,}" for number in facts.values()))
    return table


def run(choices: PostgresChoices) -> dict[str, Any]:
    """Run the demo; see ``run_chain``."""
    return run_chain(Postgres, choices)
