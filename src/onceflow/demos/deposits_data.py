"""Deposits from a seed, and what must come out of the services for them. Pure: no Kafka, no Spark.

What is expected is computed here, from the seed, and never from what a topic holds: an audit that asked the
flows' own output what to expect would find nothing missing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from onceflow.demos.audit import Expected

INVALID_SHARE = 0.01
ACCOUNTS = 2_000
CURRENCIES = ("EUR", "GBP", "USD")
AMOUNT_MAX = 1_000_000
CAUSES = (
    "not JSON",
    "missing field",
    "amount not a whole number",
    "amount not positive",
    "amount too large",
    "unknown currency",
)
_ID = re.compile(rb"dep-\d{9}")


class Deposit(NamedTuple):
    """One generated record; ``cause`` is why it must be rejected, None for a valid one."""

    id: str
    account: str
    amount: int
    currency: str
    value: bytes
    cause: str | None

    @property
    def key(self) -> bytes:
        return self.account.encode()


class Origin(NamedTuple):
    """Where the broker put a generated record, as it told the producer."""

    topic: str
    partition: int
    offset: int


def generate(seed: int, count: int) -> Iterator[Deposit]:
    """``count`` deposits, about 1 % of them invalid; the same ones for the same seed."""
    rng = random.Random(f"deposits-{seed}")
    # Looked up once: this loop makes several hundred thousand records.
    chance = rng.random
    for number in range(count):
        identity = f"dep-{number:09d}"
        account = f"acc-{int(chance() * ACCOUNTS):05d}"
        amount = 1 + int(chance() * AMOUNT_MAX)
        currency = CURRENCIES[int(chance() * 3)]
        if chance() < INVALID_SHARE:
            cause = rng.choice(CAUSES)
            value = _invalid(cause, identity, account, amount, currency, rng)
            yield Deposit(identity, account, amount, currency, value, cause)
        else:
            value = _json(identity, account, str(amount), currency)
            yield Deposit(identity, account, amount, currency, value, None)


def identify(value: bytes | None) -> str | None:
    """The id in a value, even in one that is no JSON; every generated value has exactly one."""
    found = _ID.search(value or b"")
    return None if found is None else found[0].decode()


def expected_validated(deposits: Iterator[Deposit]) -> Iterator[Expected]:
    """Valid deposits, as they were."""
    for deposit in deposits:
        if deposit.cause is None:
            yield Expected(deposit.id, deposit.key, deposit.value)


def expected_rejected(deposits: Iterator[Deposit], origins: Mapping[str, Origin]) -> Iterator[Expected]:
    """Invalid deposits, as they were, with headers that say why and where they came from."""
    for deposit in deposits:
        if deposit.cause is not None:
            origin = origins[deposit.id]
            headers = (
                ("cause", deposit.cause.encode()),
                ("origin-topic", origin.topic.encode()),
                ("origin-partition", str(origin.partition).encode()),
                ("origin-offset", str(origin.offset).encode()),
            )
            yield Expected(deposit.id, deposit.key, deposit.value, headers)


def expected_settled(deposits: Iterator[Deposit]) -> Iterator[Expected]:
    """Valid deposits with their fee."""
    for deposit in deposits:
        if deposit.cause is None:
            value = (
                f'{{"id":"{deposit.id}","account":"{deposit.account}","amount":{deposit.amount},'
                f'"currency":"{deposit.currency}","fee":{deposit.amount // 200},"settled":true}}'
            )
            yield Expected(deposit.id, deposit.key, value.encode())


def _json(identity: str, account: str, amount: str, currency: str) -> bytes:
    text = f'{{"id": "{identity}", "account": "{account}", "amount": {amount}, "currency": "{currency}"}}'
    return text.encode()


def _invalid(cause: str, identity: str, account: str, amount: int, currency: str, rng: random.Random) -> bytes:
    whole = _json(identity, account, str(amount), currency)
    if cause == "not JSON":
        # Cut off behind the id, text, or bytes that are not even UTF-8: the service must pass all on unchanged.
        return rng.choice(
            [whole[: rng.randint(25, len(whole) - 1)], b"deposit " + identity.encode(), b"\xff\xfe" + whole]
        )
    if cause == "missing field":
        missing = rng.choice(["account", "amount", "currency"])
        return re.sub(rf', "{missing}": [^,}}]+'.encode(), b"", whole)
    if cause == "amount not a whole number":
        amounts = ['"a lot"', f"{amount}.5", '{"cents": 1}', "[1]", "true"]
        return _json(identity, account, rng.choice(amounts), currency)
    if cause == "amount not positive":
        return _json(identity, account, str(rng.choice([0, -amount])), currency)
    if cause == "amount too large":
        return _json(identity, account, str(AMOUNT_MAX + amount), currency)
    return _json(identity, account, str(amount), rng.choice(["XXX", "eur", ""]))
