"""Movements on accounts from a seed, and the rows that a table of balances must have after them. Pure.

What is expected is computed here, from the seed, and never from what a topic or an answer holds.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from onceflow_workshop.demos.audit import EXAMPLES_MAX, Origin

ACCOUNTS = 400
INVALID_SHARE, EMPTYING_SHARE, CLOSE_SHARE = 0.01, 0.1, 0.5
_CLOSE = b'{"close": true}'
#: Values that must become dead letters; none of them may change a row.
_INVALID = (b"5", b"{}", b'{"amount": 0}', b'{"amount": "5"}', b'{"amount": 1000000001}', b'{"amount": 5', b"\xff")


class Movement(NamedTuple):
    """One generated record.

    Args:
        amount: cents; None: it closes the account, or is invalid.
    """

    account: str
    value: bytes
    amount: int | None = None
    valid: bool = True


@dataclass
class Row:
    """What the table has of an account, but for the offset."""

    balance: int = 0
    count: int = 0


@dataclass
class Movements:
    """An endless iterator over movements, and what follows from those that it has returned.

    Attributes:
        rows: by account, what the table must have.
        sum: cents of all valid movements.
        invalid: how many were.
    """

    seed: int
    rows: dict[str, Row] = field(default_factory=dict)
    sum: int = 0
    returned: int = 0
    invalid: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(f"tables-{self.seed}")

    def __iter__(self) -> Iterator[Movement]:
        return self

    def __next__(self) -> Movement:
        rng = self._rng
        account = account_of(int(rng.random() * ACCOUNTS))
        row = self.rows.get(account)
        self.returned += 1
        if rng.random() < INVALID_SHARE:
            self.invalid += 1
            broken = rng.choice(_INVALID)
            # An account with money cannot be closed.
            return Movement(account, _CLOSE if row is not None and row.balance else broken, valid=False)
        if row is not None and not row.balance and rng.random() < CLOSE_SHARE:
            del self.rows[account]
            return Movement(account, _CLOSE)
        row = self.rows.setdefault(account, Row())
        amount = rng.randint(1, 100_000) * rng.choice((1, 1, -1))
        if row.balance and rng.random() < EMPTYING_SHARE:
            amount = -row.balance
        row.balance += amount
        row.count += 1
        self.sum += amount
        return Movement(account, json.dumps({"amount": amount}).encode(), amount)


def account_of(number: int) -> str:
    """The name of an account."""
    return f"acc-{number:04d}"


def wrong_rows(movements: Movements, origins: Mapping[str, Origin], rows: Mapping[str, Any]) -> list[str]:
    """What is wrong with the rows of the table at the end, in texts; nothing: they are what the seed says.

    Args:
        origins: by account, where its last movement was written.
    """
    expected = {
        account: {"balance": row.balance, "count": row.count, "through": origins[account].offset}
        for account, row in movements.rows.items()
    }
    different = [account for account in sorted({*expected, *rows}) if expected.get(account) != rows.get(account)]
    return [f"{each} is {rows.get(each)} at the end, must be {expected.get(each)}" for each in different[:EXAMPLES_MAX]]
