"""The books of the demo `deposits`: that their auditor sees money made, lost, or half moved."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable

import pyarrow as pa
import pytest

from onceflow.protocol.partitioners import key_partitions
from onceflow_workshop.demos import deposits_data as data
from onceflow_workshop.demos import ledger
from onceflow_workshop.demos.audit import Message
from onceflow_workshop.demos.deposits_data import Balance
from onceflow_workshop.demos.ledger import Line

SEED = 42
COUNT = 3_000
LEDGER, TABLE = 6, 3
BATCH = 250
Lines = list[Line]


def operations() -> list[data.Operation]:
    return list(data.generate(SEED, COUNT))


def places(partitions: int) -> dict[str, int]:
    accounts = sorted({entry.account for entry in data.entries(operations())})
    found = key_partitions(pa.array([account.encode() for account in accounts], pa.binary()), partitions)
    return dict(zip(accounts, found.tolist(), strict=True))


def book(batches: list[list[data.Entry]]) -> Lines:
    """A flawless ledger of these transactions, partition by partition, as a consumer delivers it."""
    where = places(LEDGER)
    running: dict[str, Balance] = defaultdict(lambda: Balance(0, 0))
    ends: Counter[int] = Counter()
    lines = []
    for batch in batches:
        for entry in batch:
            place, before = where[entry.account], running[entry.account]
            after = running[entry.account] = Balance(before.balance + entry.amount, before.count + 1)
            lines.append(Line(place, ends[place], *entry, after.balance, after.count))
            ends[place] += 1
        for place in {where[entry.account] for entry in batch}:
            ends[place] += 1  # the control record
    return sorted(lines)


def batches() -> list[list[data.Entry]]:
    entries = list(data.entries(operations()))
    return [entries[first : first + BATCH] for first in range(0, len(entries), BATCH)]


def audit(lines: Lines) -> ledger.Books:
    return ledger.audit_books(lines, partitions=LEDGER)


def message(line: Line, **changed: object) -> Message:
    names = ("id", "account", "amount", "balance", "count")
    value = dict(zip(names, line[2:], strict=True)) | changed
    return Message(line.partition, line.offset, line.account.encode(), json.dumps(value).encode())


# ---- every committed prefix --------------------------------------------------------------------------


def test_right_books_pass_at_every_transaction() -> None:
    books = audit(book(batches()))
    assert books.holds
    assert books.examples == []
    assert books.prefixes == len(batches()) > 5
    assert (books.torn, books.money) == (0, 0)


def test_gaps_of_aborted_transactions_make_no_difference() -> None:
    """Their records, and control records, are offsets that a reader does not see."""
    rng = random.Random(SEED)
    lines, moved = [], Counter[int]()
    before: dict[int, int] = {}
    for line in book(batches()):
        if before.get(line.partition, line.offset) + 1 != line.offset:
            moved[line.partition] += rng.choice([0, 1, 300])
        before[line.partition] = line.offset
        lines.append(line._replace(offset=line.offset + moved[line.partition]))
    assert audit(lines).holds
    assert audit(lines).prefixes == len(batches())


def test_the_order_of_partitions_makes_no_difference() -> None:
    lines = book(batches())
    mixed = sorted(lines, key=lambda line: (line.offset, -line.partition))
    assert audit(mixed).holds
    assert audit(mixed).prefixes == len(batches())


def test_small_transactions_with_nothing_in_common_are_looked_at_one_by_one() -> None:
    transfers = [each for each in operations() if each.to is not None and each.cause is None]
    where = places(LEDGER)
    first = transfers[0]
    apart = {where[first.account], where[first.to or ""]}
    second = next(each for each in transfers if not {where[each.account], where[each.to or ""]} & apart)
    entries = [data.Entry("op-1", "cash", -(10**9)), data.Entry("op-1", first.account, 10**9)]
    entries += [data.Entry("op-2", "cash", -(10**9)), data.Entry("op-2", second.account, 10**9)]
    books = audit(book([entries, list(data.entries([first, second]))]))
    assert books.holds
    assert books.prefixes == 3


def _lose_half(lines: Lines) -> None:
    """The last entry of an account, so that only the pair tells."""
    latest = {line.account: index for index, line in enumerate(lines)}
    del lines[latest["cash"]]


def _more(lines: Lines) -> None:
    latest = max(index for index, line in enumerate(lines) if line.account != "cash")
    lines[latest] = lines[latest]._replace(amount=lines[latest].amount + 1, balance=lines[latest].balance + 1)


def _again(lines: Lines) -> None:
    last = lines[-1]
    lines.append(last._replace(offset=last.offset + 1, balance=last.balance + last.amount, nth=last.nth + 1))


def _wrong_balance(lines: Lines) -> None:
    lines[17] = lines[17]._replace(balance=lines[17].balance + 1)


def _wrong_count(lines: Lines) -> None:
    lines[17] = lines[17]._replace(nth=lines[17].nth + 1)


def _elsewhere(lines: Lines) -> None:
    lines[17] = lines[17]._replace(partition=(lines[17].partition + 1) % LEDGER)


def _swapped(lines: Lines) -> None:
    """Two entries of an account in each other's place."""
    at = [index for index, line in enumerate(lines) if line.account == "cash"][:2]
    first, second = (lines[index] for index in at)
    lines[at[0]] = second._replace(offset=first.offset)
    lines[at[1]] = first._replace(offset=second.offset)


