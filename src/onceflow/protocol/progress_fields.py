"""Fields of the progress record in JSON: written, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

from onceflow.errors import ProtocolError

PROGRESS_TOPIC = "__onceflow_progress"

Offsets: TypeAlias = Mapping[str, Mapping[int, int]]
"""Topic, then partition, then offset."""

Epochs: TypeAlias = Mapping[str, Mapping[int, tuple[int, int]]]
"""Topic, then partition, then an offset, and the epoch of a leader whose log had the records before it."""


def plain(offsets: Offsets) -> dict[str, dict[int, int]]:
    """Plain dicts of Python's int, in order of partitions: numpy's integers cannot be written as JSON."""
    return {
        topic: {int(partition): int(offset) for partition, offset in sorted(partitions.items())}
        for topic, partitions in offsets.items()
    }


def take(content: dict[str, Any], flow: str, name: str, kind: type) -> Any:
    value = content.get(name)
    # In Python, bool (JSON true and false) is a subclass of int.
    if not isinstance(value, kind) or isinstance(value, bool):
        garbage(flow, f"{name} is {short(value)}, not of type {kind.__name__}")
    return value


def offsets(content: dict[str, Any], flow: str, name: str) -> dict[str, dict[int, int]]:
    result: dict[str, dict[int, int]] = {}
    for topic, partitions in take(content, flow, name, dict).items():
        if not isinstance(partitions, dict):
            garbage(flow, f"{name} of {topic} is {short(partitions)}")
        result[topic] = {}
        for partition, offset in partitions.items():
            legal = partition.isascii() and partition.isdecimal()
            if not legal or not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
                garbage(flow, f"{name} of {topic} has {short(partition)}: {short(offset)}")
            result[topic][int(partition)] = offset
    return result


def plain_epochs(epochs: Epochs) -> dict[str, dict[int, list[int]]]:
    """Plain lists, in order of partitions."""
    return {
        topic: {int(partition): [int(each) for each in pair] for partition, pair in sorted(partitions.items())}
        for topic, partitions in epochs.items()
    }


def epochs(content: dict[str, Any], flow: str, name: str) -> dict[str, dict[int, tuple[int, int]]]:
    """`Epochs`, checked."""
    found: dict[str, dict[int, tuple[int, int]]] = {}
    for topic, partitions in take(content, flow, name, dict).items():
        if not isinstance(partitions, dict):
            garbage(flow, f"{name} of {topic} is {short(partitions)}")
        for partition, pair in partitions.items():
            legal = isinstance(pair, list) and [type(each) for each in pair] == [int, int] and min(pair) >= 0
            if not legal or not (partition.isascii() and partition.isdecimal()):
                garbage(flow, f"{name} of {topic} has {short(partition)}: {short(pair)}")
            found.setdefault(topic, {})[int(partition)] = (pair[0], pair[1])
    return found


def texts(content: dict[str, Any], flow: str, name: str) -> dict[str, str]:
    found = take(content, flow, name, dict)
    for topic, text in found.items():
        if not isinstance(text, str):
            garbage(flow, f"{name} of {topic} is {short(text)}")
    return dict(found)


def short(value: Any) -> str:
    return repr(value)[:80]


def garbage(flow: str | None, detail: str) -> NoReturn:
    raise ProtocolError(
        f"a record in {PROGRESS_TOPIC} is not a progress record",
        next_step=f"find out who else writes to {PROGRESS_TOPIC}; `onceflow reset` lets the flow start anew.",
        flow=flow,
        detail=detail,
    )
