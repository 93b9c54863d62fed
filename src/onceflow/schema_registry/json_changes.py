"""What of one JSON Schema may not fit another one, as far as it can be told from the schemas alone.

It is no proof: what is found here says which values may be refused. A new property is not found, because an older
schema that allows more properties than it names says nothing of it.
"""

from __future__ import annotations

from typing import Any

from onceflow.state.format import exact_json

#: What says nothing about values.
_NOTES = frozenset(
    ("$schema", "$id", "id", "$comment", "title", "description", "default", "examples", "format", "readOnly",
     "writeOnly", "deprecated", "contentEncoding", "contentMediaType")
)  # fmt: skip
_OF_PROPERTIES = ("properties", "required", "additionalProperties")
_DEFINITIONS = ("definitions", "$defs")
_LOWEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_HIGHEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


def unreadable(writer: Any, reader: Any, path: str = "$") -> list[str]:
    """What may not fit, each with its place; empty: nothing is known."""
    if reader is True or writer is False or writer == reader:
        return []
    if not (isinstance(writer, dict) and isinstance(reader, dict)):
        return [f"{path}: {_shown(writer)} has become {_shown(reader)}"]
    found = []
    for name in sorted(reader.keys() - _NOTES - {*_OF_PROPERTIES}):
        before, now = writer.get(name), reader[name]
        if before == now or _is_wider(name, before, now):
            continue
        if name == "items" and isinstance(before, dict) and isinstance(now, dict):
            found += unreadable(before, now, f"{path}[]")
        elif name in _DEFINITIONS and isinstance(before, dict) and isinstance(now, dict):
            for each in before.keys() & now.keys():
                found += unreadable(before[each], now[each], f"{path}.{name}.{each}")
        elif name not in _DEFINITIONS:
            found.append(
                f"{path}: {name} is new, {_shown(now)}"
                if name not in writer
                else f"{path}: {name} was {_shown(before)} and is {_shown(now)}"
            )
    return found + _of_properties(writer, reader, path)


def _of_properties(writer: dict[str, Any], reader: dict[str, Any], path: str) -> list[str]:
    found = []
    old, new = (each.get("properties", {}) for each in (writer, reader))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [f"{path}: properties have changed"]
    required = [name for name in reader.get("required", ()) if name not in writer.get("required", ())]
    found += [f"{path}.{name}: it is required now" for name in required]
    for name, schema in old.items():
        if name in new:
            found += unreadable(schema, new[name], f"{path}.{name}")
        elif reader.get("additionalProperties") is False:
            found.append(f"{path}.{name}: it is not allowed any more")
    if reader.get("additionalProperties", True) is False and writer.get("additionalProperties", True) is not False:
        found.append(f"{path}: more properties are not allowed any more")
    return found


def _is_wider(name: str, before: Any, now: Any) -> bool:
    """Whether a keyword allows all that it has allowed before."""
    if name == "type":
        given, wanted = ({each} if isinstance(each, str) else {*(each or ())} for each in (before, now))
        return bool(given) and all(each in wanted or (each == "integer" and "number" in wanted) for each in given)
    if name == "enum" and isinstance(before, list) and isinstance(now, list):
        return all(each in now for each in before)
    if name in (*_LOWEST, *_HIGHEST) and isinstance(before, (int, float)) and isinstance(now, (int, float)):
        return now <= before if name in _LOWEST else now >= before
    return False


def _shown(value: Any) -> str:
    return exact_json.dumps(value).decode()[:80]