@pytest.mark.parametrize("damage", [_lose_half, _more, _again, _wrong_balance, _wrong_count, _elsewhere, _swapped])
def test_damage_is_seen(damage: Callable[[Lines], None]) -> None:
    lines = book(batches())
    damage(lines)
    books = audit(lines)
    assert not books.holds
    assert books.examples[0].startswith("ledger: ")


def test_a_movement_that_is_torn_over_two_transactions_is_seen() -> None:
    """At the end everything adds up; only the state between the two was wrong."""
    torn = batches()
    half = torn[3].pop()
    torn[4].append(half)
    books = audit(book(torn))
    assert books.money == 0
    assert books.torn > 0
    assert any("pieces in partition" in each for each in books.examples), books.examples
    # The totals of the two, which cannot be told apart any more, are right.
    assert not any("out of nothing" in example for example in books.examples)


def test_money_that_comes_and_goes_is_seen() -> None:
    """Every account's balance and the sum at the end are right; the pairs and one prefix are not."""
    wrong = batches()
    one, two = wrong[2][-1], wrong[5][-1]
    wrong[2][-1] = one._replace(amount=one.amount + 5)
    wrong[5][-1] = two._replace(amount=two.amount - 5)
    books = audit(book(wrong))
    assert books.money == 0
    assert any("5 cents out of nothing" in example for example in books.examples)
    assert any("-5 cents out of nothing" in example for example in books.examples)


def test_transactions_in_different_orders_are_seen() -> None:
    """In one partition the runs of two transactions have changed places."""
    deposits = [each for each in data.entries(operations()) if each.amount > 0][:2]
    where = places(LEDGER)
    account = next(each.account for each in data.entries(operations()) if where[each.account] != where["cash"])
    entries = [[data.Entry(each.id, "cash", -7), data.Entry(each.id, account, 7)] for each in deposits]
    assert audit(book(entries)).holds
    lines = book(entries)
    at = [index for index, line in enumerate(lines) if line.account == account]
    first, second = (lines[index] for index in at)
    lines[at[0]], lines[at[1]] = first._replace(id=second.id), second._replace(id=first.id)
    books = audit(lines)
    assert books.torn == 2
    assert any("different orders" in example for example in books.examples)


def test_an_account_that_owes_is_seen() -> None:
    account, other = list(places(LEDGER))[:2]
    entries = [data.Entry("op-1", account, -5), data.Entry("op-1", other, 5)]
    books = audit(book([entries]))
    assert not books.holds
    assert any(f"{account} owes 5" in example for example in books.examples)


def test_an_empty_ledger_has_no_prefixes() -> None:
    books = audit([])
    assert (books.prefixes, books.money, books.holds) == (0, 0, True)


def test_the_order_of_an_accounts_own_records_is_looked_at() -> None:
    owners = {each.id: (each.account, nth) for nth, each in enumerate(operations()) if each.cause is None}
    lines = book(batches())
    assert ledger.own_order(lines, owners) == []
    own: dict[str, list[int]] = defaultdict(list)
    for index, line in enumerate(lines):
        if owners[line.id][0] == line.account:
            own[line.account].append(index)
    first, second, *_ = next(found for found in own.values() if len(found) > 1)
    lines[first], lines[second] = lines[second], lines[first]
    assert len(ledger.own_order(lines, owners)) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"amount": 1.0},
        {"amount": "1"},
        {"balance": True},
        {"id": 7},
        {"id": None},
        {"account": "acc-99999"},
        {"account": ["acc-00001"]},
        {"more": 1},
    ],
)
def test_what_is_no_line_is_seen(changed: dict[str, object]) -> None:
    line = book(batches())[17]
    assert ledger.line_of(message(line)) == line
    assert ledger.line_of(message(line, **changed)) is None


