"""The books of the demo ``deposits``: is money neither made nor lost, at any time? Pure.

Readers of a topic learn nothing of transactions, but in each partition it puts a control record behind every one
of them. A reader does not get that record, and sees a gap in the offsets: the records of one transaction are those of
a *run* without a gap, one run in each partition at most. Which runs of several partitions belong together is shown
by the ids: both entries of an id were written in one transaction.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import orjson
import pyarrow as pa

from onceflow.protocol.partitioners import key_partitions
from onceflow_workshop.demos.audit import EXAMPLES_MAX, Message, Problems
from onceflow_workshop.demos.deposits_data import CASH, Balance

#: So long after one entry of an id a reader who looks all the time must have seen the other.
HEAL_S = 30.0


class Line(NamedTuple):
    """A record of the ledger: one entry, and the balance of its account after it."""

    partition: int
    offset: int
    id: str
    account: str
    amount: int
    balance: int
    nth: int

    @property
    def place(self) -> str:
        return f"{self.id} of {self.account} at {self.partition}@{self.offset}"


@dataclass
class Books(Problems):
    """What an audit of the ledger found; ``holds`` when nothing is wrong.

    Args:
        prefixes: transactions, and so states that a reader may find, each of which was checked.
        torn: ids of which a reader may find one entry without the other.
        money: the sum of all entries.
    """

    place: str = "ledger"
    prefixes: int = 0
    torn: int = 0
    money: int = 0


def line_of(message: Message) -> Line | None:
    """A record of the ledger; None when it is none."""
    partition, offset, key, value, _ = message
    try:
        found = orjson.loads(value or b"")
        identity, account, amount = found["id"], found["account"], found["amount"]
        line = Line(partition, offset, identity, account, amount, found["balance"], found["count"])
    except (ValueError, TypeError, KeyError):
        return None
    whole = type(amount) is type(line.balance) is type(line.nth) is int and type(identity) is type(account) is str
    return line if whole and len(found) == 5 and account.encode() == key else None


# ---- every committed prefix --------------------------------------------------------------------------


def audit_books(lines: Sequence[Line], *, partitions: int) -> Books:
    """Check the ledger after every one of its transactions.

    After each, all ids that are there have two entries that add up to zero, and no account but cash owes anything.
    Along each account, every entry adds its amount to the balance.

    Args:
        lines: all of the ledger, in offset order per partition.
        partitions: of the topic.
    """
    books = Books(money=sum(line.amount for line in lines))
    _check_pairs(lines, books)
    _check_accounts(lines, books, partitions)
    balances: Counter[str] = Counter()
    for transaction in _in_order(_transactions(lines), books):
        books.prefixes += 1
        for line in transaction:
            balances[line.account] += line.amount
        total = sum(line.amount for line in transaction)
        if total:
            books.note(f"{total} cents out of nothing in the transaction with {transaction[0].place}")
        for account in {line.account for line in transaction}:
            if account != CASH and balances[account] < 0:
                books.note(f"{account} owes {-balances[account]} after the transaction with {transaction[0].place}")
    return books


def _check_pairs(lines: Sequence[Line], books: Books) -> None:
    pairs: defaultdict[str, list[Line]] = defaultdict(list)
    for line in lines:
        pairs[line.id].append(line)
    for pair in pairs.values():
        if len(pair) != 2 or pair[0].amount != -pair[1].amount or pair[0].account == pair[1].account:
            books.torn += len(pair) == 1
            books.note(f"{pair[0].place}: its entries are {[(line.account, line.amount) for line in pair]}")


def _check_accounts(lines: Sequence[Line], books: Books, partitions: int) -> None:
    accounts = sorted({line.account.encode() for line in lines})
    places = dict(zip(accounts, key_partitions(pa.array(accounts, pa.binary()), partitions).tolist(), strict=True))
    running: dict[str, tuple[int, int]] = {}
    for line in lines:
        balance, nth = running.get(line.account, (0, 0))
        if (line.balance, line.nth) != (balance + line.amount, nth + 1):
            books.note(f"{line.place}: balance {line.balance} as number {line.nth}, after {balance} as number {nth}")
        if line.partition != places[line.account.encode()]:
            books.note(f"{line.place}: its account belongs to partition {places[line.account.encode()]}")
        if line.balance < 0 and line.account != CASH:
            books.note(f"{line.place}: the account owes {-line.balance}")
        running[line.account] = (line.balance, line.nth)


def _transactions(lines: Sequence[Line]) -> dict[int, list[list[Line]]]:
    """The runs of every transaction; the key means nothing."""
    runs: list[list[Line]] = []
    open_runs: dict[int, int] = {}
    parents: list[int] = []
    run_of: dict[str, int] = {}  # of the first entry of an id
    for line in lines:
        run = open_runs.get(line.partition)
        if run is None or runs[run][-1].offset + 1 != line.offset:
            run = open_runs[line.partition] = len(runs)
            runs.append([])
            parents.append(run)
        runs[run].append(line)
        first, second = _root(parents, run_of.setdefault(line.id, run)), _root(parents, run)
        parents[max(first, second)] = min(first, second)
    transactions: defaultdict[int, list[list[Line]]] = defaultdict(list)
    for number, run_lines in enumerate(runs):
        transactions[_root(parents, number)].append(run_lines)
    return transactions


def _root(parents: list[int], number: int) -> int:
    while parents[number] != number:
        parents[number] = number = parents[parents[number]]
    return number


def _in_order(transactions: Mapping[int, list[list[Line]]], books: Books) -> Iterator[list[Line]]:
    """The lines of each transaction, in an order of transactions that is right in all partitions."""
    by_partition: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, runs in transactions.items():
        pieces = Counter(run[0].partition for run in runs)
        for partition, count in pieces.items():
            if count > 1:
                # Some of its ids were visible without their other entry while its pieces came one after the other.
                books.torn += 1
                books.note(f"the transaction with {runs[0][0].place} has {count} pieces in partition {partition}")
        for run in runs:
            by_partition[run[0].partition].append((run[0].offset, number))
    later: defaultdict[int, set[int]] = defaultdict(set)
    waits = dict.fromkeys(transactions, 0)
    for found in by_partition.values():
        found.sort()
        for (_, before), (_, after) in itertools.pairwise(found):
            if before != after and after not in later[before]:
                later[before].add(after)
                waits[after] += 1
    ready = sorted(number for number, count in waits.items() if not count)
    while ready:
        number = heapq.heappop(ready)
        yield [line for run in transactions[number] for line in run]
        for after in later[number]:
            waits[after] -= 1
            if not waits[after]:
                heapq.heappush(ready, after)
    stuck = sum(1 for count in waits.values() if count)
    if stuck:
        books.torn += stuck
        books.note(f"{stuck} transactions come in different orders in different partitions")


# ---- what the seed says ------------------------------------------------------------------------------


def own_order(lines: Iterable[Line], owners: Mapping[str, tuple[str, int]]) -> list[str]:
    """Entries of an account's own deposits and transfers that come before an earlier one.

    Args:
        owners: of every id: whose record it was, and which of all.
    """
    latest: dict[str, int] = {}
    problems = []
    for line in lines:
        account, nth = owners.get(line.id, ("", 0))
        if account == line.account:
            if nth < latest.get(account, -1):
                problems.append(f"{line.place} comes after a later one of the same account")
            latest[account] = nth
    return problems


# ---- balances ----------------------------------------------------------------------------------------


@dataclass
class BalanceFindings(Problems):
    """What an audit of a table in one place found; ``holds`` when every row is right.

    Args:
        expected, found: accounts. total: sum of their balances.
        wrong: accounts, or records of the table topic, with something wrong.
    """

    expected: int = 0
    found: int = 0
    total: int = 0


def audit_rows(place: str, expected: Mapping[bytes, object], rows: Iterable[tuple[bytes, bytes]]) -> BalanceFindings:
    """Hold keys and values of a table against what they must be.

    Args:
        place: for messages.
        expected: a `Balance`, or the dict that a row must be, by key.
        rows: of all partitions; each key must be there once.
    """
    findings = BalanceFindings(place, expected=len(expected))
    wanted = {key: asdict(row) if isinstance(row, Balance) else row for key, row in expected.items()}
    seen: set[bytes] = set()
    for key, value in rows:
        findings.found += 1
        row = _decoded(value)
        findings.total += row.get("balance", 0)
        if key not in wanted:
            findings.note(f"{_shown(key)} is no account: {value!r}")
        elif key in seen:
            findings.note(f"{_shown(key)} is there twice: {value!r}")
        elif row != wanted[key]:
            findings.note(f"{_shown(key)} is {value!r}, must be {json.dumps(wanted[key])}")
        seen.add(key)
    for key in wanted.keys() - seen:
        findings.note(f"{_shown(key)} is missing, must be {json.dumps(wanted[key])}")
    return findings


def audit_table(
    topic: str,
    expected: Mapping[bytes, Balance],
    lines: Iterable[Line],
    messages: Iterable[Message],
    *,
    partitions: int,
) -> BalanceFindings:
    """Hold a table topic against what it must be: its rows, and every record that led to them.

    A reader may look at any time, so each record must be a balance that the account once had, later than the one of
    the record before; and where clients look for the key.

    Args:
        expected: the last balances, as the seed says.
        lines: of the ledger, which has the balances between.
        messages: in offset order per partition; compaction may have removed some.
        partitions: of the topic.
    """
    had: defaultdict[bytes, list[int]] = defaultdict(list)
    for line in lines:
        had[line.account.encode()].append(line.balance)
    keys = sorted(expected)
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
        if key not in places:
            continue  # the audit of the rows reports it
        if message.partition != places[key]:
            problems.append(f"{where}: its key belongs to partition {places[key]}")
        problem = _wrong_balance(value, had[key], counts.get(key, 0))
        if problem:
            problems.append(f"{where}: {value!r} {problem}")
        else:
            counts[key] = _decoded(value)["count"]
    findings = audit_rows(topic, expected, ((key, value) for (_, key), value in rows.items()))
    for problem in problems:
        findings.note(problem)
    return findings


def _wrong_balance(value: bytes, had: Sequence[int], latest: int) -> str:
    """What is wrong with a record of the table; nothing: it is a balance that the account once had, and a later one.

    Args:
        had: the balances of the account, one after each of its movements. latest: count of movements so far.
    """
    count = _decoded(value).get("count", 0)
    balance = had[count - 1] if 0 < count <= len(had) else None
    if _decoded(value) != {"balance": balance, "count": count}:
        return "was never its balance"
    return "comes after a later balance" if count <= latest else ""


def _decoded(value: bytes) -> dict[str, int]:
    """A row whose values are whole numbers; an empty one when it is something else."""
    try:
        row = json.loads(value)
    except ValueError:
        return {}
    whole = isinstance(row, dict) and all(type(number) is int for number in row.values())
    return row if whole else {}


def _shown(key: bytes) -> str:
    return key.decode(errors="replace")


# ---- a reader who looks all the time -----------------------------------------------------------------


class Looks:
    """What a read_committed reader of the ledger sees who looks again and again while it is written.

    A transaction becomes visible in one partition after the other, so an entry may be there a moment before its
    counterpart. That must heal; and what is whole adds up to zero at every look.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.looks = 0
        self.halves_seen = 0
        self.problems: list[str] = []
        self.torn = 0
        self._clock = clock
        self._total = 0
        self._halves: dict[str, tuple[Line, float]] = {}
        self._whole: set[str] = set()

    def see(self, messages: Iterable[Message]) -> None:
        """One look: the records that are new since the last one."""
        now = self._clock()
        self.looks += 1
        for message in messages:
            line = line_of(message)
            if line is None or line.id in self._whole:
                where = f"{message.partition}@{message.offset}"
                self._note(f"no entry, or one too many at {where}: {message.value!r}")
            elif line.id in self._halves:
                self._total += self._halves.pop(line.id)[0].amount + line.amount
                self._whole.add(line.id)
            else:
                self._halves[line.id] = (line, now)
        self.halves_seen = max(self.halves_seen, len(self._halves))
        if self._total:
            self._note(f"{self._total} cents too much at look {self.looks}")
            self._total = 0
        overdue = []
        for line, since in self._halves.values():  # the oldest first
            if now - since <= HEAL_S:
                break
            overdue.append(line)
        self._tear(overdue, f"is alone for more than {HEAL_S:g} s")

    def end(self) -> None:
        """All is read, and nothing more will come."""
        self._tear([line for line, _ in self._halves.values()], "is alone at the end")

    @property
    def ids(self) -> int:
        """How many were seen with both entries."""
        return len(self._whole)

    def _tear(self, lines: Iterable[Line], how: str) -> None:
        for line in lines:
            del self._halves[line.id]
            self.torn += 1
            self._note(f"{line.place} {how}")

    def _note(self, problem: str) -> None:
        if len(self.problems) < EXAMPLES_MAX:
            self.problems.append(f"a reader of the ledger: {problem}")
