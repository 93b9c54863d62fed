"""The demo `deposits`: what it generates, what it expects, and that its audits see what is wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import deposits as service
import pytest

from onceflow import Record
from onceflow.testing.processor_driver import ProcessorDriver
from onceflow_workshop.demos import deposits_data as data
from onceflow_workshop.demos.audit import KINDS, Headers, Message, Origin, origin_headers
from onceflow_workshop.demos.chain import Audit, Choices
from onceflow_workshop.demos.deposits import SERVICE, Deposits
from onceflow_workshop.demos.harness import Death

SEED = 42
ORIGIN = Origin("deposits-1a2b3c", 1, 7)


@pytest.fixture(scope="module")
def operations() -> list[data.Operation]:
    return list(data.generate(SEED, 20_000))


# ---- generator ---------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_records_again(operations: list[data.Operation]) -> None:
    assert list(data.generate(SEED, 20_000)) == operations
    assert list(data.generate(SEED + 1, 100)) != operations[:100]


def test_a_longer_run_of_a_seed_begins_like_a_shorter_one(operations: list[data.Operation]) -> None:
    assert list(data.generate(SEED, 500)) == operations[:500]


def test_one_percent_is_invalid_in_every_way(operations: list[data.Operation]) -> None:
    causes = Counter(each.cause for each in operations if each.cause)
    assert set(causes) == set(data.CAUSES)
    assert 0.007 < causes.total() / len(operations) < 0.013


def test_all_kinds_are_there(operations: list[data.Operation]) -> None:
    kinds = Counter(each.kind for each in operations if not each.cause)
    assert kinds["open"] == data.ACCOUNTS
    assert min(kinds["deposit"], kinds["transfer"]) > 0.3 * len(operations)
    assert any(each.timestamp_ms in data.ABSURD_TIMES_MS and each.cause is None for each in operations)
    assert any(each.timestamp_ms in data.ABSURD_TIMES_MS and each.cause is not None for each in operations)
    assert any(each.headers and each.cause is None for each in operations)
    # Written in all the ways that parsers may read differently.
    values = [each.value or b"" for each in operations if each.cause is None]
    assert all(any(before.encode() + b', "amount"' in value for value in values) for before, _ in data._ODD[:2])
    assert all(any(value.endswith(after.encode() + b"}") for value in values) for _, after in data._ODD[2:])


def test_every_record_tells_its_id(operations: list[data.Operation]) -> None:
    assert [data.identify(each.value, each.headers) for each in operations] == [each.id for each in operations]
    ids = Counter(each.id for each in operations)
    assert {each.id for each in operations if ids[each.id] > 1} == {
        each.id for each in operations if each.cause == "double id"
    }
    assert max(ids.values()) == 2
    assert data.identify(None) is None
    assert data.identify(b"op-1") is None


def test_huge_values_are_huge_and_still_fit_into_a_record(operations: list[data.Operation]) -> None:
    sizes = [len(each.value or b"") for each in operations if each.cause == "huge value"]
    assert sizes
    assert all(200_000 <= size < 1_000_000 for size in sizes)
    assert max(len(each.value or b"") for each in operations if each.cause not in ("huge value", "no JSON")) < 1_000


def test_valid_records_are_what_the_values_say(operations: list[data.Operation]) -> None:
    for each in operations:
        if each.cause is None:
            fields = json.loads(each.value or b"")
            assert json.loads(data.validated(each)).items() <= fields.items()
            assert (fields["kind"], fields["account"].encode()) == (each.kind, each.key)
            assert fields.get("to") == each.to != each.account


# ---- the service's rules, once more --------------------------------------------------------------------


def test_the_service_does_what_the_seed_says(operations: list[data.Operation]) -> None:
    """The processors, without Kafka and Spark, over batches of 1,000."""
    driver = ProcessorDriver(service.Validate(), on_error="dead-letter")
    for first in range(0, len(operations), 1_000):
        part = operations[first : first + 1_000]
        driver.send_many([Record(each.key, each.value, headers=each.headers) for each in part])
    valid = {each.id: each for each in operations if each.cause is None}
    assert len(driver.outputs) == len(valid)
    for record in driver.outputs:
        each = valid[record.value["id"]]
        assert (record.key, record.headers) == (each.account, each.headers)
        assert json.dumps(record.value, separators=(",", ":")).encode() == data.validated(each)
    bad = {each.id: each for each in operations if each.cause is not None}
    assert len(driver.dead_letters) == len(bad)
    for nth, dead_letter in enumerate(driver.dead_letters):
        each = bad.pop(data.identify(dead_letter.value, tuple(dead_letter.headers)) or "")
        assert dead_letter.key == each.key
        message = Message(0, nth, dead_letter.key, dead_letter.value, tuple(dead_letter.headers))
        place = {name: value.decode() for name, value in dead_letter.headers if name.startswith("onceflow.") and value}
        origin = {name: place[name] for name in origin_headers(ORIGIN)}
        assert data.wrong_dead_letter(each, message, origin) == "", each
    accounts = {key.encode(): account for key, account in driver.states.items()}
    assert accounts == data.final_accounts(operations)
    ids = {(key, entry) for key in accounts for entry in driver.map(key.decode(), "ids")}
    assert ids == set(data.ids(operations))


def test_booking_adds_up(operations: list[data.Operation]) -> None:
    driver = ProcessorDriver(service.Book())
    entries = list(data.entries(operations))
    driver.send_many([(entry.account, {"id": entry.id, "amount": entry.amount}) for entry in entries])
    balances = {
        key: {"balance": each.balance, "count": each.count} for key, each in data.final_balances(operations).items()
    }
    assert {key.encode(): balance for key, balance in driver.states.items()} == balances
    assert sum(balance["balance"] for balance in driver.states.values()) == 0
    assert {(each.value["id"], each.key, each.value["amount"]) for each in driver.outputs} == set(entries)


# ---- expected results --------------------------------------------------------------------------------


def test_every_movement_has_two_entries_that_add_up_to_zero(operations: list[data.Operation]) -> None:
    sums: Counter[str] = Counter()
    for entry in data.entries(operations):
        sums[entry.id] += entry.amount
    assert set(sums.values()) == {0}
    assert len(sums) == sum(each.cause is None and each.kind != "open" for each in operations)
    assert len(list(data.entries(operations))) == 2 * len(sums)


def test_nobody_owes_anything_in_whatever_order_money_is_received(operations: list[data.Operation]) -> None:
    """An account's own records keep their order; what others send may come at any time, and first of all never."""
    own: Counter[str] = Counter()
    for each in operations:
        if each.cause is None and each.kind != "open":
            own[each.account] += each.amount if each.to is None else -each.amount
            assert own[each.account] == each.funds >= 0
    final = data.final_balances(operations)
    assert min(balance.balance for key, balance in final.items() if key != b"cash") >= 0
    assert final[b"cash"].balance == -sum(
        each.amount for each in operations if not each.cause and each.kind == "deposit"
    )


