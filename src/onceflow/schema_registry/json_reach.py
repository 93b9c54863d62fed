"""What a JSON Schema refers to: found where the flow is defined, and not at the first value that needs it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

#: Names to schemas.
_NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies")
#: Schemas, or lists of them.
_SINGLE = (
    "items", "additionalItems", "prefixItems", "contains", "additionalProperties", "propertyNames", "not", "if", "then",
    "else", "allOf", "anyOf", "oneOf", "unevaluatedItems", "unevaluatedProperties", "contentSchema",
)  # fmt: skip


def check_reach(schema: Any, resolver: Any) -> None:
    """Look up all that values may need of a schema. Definitions that nothing refers to are not looked at.

    Args:
        resolver: of ``referencing``, at the schema.

    Raises:
        ValueError: a reference leads nowhere, or Python does not understand a pattern.
    """
    seen: set[int] = set()
    open_ = [(schema, resolver)]
    while open_:
        found, at = open_.pop()
        if not isinstance(found, Mapping) or id(found) in seen:
            continue
        seen.add(id(found))
        if found is not schema and isinstance(found.get("$id", found.get("id")), str):
            at = at.in_subresource(_resource(found))
        for pattern in _patterns(found):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"Python does not understand the pattern {pattern!r:.100}: {error}") from None
        reference = found.get("$ref")
        if isinstance(reference, str):
            try:
                target = at.lookup(reference)
            except Exception as error:  # referencing has several, and those of what a name is looked up in
                raise ValueError(f"its reference {reference!r:.100} leads nowhere: {type(error).__name__}") from None
            open_.append((target.contents, target.resolver))
        open_ += [(each, at) for each in _inside(found)]


def _resource(schema: Any) -> Any:
    from referencing import Resource
    from referencing.jsonschema import DRAFT7

    return Resource.from_contents(schema, DRAFT7)


def _patterns(schema: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(schema.get("pattern"), str):
        yield schema["pattern"]
    by_pattern = schema.get("patternProperties")
    if isinstance(by_pattern, Mapping):
        yield from by_pattern


def _inside(schema: Mapping[str, Any]) -> Iterator[Any]:
    for name in _NAMED:
        if isinstance(schema.get(name), Mapping):
            yield from schema[name].values()
    for name in _SINGLE:
        found = schema.get(name)
        yield from found if isinstance(found, list) else [found]
