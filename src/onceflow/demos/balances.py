"""The demo ``balances``: a third flow keeps the balance of every account, and loses its driver and its disk.

generator -> deposits -> [validate] -> validated -> [settle] -> settled -> [balance] -> statements
                                   \\-> rejected                            balances (table topic, local store)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import onceflow
from onceflow.demos import balances_data
from onceflow.demos import deposits_data as data
from onceflow.demos.audit import Expected
from onceflow.demos.balances_data import BalanceFindings
from onceflow.demos.chain import Audit, Choices, Link, run_chain
from onceflow.demos.deposits import Deposits
from onceflow.demos.display import Display, balances_table
from onceflow.demos.reading import read_topic

# What the driver says of each partition when a batch that had to read its state from the topics is committed.
READ_BACK = r"table \S+-\d+: (?:restored|caught up), (\d+) records read"


class Balances(Deposits):
    """Validate deposits, settle them, keep balances."""

    name = "balances"
    partitions: ClassVar[Mapping[str, int]] = {**Deposits.partitions, "statements": 8}
    links: ClassVar[Sequence[Link]] = (
        *Deposits.links,
        Link("balance", "settled", "balances", "balances.py", keeps_state=True),
    )

    @property
    def table(self) -> str:
        """The table topic: made by the flow, with as many partitions as its source has."""
        return f"balances{self.suffix}"

    def more_topics(self) -> list[str]:
        return [self.table, f"{self.table}-internal"]

    def expected(self, origins: Mapping[str, data.Origin]) -> Mapping[str, Iterable[Expected]]:
        statements = balances_data.expected_statements(self.deposits())
        return {**super().expected(origins), "statements": statements}

    def look_further(self, audit: Audit, display: Display) -> None:
        findings = self.audit_balances()
        for finding in findings:
            display.say(f"{finding.place}: {finding.found:,} accounts read, {finding.expected:,} expected")
            audit.problems += finding.examples
        audit.tables.append(balances_table(findings))
        deleted = sum(death.lost_state for service in self.services for death in service.deaths)
        planned = sum(service.planned_losses for service in self.services)
        restores = self.restores()
        # The first planned loss always finds something. A later one may not: a driver that dies before it has opened
        # its state again has none to lose. That is no deletion, and is not counted as one.
        if planned and not deleted:
            audit.problems.append(f"local state was never deleted, {planned} times were planned")
        if planned and not restores:
            audit.problems.append("local state was deleted, and nothing was read back")
        audit.facts |= {
            "wrong_balances": sum(finding.wrong for finding in findings),
            "accounts": findings[0].expected,
            "restores": restores,
            "state_deleted": deleted,
        }

    def audit_balances(self) -> list[BalanceFindings]:
        """The balances in the table topic and in the local store."""
        records = read_topic(self.servers, self.table, self.deadline)
        in_topic = balances_data.audit_table(
            self.table, self.deposits(), records, partitions=self.partitions["settled"]
        )
        folder = self.state_dir / f"balance{self.suffix}" / self.table
        rows = onceflow.LocalTable(folder).range()
        expected = balances_data.expected_balances(self.deposits())
        return [in_topic, balances_data.audit_rows("local store", expected, rows)]

    def restores(self) -> int:
        """How many times a partition's state was read from the table topic."""
        lines = (line for service in self.services for line in service.log_lines(READ_BACK))
        return sum(int(line[1]) > 0 for line in lines)


def run(choices: Choices) -> dict[str, Any]:
    """Run the demo; see ``run_chain``."""
    return run_chain(Balances, choices)
