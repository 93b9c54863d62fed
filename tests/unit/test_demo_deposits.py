"""The demo `deposits`: what it generates, what it expects, and that its auditor sees what is wrong."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from onceflow.cli.demo import demo
from onceflow.demos import deposits_data as data
from onceflow.demos.audit import KINDS, Expected, Findings, Message, compare
from onceflow.demos.deposits import Choices, run
from onceflow.demos.harness import plan_kills
from onceflow.errors import OptionError
from onceflow.hooks import STEPS
from onceflow.wire.partitioners import key_partitions

SEED = 42
PARTITIONS = 3
Records = list[Message]


@pytest.fixture(scope="module")
def deposits() -> list[data.Deposit]:
    return list(data.generate(SEED, 20_000))


# ---- generator ---------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_deposits_again(deposits: list[data.Deposit]) -> None:
    assert list(data.generate(SEED, 20_000)) == deposits
    assert list(data.generate(SEED + 1, 100)) != deposits[:100]


def test_a_longer_run_of_a_seed_begins_like_a_shorter_one(deposits: list[data.Deposit]) -> None:
    assert list(data.generate(SEED, 500)) == deposits[:500]


def test_one_percent_is_invalid_in_every_way(deposits: list[data.Deposit]) -> None:
    causes = Counter(deposit.cause for deposit in deposits if deposit.cause)
    assert set(causes) == set(data.CAUSES)
    assert 0.007 < causes.total() / len(deposits) < 0.013


def test_every_value_tells_its_id(deposits: list[data.Deposit]) -> None:
    assert [data.identify(deposit.value) for deposit in deposits] == [deposit.id for deposit in deposits]
    assert len({deposit.id for deposit in deposits}) == len(deposits)
    assert data.identify(None) is None


def test_valid_values_are_json_with_the_fields(deposits: list[data.Deposit]) -> None:
    for deposit in deposits[:1000]:
        if deposit.cause is None:
            fields = {
                "id": deposit.id,
                "account": deposit.account,
                "amount": deposit.amount,
                "currency": deposit.currency,
            }
            assert json.loads(deposit.value) == fields
            assert 0 < deposit.amount <= data.AMOUNT_MAX


@pytest.mark.parametrize("cause", data.CAUSES)
def test_invalid_values_are_invalid_in_the_way_they_say(deposits: list[data.Deposit], cause: str) -> None:
    values = [deposit.value for deposit in deposits if deposit.cause == cause]
    assert values
    for value in values:
        assert _cause_of(value) == cause, value


def _cause_of(value: bytes) -> str | None:
    """The service's rules, once more in Python."""
    try:
        fields = json.loads(value.decode())
    except ValueError:
        return "not JSON"
    if {"id", "account", "amount", "currency"} - fields.keys():
        return "missing field"
    if type(fields["amount"]) is not int:
        return "amount not a whole number"
    if fields["amount"] <= 0:
        return "amount not positive"
    if fields["amount"] > data.AMOUNT_MAX:
        return "amount too large"
    return None if fields["currency"] in data.CURRENCIES else "unknown currency"


# ---- expected results --------------------------------------------------------------------------------


def test_every_deposit_is_expected_in_one_of_two_topics(deposits: list[data.Deposit]) -> None:
    origins = {deposit.id: data.Origin("deposits", 1, 7) for deposit in deposits if deposit.cause}
    validated = [record.identity for record in data.expected_validated(iter(deposits))]
    rejected = [record.identity for record in data.expected_rejected(iter(deposits), origins)]
    settled = [record.identity for record in data.expected_settled(iter(deposits))]
    assert sorted(validated + rejected) == [deposit.id for deposit in deposits]
    assert settled == validated


def test_rejected_deposits_say_why_and_where_they_came_from(deposits: list[data.Deposit]) -> None:
    bad = next(deposit for deposit in deposits if deposit.cause)
    (record,) = data.expected_rejected(iter([bad]), {bad.id: data.Origin("deposits", 1, 7)})
    assert record.value == bad.value
    assert dict(record.headers) == {
        "cause": str(bad.cause).encode(),
        "origin-topic": b"deposits",
        "origin-partition": b"1",
        "origin-offset": b"7",
    }


