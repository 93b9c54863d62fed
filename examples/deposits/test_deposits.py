"""The processors alone, in milliseconds; at the end the whole service, with kills."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deposits import LIMIT_MAX, Book, Validate, book_flow, validate_flow

from onceflow import Record
from onceflow.testing import independent
from onceflow.testing.flow_driver import FlowDriver
from onceflow.testing.processor_driver import ProcessorDriver

ADA, BOB = "acc-00001", "acc-00002"
Fields = dict[str, Any]


def opened(account: str = ADA, limit: int = 1_000) -> Fields:
    return {"kind": "open", "id": f"open-{account}", "account": account, "limit": limit}


def deposit(number: int, amount: int, account: str = ADA) -> Fields:
    return {"kind": "deposit", "id": f"op-{number}", "account": account, "amount": amount}


def transfer(number: int, amount: int, account: str = ADA, to: str = BOB) -> Fields:
    return {"kind": "transfer", "id": f"op-{number}", "account": account, "to": to, "amount": amount}


def record(value: Fields | bytes | None, key: str | bytes | None = None) -> Record:
    """As it comes from the topic; without a key given, that of its account."""
    if not isinstance(value, dict):
        return Record(key or ADA, value)
    return Record(key or value["account"], json.dumps(value).encode())


def send(driver: ProcessorDriver, *values: Fields | bytes | None) -> list[Fields]:
    """One batch; what goes on of it."""
    return [each.value for each in driver.send_many(record(value) for value in values)]


@pytest.fixture
def driver() -> ProcessorDriver:
    """Ada's account is open, and she has brought 500 cents."""
    driver = ProcessorDriver(Validate(), on_error="dead-letter")
    assert send(driver, opened(), deposit(1, 500)) == [opened(), deposit(1, 500)]
    return driver


def cause(driver: ProcessorDriver) -> tuple[str, str]:
    """Of the only dead letter."""
    (dead_letter,) = driver.dead_letters
    headers = dict(dead_letter.headers)
    return headers["onceflow.error.class"].decode(), headers["onceflow.error.message"].decode()


# ---- validate ----------------------------------------------------------------------------------------


def test_what_the_account_may_do_goes_on(driver: ProcessorDriver) -> None:
    asked = [transfer(2, 500), deposit(3, 1_000), transfer(4, 1_000)]
    assert send(driver, *asked) == asked
    assert driver.state(ADA) == {"limit": 1_000, "funds": 0}
    assert driver.dead_letters == []


def test_accounts_know_nothing_of_each_other(driver: ProcessorDriver) -> None:
    asked = [opened(BOB, 5), deposit(1, 5, BOB), transfer(2, 5, BOB, ADA)]
    assert send(driver, *asked) == asked
    assert driver.states == {ADA: {"limit": 1_000, "funds": 500}, BOB: {"limit": 5, "funds": 0}}


@pytest.mark.parametrize(
    "asked, why",
    [
        (opened(), "already open"),
        (deposit(2, 5, BOB), "unknown account"),
        (transfer(2, 5, BOB, ADA), "unknown account"),
        (deposit(1, 500), "double id"),
        (transfer(1, 5), "double id"),
        (deposit(2, 0), "not positive"),
        (transfer(2, -5), "not positive"),
        (deposit(2, 1_001), "over the limit"),
        (deposit(2, 2**64 - 1), "over the limit"),
        (deposit(2, 10**300), "over the limit"),
        (deposit(2, -(10**30)), "not positive"),
        (transfer(2, 501), "insufficient funds"),
        (transfer(2, 5, ADA, ADA), "no receiver"),
        (transfer(2, 5, ADA, "cash"), "no receiver"),
        (transfer(2, 5, ADA, "acc-000020"), "no receiver"),
        (opened(BOB, 0), "limit out of range"),
        (opened(BOB, LIMIT_MAX + 1), "limit out of range"),
        (opened("cash"), "not the account of the key"),
        (opened("acc-00002\n"), "not the account of the key"),
    ],
)
def test_what_breaks_a_rule_is_rejected(driver: ProcessorDriver, asked: Fields, why: str) -> None:
    before = driver.states
    assert send(driver, asked) == []
    assert cause(driver) == ("Rejected", why)
    assert driver.states == before
    # And nothing of it is left: what follows is not changed by it.
    assert send(driver, deposit(7, 5)) == [deposit(7, 5)]


def test_an_account_that_is_not_the_key_is_rejected(driver: ProcessorDriver) -> None:
    driver.send_many([record(deposit(2, 5), BOB)])
    assert cause(driver) == ("Rejected", "not the account of the key")


