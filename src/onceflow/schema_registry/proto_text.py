"""The messages of a Protobuf file that is given as text, in the order in which Protobuf numbers them.

Confluent's registry gives files in binary form when it is asked to. Others give the text that was registered. To know
which message a record has, only names and braces are needed: no types, and no files that are imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_TOKENS = re.compile(
    r"//[^\n]*|/\*.*?\*/"  # comments
    r"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"  # texts
    r"|[A-Za-z_][\w.]*|[{};<>,=\[\]]",
    re.DOTALL,
)
Path = tuple[int, ...]


def messages(text: str) -> dict[Path, str]:
    """The full name of each message, by the path to it.

    Entries of maps and groups are messages, too: Protobuf makes a nested message of each.

    Raises:
        ValueError: braces do not match.
    """
    tokens = [token for token in _TOKENS.findall(text) if token[:2] not in ("//", "/*")]
    at = _after(tokens, "package")
    package = f"{tokens[at]}." if at is not None else ""
    return dict(_scope(_statements(tokens), (), package))


def _after(tokens: list[str], word: str) -> int | None:
    """Where the first statement that begins with a word goes on."""
    for at, token in enumerate(tokens[:-1]):
        if token == word and (at == 0 or tokens[at - 1] in (";", "}")):
            return at + 1
    return None


def _statements(tokens: list[str]) -> Iterator[tuple[list[str], str]]:
    """Statements: the words before ``;``, ``{`` or ``}``, and which of these it was."""
    words: list[str] = []
    brackets = 0  # options in brackets may have braces
    for token in tokens:
        brackets += (token == "[") - (token == "]")
        if token in (";", "{", "}") and brackets <= 0:
            yield words, token
            words = []
        else:
            words.append(token)


def _scope(statements: Iterator[tuple[list[str], str]], above: Path, before: str) -> Iterator[tuple[Path, str]]:
    """The messages in a file or in a message, up to the brace that closes it."""
    count = 0
    inside = 0  # of ``oneof`` and ``extend``: their groups are messages of what is around them
    for words, end in statements:
        name = _message_of(words, end)
        if name:
            path = (*above, count)
            count += 1
            yield path, before + name
            if end == "{":
                yield from _scope(statements, path, f"{before}{name}.")
        elif end == "{" and words[:1] in (["oneof"], ["extend"]):
            inside += 1
        elif end == "{":
            _skip(statements)
        elif end == "}" and inside:
            inside -= 1
        elif end == "}":
            if not above:
                raise ValueError("a brace is closed that was not opened")
            return
    if above or inside:
        raise ValueError("a brace is not closed")


def _message_of(words: list[str], end: str) -> str:
    """The name of the message that a statement makes; empty: none."""
    if words[:1] in (["export"], ["local"]):  # since edition 2024
        words = words[1:]
    if end == "{" and len(words) == 2 and words[0] == "message":
        return words[1]
    if end == "{" and "group" in words[:2] and words.index("group") + 1 < len(words):
        return words[words.index("group") + 1]
    if end == ";" and words[:2] == ["map", "<"] and ">" in words and words.index(">") + 1 < len(words):
        return _entry_name(words[words.index(">") + 1])
    return ""


def _entry_name(field: str) -> str:
    """As protoc calls the entries of a map: ``item_counts`` has ItemCountsEntry."""
    return "".join(part[:1].upper() + part[1:] for part in field.split("_")) + "Entry"


def _skip(statements: Iterator[tuple[list[str], str]]) -> None:
    depth = 1
    for _, end in statements:
        depth += (end == "{") - (end == "}")
        if not depth:
            return
    raise ValueError("a brace is not closed")
