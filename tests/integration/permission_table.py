"""The table of permissions in docs/connect.md, as tests grant them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import confluent_kafka.admin

_admin: Any = confluent_kafka.admin
PAGE = Path(__file__).parents[2] / "docs" / "connect.md"
_HEADING = "| Flow or command | Needs | On |"
_TAKEOVER = "taking over a flow"
_KINDS = {
    "topic": (_admin.ResourceType.TOPIC, "--topic"),
    "group": (_admin.ResourceType.GROUP, "--group"),
    "transactional id": (_admin.ResourceType.TRANSACTIONAL_ID, "--transactional-id"),
    "the cluster": (_admin.ResourceType.BROKER, "--cluster"),
}


class Right(NamedTuple):
    """A permission. ``name`` may have a placeholder in capitals."""

    operation: str
    kind: str
    name: str

    def of(self, names: Mapping[str, str]) -> Right:
        """With names in place of placeholders."""
        return self._replace(name=re.sub(r"[A-Z]{2,}", lambda found: names[found[0]], self.name))

    @property
    def acl(self) -> tuple[Any, str, Any]:
        """As `grant` takes it."""
        return _KINDS[self.kind][0], self.name or "kafka-cluster", getattr(_admin.AclOperation, self.operation)

    @property
    def added_by(self) -> str:
        """What the command that adds it ends with."""
        operation = "".join(word.capitalize() for word in self.operation.split("_"))
        return f"--operation {operation} {_KINDS[self.kind][1]} {self.name}".rstrip()


def table() -> dict[str, list[Right]]:
    """What each row needs, by what is in its first cell: one flow or command."""
    lines = PAGE.read_text().splitlines()
    found: dict[str, list[Right]] = {}
    labels: list[str] = []
    for line in lines[lines.index(_HEADING) + 2 :]:
        if not line.startswith("|"):
            break
        first, needs, on = (cell.strip() for cell in line.strip("|").split("|"))
        if first:
            # Several commands, or a flow, or a command and its condition.
            labels = re.findall(r"`([^`]+)`", first) if re.fullmatch(r"(`[^`]+`(, )?)+", first) else [first]
            found |= {label: [] for label in labels}
        for label in labels:
            found[label] += found[_TAKEOVER] if needs == _TAKEOVER else _rights(needs, on)
    return found


def _rights(needs: str, on: str) -> list[Right]:
    if not on:
        assert needs == "what the flow needs"
        return []
    places = re.findall(r"(topic|group|transactional id) `([^`]+)`", on) or [(on, "")]
    return [Right(operation, kind, name) for kind, name in places for operation in needs.split(", ")]
