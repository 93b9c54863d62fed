"""Deposits from a seed, and the rows of the ledger that they must become. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from onceflow_workshop.demos.audit import Message, Origin

ACCOUNTS = 500
_FIRST_MS = 1_750_000_000_000
# What separates, ends or escapes values somewhere on the way to a table.
_NOTES = (
    None,
    "",
    "rent",
    "\\N",
    "\t\n\r",
    "O'Neil \"; DROP TABLE ledger; --",
    "50 € für 🚀",
    "{}",
    "a" * 500,
    "NULL",
    " ",
)


class Deposit(NamedTuple):
    """One generated record."""

    id: str
    account: str
    cents: int
    made_ms: int
    note: str | None

    @property
    def value(self) -> bytes:
        amount = f"{self.cents // 100}.{self.cents % 100:02d}"
        return json.dumps({"id": self.id, "amount": amount, "made": self.made_ms, "note": self.note}).encode()

    def row(self, origin: Origin) -> bytes:
        """The row of the ledger, see `row_of`."""
        return _text(self.id, self.account, self.cents, self.made_ms, self.note, origin.partition, origin.offset)


class Sums(NamedTuple):
    """Of an account: the sum of its deposits in cents, and how many there are."""

    cents: int
    number: int


def generate(seed: int, count: int) -> Iterator[Deposit]:
    """The deposits of a run, in order."""
    rng = random.Random(f"postgres-{seed}")
    for number in range(count):
        cents = 1 if rng.random() < 0.01 else rng.randint(1, 10**10) if rng.random() < 0.01 else rng.randint(1, 99_999)
        account = f"acc-{rng.randrange(ACCOUNTS):05d}"
        yield Deposit(f"dep-{number:09d}", account, cents, _FIRST_MS + rng.randrange(10**9), rng.choice(_NOTES))


def row_of(found: tuple[Any, ...]) -> Message:
    """A row of the ledger, for a comparison: id, account, amount in cents, time in ms, note, partition, offset."""
    identity, account, *_, partition, offset = found
    return Message(partition, offset, account.encode(), _text(*found), (("id", identity.encode()),))


def fold(messages: Iterable[Message]) -> dict[str, Sums]:
    """The sums of all accounts, from the records of the topic."""
    sums: dict[str, Sums] = {}
    for message in messages:
        account = (message.key or b"").decode()
        whole, _, part = json.loads(message.value or b"")["amount"].partition(".")
        before = sums.get(account, Sums(0, 0))
        sums[account] = Sums(before.cents + 100 * int(whole) + int(part), before.number + 1)
    return sums


def _text(*fields: Any) -> bytes:
    return json.dumps(fields).encode()
