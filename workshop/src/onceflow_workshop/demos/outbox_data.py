"""Requests of payments from a seed, and what must come out of the flows for them. Pure: no Kafka, no network.

Every request has an account of its own, by which the charges of the payment service are told apart.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from onceflow_workshop.demos.audit import Expected, Message
from onceflow_workshop.demos.files_rows import compact_json
from onceflow_workshop.demos.generator import Input

#: How often each kind of card is there, relative to the others.
CARDS = {"ok": 100, "busy": 4, "reset": 3, "lost": 3, "late": 1, "declined": 2, "down": 1}
#: Nothing is charged, whatever is tried.
REFUSED = ("declined", "down")
_REPEATED_SHARE, _CONFLICT_SHARE, _BAD_SHARE = 0.05, 0.01, 0.01
_CLICK = re.compile(rb"click-\d{6}")


class Click(NamedTuple):
    """A request, of which there may be several for one payment.

    Args:
        kind: ``first``, ``repeated``, ``conflict`` (the token was another payment before), or ``bad``.
    """

    name: str
    token: str
    kind: str
    account: str
    amount: int
    card: str

    @property
    def value(self) -> bytes:
        if self.kind == "bad":
            return b'{"click":"%s","amount":"much"}' % self.name.encode()
        payment = {"account": self.account, "amount": self.amount, "card": self.card}
        return compact_json({**payment, "click": self.name})

    @property
    def is_paid(self) -> bool:
        return self.kind == "first" and self.card not in REFUSED


def clicks(seed: int, count: int, *, fatal: bool) -> list[Click]:
    """``count`` requests, the same ones for the same seed.

    Args:
        fatal: whether one of them kills who makes its call.
    """
    rng = random.Random(f"outbox-{seed}")
    found: list[Click] = []
    while len(found) < count:
        number = len(found)
        name, token = f"click-{number:06d}", f"token-{rng.getrandbits(48):012x}"
        drawn = rng.random()
        card = rng.choices(list(CARDS), list(CARDS.values()))[0]
        first = Click(name, token, "first", f"acc-{number:06d}", rng.randint(1, 100_000), card)
        if drawn < _BAD_SHARE:
            found.append(first._replace(kind="bad"))
            continue
        if fatal and number >= count // 2:
            first, fatal = first._replace(card="fatal"), False
        found.append(first)
        if card not in REFUSED and drawn > 1 - _REPEATED_SHARE:
            found.append(first._replace(name=f"click-{len(found):06d}", kind="repeated"))
        elif card not in REFUSED and drawn > 1 - _REPEATED_SHARE - _CONFLICT_SHARE:
            again = first._replace(name=f"click-{len(found):06d}", kind="conflict", amount=first.amount + 1)
            found.append(again)
    return found[:count]


def inputs(made: Sequence[Click]) -> Iterator[Input]:
    for click in made:
        yield Input("payments", click.token.encode(), click.value)


def expected(made: Sequence[Click], *kinds: str) -> Iterator[Expected]:
    """Requests of these kinds, as they were sent."""
    for click in made:
        if click.kind in kinds:
            yield Expected(click.name, click.token.encode(), click.value, None)


def expected_failed(made: Sequence[Click], *, called: bool) -> Iterator[Expected]:
    """Dead letters.

    Args:
        called: whether a call that fails makes one.
    """
    for click in made:
        if click.kind in ("bad", "conflict") or (called and click.kind == "first" and click.card in REFUSED):
            yield Expected(click.name, click.token.encode(), click.value, None)


def identify(topic: str, message: Message) -> str | None:
    """The name of a request, or the token where a record has no other name."""
    if topic in ("payments", "repeated", "failed"):
        found = _CLICK.search(message.value or b"")
        return None if found is None else found[0].decode()
    return None if message.key is None else message.key.decode()