@pytest.mark.parametrize("value", [None, b"", b"7", b"[1, 2, 3, 4, 5]", b'{"id": "op-1"}', b"\xff"])
def test_what_is_no_json_object_is_no_line(value: bytes | None) -> None:
    assert ledger.line_of(Message(0, 0, b"cash", value)) is None


# ---- a reader who looks all the time -----------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def looks(clock: Clock) -> ledger.Looks:
    return ledger.Looks(clock)


def pairs() -> list[tuple[Message, Message]]:
    by_id: dict[str, list[Line]] = defaultdict(list)
    for line in book(batches()):
        by_id[line.id].append(line)
    return [(message(one), message(two)) for one, two in by_id.values()]


def test_a_half_that_heals_is_right(looks: ledger.Looks, clock: Clock) -> None:
    for one, two in pairs():
        looks.see([one])
        clock.now += ledger.HEAL_S
        looks.see([two])
    looks.end()
    assert (looks.torn, looks.problems) == (0, [])
    assert looks.looks == 2 * looks.ids == 2 * len(pairs())
    assert looks.halves_seen == 1


def test_a_half_that_stays_is_torn(looks: ledger.Looks, clock: Clock) -> None:
    (one, two), *others = pairs()
    looks.see([one])
    clock.now += ledger.HEAL_S + 0.1
    looks.see([each for pair in others for each in pair])
    assert looks.torn == 1
    assert "alone for more than" in looks.problems[0]
    looks.see([two])
    looks.end()
    assert looks.torn == 2  # the other half came too late, and is alone as well


def test_a_half_at_the_end_is_torn(looks: ledger.Looks) -> None:
    (one, _), *others = pairs()
    looks.see([one, *(each for pair in others for each in pair)])
    assert looks.torn == 0
    looks.end()
    assert looks.torn == 1


def test_a_third_entry_is_seen(looks: ledger.Looks) -> None:
    (one, two), *_ = pairs()
    looks.see([one, two])
    assert looks.problems == []
    looks.see([two._replace(offset=10_000)])
    assert "one too many" in looks.problems[0]


def test_what_is_no_entry_is_seen_by_the_reader(looks: ledger.Looks) -> None:
    looks.see([Message(0, 7, b"cash", None)])
    assert "0@7" in looks.problems[0]


def test_money_that_is_made_is_seen_at_the_look(looks: ledger.Looks) -> None:
    (one, two), *_ = pairs()
    line = ledger.line_of(two)
    assert line is not None
    looks.see([one, message(line, amount=line.amount + 3)])
    assert "3 cents too much at look 1" in looks.problems[0]


# ---- tables ------------------------------------------------------------------------------------------


def final() -> dict[bytes, Balance]:
    return data.final_balances(operations())


def value_of(balance: Balance) -> bytes:
    return f'{{"balance":{balance.balance},"count":{balance.count}}}'.encode()


def rows() -> list[tuple[bytes, bytes]]:
    return [(key, value_of(balance)) for key, balance in final().items()]


def audit_rows(found: list[tuple[bytes, bytes]]) -> ledger.BalanceFindings:
    return ledger.audit_rows("store", final(), found)


def test_right_rows_pass() -> None:
    findings = audit_rows(rows())
    assert findings.holds
    assert findings.found == findings.expected == len(rows())
    assert findings.total == 0


@pytest.mark.parametrize(
    "value",
    [
        b'{"balance":1,"count":1}',
        b'{"balance":1.0,"count":1}',
        b'{"balance":1}',
        b'{"balance":1,"count":1,"more":1}',
        b"[1, 2]",
        b"7",
        b"\xff",
        b"",
    ],
)
def test_a_wrong_row_is_seen(value: bytes) -> None:
    found = rows()
    found[3] = (found[3][0], value)
    findings = audit_rows(found)
    assert findings.wrong == 1
    assert found[3][0].decode() in findings.examples[0]


