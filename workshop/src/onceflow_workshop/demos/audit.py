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

from onceflow.protocol.partitioners import key_partitions

Headers = tuple[tuple[str, bytes | None], ...]
EXAMPLES_MAX = 5
# A wrong value may be as large as a record can be.
_SHOWN_MAX = 300
KINDS = ("lost", "duplicated", "unexpected", "wrong", "misplaced", "reordered")


class Message(NamedTuple):
    """One record as a consumer got it."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


class Expected(NamedTuple):
    """One record that must be there exactly once.

    Args:
        headers: None: they are not compared.
        free: it may be in any partition, and before or after others of its key.
        goes_on: the key that was found goes on after this one, with a slash and more.
    """

    identity: str
    key: bytes | None
    value: bytes | None
    headers: Headers | None = ()
    free: bool = False
    goes_on: bool = False


class Origin(NamedTuple):
    """Where the broker put a produced record, as it was reported to the producer."""

    topic: str
    partition: int
    offset: int


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


@dataclass
class Problems:
    """The problems that an audit of anything else found: how many, and the first ones. ``holds`` without any."""

    place: str
    wrong: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.wrong

    def note(self, example: str) -> None:
        self.wrong += 1
        if self.wrong <= EXAMPLES_MAX:
            self.examples.append(f"{self.place}: {example}")


def compare(
    topic: str,
    expected: Iterable[Expected],
    found: Iterable[Message],
    *,
    partitions: int,
    identify: Callable[[Message], str | None],
) -> Findings:
    """Hold every record that was found against the expected ones.

    Args:
        expected: in the order in which they were produced; order is checked per key.
        found: all records of the topic, in offset order per partition.
        partitions: how many the topic has.
        identify: the identity of a record; None: it has none.
    """
    findings = Findings(topic)
    wanted = {record.identity: (position, record) for position, record in enumerate(expected)}
    findings.expected = len(wanted)
    places = _places({record.key for _, record in wanted.values() if record.key is not None}, partitions)
    seen: set[str] = set()
    latest: dict[bytes, int] = {}
    for message in found:
        findings.found += 1
        identity = identify(message)
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
        if record.free or record.key is None or message.key is None:
            continue
        place = _places({message.key}, partitions)[message.key] if record.goes_on else places[record.key]
        if message.partition != place:
            findings.note("misplaced", f"{where}: its key belongs to partition {place}")
        if position < latest.get(record.key, -1):
            findings.note("reordered", where)
        latest[record.key] = max(position, latest.get(record.key, -1))
    for identity in wanted.keys() - seen if len(seen) < len(wanted) else ():
        findings.note("lost", identity)
    return findings


def _difference(record: Expected, message: Message) -> str:
    for name in ("key", "value", "headers"):
        want, got = getattr(record, name), getattr(message, name)
        if name == "key" and record.goes_on and want is not None and (got or b"").startswith(want + b"/"):
            continue
        if want != got and not (name == "headers" and want is None):
            return f"{name} is {_short(got)}, must be {_short(want)}"
    return ""


def _short(content: object) -> str:
    text = repr(content)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}... ({len(text):,} characters)"


def onceflow_headers(message: Message) -> dict[str, str]:
    """The headers that onceflow has added to a dead letter, as text."""
    return {
        name: (raw or b"").decode(errors="replace") for name, raw in message.headers if name.startswith("onceflow.")
    }


def origin_headers(origin: Origin) -> dict[str, str]:
    """What a dead letter's headers must say of where it came from, when it was read once."""
    values = {"topic": origin.topic, "partition": str(origin.partition), "offset": str(origin.offset)}
    return {f"onceflow.{kind}.{name}": value for kind in ("error", "origin") for name, value in values.items()}


def _places(keys: set[bytes], partitions: int) -> Mapping[bytes, int]:
    ordered = sorted(keys)
    return dict(zip(ordered, key_partitions(pa.array(ordered, pa.binary()), partitions).tolist(), strict=True))
