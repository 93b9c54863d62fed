"""Accounts, deposits and transfers from a seed, and what must come out of the two flows for them. Pure.

What is expected is computed here, from the seed, and never from what a topic holds: an audit that asked the
flows' own output what to expect would find nothing missing.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from onceflow_workshop.demos.audit import Headers, Message, onceflow_headers

INVALID_SHARE = 0.0105
TRANSFER_SHARE = 0.5
ABSURD_TIMES_SHARE = 0.002
HEADERS_SHARE = 0.01
ACCOUNTS = 1_000
CASH = "cash"
LIMIT_MAX = 500_000
#: In 1970, and in 9999. (0 would mean "now" to the producer.)
ABSURD_TIMES_MS = (1, 253_402_300_799_000)

REJECTED = "Rejected"
#: What can be wrong: the class and the text of the cause in the dead letter (None: the text is not the service's own).
CAUSES = {
    "no JSON": ("JSONDecodeError", None),
    "no object": ("TypeError", None),
    "no value": ("ValueError", "no value"),
    "huge value": ("ValueError", None),
    "missing field": ("KeyError", None),
    "wrong type": ("TypeError", "amount is no int"),
    "unknown kind": ("KeyError", None),
    "no key": ("ValueError", "the record has no key: state is kept by key"),
    "key not text": ("UnicodeDecodeError", None),
    "other key": (REJECTED, "not the account of the key"),
    "cash": (REJECTED, "not the account of the key"),
    "already open": (REJECTED, "already open"),
    "unknown account": (REJECTED, "unknown account"),
    "double id": (REJECTED, "double id"),
    "not positive": (REJECTED, "not positive"),
    "over the limit": (REJECTED, "over the limit"),
    "no receiver": (REJECTED, "no receiver"),
    "insufficient funds": (REJECTED, "insufficient funds"),
}
_NAMES = tuple(CAUSES)
_HEADERS = (("trace", b"\x00\xff"), ("trace", None), ("", b""))
_HUGE_BYTES = (200_000, 600_000)
# A few are enough: a topic of nothing but these would take a long time to read.
_HUGE_KEPT = 0.3
_ID = re.compile(rb"op-\d{9}")


class Operation(NamedTuple):
    """One generated record.

    Args:
        kind: open, deposit or transfer. amount: the limit, if it opens an account.
        cause: the name in ``CAUSES`` of why it must be rejected; None for a valid one.
        funds: of the account after it.
    """

    id: str
    kind: str
    account: str
    to: str | None
    amount: int
    key: bytes | None
    value: bytes | None
    cause: str | None = None
    headers: Headers = ()
    timestamp_ms: int | None = None
    funds: int = 0


class Entry(NamedTuple):
    """Half of what a deposit or transfer is in the ledger."""

    id: str
    account: str
    amount: int


@dataclass(frozen=True)
class Balance:
    """Of one account: cents, and how many entries they come from."""

    balance: int
    count: int


def generate(seed: int, count: int) -> Iterator[Operation]:
    """``count`` records, about 1 % of them invalid; the same ones for the same seed."""
    rng = random.Random(f"deposits-{seed}")
    chance = rng.random  # looked up once: this loop makes several hundred thousand records
    books: dict[str, Operation] = {}  # the latest valid record of every account
    limits: dict[str, int] = {}
    for number in range(count):
        identity = f"op-{number:09d}"
        account = f"acc-{int(chance() * ACCOUNTS):05d}"
        latest = books.get(account)
        timestamp_ms = rng.choice(ABSURD_TIMES_MS) if chance() < ABSURD_TIMES_SHARE else None
        if latest is None:
            limit = limits[account] = 1_000 * (1 + int(chance() * (LIMIT_MAX // 1_000)))
            made = operation(identity, "open", account, None, limit)
        else:
            kind = "transfer" if chance() < TRANSFER_SHARE and latest.funds else "deposit"
            # Less comes in at a time than may go out: accounts are short of funds now and then.
            most = limits[account] // 2 if kind == "deposit" else min(limits[account], latest.funds)
            amount, to = 1 + int(chance() * most), None
            funds = latest.funds + amount
            if kind == "transfer":
                to, funds = _another(account, chance()), latest.funds - amount
            made = operation(identity, kind, account, to, amount, odd=chance())._replace(funds=funds)
            if chance() < INVALID_SHARE:
                bad = _invalid(made, latest, limits[account], rng)
                if bad.id == latest.id:
                    books[account] = latest._replace(kind="open")  # it is sent again only once
                yield bad._replace(timestamp_ms=timestamp_ms)
                continue
        books[account] = made
        yield made._replace(timestamp_ms=timestamp_ms, headers=_HEADERS if chance() < HEADERS_SHARE else ())


def operation(identity: str, kind: str, account: str, to: str | None, amount: int, *, odd: float = 1.0) -> Operation:
    """A record as it should be.

    Args:
        odd: below 0.01 it is written in a way that parsers may read differently, and must not.
    """
    receiver = "" if to is None else f', "to": "{to}"'
    name = "limit" if kind == "open" else "amount"
    before, after = ("", "") if odd >= 0.01 else _ODD[int(odd * 100 * len(_ODD))]
    fields = (
        f'"kind": "{kind}", "id": "{identity}", "account": "{account}"{receiver}{before}, "{name}": {amount}{after}'
    )
    return Operation(identity, kind, account, to, amount, account.encode(), f"{{{fields}}}".encode())


# Before and behind the amount. The last of two fields of one name counts; others are nobody's business.
_ODD = (
    (', "amount": 7', ""),
    (', "amount": {"cents": [7]}', ""),
    ("", ', "Amount": 7, "note": "\\u00e4\\"\\ud83d\\udcb6"'),
    ("", ', "note": {"amount": 7, "more": [null, 1.5e300, 18446744073709551616]}'),
    ("\n\t", "\r\n "),
)


def identify(value: bytes | None, headers: Headers = ()) -> str | None:
    """The id of a record: every value has exactly one, also when it is no JSON; without a value a header has it."""
    found = _ID.search(dict(headers).get("id") or b"" if value is None else value)
    return None if found is None else found[0].decode()


def validated(each: Operation) -> bytes:
    """What goes on of a valid record: the fields that the service has checked."""
    fields: dict[str, object] = {"kind": each.kind, "id": each.id, "account": each.account}
    if each.to is not None:
        fields["to"] = each.to
    fields["limit" if each.kind == "open" else "amount"] = each.amount
    return json.dumps(fields, separators=(",", ":")).encode()


def entries(operations: Iterable[Operation]) -> Iterator[Entry]:
    """Two for every deposit and transfer that is valid."""
    for each in operations:
        if each.cause is None and each.kind != "open":
            yield Entry(each.id, CASH if each.to is None else each.account, -each.amount)
            yield Entry(each.id, each.account if each.to is None else each.to, each.amount)


def final_balances(operations: Iterable[Operation]) -> dict[bytes, Balance]:
    """By account, cash among them: sum and number of its entries."""
    balances: dict[bytes, Balance] = {}
    for entry in entries(operations):
        before = balances.get(entry.account.encode(), Balance(0, 0))
        balances[entry.account.encode()] = Balance(before.balance + entry.amount, before.count + 1)
    return balances


def ids(operations: Iterable[Operation]) -> Iterator[tuple[bytes, bytes]]:
    """Account and id of all that must not be accepted once more."""
    for each in operations:
        if each.cause is None and each.kind != "open":
            yield each.account.encode(), each.id.encode()


def wrong_dead_letter(each: Operation, dead_letter: Message, origin: Mapping[str, str]) -> str:
    """What is wrong with the headers of a dead letter; nothing: they tell the cause, and where the record was.

    Args:
        origin: headers that say so.
    """
    headers = onceflow_headers(dead_letter)
    kind, text = CAUSES[each.cause or ""]
    must = {**origin, "onceflow.error.class": kind, "onceflow.attempt": "1"}
    if text is not None:
        must["onceflow.error.message"] = text
    for name, value in must.items():
        if headers.get(name) != value:
            return f"{name} is {headers.get(name)!r}, must be {value!r}"
    for name in ("onceflow.error.message", "onceflow.error.stack"):
        if not headers.get(name):
            return f"{name} is missing"
    own = tuple(header for header in dead_letter.headers if header[0] not in headers)
    return "" if own == each.headers else f"its own headers are {own!r}, must be {each.headers!r}"


def final_accounts(operations: Iterable[Operation]) -> dict[bytes, dict[str, int]]:
    """By account that was opened: what the validating flow knows of it."""
    accounts: dict[bytes, dict[str, int]] = {}
    for each in operations:
        if each.cause is None:
            limit = each.amount if each.kind == "open" else accounts[each.account.encode()]["limit"]
            accounts[each.account.encode()] = {"limit": limit, "funds": each.funds}
    return accounts


def _another(account: str, chance: float) -> str:
    """Another account than this one, open or not."""
    number = int(chance * (ACCOUNTS - 1))
    return f"acc-{number + (number >= int(account[4:])):05d}"


def _invalid(made: Operation, latest: Operation, limit: int, rng: random.Random) -> Operation:
    """The same record with something wrong.

    Args:
        made: valid. latest: the valid one before it, of the same account. limit: of the account.
    """
    cause = rng.choice(_NAMES)
    whole, identity, account = made.value or b"", made.id, made.account
    if cause == "double id" and latest.kind != "open":
        # Word for word, or for another amount.
        again = latest.value if rng.random() < 0.5 else operation(*latest[:4], latest.amount + 1).value
        return latest._replace(value=again, cause=cause)
    if cause == "insufficient funds" and latest.funds < limit:
        to = _another(account, rng.random())
        amount = rng.randint(latest.funds + 1, limit)
        return operation(identity, "transfer", account, to, amount)._replace(cause=cause)
    if cause == "huge value" and rng.random() < _HUGE_KEPT:
        note = b'{"id": "%s", "note": "%s", ' % (identity.encode(), b"x" * rng.randint(*_HUGE_BYTES))
        return made._replace(value=note + whole[1:], cause=cause)
    if cause == "no value":
        return made._replace(value=None, headers=(("id", identity.encode()),), cause=cause)
    if cause in ("no key", "key not text"):
        return made._replace(key=None if cause == "no key" else b"acc-\xff\xfe" + account.encode(), cause=cause)
    if cause == "other key":
        return made._replace(key=_another(account, rng.random()).encode(), cause=cause)
    if cause == "cash":
        return operation(identity, "open", CASH, None, limit)._replace(cause=cause)
    if cause == "unknown account":
        stranger = f"acc-9{int(account[4:]):04d}"
        return operation(identity, "deposit", stranger, None, made.amount)._replace(cause=cause)
    if cause == "already open":
        return operation(identity, "open", account, None, limit)._replace(cause=cause)
    if cause == "no receiver":
        to = rng.choice([account, CASH, "", "acc-00001\\u0000", "x" * 400])
        return operation(identity, "transfer", account, to, made.amount)._replace(cause=cause)
    if cause == "over the limit":
        amount = rng.choice([limit + 1, 2**63, 2**64 - 1, 2**64, 10**300])
        return operation(identity, "deposit", account, None, amount)._replace(cause=cause)
    if cause == "not positive":
        return operation(identity, made.kind, account, made.to, rng.choice([0, -made.amount, -(10**30)]))._replace(
            cause=cause
        )
    return _malformed(cause, operation(identity, "deposit", account, None, made.amount), rng)


def _malformed(cause: str, deposit: Operation, rng: random.Random) -> Operation:
    """A deposit whose value is damaged: one of its fields, or the JSON itself."""
    whole = deposit.value or b""
    changed = {
        "missing field": (rng.choice([rb'"kind": [^,]+, ', rb', "account": [^,]+', rb', "amount": \d+']), b""),
        "unknown kind": (b'"deposit"', rng.choice([b'"gift"', b'""', b'"Open"'])),
        "wrong type": (rb"\d+}", rng.choice([b'"a lot"}', b"1.5}", b"1e3}", b"true}", b"null}", b"[1]}"])),
        "no object": (rb"(?s).+", rng.choice([b'["%s"]', b'"%s"', b'[{"id": "%s"}]']) % deposit.id.encode()),
    }.get(cause)
    if changed is not None:
        return deposit._replace(value=re.sub(changed[0], changed[1], whole, count=1), cause=cause)
    # Cut off behind the id, text, bytes that are not even UTF-8, or too deep; also what could not be had above.
    broken = [whole[: rng.randint(45, len(whole) - 1)], b"deposit " + deposit.id.encode(), b"\xff\xfe" + whole]
    return deposit._replace(
        value=rng.choice([*broken, whole + whole, b"[" * 950 + deposit.id.encode()]), cause="no JSON"
    )
