"""Compares what a topic holds with what it must hold: record by record, order and place included. Pure.

The names of what can be wrong: *lost* (missing), *duplicated* (a further copy), *unexpected* (belongs to no
expected record of this topic), *wrong* (other key, value or headers), *misplaced* (not the partition that a Java
client gives the key), *reordered* (before a record of the same key that was written earlier).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from onceflow.wire.partitioners import key_partitions

Headers = tuple[tuple[str, bytes | None], ...]
EXAMPLES_MAX = 5
KINDS = ("lost", "duplicated", "unexpected", "wrong", "misplaced", "reordered")


class Message(NamedTuple):
    """One record as a consumer got it."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


class Expected(NamedTuple):
    """One record that must be there exactly once."""

    identity: str
    key: bytes
    value: bytes
    headers: Headers = ()


@dataclass
class Findings:
    """What an audit of one topic found; ``holds`` when nothing at all is wrong."""

    topic: str
    expected: int = 0
    found: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    examples: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not any(self.counts.values())

    def note(self, kind: str, example: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= EXAMPLES_MAX:
            self.examples.append(f"{self.topic}: {kind}: {example}")


def compare(
    topic: str,
    expected: Iterable[Expected],
    found: Iterable[Message],
    *,
    partitions: int,
    identify: Callable[[bytes | None], str | None],
) -> Findings:
    """Hold every record that was found against the expected ones.

    Args:
        expected: in the order in which they were produced; order is checked per key.
        found: all records of the topic, in offset order per partition.
        partitions: how many the topic has.
        identify: the identity of a record, from its value.
    """
    findings = Findings(topic)
    wanted = {record.identity: (position, record) for position, record in enumerate(expected)}
    findings.expected = len(wanted)
    places = _places({record.key for _, record in wanted.values()}, partitions)
    seen: set[str] = set()
    latest: dict[bytes, int] = {}
    for message in found:
        findings.found += 1
        identity = identify(message.value)
        where = f"{identity} at {topic}-{message.partition}@{message.offset}"
        if identity is None or identity not in wanted:
            findings.note("unexpected", where)
            continue
        if identity in seen:
            findings.note("duplicated", where)
            continue
        seen.add(identity)
        position, record = wanted[identity]
        difference = _difference(record, message)
        if difference:
            findings.note("wrong", f"{where}: {difference}")
        if message.partition != places[record.key]:
            findings.note("misplaced", f"{where}: its key belongs to partition {places[record.key]}")
        if position < latest.get(record.key, -1):
            findings.note("reordered", where)
        latest[record.key] = max(position, latest.get(record.key, -1))
    for identity in wanted.keys() - seen if len(seen) < len(wanted) else ():
        findings.note("lost", identity)
    return findings


def _difference(record: Expected, message: Message) -> str:
    for name in ("key", "value", "headers"):
        want, got = getattr(record, name), getattr(message, name)
        if want != got:
            return f"{name} is {got!r}, must be {want!r}"
    return ""


def _places(keys: set[bytes], partitions: int) -> Mapping[bytes, int]:
    ordered = sorted(keys)
    return dict(zip(ordered, key_partitions(pa.array(ordered, pa.binary()), partitions).tolist(), strict=True))
