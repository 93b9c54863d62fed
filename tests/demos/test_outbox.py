"""The demo `outbox`: what it generates and expects, and that its auditor sees a payment that was charged wrongly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from onceflow.client.deadline import Deadline
from onceflow_workshop.demos import outbox_data as data
from onceflow_workshop.demos.chain import Audit
from onceflow_workshop.demos.display import Display
from onceflow_workshop.demos.outbox import Outbox, OutboxChoices, OutboxWithoutKeys
from onceflow_workshop.demos.outbox_server import Charge

SEED = 42


def test_a_seed_gives_the_same_requests_again() -> None:
    made = data.clicks(SEED, 2000, fatal=True)
    assert made == data.clicks(SEED, 2000, fatal=True) != data.clicks(SEED + 1, 2000, fatal=True)
    assert len(made) == len({click.name for click in made}) == 2000
    assert len({click.account for click in made if click.kind == "first"}) == len(
        {click.token for click in made}
    ) - sum(click.kind == "bad" for click in made)


def test_all_kinds_are_there() -> None:
    made = data.clicks(SEED, 2000, fatal=True)
    assert set(Counter(click.kind for click in made)) == {"first", "repeated", "conflict", "bad"}
    cards = Counter(click.card for click in made if click.kind == "first")
    assert set(cards) == {*data.CARDS, "fatal"}
    assert cards["fatal"] == 1
    assert all(click.card not in data.REFUSED for click in made if click.kind in ("repeated", "conflict"))


@pytest.fixture
def demo(tmp_path: Path) -> Any:
    choices = OutboxChoices(records=200, seed=SEED, kills=1)
    made = Outbox(choices, "127.0.0.1:1", tmp_path, Deadline(1.0, "a test"))
    made.server.charges = [
        Charge(click.account, click.amount, f"ch-{number}") for number, click in enumerate(made.clicks) if click.is_paid
    ]
    made.server.answered_again = 1
    yield made
    made.server._server.server_close()


def problems(demo: Any) -> list[str]:
    audit = Audit()
    charged = demo._charged(audit)
    wanted = {click.token for click in demo.clicks if click.is_paid}
    return [*audit.problems, *(f"{token}: not charged" for token in wanted - charged.keys())]


def test_the_auditor_finds_what_is_charged_wrongly(demo: Any) -> None:
    assert problems(demo) == []
    charges, first = demo.server.charges, demo.server.charges[0]
    for wrong, text in (
        ([*charges, first], "charged 2 times"),
        (charges[1:], "not charged"),
        ([first.__class__(first.account, first.amount + 1, "ch-0"), *charges[1:]], "asked for"),
        ([*charges, Charge("acc-999999", 5, "ch-x")], "nobody has asked for it"),
    ):
        demo.server.charges = wrong
        [problem] = problems(demo)
        assert text in problem


def test_the_auditor_finds_what_is_listed_wrongly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = OutboxChoices(records=200, seed=SEED, kills=0)
    demo = OutboxWithoutKeys(choices, "127.0.0.1:1", tmp_path, Deadline(1.0, "a test"))
    demo.server._server.server_close()
    paid, *others = [click for click in demo.clicks if click.is_paid]
    silent = [click for click in demo.clicks if click.kind == "first" and not click.is_paid]
    charges = [Charge(click.account, click.amount, f"ch-{number}") for number, click in enumerate([paid, *others])]
    demo.server.charges = charges
    results = {
        click.token: {"status": "paid", "receipt": charge.receipt}
        for click, charge in zip([paid, *others], charges, strict=True)
    }
    listed: dict[str, Any] = {click.token: {"status": "unclear"} for click in silent}
    topics = {"results": results, "unclear": listed}
    monkeypatch.setattr(demo, "_read", lambda name: topics[name])

    def found() -> list[str]:
        audit = Audit()
        demo.look_further(audit, Display({}))
        return audit.problems

    assert found() == []
    listed[paid.token] = {"status": "unclear"}
    [problem] = found()
    assert "still listed" in problem
    listed[paid.token] = None  # deleted from the list
    assert found() == []
    del results[paid.token]
    [problem] = found()
    assert "no result, and not listed" in problem
