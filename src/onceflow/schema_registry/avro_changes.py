"""What of one Avro schema cannot be read with another one, by Avro's rules of schema resolution.

It is judged by the types alone. A union of which one type cannot be read may never have had a value of it, so what is
found here says which values may be unreadable. What is not found here can be read.
"""

from __future__ import annotations

from typing import Any

from onceflow.schema_registry.avro_names import NAMED, branch_name
from onceflow.schema_registry.avro_schema import AvroSchema

#: Which types a type is read as besides itself.
_PROMOTED = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}


def unreadable(writer: AvroSchema, reader: AvroSchema) -> list[str]:
    """What cannot be read, each with its field; empty: every value can."""
    comparison = _Comparison(writer.named, reader.named)
    comparison.compare(writer.root, reader.root, "")
    return comparison.found


class _Comparison:
    """Compares two schemas. Types that refer to themselves are compared once."""

    def __init__(self, written: dict[str, Any], read: dict[str, Any]) -> None:
        self._written, self._read = written, read
        self._seen: set[tuple[str, str]] = set()
        self.found: list[str] = []

    def compare(self, writer: Any, reader: Any, path: str) -> None:
        writer, reader = _resolved(writer, self._written), _resolved(reader, self._read)
        if isinstance(writer, list):
            for branch in writer:
                self.compare(branch, reader, path)
            return
        if isinstance(reader, list):
            fitting = next((branch for branch in reader if self._matches(writer, branch)), None)
            if fitting is None:
                self._note(path, f"{_shown(writer)} is none of {', '.join(map(branch_name, reader))}")
            else:
                self.compare(writer, fitting, path)
            return
        kind = _kind(writer)
        if not self._matches(writer, reader) or (kind in NAMED and kind != _kind(reader)):
            self._note(path, f"{_shown(writer)} has become {_shown(reader)}")
        elif kind in ("array", "map"):
            inner = "items" if kind == "array" else "values"
            self.compare(writer[inner], reader[inner], f"{path}[]" if kind == "array" else f"{path}{{}}")
        elif kind == "enum":
            self._enum(writer, reader, path)
        elif kind in ("record", "error"):
            self._record(writer, reader, path)
        elif kind == "bytes" and _kind(reader) == "string":
            self._note(path, "bytes have become string: bytes that are no UTF-8 cannot be read")

    def _enum(self, writer: Any, reader: Any, path: str) -> None:
        lost = [symbol for symbol in writer["symbols"] if symbol not in reader["symbols"]]
        if lost and not reader.get("default"):
            self._note(path, f"the enum {reader['name']} lacks {', '.join(lost)}")

    def _record(self, writer: Any, reader: Any, path: str) -> None:
        pair = (writer["name"], reader["name"])
        if pair in self._seen:
            return
        self._seen.add(pair)
        left = {field["name"]: field for field in reader["fields"]}
        aliases = {alias: field for field in reader["fields"] for alias in field.get("aliases", ())}
        for field in writer["fields"]:
            wanted = left.get(field["name"], aliases.get(field["name"]))
            if wanted is not None:
                left.pop(wanted["name"], None)
                self.compare(field["type"], wanted["type"], _below(path, wanted["name"]))
        for name, field in left.items():
            if "default" not in field:
                self._note(_below(path, name), "it is new, and has no default")

    def _matches(self, writer: Any, reader: Any) -> bool:
        """Whether the outer types fit, as fastavro decides it: what is inside of records is not looked at."""
        writer, reader = _resolved(writer, self._written), _resolved(reader, self._read)
        if isinstance(writer, list) or isinstance(reader, list):
            return True
        kinds = _kind(writer), _kind(reader)
        if kinds in (("array", "array"), ("map", "map")):
            inner = "items" if kinds[0] == "array" else "values"
            return self._matches(writer[inner], reader[inner])
        if kinds[0] in NAMED and kinds[1] in NAMED:
            if kinds == ("fixed", "fixed") and writer["size"] != reader["size"]:
                return False
            short = _short(writer["name"])
            return short == _short(reader["name"]) or not {writer["name"], short}.isdisjoint(reader.get("aliases", ()))
        return kinds[0] == kinds[1] or kinds[1] in _PROMOTED.get(kinds[0], ())

    def _note(self, path: str, what: str) -> None:
        found = f"{path}: {what}" if path else what
        if found not in self.found:
            self.found.append(found)


def _resolved(schema: Any, named: dict[str, Any]) -> Any:
    """A type itself in place of its name, or of what stands around it."""
    while not isinstance(schema, list):
        kind = _kind(schema)
        if isinstance(kind, str):
            return named.get(kind, schema)
        schema = kind
    return schema


def _kind(schema: Any) -> Any:
    return schema if isinstance(schema, str) else schema["type"]


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(schema: Any) -> str:
    kind = str(_kind(schema))
    if kind == "fixed":
        return f"fixed {schema['name']} of {schema['size']} bytes"
    if kind in NAMED:
        return f"{kind} {schema['name']}"
    return f"{kind} of {branch_name(schema['items' if kind == 'array' else 'values'])}" if _holds(schema) else kind


def _holds(schema: Any) -> bool:
    """Whether it is an array or a map of one type."""
    inner = None if isinstance(schema, str) else schema.get("items", schema.get("values"))
    return inner is not None and not isinstance(inner, list)