class _Deadline:
    seconds = remaining = 1.0


@pytest.fixture
def chain(tmp_path: Path) -> Deposits:
    return Deposits(Choices(10_000, SEED, 3), "localhost:1", tmp_path, _Deadline())  # type: ignore[arg-type]


def test_every_record_is_expected_in_one_of_two_topics(chain: Deposits) -> None:
    expected = {name: [record.identity for record in records] for name, records in chain.expected().items()}
    assert list(expected) == ["validated", "rejected", "ledger"]
    inputs = list(chain.inputs())
    assert len(inputs) == len(expected["validated"]) + len(expected["rejected"]) == 10_000
    # Where these were put is remembered: the dead letters must say the same.
    assert [record.identity for record in inputs if record.identity is not None] == expected["rejected"]
    for name, identities in expected.items():
        assert len(set(identities)) == len(identities), name


def test_both_flows_have_kills_and_lose_state(chain: Deposits) -> None:
    assert [each.flow.split("-")[0] for each in chain.services] == ["validate", "book"]
    assert [each.planned for each in chain.services] == [3, 3]
    assert all(each.planned_losses for each in chain.services)


# ---- auditors ----------------------------------------------------------------------------------------


def _found(chain: Deposits, topic: str) -> list[Message]:
    return [
        Message(0, nth, record.key, record.value, record.headers or ())
        for nth, record in enumerate(chain.expected()[topic])
    ]


