"""The demo ``outbox``: a payment service is called once for each request, and the callers are killed.

payments -> [pay] -> receipts, repeated, failed                          the service knows idempotency keys

payments -> [intend] -> intents -> [pay-once] -> results                 it does not: at most once
                           \\----------- [watch] -/  -> unclear
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from onceflow_workshop.demos import outbox_data as data
from onceflow_workshop.demos.audit import Expected, Message
from onceflow_workshop.demos.chain import Audit, Chain, Choices, Link, run_chain
from onceflow_workshop.demos.display import Display
from onceflow_workshop.demos.files_rows import compact_json
from onceflow_workshop.demos.generator import Input
from onceflow_workshop.demos.harness import Kill
from onceflow_workshop.demos.outbox_server import Charge, PaymentServer
from onceflow_workshop.demos.reading import read_topic
from onceflow_workshop.demos.service_files import service_file

SERVICE = service_file("outbox/outbox.py")
# Between the calls and the commit: a driver that dies there has to make them again.
_AFTER_THE_CALLS = ("write", "audit", "progress")


@dataclass(frozen=True)
class OutboxChoices(Choices):
    """Options of the command."""

    without_keys: bool = False


class Payments(Chain):
    """What both demos have in common."""

    inputs_of = ("payments",)
    dead_letters = ("failed",)
    min_records_per_batch = 10
    caller: ClassVar[int]  # number of the flow that makes the calls

    @cached_property
    def server(self) -> PaymentServer:
        """Made when its port is first asked for, which is before it serves."""
        return PaymentServer()

    @cached_property
    def clicks(self) -> list[data.Click]:
        return data.clicks(self.choices.seed, self.choices.records, fatal=self.choices.kills > 0)

    def surroundings(self) -> AbstractContextManager[Any]:
        return self.server.serving()

    def inputs(self) -> Iterator[Input]:
        return data.inputs(self.clicks)

    def identify(self, topic: str, message: Message) -> str | None:
        return data.identify(topic, message)

    def command(self, link: Link) -> list[str]:
        return [*super().command(link), "--service", self.server.url]

    def _report_deaths(self, display: Display) -> None:
        if self.server.fatal.is_set():  # while the call is under way
            self.server.fatal.clear()
            self.services[self.caller].planned += 1
            self.services[self.caller].kill()
        super()._report_deaths(display)

    def _read(self, name: str) -> dict[str, Any]:
        """What is in a topic, by token."""
        found = read_topic(self.servers, self.topics[name], self.deadline)
        return {(message.key or b"").decode(): json.loads(message.value or b"null") for message in found}

    def _charged(self, audit: Audit) -> dict[str, Charge]:
        """The charge of each token. None may be there twice, and none that nobody has asked for."""
        charges = self.server.by_account()
        found = {}
        for click in self.clicks:
            made = charges.pop(click.account, []) if click.kind == "first" else []
            if len(made) > 1:
                audit.problems.append(f"{click.token}: charged {len(made)} times")
            if made:
                found[click.token] = made[0]
            if made and (made[0].amount != click.amount or click.card in data.REFUSED):
                audit.problems.append(f"{click.token}: charged {made[0].amount}, asked for {click.amount}")
        audit.problems += [f"{account}: charged, but nobody has asked for it" for account in charges]
        audit.facts |= {
            "charges": len(self.server.charges),
            "requests": self.server.requests.total(),
            "answered_again": self.server.answered_again,
        }
        return found


class Outbox(Payments):
    """Pay with idempotency keys."""

    name = "outbox"
    partitions: ClassVar[Mapping[str, int]] = {"payments": 4, "receipts": 3, "repeated": 2, "failed": 2}
    links: ClassVar[Sequence[Link]] = (Link("pay", ("payments",), "paid", SERVICE, ("pay",), keeps_state=True),)
    outputs = ("receipts",)
    caller = 0

    def plan(self, rng: random.Random, link: Link) -> list[Kill]:
        kills = super().plan(rng, link)
        # At least one of them makes calls necessary again.
        return [replace(kill, step=rng.choice(_AFTER_THE_CALLS)) if n == 0 else kill for n, kill in enumerate(kills)]

    def expected(self) -> Mapping[str, Iterable[Expected]]:
        return {
            "payments": data.expected(self.clicks, "first", "repeated", "conflict", "bad"),
            "receipts": self._receipts(),
            "repeated": data.expected(self.clicks, "repeated"),
            "failed": data.expected_failed(self.clicks, called=True),
        }

    def _receipts(self) -> Iterator[Expected]:
        charges = self.server.by_account()
        for click in self.clicks:
            if click.is_paid:
                receipt = "".join(charge.receipt for charge in charges.get(click.account, ()))
                value = {"amount": click.amount, "receipt": receipt}
                yield Expected(click.token, click.token.encode(), compact_json(value))

    def more_topics(self) -> list[str]:
        return [f"paid{self.suffix}", f"paid{self.suffix}-internal"]

    def look_further(self, audit: Audit, display: Display) -> None:
        charged = self._charged(audit)
        wanted = {click.token for click in self.clicks if click.is_paid}
        audit.problems += [f"{token}: not charged" for token in wanted - charged.keys()]
        if self.kills and not self.server.answered_again:
            audit.problems.append("no call was made twice: the kills have shown nothing")
        display.say(f"the service was asked {self.server.requests.total():,} times, and charged {len(charged):,} times")


class OutboxWithoutKeys(Payments):
    """Pay at most once."""

    name = "outbox"
    partitions: ClassVar[Mapping[str, int]] = {
        "payments": 4, "intents": 4, "repeated": 2, "failed": 2, "results": 4, "unclear": 2,
    }  # fmt: skip
    configs: ClassVar[Mapping[str, Mapping[str, str]]] = {"unclear": {"cleanup.policy": "compact"}}
    links: ClassVar[Sequence[Link]] = (
        Link("intend", ("payments",), "intended", SERVICE, ("intend",), keeps_state=True),
        Link("pay-once", ("intents",), "called", SERVICE, ("pay-once",), at_most_once=True),
        Link("watch", ("intents", "results"), "watched", SERVICE, ("watch",), keeps_state=True),
    )
    outputs = ("results",)
    caller = 1

    def plan(self, rng: random.Random, link: Link) -> list[Kill]:
        if link.flow == "watch":
            return []
        kills = super().plan(rng, link)
        if link.flow == "pay-once":  # progress comes first there: after it, calls are lost
            kills = [replace(kill, step="progress") if n == 0 else kill for n, kill in enumerate(kills)]
        return kills

    def expected(self) -> Mapping[str, Iterable[Expected]]:
        return {
            "payments": data.expected(self.clicks, "first", "repeated", "conflict", "bad"),
            "intents": self._intents(),
            "repeated": data.expected(self.clicks, "repeated"),
            "failed": data.expected_failed(self.clicks, called=False),
        }

    def _intents(self) -> Iterator[Expected]:
        for click in self.clicks:
            if click.kind == "first":
                payment = {"account": click.account, "amount": click.amount, "card": click.card}
                yield Expected(click.token, click.token.encode(), compact_json(payment))

    def more_topics(self) -> list[str]:
        return [f"{table}{self.suffix}{more}" for table in ("intended", "watched") for more in ("", "-internal")]

    def through(self, display: Display) -> bool:
        """Whether nobody waits for a result any more. By then ``pay-once`` has stopped, and ``watch`` has read all
        results. What has no result is listed when its time is over."""
        known = self._read("results").keys() | self._unclear().keys()
        return all(click.token in known for click in self.clicks if click.kind == "first")

    def _unclear(self) -> dict[str, Any]:
        """What is listed, without what was deleted from the list."""
        return {token: listed for token, listed in self._read("unclear").items() if listed is not None}

    def look_further(self, audit: Audit, display: Display) -> None:
        charged, results, unclear = self._charged(audit), self._read("results"), self._unclear()
        sure = {token: result for token, result in results.items() if result["status"] != "unclear"}
        for click in self.clicks:
            if click.kind != "first":
                continue
            result, charge = sure.get(click.token), charged.get(click.token)
            if result is None and click.token not in unclear:
                audit.problems.append(f"{click.token}: no result, and not listed as unclear")
            if result is not None and click.token in unclear:
                audit.problems.append(f"{click.token}: {result}, and still listed as unclear")
            if result is not None and result.get("receipt") != (charge.receipt if charge else None):
                audit.problems.append(f"{click.token}: {result}, but {charge}")
        audit.facts |= {
            "out": len(results),
            "unclear": len(unclear),
            "unclear_charged": len(unclear.keys() & charged.keys()),
            "unclear_not_charged": len(unclear.keys() - charged.keys()),
        }
        if self.kills and not audit.facts["unclear_not_charged"]:
            audit.problems.append("no call was lost: the kills have shown nothing")
        display.say(f"{len(charged):,} payments are charged; {len(unclear):,} are listed, their outcome is not known")


def run(choices: OutboxChoices) -> dict[str, Any]:
    """Run the demo; see ``run_chain``."""
    return run_chain(OutboxWithoutKeys if choices.without_keys else Outbox, choices)
