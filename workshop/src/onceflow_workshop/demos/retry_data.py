"""Orders from a seed, how often each fails and where it must end, and what is wrong with what was found. Pure.

What is expected is drawn with the order, before its record is written down: neither the service's rules nor what a
topic holds are asked.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from onceflow_workshop.demos.audit import Expected, Headers, Message, Origin, Problems, onceflow_headers
from onceflow_workshop.demos.generator import Input

ATTEMPTS_MAX = 4
BASE_S, CEILING_S, JITTER = 0.2, 2.0, 0.5

TRANSIENT_SHARE, DOWN_SHARE, DECLINED_SHARE, BAD_SHARE = 0.12, 0.01, 0.01, 0.01
_OLD_SHARE, _BIG_SHARE = 0.005, 0.01
_AT_MS = 1_750_000_000_000
#: What may be wrong with a record, and the class of the error that it must cause.
BAD = {
    "not JSON": "JSONDecodeError",
    "no object": "TypeError",
    "missing field": "KeyError",
    "wrong type": "TypeError",
    "beyond 64 bits": "ValueError",
    "out of range": "ValueError",
    "absurd time": "ValueError",
    "huge": "ValueError",
    "null value": "TypeError",
    "no key": "ValueError",
    "attempt no number": "ValueError",
    "charged before": "AlreadyChargedError",
}


class Order(NamedTuple):
    """One generated record.

    Args:
        name: of the record; its order's id, but for an order that comes twice.
        failures: classes of the errors at its first, second, ... attempt, as often as it fails.
        receipt: what it is charged with in the end; None: it is parked.
        bad: what is wrong with the record; empty: nothing, it is the provider that fails.
    """

    name: str
    key: bytes | None
    value: bytes | None
    failures: tuple[str, ...] = ()
    receipt: bytes | None = None
    headers: Headers = ()
    timestamp_ms: int | None = None
    bad: str = ""


def generate(seed: int, count: int) -> Iterator[Order]:
    """``count`` orders, the same ones for the same seed: most are charged at once, some later, some never."""
    rng = random.Random(f"orders-{seed}")
    chance = rng.random
    charged: Order | None = None  # one that was charged at its first attempt
    for number in range(count):
        name = f"ord-{number:09d}"
        amount = 1 + int(chance() * 1_000_000)
        drawn = chance()
        if drawn < BAD_SHARE:
            order = _bad(rng, name, amount, charged)
        elif (drawn := drawn - BAD_SHARE) < DOWN_SHARE:
            order = _order(name, amount, "down", ("ConnectionError",) * ATTEMPTS_MAX)
        elif (drawn := drawn - DOWN_SHARE) < DECLINED_SHARE:
            order = _order(name, amount, "declined", ("PaymentDeclinedError",))
        elif drawn - DECLINED_SHARE < TRANSIENT_SHARE:
            times = rng.choices([1, 2, 3], [6, 3, 1])[0]
            kind, error = rng.choice([("busy", "ConnectionError"), ("slow", "TimeoutError")])
            note = "x" * rng.randint(100_000, 200_000) if chance() < _BIG_SHARE else ""
            order = _order(name, amount, f"{kind}-{times}", (error,) * times, note=note)
        else:
            order = charged = _order(name, amount, "ok")
        if chance() < _OLD_SHARE:
            order = order._replace(timestamp_ms=rng.randint(1, 1_000_000))  # in January 1970
        yield order._replace(headers=(*order.headers, ("trace", name.encode())))


def _order(name: str, amount: int, card: str, failures: tuple[str, ...] = (), note: str = "") -> Order:
    receipt = None
    if failures[:1] != ("PaymentDeclinedError",) and len(failures) < ATTEMPTS_MAX:
        receipt = f'{{"id":"{name}","amount":{amount},"attempt":{len(failures) + 1}}}'.encode()
    return Order(
        name, name.encode(), _json(name, str(amount), str(_AT_MS + amount), f'"{card}"', note), failures, receipt
    )


def _json(name: str, amount: str, at: str, card: str, note: str = "") -> bytes:
    more = f', "note": "{note}"' if note else ""
    return f'{{"id": "{name}", "amount": {amount}, "at": {at}, "card": {card}{more}}}'.encode()


def _bad(rng: random.Random, name: str, amount: int, charged: Order | None) -> Order:
    kinds = list(BAD) if charged is not None else [kind for kind in BAD if kind != "charged before"]
    kind = rng.choice(kinds)
    good = _json(name, str(amount), str(_AT_MS), '"ok"')
    key: bytes | None = name.encode()
    value: bytes | None = good
    headers: Headers = ()
    if kind == "not JSON":
        cut = good[: rng.randint(1, len(good) - 1)]
        value = rng.choice(
            [cut, b"", b"order " + name.encode(), b"\xff\xfe" + good, b"[" * 100_000, b'{"amount": NaN}']
        )
    elif kind == "no object":
        value = rng.choice([b"null", b"17", b'"text"', b"[]", b"true"])
    elif kind == "missing field":
        value = rng.choice([b"{}", b'{"id": "' + name.encode() + b'"}', good.replace(b'"card"', b'"cart"')])
    elif kind == "wrong type":
        value = rng.choice(
            [
                _json(name, rng.choice(['"a lot"', "1.5", "true", "null", "[1]", "{}"]), str(_AT_MS), '"ok"'),
                _json(name, str(amount), rng.choice(['"yesterday"', "1e3", "false"]), '"ok"'),
                _json(name, str(amount), str(_AT_MS), rng.choice(["7", "null", '["ok"]'])),
            ]
        )
    elif kind == "beyond 64 bits":
        large = str(rng.choice([1, -1]) * 10 ** rng.randint(25, 300))
        value = rng.choice([_json(name, large, str(_AT_MS), '"ok"'), _json(name, str(amount), large, '"ok"')])
    elif kind == "out of range":
        value = _json(name, str(rng.choice([0, -amount, 1_000_000 + amount, 2**63, 2**64 - 1])), str(_AT_MS), '"ok"')
    elif kind == "absurd time":
        value = _json(name, str(amount), str(rng.choice([0, -1, -(2**63), 2**63 - 1, 253_402_300_800_000])), '"ok"')
    elif kind == "huge":
        value = _json(name, str(amount), str(_AT_MS), '"' + "?" * rng.randint(200_000, 500_000) + '"')
    elif kind == "null value":
        value = None
    elif kind == "no key":
        key = None
    elif kind == "attempt no number":
        headers = (("onceflow.attempt", rng.choice([b"many", b"1.5", b"\xff"])),)
    elif charged is not None:
        key, value = charged.key, charged.value
    return Order(name, key, value, (BAD[kind],), headers=headers, bad=kind)


# ---- what must come out ------------------------------------------------------------------------------


def inputs(orders: Iterable[Order]) -> Iterator[Input]:
    """The records to produce; of those that fail it matters where the broker puts them."""
    for order in orders:
        identity = order.name if order.failures else None
        yield Input("orders", order.key, order.value, identity, headers=order.headers, timestamp_ms=order.timestamp_ms)


def ends(orders: Iterable[Order]) -> Counter[str]:
    """How many orders end where."""
    return Counter("parked" if order.receipt is None else "charged" for order in orders)


def place(origin: Origin) -> str:
    """An origin as text."""
    return f"{origin.topic}/{origin.partition}/{origin.offset}"


def expected_charged(orders: Iterable[Order]) -> Iterator[Expected]:
    """Receipts, with the attempt that succeeded."""
    for order in orders:
        if order.receipt is not None:
            yield Expected(order.name, order.key, order.receipt)


def expected_failed(orders: Iterable[Order], origins: Mapping[str, Origin]) -> Iterator[Expected]:
    """A dead letter for every failure; its headers are for `check_headers`."""
    for order in orders:
        for attempt in range(1, len(order.failures) + 1):
            yield Expected(f"{place(origins[order.name])}#{attempt}", order.key, order.value, headers=None)


def expected_retry(orders: Iterable[Order], origins: Mapping[str, Origin]) -> Iterator[Expected]:
    """A retry for every failure, but for the last one of those that are parked."""
    for order in orders:
        for attempt in range(1, len(order.failures) + (order.receipt is not None)):
            yield Expected(f"{place(origins[order.name])}#{attempt}", order.key, order.value, headers=None)


def expected_parked(orders: Iterable[Order], origins: Mapping[str, Origin]) -> Iterator[Expected]:
    """Those that are never charged, under their origins. Their keys go on: one origin may have several records."""
    for order in orders:
        if order.receipt is None:
            origin = place(origins[order.name])
            yield Expected(origin, origin.encode(), order.value or b"", headers=None, goes_on=True)


def identify(topic: str, message: Message) -> str | None:
    """The identity of a record in a topic (its name without suffix), as the functions above give it."""
    if topic in ("charged", "parked"):
        key = None if message.key is None else message.key.decode(errors="replace")
        return key if key is None or topic == "charged" else key.rpartition("/")[0]
    headers = onceflow_headers(message)
    origin = "/".join(headers.get(f"onceflow.origin.{name}", "") for name in ("topic", "partition", "offset"))
    return f"{origin}#{headers.get('onceflow.attempt', '')}"


# ---- what else is looked at --------------------------------------------------------------------------


def check_headers(
    topic: str,
    orders: Iterable[Order],
    origins: Mapping[str, Origin],
    messages: Iterable[Message],
    *,
    parked: bool,
    retry_topic: str,
) -> Problems:
    """Whether dead letters (or, ``parked``, parked records) say what happened to them.

    Args:
        topic, retry_topic: full names.
        messages: of the topic.
    """
    problems = Problems(topic)
    by_origin = {place(origins[order.name]): order for order in orders if order.failures}
    for message in messages:
        where = f"{topic}-{message.partition}@{message.offset}"
        origin, _, number = (identify("failed", message) or "").rpartition("#")
        order = by_origin.get(origin)
        attempt = int(number) if number.isdecimal() else 0
        if order is None or not 0 < attempt <= len(order.failures):
            problems.note(f"{where}: no order has failed as origin {origin!r}, attempt {number!r}")
            continue
        expected = _expected_headers(order, origins[order.name], attempt, retry_topic, parked=parked)
        for problem in _wrong_headers(message, order, attempt, expected, parked=parked):
            problems.note(f"{where}: {problem}")
    return problems


def _expected_headers(order: Order, origin: Origin, attempt: int, retry_topic: str, *, parked: bool) -> dict[str, str]:
    """Headers of the dead letter of one attempt whose values follow from the seed."""
    expected = {"onceflow.error.class": order.failures[attempt - 1], "trace": order.name}
    if attempt == 1:
        expected |= {"onceflow.error.topic": origin.topic, "onceflow.error.partition": str(origin.partition)}
    else:
        expected["onceflow.error.topic"] = retry_topic
    if parked:
        expected["onceflow.retry.topic"] = retry_topic
    return expected


def _wrong_headers(
    message: Message, order: Order, attempt: int, expected: Mapping[str, str], *, parked: bool
) -> Iterator[str]:
    """What is wrong with a dead letter or a parked record, one text each."""
    if parked and attempt != len(order.failures):
        yield f"parked after attempt {attempt}, must be after {len(order.failures)}"
    names = Counter(name for name, _ in message.headers)
    found = {name: (content or b"").decode(errors="replace") for name, content in message.headers}
    for name, value in expected.items():
        if found.get(name) != value:
            yield f"header {name} is {found.get(name)!r:.200}, must be {value!r}"
    for name in [name for name, count in names.items() if count > 1]:
        yield f"header {name} is there {names[name]} times"
    error = order.failures[attempt - 1]
    if error not in onceflow_headers(message).get("onceflow.error.stack", ""):
        yield f"the stack does not name {error}"
    if parked and dict(message.headers).get("onceflow.key") != order.key:
        yield "header onceflow.key is not the order's key"
    if parked and ("onceflow.value.null" in found) != (order.value is None):
        yield f"header onceflow.value.null is {'there' if order.value is not None else 'missing'}"


def check_waits(dead_letters: Mapping[str, int], retries: Mapping[str, int]) -> tuple[Problems, list[float]]:
    """Whether no record was retried before its time.

    Args:
        dead letters, retries: identity and the time at which the broker has appended the record, milliseconds.

    Returns:
        what is wrong, and the waits in seconds.
    """
    problems = Problems("waits")
    waits = []
    for identity, at_ms in retries.items():
        if identity not in dead_letters:
            problems.note(f"{identity} was retried and has never failed")
            continue
        waits.append((at_ms - dead_letters[identity]) / 1000)
        attempt = int(identity.rpartition("#")[2] or 0)
        least = min(CEILING_S, BASE_S * 2 ** (attempt - 1)) * (1 - JITTER)
        if waits[-1] < least:
            problems.note(f"{identity} was retried after {waits[-1]} s, not before {least} s")
    return problems, waits


def check_deleted(topic: str, messages: Iterable[Message]) -> Problems:
    """Whether the last record of every key is a tombstone.

    Args:
        messages: in offset order per partition.
    """
    problems = Problems(topic)
    last = {(message.partition, message.key): message for message in messages}
    for message in last.values():
        if message.value is not None:
            problems.note(f"{message.key!r:.200} is still there, at {topic}-{message.partition}@{message.offset}")
    return problems


def check_rows(topic: str, orders: Iterable[Order], messages: Iterable[Message]) -> Problems:
    """Whether the table of charges has the receipts, and nothing else.

    Args:
        messages: in offset order per partition.
    """
    problems = Problems(topic)
    rows = {message.key: message.value for message in messages}
    receipts = {order.key: order.receipt for order in orders if order.receipt is not None}
    for key in rows.keys() | receipts.keys():
        if rows.get(key) != receipts.get(key):
            problems.note(f"{key!r:.200} is {rows.get(key)!r:.200}, must be {receipts.get(key)!r}")
    return problems
