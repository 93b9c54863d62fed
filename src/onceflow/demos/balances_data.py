"""What balances and statements must come out for the generated deposits, and what is wrong with those that did. Pure.

As everywhere in the demos, what is expected comes from the seed, never from what a topic or a store holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

import pyarrow as pa

from onceflow.demos.audit import EXAMPLES_MAX, Expected, Message
from onceflow.demos.deposits_data import Deposit
from onceflow.wire.partitioners import key_partitions


@dataclass(frozen=True)
class Balance:
    """Of one account: cents, and how many deposits they come from."""

    balance: int
    count: int


@dataclass
class BalanceFindings:
    """What an audit of the balances in one place found; ``holds`` when every one is right.

    Args:
        expected, found: accounts. expected_total, total: sums of their balances.
        wrong: accounts, or records of the table topic, with something wrong.
    """

    place: str
    expected: int = 0
    found: int = 0
    expected_total: int = 0
    total: int = 0
    wrong: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.wrong

    def note(self, example: str) -> None:
        self.wrong += 1
        if self.wrong <= EXAMPLES_MAX:
            self.examples.append(f"{self.place}: {example}")


def expected_balances(deposits: Iterable[Deposit]) -> dict[bytes, Balance]:
    """By account: sum and number of its valid deposits."""
    balances: dict[bytes, Balance] = {}
    for deposit in deposits:
        if deposit.cause is None:
            before = balances.get(deposit.key, Balance(0, 0))
            balances[deposit.key] = Balance(before.balance + deposit.amount, before.count + 1)
    return balances


def expected_statements(deposits: Iterable[Deposit]) -> Iterator[Expected]:
    """One per valid deposit, with the account's balance after it."""
    running: dict[str, tuple[int, int]] = {}
    for deposit in deposits:
        if deposit.cause is None:
            balance, count = running.get(deposit.account, (0, 0))
            balance, count = running[deposit.account] = (balance + deposit.amount, count + 1)
            value = (
                f'{{"id":"{deposit.id}","account":"{deposit.account}","amount":{deposit.amount},'
                f'"balance":{balance},"count":{count}}}'
            )
            yield Expected(deposit.id, deposit.key, value.encode())


def audit_rows(place: str, expected: Mapping[bytes, Balance], rows: Iterable[tuple[bytes, bytes]]) -> BalanceFindings:
    """Hold keys and values of a table against what they must be.

    Args:
        place: for messages.
        rows: of all partitions; each key must be there once.
    """
    findings = BalanceFindings(place, expected=len(expected), expected_total=_total(expected.values()))
    seen: set[bytes] = set()
    for key, value in rows:
        findings.found += 1
        balance = decoded(value)
        findings.total += 0 if balance is None else balance.balance
        if key not in expected:
            findings.note(f"{_shown(key)} is no account: {value!r}")
        elif key in seen:
            findings.note(f"{_shown(key)} is there twice: {value!r}")
        elif balance != expected[key]:
            findings.note(f"{_shown(key)} is {value!r}, must be {_json(expected[key])}")
        seen.add(key)
    for key in expected.keys() - seen:
        findings.note(f"{_shown(key)} is missing, must be {_json(expected[key])}")
    return findings


def audit_table(
    topic: str, deposits: Iterable[Deposit], messages: Iterable[Message], *, partitions: int
) -> BalanceFindings:
    """Hold a table topic against what it must be: its rows, and every record that led to them.

    A reader may look at any time, so each record must be a balance that the account once had, later than the one of
    the record before; and where clients look for the key.

    Args:
        messages: in offset order per partition; compaction may have removed some.
        partitions: of the topic.
    """
    running: dict[bytes, list[int]] = {}
    for statement in expected_statements(deposits):
        running.setdefault(statement.key, []).append(json.loads(statement.value)["balance"])
    keys = sorted(running)
    places = dict(zip(keys, key_partitions(pa.array(keys, pa.binary()), partitions).tolist(), strict=True))
    rows: dict[tuple[int, bytes], bytes] = {}
    counts: dict[bytes, int] = {}
    problems: list[str] = []
    for message in messages:
        key, value = message.key or b"", message.value
        where = f"{_shown(key)} at {topic}-{message.partition}@{message.offset}"
        if value is None:
            problems.append(f"{where}: deleted")
            rows.pop((message.partition, key), None)
            continue
        rows[message.partition, key] = value
        if key not in running:
            continue  # said of the row
        if message.partition != places[key]:
            problems.append(f"{where}: its key belongs to partition {places[key]}")
        balance = decoded(value)
        if balance is None or not 0 < balance.count <= len(running[key]):
            problems.append(f"{where}: {value!r} was never its balance")
            continue
        if running[key][balance.count - 1] != balance.balance:
            problems.append(f"{where}: {value!r} was never its balance")
        if balance.count <= counts.get(key, 0):
            problems.append(f"{where}: {value!r} comes after a later balance")
        counts[key] = balance.count
    final = {key: Balance(balances[-1], len(balances)) for key, balances in running.items()}
    findings = audit_rows(topic, final, ((key, value) for (_, key), value in rows.items()))
    for problem in problems:
        findings.note(problem)
    return findings


def decoded(value: bytes) -> Balance | None:
    """The balance in a row of the table; None when it is none."""
    try:
        fields = json.loads(value)
        balance = Balance(**fields)
    except (ValueError, TypeError):
        return None
    return balance if type(balance.balance) is int and type(balance.count) is int else None


def _total(balances: Iterable[Balance]) -> int:
    return sum(balance.balance for balance in balances)


def _json(balance: Balance) -> str:
    return json.dumps(asdict(balance))


def _shown(key: bytes) -> str:
    return key.decode(errors="replace")