@pytest.mark.parametrize(
    "asked, kind",
    [
        (None, "ValueError"),
        (b"", "JSONDecodeError"),
        (b"deposit", "JSONDecodeError"),
        (b'{"kind": "deposit", "id": "op-2", "acc', "JSONDecodeError"),
        (b"\xff\xfe{}", "JSONDecodeError"),
        (b"[" * 900, "JSONDecodeError"),
        (b"[]", "TypeError"),
        (b'"deposit"', "TypeError"),
        (b"7", "TypeError"),
        (b"{}", "KeyError"),
        (b'{"kind": ["deposit"]}', "TypeError"),
        (deposit(2, 5) | {"kind": "gift"}, "KeyError"),
        ({"kind": "transfer", "id": "op-2", "account": ADA, "amount": 5}, "KeyError"),
        (deposit(2, 5) | {"id": 2}, "TypeError"),
        (deposit(2, 5) | {"amount": "5"}, "TypeError"),
        (deposit(2, 5) | {"amount": 5.0}, "TypeError"),
        (deposit(2, 5) | {"amount": True}, "TypeError"),
        (deposit(2, 5) | {"amount": None}, "TypeError"),
        (deposit(2, 5) | {"note": "x" * 300_000}, "ValueError"),
    ],
)
def test_what_cannot_be_read_is_rejected_as_it_is(driver: ProcessorDriver, asked: Fields | None, kind: str) -> None:
    assert send(driver, asked) == []
    assert cause(driver)[0] == kind
    assert driver.dead_letters[0].value == record(asked).value


@pytest.mark.parametrize("key", [b"acc-\xff", b"x" * 500])
def test_keys_that_are_none_are_rejected(driver: ProcessorDriver, key: bytes) -> None:
    driver.send_many([record(deposit(2, 5), key)])
    assert driver.outputs[2:] == []
    assert driver.dead_letters[0].key == key


def test_a_record_without_a_key_is_rejected(driver: ProcessorDriver) -> None:
    driver.send(None, json.dumps(deposit(2, 5)).encode())
    assert cause(driver) == ("ValueError", "the record has no key: state is kept by key")


def test_bad_ones_among_good_ones(driver: ProcessorDriver) -> None:
    """All of one account in one batch: each counts, or does not, by itself."""
    asked = [deposit(2, 5), b"deposit", transfer(3, 505), transfer(4, 1), deposit(2, 5), deposit(5, 1)]
    assert send(driver, *asked) == [deposit(2, 5), transfer(3, 505), deposit(5, 1)]
    assert [dead_letter.value for dead_letter in driver.dead_letters] == [record(asked[n]).value for n in (1, 3, 4)]
    assert driver.state(ADA)["funds"] == 1


def test_an_id_may_be_used_again_after_it_was_rejected(driver: ProcessorDriver) -> None:
    assert send(driver, transfer(2, 501)) == []
    assert send(driver, transfer(2, 500)) == [transfer(2, 500)]


def test_ids_are_forgotten_after_a_week(driver: ProcessorDriver) -> None:
    driver.advance(7 * 24 * 3600 - 1)
    assert send(driver, deposit(1, 500)) == []
    driver.advance(1)
    assert send(driver, deposit(1, 500)) == [deposit(1, 500)]


@pytest.mark.parametrize(
    "text, asked",
    [
        ('"amount": 7, "amount": 5', deposit(2, 5)),
        ('"amount": {"cents": 7}, "amount": 5', deposit(2, 5)),
        ('"Amount": 7, "amount": 5, "note": [1e300, {"amount": 9}]', deposit(2, 5)),
        ('"\\u0061mount"\n: 5', deposit(2, 5)),
    ],
)
def test_what_goes_on_is_what_was_checked(driver: ProcessorDriver, text: str, asked: Fields) -> None:
    """The next flow may read a value in another way; so it gets one that can be read in one way only."""
    value = b'{"kind": "deposit", "id": "op-2", "account": "%s", %s}' % (ADA.encode(), text.encode())
    assert send(driver, value) == [asked]


def test_headers_go_on(driver: ProcessorDriver) -> None:
    (passed,) = driver.send(ADA, json.dumps(deposit(2, 5)).encode(), headers=[("trace", b"7")])
    assert passed.headers == (("trace", b"7"),)


# ---- book --------------------------------------------------------------------------------------------


