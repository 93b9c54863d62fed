"""What all demos' audits have in common: that the auditor of topics sees every kind of damage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

from onceflow.protocol.partitioners import key_partitions
from onceflow_workshop.demos.audit import (
    KINDS,
    Expected,
    Findings,
    Message,
    Origin,
    compare,
    onceflow_headers,
    origin_headers,
)
from onceflow_workshop.demos.reading import GroupLag

PARTITIONS = 3
Records = list[Message]


def _expected() -> list[Expected]:
    return [Expected(f"id-{n:03d}", b"key-%d" % (n % 50), b"id-%03d: %d" % (n, n * n)) for n in range(300)]


def _topic(expected: list[Expected]) -> Records:
    """The messages of a flawless topic, partition by partition, as a consumer may deliver them."""
    places = key_partitions(pa.array([record.key for record in expected], pa.binary()), PARTITIONS)
    offsets: Counter[int] = Counter()
    found = []
    for place, record in zip(places.tolist(), expected, strict=True):
        found.append(Message(place, offsets[place], record.key, record.value, record.headers or ()))
        offsets[place] += 1
    return sorted(found)


def _identify(message: Message) -> str | None:
    return None if message.value is None else message.value[:6].decode()


def _audit(found: Records, expected: list[Expected] | None = None) -> Findings:
    wanted = _expected() if expected is None else expected
    return compare("out", wanted, found, partitions=PARTITIONS, identify=_identify)


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
    found.append(Message(0, 10_000, b"key-1", b"id-999: 5"))


def _add_unidentified(found: Records) -> None:
    found.append(Message(0, 10_000, None, None))


def _change_value(found: Records) -> None:
    found[17] = found[17]._replace(value=(found[17].value or b"") + b"0")


def _change_key(found: Records) -> None:
    found[17] = found[17]._replace(key=b"key-99")


def _add_header(found: Records) -> None:
    found[17] = found[17]._replace(headers=(("more", b""),))


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
        (_change_value, "wrong"),
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
    assert findings.examples[0].startswith(f"out: {kind}: ")


@pytest.mark.parametrize("mutate", [_misplace, _reorder])
def test_place_and_order_of_free_records_are_not_looked_at(mutate: Callable[[Records], None]) -> None:
    found = _topic(_expected())
    mutate(found)
    assert _audit(found, [record._replace(free=True) for record in _expected()]).holds


@pytest.mark.parametrize("mutate", [_lose, _double, _change_value, _change_key, _add_header])
def test_all_else_of_free_records_is(mutate: Callable[[Records], None]) -> None:
    found = _topic(_expected())
    mutate(found)
    assert not _audit(found, [record._replace(free=True) for record in _expected()]).holds


def test_headers_that_nobody_knows_are_not_compared() -> None:
    found = _topic(_expected())
    _add_header(found)
    assert _audit(found, [record._replace(headers=None) for record in _expected()]).holds


def test_records_without_key_may_be_anywhere() -> None:
    expected = [Expected(f"id-{n:03d}", None, b"id-%03d" % n) for n in range(3)]
    found = [Message(2 - n, 0, None, b"id-%03d" % n) for n in range(3)]
    assert _audit(found, expected).holds
    assert _audit(found[1:], expected).counts["lost"] == 1
    assert _audit([found[0]._replace(key=b"key"), *found[1:]], expected).counts["wrong"] == 1


def test_an_empty_topic_has_lost_everything() -> None:
    findings = _audit([])
    assert findings.counts["lost"] == findings.expected == len(_expected())


def test_a_huge_record_is_shown_in_part() -> None:
    expected = [record._replace(value=b"id-000" + b"x" * 1_000_000) for record in _expected()[:1]]
    (message,) = _topic(expected)
    (example,) = _audit([message._replace(value=b"id-000")], expected).examples
    assert len(example) < 500


def test_what_a_letter_says_of_its_cause() -> None:
    own = (("trace", b"7"), ("onceflow.error.class", b"ValueError"), ("onceflow.error.message", b"\xff"))
    headers = onceflow_headers(Message(0, 0, b"key", b"value", own))
    assert headers == {"onceflow.error.class": "ValueError", "onceflow.error.message": "�"}
    assert origin_headers(Origin("in", 2, 30)) == {
        "onceflow.error.topic": "in",
        "onceflow.error.partition": "2",
        "onceflow.error.offset": "30",
        "onceflow.origin.topic": "in",
        "onceflow.origin.partition": "2",
        "onceflow.origin.offset": "30",
    }


# ---- progress of the flows ---------------------------------------------------------------------------


class _Consumer:
    def __init__(self, problem: int) -> None:
        self._problem = problem

    def committed(self, span: object, timeout: float) -> object:
        raise KafkaException(KafkaError(self._problem))

    def close(self) -> None:
        pass


def _lag(problem: int) -> GroupLag:
    lag = GroupLag("localhost:1", "group", {"topic": 1})
    lag.close()
    lag._consumer = _Consumer(problem)
    return lag


@pytest.mark.parametrize("problem", [14, 15, 16])
def test_a_coordinator_that_moves_is_waited_for(problem: int) -> None:
    assert _lag(problem).read() is None


@pytest.mark.parametrize("problem", [KafkaError._ALL_BROKERS_DOWN, KafkaError.GROUP_AUTHORIZATION_FAILED])
def test_other_problems_are_not_passed_over(problem: int) -> None:
    with pytest.raises(KafkaException):
        _lag(problem).read()
