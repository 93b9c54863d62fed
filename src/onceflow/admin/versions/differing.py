"""Describes how two versions of a record differ: its key, both values, and the fields that are not the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from onceflow.admin.verify.identity import field_path
from onceflow.admin.verify.tally import Difference, RecordOffset
from onceflow.client.committed import CommittedReader
from onceflow.errors import OptionError
from onceflow.state.format import exact_json

_SHOWN = 200
_MISSING: Any = object()

Value = bytes | None


def without(fields: Sequence[str]) -> Callable[[Value], Value]:
    """Leaves fields out of values that are JSON objects, so that they do not count. Other values stay.

    Args:
        fields: ``$.field`` or ``$.field.field``.

    Raises:
        OptionError: one is none of these.
    """
    paths = list[list[str]]()
    for each in fields:
        path = field_path(each)
        if path is None:
            raise OptionError(
                f"--ignore {each!r} is no field of a JSON value", next_step="give $.field or $.field.field"
            )
        paths.append(path)

    def left(value: Value) -> Value:
        if not paths or value is None:
            return value
        try:
            found = exact_json.loads(value)
            for *above, last in paths:
                at = found
                for name in above:
                    at = at.get(name) if isinstance(at, dict) else None
                if isinstance(at, dict):
                    at.pop(last, None)
            return exact_json.canonical(exact_json.dumps(found))
        except ValueError:
            return value

    return left


def described(
    differences: Sequence[Difference],
    sides: tuple[Mapping[str, str], tuple[str, str]],
    reader: CommittedReader,
    left: Callable[[Value], Value],
) -> Iterator[tuple[str, tuple[RecordOffset, ...]]]:
    """What differs, as text, and the records that it concerns. Records of one key that are there on one side each are
    told together.

    Args:
        differences: some of them.
        sides: by topic of the flow, that of its copy; and the names of both.
        reader: of the topics. left: see `without`.
    """
    topics, names = sides
    waiting: dict[tuple[str, Value], list[tuple[Difference, Value]]] = {}
    read = [(each, *_record(reader, each.places[0])) for each in differences if each.places]
    for each, key, value in read:
        if not each.expected:
            waiting.setdefault((each.places[0].topic, key), []).append((each, value))
    paired = set[int]()
    for each, key, value in read:
        if each.found or not each.expected:
            continue
        others = waiting.get((topics.get(each.places[0].topic, ""), key), [])
        if not others:
            continue
        other, other_value = others.pop(0)
        paired |= {id(each), id(other)}
        text = f"key {shown(key)}: {_apart(left(value), left(other_value), names)}"
        yield text, (*each.places, *other.places)
    for each, key, value in read:
        if id(each) not in paired:
            times = f"{names[0]} has it {_times(each.expected)}, {names[1]} {_times(each.found)}"
            yield f"key {shown(key)}, value {shown(value)}: {times}", each.places


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def shown(raw: Value) -> str:
    """A key or a value, in limited length."""
    if raw is None:
        return "null"
    text = raw[:_SHOWN].decode(errors="backslashreplace")
    more = "..." if len(raw) > _SHOWN else ""
    return (text if text.isprintable() else repr(raw[:_SHOWN])) + more


def _apart(old: Value, new: Value, names: tuple[str, str]) -> str:
    """The fields that differ; of values that are no JSON objects both values."""
    try:
        values = [exact_json.loads(each or b"") for each in (old, new)]
    except ValueError:
        values = []
    if len(values) != 2 or not all(isinstance(each, dict) for each in values):
        return f"{names[0]} has {shown(old)}, {names[1]} has {shown(new)}"
    whole = f"{names[0]} has {shown(old)}, {names[1]} has {shown(new)}"
    try:
        return "; ".join(_fields(values[0], values[1], "", names)) or whole
    except ValueError:  # it can be read, but not written: it is nested deeply, or a number is too large
        return whole


def _fields(old: dict[str, Any], new: dict[str, Any], above: str, names: tuple[str, str]) -> Iterator[str]:
    for name in dict.fromkeys([*old, *new]):
        pair = old.get(name, _MISSING), new.get(name, _MISSING)
        if all(isinstance(each, dict) for each in pair):
            yield from _fields(*pair, f"{above}{name}.", names)
        elif _in_one_form(pair[0]) != _in_one_form(pair[1]):
            named = shown(f"{above}{name}".encode(errors="backslashreplace"))
            yield f"{named} is {_written(pair[0])} in {names[0]}, {_written(pair[1])} in {names[1]}"


def _in_one_form(value: Any) -> bytes | None:
    return None if value is _MISSING else exact_json.canonical(exact_json.dumps(value))


def _written(value: Any) -> str:
    """As in the record."""
    if value is _MISSING:
        return "missing"
    text = exact_json.dumps(value).decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _record(reader: CommittedReader, place: RecordOffset) -> tuple[Value, Value]:
    for chunk in reader.read(place.topic, place.partition, place.offset, place.offset + 1):
        if chunk.keys:
            return chunk.keys[0], chunk.values[0]
    return None, None