@pytest.mark.parametrize(
    "change, kind",
    [
        (lambda one: [], "lost"),
        (lambda one: [one, one], "duplicated"),
        (lambda one: [one, one._replace(key=b"acc-99999")], "unexpected"),
        (lambda one: [one, Message(0, 0, None, None)], "unexpected"),
        (lambda one: [one, Message(0, 0, b"\xff", b"\xff")], "unexpected"),
        (lambda one: [one._replace(value=one.value + b"1")], "wrong"),
        (lambda one: [one._replace(headers=(("more", b""),))], "wrong"),
    ],
)
def test_the_ledger_is_compared_with_the_seed(
    chain: Deposits, monkeypatch: pytest.MonkeyPatch, change: Callable[[Message], list[Message]], kind: str
) -> None:
    found = _found(chain, "ledger")
    found[17:18] = change(found[17])
    told = [message._replace(value=(message.value or b"") + b',"balance":1,"count":1}') for message in found]
    monkeypatch.setattr("onceflow_workshop.demos.deposits.read_topic", lambda *_: iter(told))
    findings = chain.compare("ledger", chain.expected()["ledger"])
    assert findings.counts == {**dict.fromkeys(KINDS, 0), kind: 1}
    assert len(chain.lines) + len(chain.problems) == findings.found


def _dead_letter(each: data.Operation, **changed: str | None) -> Message:
    kind, text = data.CAUSES[each.cause or ""]
    headers = {
        **origin_headers(ORIGIN),
        "onceflow.error.class": kind,
        "onceflow.error.message": text or "something",
        "onceflow.error.stack": "a line",
        "onceflow.attempt": "1",
    }
    told = headers | {f"onceflow.{name.replace('_', '.')}": value for name, value in changed.items()}
    cause: Headers = tuple((name, value.encode()) for name, value in told.items() if value is not None)
    return Message(0, 0, each.key, each.value, (*each.headers, *cause))


@pytest.mark.parametrize("cause", data.CAUSES)
def test_a_letter_must_say_why_and_where_it_came_from(operations: list[data.Operation], cause: str) -> None:
    each = next(each for each in operations if each.cause == cause)
    origin = origin_headers(ORIGIN)
    assert data.wrong_dead_letter(each, _dead_letter(each), origin) == ""
    assert "class is 'OSError'" in data.wrong_dead_letter(each, _dead_letter(each, error_class="OSError"), origin)
    assert "attempt is '2'" in data.wrong_dead_letter(each, _dead_letter(each, attempt="2"), origin)
    assert "origin.offset is '8'" in data.wrong_dead_letter(each, _dead_letter(each, origin_offset="8"), origin)
    assert "error.topic is None" in data.wrong_dead_letter(each, _dead_letter(each, error_topic=None), origin)
    assert "stack" in data.wrong_dead_letter(each, _dead_letter(each, error_stack=None), origin)
    assert "message" in data.wrong_dead_letter(each, _dead_letter(each, error_message=""), origin)
    more = _dead_letter(each)._replace(headers=(*_dead_letter(each).headers, ("more", b"")))
    assert "own headers" in data.wrong_dead_letter(each, more, origin)


def test_wrong_dead_letters_are_problems(chain: Deposits, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [each for each in chain.operations if each.cause is not None]
    chain._generator.origins.update({each.id: ORIGIN for each in bad})
    dead_letters = [_dead_letter(each) for each in bad]
    monkeypatch.setattr("onceflow_workshop.demos.deposits.read_topic", lambda *_: iter(dead_letters))
    assert chain.audit_dead_letters() == []
    dead_letters[3] = _dead_letter(bad[3], origin_partition="0")
    (problem,) = chain.audit_dead_letters()
    assert bad[3].id in problem


@pytest.mark.parametrize(
    "lost, restores, problem",
    [
        ([True, True, False], 8, None),
        ([True, False, False], 1, None),
        ([False, False, False], 8, "never deleted"),
        ([True, True, True], 0, "nothing was read back"),
    ],
)
def test_state_must_have_been_deleted_and_read_back(
    chain: Deposits, monkeypatch: pytest.MonkeyPatch, lost: list[bool], restores: int, problem: str | None
) -> None:
    """A driver that dies before it has opened its state again has none to lose: that deletion does not count."""
    monkeypatch.setattr(chain, "restores", lambda: restores)
    chain.services[-1].deaths = [Death("plan", 4, 0.0, lost_state=one) for one in lost]
    audit = Audit()
    assert chain.losses(audit) == {"restores": restores, "state_deleted": sum(lost)}
    assert [problem in text for text in audit.problems] == ([True] if problem else [])


def test_the_example_is_the_service_of_the_demo() -> None:
    example = Path(__file__).parents[2] / "examples" / "deposits" / "deposits.py"
    assert example == SERVICE == Path(service.__file__)