def test_a_balance_that_is_off_by_a_cent_is_seen() -> None:
    found = rows()
    balance = final()[found[3][0]]
    found[3] = (found[3][0], value_of(Balance(balance.balance + 1, balance.count)))
    findings = audit_rows(found)
    assert findings.wrong == 1
    assert findings.total == 1


def test_missing_doubled_and_foreign_accounts_are_seen() -> None:
    assert audit_rows(rows()[1:]).wrong == 1
    assert audit_rows([*rows(), rows()[0]]).wrong == 1
    assert audit_rows([*rows(), (b"acc-99999", rows()[0][1])]).wrong == 1
    assert audit_rows([]).wrong == len(rows())


def table() -> list[Message]:
    """The table topic of a flow with these batches."""
    where = places(TABLE)
    running: dict[str, Balance] = defaultdict(lambda: Balance(0, 0))
    offsets: Counter[int] = Counter()
    messages = []
    for batch in batches():
        for entry in batch:
            before = running[entry.account]
            running[entry.account] = Balance(before.balance + entry.amount, before.count + 1)
        for account in dict.fromkeys(entry.account for entry in batch):
            place = where[account]
            messages.append(Message(place, offsets[place], account.encode(), value_of(running[account])))
            offsets[place] += 1
    return messages


def audit_table(messages: list[Message]) -> ledger.BalanceFindings:
    return ledger.audit_table("balances", final(), book(batches()), messages, partitions=TABLE)


def _twice(messages: list[Message]) -> tuple[int, int]:
    """Indexes of two records of a key."""
    second = max(n for n, found in enumerate(messages) if found.key in {each.key for each in messages[:n]})
    first = max(n for n, found in enumerate(messages[:second]) if found.key == messages[second].key)
    return first, second


def test_a_right_table_passes_also_when_compacted() -> None:
    messages = table()
    findings = audit_table(messages)
    assert findings.holds
    assert findings.examples == []
    assert findings.found == findings.expected == len(final())
    last = {each.key: each for each in messages}
    assert audit_table(list(last.values())).holds


def _wrong_last(messages: list[Message]) -> None:
    messages[-1] = messages[-1]._replace(value=b'{"balance":5,"count":1}')


def _wrong_between(messages: list[Message]) -> None:
    first, _ = _twice(messages)
    balance = Balance(**json.loads(messages[first].value or b""))
    messages[first] = messages[first]._replace(value=value_of(Balance(balance.balance + 1, balance.count)))


def _ahead(messages: list[Message]) -> None:
    messages[-1] = messages[-1]._replace(value=b'{"balance":5,"count":100000}')


def _back(messages: list[Message]) -> None:
    first, second = _twice(messages)
    messages.append(messages[first]._replace(offset=messages[second].offset + 1))


def _same_again(messages: list[Message]) -> None:
    messages.append(messages[-1]._replace(offset=messages[-1].offset + 1))


def _in_another_partition(messages: list[Message]) -> None:
    messages.append(messages[-1]._replace(partition=(messages[-1].partition + 1) % TABLE, offset=10_000))


def _deleted(messages: list[Message]) -> None:
    messages.append(messages[-1]._replace(offset=messages[-1].offset + 1, value=None))


def _deleted_for_a_while(messages: list[Message]) -> None:
    _, second = _twice(messages)
    messages.insert(second, messages[second]._replace(value=None))


def _foreign(messages: list[Message]) -> None:
    messages.append(Message(0, 10_000, b"acc-99999", b'{"balance":5,"count":1}'))


def _without_key(messages: list[Message]) -> None:
    messages.append(Message(0, 10_000, None, b'{"balance":5,"count":1}'))


def _no_json(messages: list[Message]) -> None:
    messages[-1] = messages[-1]._replace(value=b"\xff")


@pytest.mark.parametrize(
    "damage",
    [
        _wrong_last,
        _wrong_between,
        _ahead,
        _back,
        _same_again,
        _in_another_partition,
        _deleted,
        _deleted_for_a_while,
        _foreign,
        _without_key,
        _no_json,
    ],
)
def test_damage_to_the_table_is_seen(damage: Callable[[list[Message]], None]) -> None:
    messages = table()
    damage(messages)
    findings = audit_table(messages)
    assert not findings.holds
    assert findings.examples[0].startswith("balances: ")
