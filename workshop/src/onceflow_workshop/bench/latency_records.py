"""The records with which latency is measured, and what must come out of them, for each kind of service."""

from __future__ import annotations

import os
from array import array
from typing import NamedTuple

import orjson

from onceflow_workshop.bench.balances import payment

COPY, BALANCE = WORKLOADS = ("copy", "balance")
VALUE_BYTES = 1024
_ACCOUNTS = 10_000
_SPREAD = 7919  # a prime: neighbours go to other accounts, and so to other partitions
_OTHER_SPREAD = 7907  # for counts of accounts that the first one divides


class Output(NamedTuple):
    """What came out: of which record, and whether it is what had to come out."""

    number: int
    right: bool


class Copies:
    """A record comes out as it was: its key is its number, its value the number and bytes that do not compress."""

    def __init__(self, value_bytes: int | None) -> None:
        self._rest = os.urandom(max(0, (value_bytes or VALUE_BYTES) - 8))

    def record(self, number: int) -> tuple[bytes, bytes]:
        """Key and value. Numbers are asked for from 0 on, each once."""
        key = number.to_bytes(8, "big")
        return key, key + self._rest

    def output(self, key: bytes | None, value: bytes | None) -> Output:
        """Which record this comes from. Bytes of another kind raise ValueError."""
        if key is None or value is None or len(key) != 8:
            raise ValueError(f"key {key!r}")
        return Output(int.from_bytes(key, "big"), value[:8] == key and value[8:] == self._rest)


class Balances:
    """A record is a payment; what comes out is the balance of its account after it.

    Args:
        accounts: the first records are of one account each, until every account has had one.
    """

    def __init__(self, value_bytes: int | None, accounts: int = _ACCOUNTS) -> None:
        self._value_bytes = value_bytes or 0
        self._count = accounts
        self._spread = _SPREAD if accounts % _SPREAD else _OTHER_SPREAD
        self._accounts: dict[int, tuple[int, int]] = {}
        self._balances, self._counts = array("q"), array("q")  # after each record

    def record(self, number: int) -> tuple[bytes, bytes]:
        """Key and value. Numbers are asked for from 0 on, each once."""
        account, amount = number * self._spread % self._count, number % 100 - 50
        balance, count = self._accounts.get(account, (0, 0))
        balance, count = self._accounts[account] = balance + amount, count + 1
        self._balances.append(balance)
        self._counts.append(count)
        key, value = payment(account, amount, number)
        missing = self._value_bytes - len(value) - len(b',"note":""')
        return key, value if missing <= 0 else b'%s,"note":"%s"}' % (value[:-1], b"x" * missing)

    def output(self, key: bytes | None, value: bytes | None) -> Output:
        """Which record this comes from. Bytes of another kind raise ValueError."""
        found = orjson.loads(value or b"")
        number = found["id"]
        known = number < len(self._counts)
        right = known and (found["balance"], found["count"]) == (self._balances[number], self._counts[number])
        return Output(number, right and key == found["account"].encode())


def records_of(workload: str, value_bytes: int | None) -> Copies | Balances:
    """The records of a workload.

    Args:
        value_bytes: size of a value; None: 1,024 of a copy, and a payment as it is.
    """
    kinds: dict[str, type[Copies | Balances]] = {COPY: Copies, BALANCE: Balances}
    return kinds[workload](value_bytes)
