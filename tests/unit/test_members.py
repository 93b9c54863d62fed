"""What instances tell each other through a consumer group that strangers may join, and lead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from onceflow.server.members import Members, _StrangerError
from onceflow.server.peer_auth import PeerSecrets
from onceflow.server.routes import Routes

SECRETS = PeerSecrets(["a-secret-of-the-tests"])


class Share:
    placed = True

    def __init__(self, held: list[int], partitions: int) -> None:
        self.held, self.partitions_now = held, partitions

    def on_disk(self) -> list[int]:
        return []

    def progress(self, partition: int) -> Any:
        return SimpleNamespace(restored=True)


class Holding:
    def __init__(self) -> None:
        self.wanted: list[Any] = []
        self.problems: list[str] = []

    def want(self, partitions: Any) -> None:
        self.wanted.append(partitions)


class Instance:
    def __init__(self, name: str, held: list[int], partitions: int = 4, secrets: PeerSecrets = SECRETS) -> None:
        self.member, self.routes = f"member-{name}", Routes(f"http://{name}")
        self.share: Any = Share(held, partitions)
        settings: Any = None
        self.members = Members(
            {"t": self.share},
            self.routes,
            settings,
            group="g",
            secrets=secrets,
            copies=1,
            session_s=10,
            give_up=lambda: None,
        )
        self.holding: Any = Holding()
        self.members._holding = self.holding

    @property
    def says(self) -> dict[str, bytes]:
        return {self.member: self.members.said(self.member)}

    @property
    def owners(self) -> list[str]:
        return [each[0].removeprefix("http://") if each else "" for each in self.routes.tables["t"].holders]


def test_members_share_the_partitions() -> None:
    one, two = Instance("a", [0, 1, 2, 3]), Instance("b", [])
    decided = one.members.decided({**one.says, **two.says}, 7)
    for each in (one, two):
        each.members.on_assignment(decided[each.member], each.member, 7)
    assert one.owners == two.owners
    assert set(one.owners) == {"a"}  # b has restored nothing yet
    assert sorted(two.holding.wanted[0]["t"] + one.holding.wanted[0]["t"]) != [0, 1, 2, 3]  # b restores some beside a


def test_what_an_instance_has_said_says_nothing_about_another_member() -> None:
    """Members of a group see what all have said, if they lead it. They may say it again when the instance has gone."""
    gone, here = Instance("gone", [0, 1, 2, 3]), Instance("a", [])
    (sealed,) = gone.says.values()
    for members in ({"stranger": sealed}, {"stranger": b""}, {"stranger": b"0" * 64 + b"{}"}):
        decided = here.members.decided({**members, **here.says}, 3)
        assert set(decided) == {here.member}  # strangers are told nothing
        here.members.on_assignment(decided[here.member], here.member, 3)
        assert set(here.owners) == {"a"}


def test_an_earlier_assignment_is_not_believed() -> None:
    here, other = Instance("a", [0, 1, 2, 3]), Instance("b", [])
    old = here.members.decided(here.says, 5)[here.member]
    of_others = other.members.decided(other.says, 6)[other.member]
    here.share.partitions_now = 8
    now = here.members.decided(here.says, 6)[here.member]
    here.members.on_assignment(now, here.member, 6)
    known, wanted = here.routes.tables, list(here.holding.wanted)
    assert len(here.owners) == 8
    for repeated, member in ((old, here.member), (of_others, here.member), (now, "another-life"), (b"", here.member)):
        with pytest.raises(_StrangerError):
            here.members.on_assignment(repeated, member, 6)
    with pytest.raises(_StrangerError):
        here.members.on_assignment(now, here.member, 7)  # that of the generation before
    assert here.routes.tables is known
    assert here.holding.wanted == wanted


def test_another_secret(caplog: pytest.LogCaptureFixture) -> None:
    here, other = Instance("a", []), Instance("b", [], secrets=PeerSecrets(["another-secret-of-tests"]))
    decided = here.members.decided({**here.says, **other.says}, 1)
    assert set(decided) == {here.member}
    assert "1 member has no secret of this instance" in caplog.text
    with pytest.raises(_StrangerError):
        other.members.on_assignment(decided[here.member], other.member, 1)
    assert b"secret" not in decided[here.member]
    assert orjson.loads(decided[here.member][64:])["members"] == [here.member]