def test_settled_deposits_have_their_fee(deposits: list[data.Deposit]) -> None:
    good = next(deposit for deposit in deposits if deposit.cause is None)
    (record,) = data.expected_settled(iter([good]))
    assert json.loads(record.value) == {**json.loads(good.value), "fee": good.amount // 200, "settled": True}


# ---- auditor -----------------------------------------------------------------------------------------


def _expected() -> list[Expected]:
    return list(data.expected_validated(data.generate(SEED, 300)))


def _topic(expected: list[Expected]) -> Records:
    """The messages of a flawless topic, partition by partition, as a consumer may deliver them."""
    import pyarrow as pa

    places = key_partitions(pa.array([record.key for record in expected], pa.binary()), PARTITIONS)
    offsets: Counter[int] = Counter()
    found = []
    for place, record in zip(places.tolist(), expected, strict=True):
        found.append(Message(place, offsets[place], record.key, record.value, record.headers))
        offsets[place] += 1
    return sorted(found)


def _audit(found: Records) -> Findings:
    return compare("validated", _expected(), found, partitions=PARTITIONS, identify=data.identify)


def test_a_flawless_topic_passes() -> None:
    findings = _audit(_topic(_expected()))
    assert findings.holds
    assert findings.found == findings.expected == len(_expected())
    assert findings.examples == []


def _lose(found: Records) -> None:
    del found[17]


def _double(found: Records) -> None:
    found.append(found[17]._replace(offset=10_000))


def _double_elsewhere(found: Records) -> None:
    found.append(found[17]._replace(partition=(found[17].partition + 1) % PARTITIONS, offset=10_000))


def _add_foreign(found: Records) -> None:
    found.append(Message(0, 10_000, b"acc-00001", b'{"id": "dep-999999999"}'))


def _add_unidentified(found: Records) -> None:
    found.append(Message(0, 10_000, None, None))


def _change_amount(found: Records) -> None:
    found[17] = found[17]._replace(value=(found[17].value or b"").replace(b'"amount": ', b'"amount": 1'))


def _change_key(found: Records) -> None:
    found[17] = found[17]._replace(key=b"acc-99999")


def _add_header(found: Records) -> None:
    found[17] = found[17]._replace(headers=(("cause", b"not JSON"),))


def _misplace(found: Records) -> None:
    found[17] = found[17]._replace(partition=(found[17].partition + 1) % PARTITIONS)


def _reorder(found: Records) -> None:
    by_key: dict[bytes | None, int] = {}
    for index, message in enumerate(found):
        if message.key in by_key:
            first = by_key[message.key]
            found[first], found[index] = found[index], found[first]
            return
        by_key[message.key] = index
    raise AssertionError("no key is there twice")


@pytest.mark.parametrize(
    "mutate, kind",
    [
        (_lose, "lost"),
        (_double, "duplicated"),
        (_double_elsewhere, "duplicated"),
        (_add_foreign, "unexpected"),
        (_add_unidentified, "unexpected"),
        (_change_amount, "wrong"),
        (_change_key, "wrong"),
        (_add_header, "wrong"),
        (_misplace, "misplaced"),
        (_reorder, "reordered"),
    ],
)
def test_the_auditor_sees_every_kind_of_damage(mutate: Callable[[Records], None], kind: str) -> None:
    found = _topic(_expected())
    mutate(found)
    findings = _audit(found)
    assert not findings.holds
    assert findings.counts == {**dict.fromkeys(KINDS, 0), kind: 1}
    assert findings.examples[0].startswith(f"validated: {kind}: ")


def test_an_empty_topic_has_lost_everything() -> None:
    findings = _audit([])
    assert findings.counts["lost"] == findings.expected == len(_expected())


def test_a_wrong_cause_is_seen() -> None:
    deposits = [deposit for deposit in data.generate(SEED, 2000) if deposit.cause]
    origins = {deposit.id: data.Origin("deposits", 0, 1) for deposit in deposits}
    expected = list(data.expected_rejected(iter(deposits), origins))
    found = _topic(expected)
    found[0] = found[0]._replace(headers=(("cause", b"no reason"), *found[0].headers[1:]))
    findings = compare("rejected", expected, found, partitions=PARTITIONS, identify=data.identify)
    assert findings.counts["wrong"] == 1


# ---- kills and command -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [1, 3, 12])
def test_all_planned_kills_fit_into_the_batches_there_are(seed: int, count: int) -> None:
    batches = 5 * (count + 1)
    kills = plan_kills(count, batches=batches, rng=random.Random(seed))
    assert len(kills) == count
    assert all(kill.step in STEPS and kill.batches >= 1 for kill in kills)
    # Each kill needs its batches, and one more at `settle`, which belongs to the batch after.
    assert sum(kill.batches + 1 for kill in kills) < batches
    assert plan_kills(count, batches=batches, rng=random.Random(seed)) == kills


def test_no_kills_are_none() -> None:
    assert plan_kills(0, batches=5, rng=random.Random(1)) == []


def test_too_few_records_for_the_kills_are_refused_before_anything_starts() -> None:
    with pytest.raises(OptionError, match="too few"):
        run(Choices(records=1000, kills=3))


def test_the_command_lists_the_demos() -> None:
    answer = CliRunner().invoke(demo, [])
    assert answer.exit_code == 0
    assert answer.output.startswith("deposits ")
