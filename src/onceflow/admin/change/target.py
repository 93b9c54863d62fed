"""Where a flow is to be moved, as a user writes it: ``earliest``, ``timestamp=...``, ``offsets=...``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onceflow.errors import OptionError
from onceflow.options.instants import instant_ms

EARLIEST, LATEST, BEGINNING, TIMESTAMP, OFFSETS = "earliest", "latest", "beginning", "timestamp", "offsets"
_PLACE = re.compile(r"([a-zA-Z0-9._-]+):([0-9]{1,10})=([0-9]{1,19})")
_FORMS = (
    "give earliest, latest, beginning, timestamp=2025-01-31T08:00:00Z (or epoch milliseconds), or "
    'offsets=TOPIC:PARTITION=OFFSET,... (or JSON: \'{"TOPIC": {"0": 1200}}\')'
)


@dataclass(frozen=True)
class OffsetSpec:
    """Where a flow is to be moved.

    Args:
        kind: ``earliest``: the first records that are still there. ``beginning``: offset 0. ``latest``: the last stable
            offset. ``timestamp``: the first record with a timestamp or a later one. ``offsets``: as given.
        timestamp_ms: of ``timestamp``, epoch milliseconds.
        offsets: of ``offsets``, by topic and partition. What is not named stays where it is.
    """

    kind: str
    timestamp_ms: int = -1
    offsets: Mapping[str, Mapping[int, int]] = field(default_factory=dict)


def parse_target(text: str, option: str = "--to") -> OffsetSpec:
    """The target that a text names.

    Args:
        option: that the text was given with, for errors.

    Raises:
        OptionError: it names none.
    """
    kind, separator, value = text.strip().partition("=")
    kind = kind.strip().lower()
    if not separator and kind in (EARLIEST, LATEST, BEGINNING):
        return OffsetSpec(kind)
    if separator and kind == TIMESTAMP:
        try:
            return OffsetSpec(kind, timestamp_ms=instant_ms(value))
        except ValueError as error:
            raise OptionError(f"{option} {text}: {error}", next_step=_FORMS) from None
    if separator and kind == OFFSETS:
        return OffsetSpec(
            kind,
            offsets=_of_json(value, f"{option} {text[:200]}")
            if value.lstrip().startswith("{")
            else _of_list(value, f"{option} {text}"),
        )
    raise OptionError(f"{option} {text} is not a place in the topics of a flow", next_step=_FORMS)


def _of_list(value: str, text: str) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for part in value.split(","):
        match = _PLACE.fullmatch(part.strip())
        if match is None:
            raise OptionError(f"{text}: {part!r} is not of the form TOPIC:PARTITION=OFFSET", next_step=_FORMS)
        topic, partition, offset = match[1], int(match[2]), int(match[3])
        if partition in found.setdefault(topic, {}):
            raise OptionError(f"{text}: {topic}-{partition} is named twice", next_step="name it once")
        found[topic][partition] = offset
    return found


def _of_json(value: str, text: str) -> dict[str, dict[int, int]]:
    def wrong(why: str) -> OptionError:
        return OptionError(f"{text}: {why}", next_step=_FORMS)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise wrong("a topic or partition is named twice")
        return dict(pairs)

    try:
        content = json.loads(value, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise wrong(f"this is not JSON: {error}") from None
    found: dict[str, dict[int, int]] = {}
    for topic, partitions in content.items():
        if not isinstance(partitions, dict) or not partitions:
            raise wrong(f"the value of {topic!r} is not an object of partitions and offsets")
        for partition, offset in partitions.items():
            if not (partition.isascii() and partition.isdecimal()) or type(offset) is not int or offset < 0:
                raise wrong(f"{topic!r} has {partition!r}: {offset!r}, which is not a partition and its offset")
            found.setdefault(topic, {})[int(partition)] = offset
    if not found:
        raise wrong("no topic is named")
    return found
