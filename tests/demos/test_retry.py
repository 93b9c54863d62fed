"""The demo `retry`: what it generates, what it expects, and that its auditor sees what is wrong."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from retry import NEVER_RETRIED, Charge

from onceflow.errors import OptionError
from onceflow.protocol.partitioners import key_partitions
from onceflow.state.api.record import Record
from onceflow.state.engine.retry import Retry
from onceflow.testing.processor_driver import ProcessorDriver
from onceflow_workshop.demos import retry_data as data
from onceflow_workshop.demos.audit import KINDS, Message, Origin, compare
from onceflow_workshop.demos.retry import Choices, run

SEED = 42
PARTITIONS = 3


@pytest.fixture(scope="module")
def orders() -> list[data.Order]:
    return list(data.generate(SEED, 20_000))


@pytest.fixture(scope="module")
def few() -> list[data.Order]:
    found = list(data.generate(SEED, 8000))
    assert {order.bad for order in found if order.bad} == set(data.BAD)
    return found


@pytest.fixture(scope="module")
def origins(few: list[data.Order]) -> dict[str, Origin]:
    return {order.name: Origin("orders-x", at % 4, at) for at, order in enumerate(few) if order.failures}


# ---- generator ---------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_orders_again(orders: list[data.Order]) -> None:
    assert list(data.generate(SEED, 20_000)) == orders
    assert list(data.generate(SEED, 500)) == orders[:500]
    assert list(data.generate(SEED + 1, 100)) != orders[:100]


def test_all_kinds_are_there_in_their_shares(orders: list[data.Order]) -> None:
    bad = Counter(order.bad for order in orders if order.bad)
    assert set(bad) == set(data.BAD)
    assert 0.007 < bad.total() / len(orders) < 0.013
    later = [order for order in orders if order.failures and order.receipt is not None]
    assert Counter(len(order.failures) for order in later).keys() == {1, 2, 3}
    assert 0.10 < len(later) / len(orders) < 0.14
    exhausted = [order for order in orders if len(order.failures) == data.ATTEMPTS_MAX]
    assert 0.007 < len(exhausted) / len(orders) < 0.013
    assert all(order.receipt is None for order in exhausted)
    assert any(len(order.value or b"") > 100_000 and order.receipt is not None for order in orders)
    assert any(order.timestamp_ms is not None and order.failures for order in orders)


def test_names_are_unique_and_keys_but_for_orders_that_come_twice(orders: list[data.Order]) -> None:
    assert len({order.name for order in orders}) == len(orders)
    keys = Counter(order.key for order in orders if order.bad != "charged before" and order.key is not None)
    assert set(keys.values()) == {1}
    assert all(keys[order.key] == 1 for order in orders if order.bad == "charged before")


# ---- the service does what the seed says ---------------------------------------------------------------


@pytest.mark.long
def test_the_processors_bring_every_order_to_where_the_seed_says(few: list[data.Order]) -> None:
    """Both processors without Kafka and Spark; what Kafka does between them is done here."""
    charging = ProcessorDriver(Charge(), on_error="dead-letter")
    retrying = ProcessorDriver(
        Retry(retry_topic="retry", parked_topic="parked", max_attempts=data.ATTEMPTS_MAX, permanent=NEVER_RETRIED)
    )
    charged: Counter[Any] = Counter()
    parked: Counter[Any] = Counter()
    failures: dict[str, list[str]] = {}
    todo = [Record(o.key, o.value, "orders", o.headers, o.timestamp_ms) for o in few]
    while todo:
        for receipt in charging.send_many(todo):
            charged[receipt.key] += 1
        dead_letters, charging.dead_letters = charging.dead_letters, []
        keyed = []
        for dead_letter in dead_letters:
            told = {name: content or b"" for name, content in dead_letter.headers}
            failures.setdefault(told["trace"].decode(), []).append(told["onceflow.error.class"].decode())
            origin = b"/".join(told[f"onceflow.origin.{part}"] for part in ("topic", "partition", "offset")).decode()
            own = () if dead_letter.key is None else (("onceflow.key", dead_letter.key),)
            keyed.append(
                Record(origin, dead_letter.value, "failed", (*dead_letter.headers, *own), dead_letter.timestamp_ms)
            )
        todo = []
        for record in [*retrying.send_many(keyed), *retrying.advance(3600)]:
            if record.topic == "parked":
                parked[dict(record.headers)["trace"]] += 1
            else:
                key = record.key.encode() if isinstance(record.key, str) else record.key
                todo.append(Record(key, record.value, "retry", record.headers, record.timestamp_ms))
    assert charged == Counter(order.key for order in few if order.receipt is not None)
    assert parked == Counter(order.name.encode() for order in few if order.receipt is None)
    assert failures == {order.name: list(order.failures) for order in few if order.failures}
    assert retrying.states == {}


# ---- expected results ----------------------------------------------------------------------------------


def test_every_order_ends_in_one_place(few: list[data.Order], origins: dict[str, Origin]) -> None:
    charged = list(data.expected_charged(few))
    parked = list(data.expected_parked(few, origins))
    assert len(charged) + len(parked) == len(few)
    assert data.ends(few) == {"charged": len(charged), "parked": len(parked)}
    failed, retried = list(data.expected_failed(few, origins)), list(data.expected_retry(few, origins))
    assert len(failed) == sum(len(order.failures) for order in few)
    assert {each.identity for each in failed} - {each.identity for each in retried} == {
        f"{data.place(origins[order.name])}#{len(order.failures)}" for order in few if order.receipt is None
    }


def test_only_what_fails_is_remembered(few: list[data.Order], origins: dict[str, Origin]) -> None:
    inputs = list(data.inputs(few))
    assert len(inputs) == len(few)
    assert {each.identity for each in inputs if each.identity} == set(origins)


# ---- auditor -------------------------------------------------------------------------------------------


def _dead_letters(orders: list[data.Order], origins: dict[str, Origin], *, parked: bool) -> list[Message]:
    """Flawless dead letters, or parked records."""
    found = []
    for order in orders:
        for attempt, error in enumerate(order.failures, 1):
            if parked and (order.receipt is not None or attempt < len(order.failures)):
                continue
            origin = origins[order.name]
            place = {"topic": origin.topic, "partition": str(origin.partition), "offset": str(origin.offset)}
            last = place if attempt == 1 else {"topic": "retry-x", "partition": "1", "offset": str(attempt)}
            told = {
                "trace": order.name,
                "onceflow.error.class": error,
                "onceflow.error.message": "",
                "onceflow.error.stack": f"Traceback\n{error}: no",
                "onceflow.attempt": str(attempt),
                **{f"onceflow.origin.{name}": value for name, value in place.items()},
                **{f"onceflow.error.{name}": value for name, value in last.items()},
            }
            headers: list[tuple[str, bytes | None]] = [(name, value.encode()) for name, value in told.items()]
            if parked:
                headers.append(("onceflow.retry.topic", b"retry-x"))
                if order.key is not None:
                    headers.append(("onceflow.key", order.key))
                if order.value is None:
                    headers.append(("onceflow.value.null", b"true"))
            key = data.place(origin).encode() if parked else order.key
            found.append(Message(0, len(found), key, order.value, tuple(headers)))
    return found


def _check(few: list[data.Order], origins: dict[str, Origin], found: list[Message], *, parked: bool) -> data.Problems:
    return data.check_headers("failed-x", few, origins, found, parked=parked, retry_topic="retry-x")


def _with(message: Message, name: str, value: bytes | None) -> Message:
    return message._replace(headers=tuple((n, value if n == name else v) for n, v in message.headers))


def _without(message: Message, name: str) -> Message:
    return message._replace(headers=tuple(each for each in message.headers if each[0] != name))


@pytest.mark.parametrize("parked", [False, True])
def test_flawless_headers_pass(few: list[data.Order], origins: dict[str, Origin], parked: bool) -> None:
    problems = _check(few, origins, _dead_letters(few, origins, parked=parked), parked=parked)
    assert problems.wrong == 0, problems.examples


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda m: _with(m, "onceflow.error.class", b"OSError"), "error.class"),
        (lambda m: _with(m, "onceflow.error.topic", b"failed-x"), "error.topic"),
        (lambda m: _with(m, "onceflow.error.stack", b""), "stack"),
        (lambda m: _with(m, "onceflow.attempt", b"9"), "no order has failed"),
        (lambda m: _with(m, "onceflow.origin.offset", b"999999"), "no order has failed"),
        (lambda m: _without(m, "onceflow.attempt"), "no order has failed"),
        (lambda m: _without(m, "trace"), "trace"),
        (lambda m: m._replace(headers=(*m.headers, m.headers[0])), "2 times"),
        (lambda m: m._replace(headers=()), "no order has failed"),
    ],
)
@pytest.mark.parametrize("parked", [False, True])
def test_wrong_headers_are_seen(
    few: list[data.Order],
    origins: dict[str, Origin],
    parked: bool,
    change: Callable[[Message], Message],
    text: str,
) -> None:
    found = _dead_letters(few, origins, parked=parked)
    found[7] = change(found[7])
    problems = _check(few, origins, found, parked=parked)
    assert problems.wrong == 1
    assert text in problems.examples[0]


@pytest.mark.parametrize("name", ["onceflow.key", "onceflow.value.null", "onceflow.retry.topic"])
def test_what_a_parked_record_lacks_is_seen(few: list[data.Order], origins: dict[str, Origin], name: str) -> None:
    found = _dead_letters(few, origins, parked=True)
    at = next(n for n, message in enumerate(found) if name in dict(message.headers))
    found[at] = _without(found[at], name)
    assert _check(few, origins, found, parked=True).wrong == 1


def test_what_was_parked_too_early_is_seen(few: list[data.Order], origins: dict[str, Origin]) -> None:
    found = _dead_letters(few, origins, parked=True)
    exhausted = next(n for n, m in enumerate(found) if dict(m.headers)["onceflow.attempt"] == b"4")
    found[exhausted] = _with(found[exhausted], "onceflow.attempt", b"3")
    assert "parked after attempt 3" in _check(few, origins, found, parked=True).examples[0]


def _key(record: Any) -> Any:
    """The keys of parked records go on after the origin."""
    return record.key + b"/0123456789abcdef" if record.goes_on else record.key


def _topic(expected: list[Any]) -> list[Message]:
    """The messages of a flawless topic; the identities of dead letters are in their headers."""
    places = key_partitions(pa.array([_key(record) for record in expected], pa.binary()), PARTITIONS)
    offsets: Counter[int] = Counter()
    found = []
    for place, record in zip(places.tolist(), expected, strict=True):
        place = max(0, place)
        origin, _, attempt = record.identity.rpartition("#")
        headers: tuple[tuple[str, bytes | None], ...] = ()
        if origin:
            parts = zip(("topic", "partition", "offset"), origin.split("/"), strict=True)
            headers = (
                ("onceflow.attempt", attempt.encode()),
                *((f"onceflow.origin.{n}", p.encode()) for n, p in parts),
            )
        found.append(Message(place, offsets[place], _key(record), record.value, headers))
        offsets[place] += 1
    return found


def _lose(found: list[Message]) -> None:
    del found[7]


def _double(found: list[Message]) -> None:
    found.append(found[7]._replace(offset=10_000))


def _change(found: list[Message]) -> None:
    found[7] = found[7]._replace(value=b"{}")


def _add(found: list[Message]) -> None:
    found.append(Message(0, 10_000, b"ord-999999999", b"{}"))


def _move(found: list[Message]) -> None:
    found[7] = found[7]._replace(partition=(found[7].partition + 1) % PARTITIONS)


@pytest.mark.parametrize("topic", ["failed", "retry", "charged", "parked"])
@pytest.mark.parametrize(
    "mutate, kind",
    [
        (None, None),
        (_lose, "lost"),
        (_double, "duplicated"),
        (_change, "wrong"),
        (_add, "unexpected"),
        (_move, "misplaced"),
    ],
)
def test_the_auditor_sees_every_kind_of_damage(
    few: list[data.Order],
    origins: dict[str, Origin],
    topic: str,
    mutate: Callable[[list[Message]], None] | None,
    kind: str | None,
) -> None:
    expected = list(
        {
            "failed": lambda: data.expected_failed(few, origins),
            "retry": lambda: data.expected_retry(few, origins),
            "charged": lambda: data.expected_charged(few),
            "parked": lambda: data.expected_parked(few, origins),
        }[topic]()
    )
    found = _topic(expected)
    if mutate is not None:
        mutate(found)
    findings = compare(
        topic, expected, found, partitions=PARTITIONS, identify=lambda message: data.identify(topic, message)
    )
    assert findings.counts == {**dict.fromkeys(KINDS, 0), **({} if kind is None else {kind: 1})}, findings.examples


def test_a_retry_before_its_time_is_seen() -> None:
    dead_letters = {f"orders/0/{n}#{attempt}": 1000 for n, attempt in itertools.product(range(3), (1, 2, 3))}
    # Half of 200, 400 and 800 ms is left to chance.
    on_time = {identity: 1000 + 100 * 2 ** (int(identity[-1]) - 1) for identity in dead_letters}
    problems, waits = data.check_waits(dead_letters, on_time)
    assert (problems.wrong, len(waits)) == (0, 9)
    problems, _ = data.check_waits(dead_letters, {**on_time, "orders/0/1#3": 1399})
    assert problems.wrong == 1
    assert "orders/0/1#3 was retried after 0.399 s" in problems.examples[0]
    assert data.check_waits(dead_letters, {"orders/0/7#1": 5000})[0].wrong == 1


def test_what_still_waits_is_seen() -> None:
    messages = [Message(0, 0, b"a", b"1"), Message(0, 1, b"a", None), Message(1, 0, b"b", None)]
    assert data.check_deleted("waiting", messages).wrong == 0
    assert data.check_deleted("waiting", [*messages, Message(1, 1, b"b", b"2")]).wrong == 1
    assert data.check_deleted("waiting", messages[:1]).wrong == 1


def test_wrong_rows_of_the_table_are_seen(few: list[data.Order]) -> None:
    rows = [Message(0, n, each.key, each.value) for n, each in enumerate(data.expected_charged(few))]
    assert data.check_rows("charges", few, rows).wrong == 0
    assert data.check_rows("charges", few, rows[1:]).wrong == 1
    assert data.check_rows("charges", few, [*rows, Message(0, 9999, b"x", b"1")]).wrong == 1
    assert data.check_rows("charges", few, [*rows, rows[7]._replace(value=None)]).wrong == 1


def test_too_few_orders_for_the_kills_are_refused_before_anything_starts() -> None:
    with pytest.raises(OptionError, match="too few"):
        run(Choices(records=1000, kills=3))
