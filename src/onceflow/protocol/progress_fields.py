"""Fields of the progress record in JSON: written, read and checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

from onceflow.errors import ProtocolError

PROGRESS_TOPIC = "__onceflow_progress"

Offsets: TypeAlias = Mapping[str, Mapping[int, int]]
"""Topic, then partition, then offset."""

Epochs: TypeAlias = Mapping[str, Mapping[int, tuple[int, int]]]
"""Topic, then partition, then an offset, and the epoch of a leader whose log had the records before it."""


MANY = 100
"""From how many partitions on, what is known of a topic is written in a form that takes fewer bytes. A record has to
fit into the ``max.message.bytes`` of the progress topic, also with thousands of partitions. Smaller ones are easier to
read."""


def plain(offsets: Offsets) -> dict[str, dict[int, int] | list[int]]:
    """Plain dicts of Python's int, in order of partitions: numpy's integers cannot be written as JSON. Lists, if there
    are `MANY` partitions that begin at 0 and have no gaps."""
    found: dict[str, dict[int, int] | list[int]] = {}
    for topic, partitions in offsets.items():
        by_number = {int(partition): int(offset) for partition, offset in sorted(partitions.items())}
        is_long = len(by_number) >= MANY and next(reversed(by_number)) == len(by_number) - 1
        found[topic] = list(by_number.values()) if is_long and min(by_number) == 0 else by_number
    return found


def take(content: dict[str, Any], flow: str, name: str, kind: type) -> Any:
    value = content.get(name)
    # In Python, bool (JSON true and false) is a subclass of int.
    if not isinstance(value, kind) or isinstance(value, bool):
        garbage(flow, f"{name} is {short(value)}, not of type {kind.__name__}")
    return value


def offsets(content: dict[str, Any], flow: str, name: str) -> dict[str, dict[int, int]]:
    result: dict[str, dict[int, int]] = {}
    for topic, partitions in take(content, flow, name, dict).items():
        if isinstance(partitions, list):
            partitions = {str(partition): offset for partition, offset in enumerate(partitions)}
        if not isinstance(partitions, dict):
            garbage(flow, f"{name} of {topic} is {short(partitions)}")
        result[topic] = {}
        for partition, offset in partitions.items():
            legal = partition.isascii() and partition.isdecimal()
            if not legal or not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
                garbage(flow, f"{name} of {topic} has {short(partition)}: {short(offset)}")
            result[topic][int(partition)] = offset
    return result


def epochs_content(epochs: Epochs, offsets: Offsets) -> dict[str, Any]:
    """The fields ``epochs`` and ``leaders``, which are left out if they are empty.

    Of `MANY` partitions, most epochs are those of the leaders at `offsets`, and most of these are equal: they are in
    ``leaders``, in a form that takes no bytes for each of them.
    """
    pairs: dict[str, dict[int, list[int]]] = {}
    leaders: dict[str, dict[str, Any]] = {}
    for topic, known in epochs.items():
        places = offsets.get(topic, {})
        at_offsets = {number: epoch for number, (offset, epoch) in known.items() if places.get(number) == offset}
        unknown = [int(number) for number in sorted(places.keys() - known.keys())]
        if len(known) < MANY or len(at_offsets) <= len(unknown):  # then it may be longer
            at_offsets = {}
        else:
            most = Counter(epoch for _, epoch in sorted(at_offsets.items())).most_common(1)[0][0]
            others = {int(number): int(epoch) for number, epoch in sorted(at_offsets.items()) if epoch != most}
            leaders[topic] = {"epoch": int(most)}
            leaders[topic] |= {"other": others} if others else {}
            leaders[topic] |= {"unknown": unknown} if unknown else {}
        rest = {
            int(number): [int(each) for each in pair]
            for number, pair in sorted(known.items())
            if number not in at_offsets
        }
        if rest:
            pairs[topic] = rest
    return {name: content for name, content in (("epochs", pairs), ("leaders", leaders)) if content}


def epochs_of(content: dict[str, Any], flow: str, offsets: Offsets) -> dict[str, dict[int, tuple[int, int]]]:
    """`Epochs` of the fields ``epochs`` and ``leaders``, checked."""
    found = _pairs(content, flow, "epochs") if "epochs" in content else {}
    for topic, part in (take(content, flow, "leaders", dict) if "leaders" in content else {}).items():
        if not isinstance(part, dict):
            garbage(flow, f"leaders of {topic} is {short(part)}")
        others, unknown = part.get("other", {}), part.get("unknown", [])
        legal = isinstance(others, dict) and isinstance(unknown, list)
        numbers = [part.get("epoch"), *others.values(), *unknown] if legal else [-1]
        if any(type(each) is not int or each < 0 for each in numbers):
            garbage(flow, f"leaders of {topic} is {short(part)}")
        known = found.setdefault(topic, {})
        away = known.keys() | set(unknown)
        for number, offset in offsets.get(topic, {}).items():
            if number not in away:
                known[number] = (offset, others.get(str(number), part["epoch"]))
    return found


def _pairs(content: dict[str, Any], flow: str, name: str) -> dict[str, dict[int, tuple[int, int]]]:
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