def test_an_entry_has_the_balance_after_it() -> None:
    driver = ProcessorDriver(Book())
    driver.send_many([(ADA, {"id": "op-1", "amount": 5}), ("cash", {"id": "op-1", "amount": -5})])
    driver.send_many([(ADA, {"id": "op-2", "amount": -2}), (BOB, {"id": "op-2", "amount": 2})])
    assert driver.outputs == [
        Record(ADA, {"id": "op-1", "account": ADA, "amount": 5, "balance": 5, "count": 1}),
        Record("cash", {"id": "op-1", "account": "cash", "amount": -5, "balance": -5, "count": 1}),
        Record(ADA, {"id": "op-2", "account": ADA, "amount": -2, "balance": 3, "count": 2}),
        Record(BOB, {"id": "op-2", "account": BOB, "amount": 2, "balance": 2, "count": 1}),
    ]
    assert driver.states == {
        ADA: {"balance": 3, "count": 2},
        BOB: {"balance": 2, "count": 1},
        "cash": {"balance": -5, "count": 1},
    }


# ---- both flows, on topics in memory ------------------------------------------------------------------


@pytest.mark.integration
def test_what_is_validated_is_booked_twice(onceflow_spark: Any) -> None:
    flows = FlowDriver(validate_flow, book_flow, partitions=3)
    for asked in (opened(), opened(BOB), deposit(1, 500), transfer(2, 200), transfer(3, 301)):
        flows.send("deposits", asked["account"], asked)
    assert [each.value for each in flows.read("validated")] == [
        opened(),
        opened(BOB),
        deposit(1, 500),
        transfer(2, 200),
    ]
    (rejected,) = flows.read("rejected")
    assert rejected.value == transfer(3, 301)
    assert dict(rejected.headers)["onceflow.error.message"] == b"insufficient funds"
    assert flows.table("balances") == {
        "cash": {"balance": -500, "count": 1},
        ADA: {"balance": 300, "count": 2},
        BOB: {"balance": 200, "count": 1},
    }
    assert sum(each.value["amount"] for each in flows.read("ledger")) == 0


# ---- the whole service -------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.faults
@pytest.mark.long
def test_killed(run_demo: Callable[..., dict[str, Any]]) -> None:
    result = run_demo("deposits", records=4_000, kills=1)
    assert result["in"] == 4_000
    assert result["dead_letters"] > 0
    assert (result["torn"], result["money"], result["wrong_balances"]) == (0, 0, 0)
    assert result["prefixes"] >= 10
    assert result["looks"] > 0
    assert result["state_deleted"] >= 1
    assert result["restores"] >= 1


@pytest.mark.integration
@pytest.mark.faults
@pytest.mark.long
def test_one_cent_more_is_found(onceflow_broker: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """More kills, at other places in every run; then somebody writes to the table, and to the ledger."""
    from onceflow.client.deadline import Deadline
    from onceflow_workshop.demos.chain import Choices
    from onceflow_workshop.demos.deposits import Deposits
    from onceflow_workshop.demos.display import Display

    seed = random.SystemRandom().randrange(1_000_000)
    chain = Deposits(Choices(20_000, seed, 2), onceflow_broker, tmp_path, Deadline(160, "the demo deposits"))
    result = chain.run()
    assert result["verdict"] == "passed", (seed, result, capfd.readouterr())
    assert result["kills"] == 4
    assert all(result[name] == 0 for name in ("lost", "duplicated", "wrong", "torn", "money", "wrong_balances"))

    rows = independent.read_topic(onceflow_broker, chain.table, decided=True)
    last = {row.key: json.loads(row.value or b"") for row in rows}
    key = sorted(key for key in last if key is not None)[17]
    wrong = {"balance": last[key]["balance"] + 1, "count": last[key]["count"]}
    independent.fill(onceflow_broker, chain.table, [(key, json.dumps(wrong).encode())])
    in_topic, in_store, in_accounts = chain.audit_balances()
    assert not in_topic.holds
    assert in_store.holds
    assert in_accounts.holds
    assert key.decode() in in_topic.examples[0]
    assert str(wrong["balance"]) in in_topic.examples[0]

    # One cent to somebody, who has one entry more: their balance is right, and money was made.
    line = max((line for line in chain.lines if line.account != "cash"), key=lambda line: line.offset)
    made = {
        "id": "op-999999999",
        "account": line.account,
        "amount": 1,
        "balance": line.balance + 1,
        "count": line.nth + 1,
    }
    independent.fill(onceflow_broker, chain.topics["ledger"], [(line.account.encode(), json.dumps(made).encode())])
    with Display({}) as display:
        result = chain.report(chain.audit(display))
    assert result["verdict"] == "failed"
    assert (result["money"], result["torn"]) == (1, 1)
    assert result["wrong_balances"] > 0
