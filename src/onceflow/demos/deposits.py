"""The demo ``deposits``: two flows in a chain, their drivers killed again and again, and every record accounted for.

generator -> deposits -> [validate] -> validated -> [settle] -> settled
                                   \\-> rejected (with cause)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from onceflow.demos import deposits_data as data
from onceflow.demos.audit import Expected
from onceflow.demos.chain import Chain, Choices, Link, run_chain


class Deposits(Chain):
    """Validate deposits, settle them."""

    name = "deposits"
    partitions: ClassVar[Mapping[str, int]] = {"deposits": 4, "validated": 3, "rejected": 2, "settled": 4}
    links: ClassVar[Sequence[Link]] = (
        Link("validate", "deposits", "validated", "deposits.py", ("validate",)),
        Link("settle", "validated", "settled", "deposits.py", ("settle",)),
    )

    def expected(self, origins: Mapping[str, data.Origin]) -> Mapping[str, Iterable[Expected]]:
        return {
            "deposits": (Expected(deposit.id, deposit.key, deposit.value) for deposit in self.deposits()),
            "validated": data.expected_validated(self.deposits()),
            "rejected": data.expected_rejected(self.deposits(), origins),
            "settled": data.expected_settled(self.deposits()),
        }


def run(choices: Choices) -> dict[str, Any]:
    """Run the demo; see ``run_chain``."""
    return run_chain(Deposits, choices)
