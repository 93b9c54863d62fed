"""Finds the names of stored objects in bytes of any kind: what refers to an object must not be overlooked.

A reference travels in many forms: as a value, inside a value of another format, in a dead letter whose value is JSON
with bytes in base64, in a column of a database that prints bytes as hexadecimal digits. What all have in common is the
name of the object: a day, a slash, and 64 hexadecimal digits. So this module looks for names, and not for references.
Where there are runs of base64 or hexadecimal digits that are long enough for a name, it decodes them, whatever they
begin with, and looks into the result in the same way.

Writers ask the same code whether a value refers to objects (`refers`) as the collection does that reads the value. So
what one of them finds, the other does, too.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from onceflow.claim_check.reference import MAX_BYTES, NAME, NEWER, PREFIX, REFERS, VERSION

#: The name of an object, also in a URL.
_NAME = re.compile(rb"(\d{4}-\d\d-\d\d)(?:/|%2[Ff])([0-9a-f]{64}(?:" + REFERS.encode() + rb")?)")
#: The beginning of a reference that this version can read.
_KNOWN = re.compile(
    re.escape(PREFIX + VERSION) + rb'\{"name":"\d{4}-\d\d-\d\d/[0-9a-f]{64}(?:' + REFERS.encode() + rb')?"'
)
_NEWER = re.compile(re.escape(PREFIX) + NEWER)
_HASH_DIGITS = 64
_DAY_BYTES = 11  # with what separates it from the hash, or with the first byte of that
_NAME_BYTES = _DAY_BYTES + _HASH_DIGITS
_HEX_DIGITS = 2 * _NAME_BYTES
# Each of the characters of a name has a part in four characters of base64 at the most.
_BASE64_DIGITS = _NAME_BYTES * 4 // 3
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_LINE_ENDS = b"\r\n"

#: What programs put between the digits: escaped ends of lines, indented lines, and other spellings of `+` and `/`.
_ADDED_MARKS = (b"\\", b"%", b"<", b"\n ", b"\n\t", b"\r ", b"\r\t")
_ADDED = re.compile(rb"\\(?:[rn][ \t]*|u000[aAdD]|u00(2[bBfF])|(?=/))|%0[aAdD]|%(2[bBfF])|<br ?/?>|(?<=[\r\n])[ \t]+")
#: The beginning of one of them, where bytes are cut.
_ADDED_IN_PART = re.compile(rb"(?:\\(?:u(?:0(?:0[02]?)?)?)?|%[02]?|<(?:b(?:r ?/?)?)?)\Z")
#: JSON in JSON has more of them.
_BACKSLASHES = re.compile(rb"\\{2,}")
_SPELLED = {b"2b": b"+", b"2f": b"/", b"": b""}


def _class_of(members: bytes) -> bytes:
    """A table for `bytes.translate`: 1 for the members, 0 for all others."""
    return bytes(byte in members for byte in range(256))


_DIGITS = b"0123456789abcdefABCDEF"
_LETTERS = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+/-_"
_OF_HASH = _class_of(_DIGITS)
_OF_HEX = _class_of(_DIGITS + _LINE_ENDS)
_OF_BASE64 = _class_of(_LETTERS + _LINE_ENDS)
#: All of which names and digits consist, with everything that `_ADDED` takes away.
_OF_TEXT = _class_of(_LETTERS + _LINE_ENDS + b"\\% \t<>")

#: The digits in a cell of a table that is printed in columns, also those of a bytea, and those in its next lines.
_CELL = re.compile(rb"(?<=[ |.?])(?:\\x)?[0-9A-Za-z+/_-]{16,}")
_CELL_GOES_ON = re.compile(rb"[0-9A-Za-z+/_-]+")
#: Characters that take two columns.
_WIDE = re.compile(
    "[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\U0001f300-\U0003fffd]"
)

#: What is encoded is looked for so many times in what was decoded.
LEVELS = 5
#: So many bytes of a stream are looked at twice, so that no name is cut in two, whatever form it has.
_OVERLAP = 1 << 16
_APART = b"\0"
_SHOWN_BYTES = 60


PIECE_BYTES = 1 << 20
"""So much is best looked at at once: a scan takes several times the memory of what it gets."""


@dataclass
class Found:
    """What a scan has found.

    Args:
        names: of all objects that the bytes may refer to, each as often as it is there, or more often.
        newer: beginnings of what can be references in a newer format: what they refer to is not known.
        odd: beginnings of what begins like a reference, and is none in any format.
    """

    names: list[str] = field(default_factory=list)
    newer: list[bytes] = field(default_factory=list)
    odd: list[bytes] = field(default_factory=list)


def scan(raw: bytes) -> Found:
    """What these bytes refer to."""
    found = Found()
    _look(raw, found, cut=False)
    return found


def scan_stream(chunks: Iterable[bytes]) -> Iterator[Found]:
    """As `scan`, for bytes that are too many for memory: what is found, piece by piece."""
    rest = b""
    for chunk in chunks:
        window = rest + chunk
        rest = window[-_OVERLAP:]
        found = Found()
        _look(window, found, cut=True)
        yield found
    yield scan(rest)


def refers(chunks: Iterable[bytes]) -> bool:
    """Whether a value may refer to objects: whether `scan_stream` finds a name in it, or what it cannot read."""
    return any(found.names or found.newer for found in scan_stream(chunks))


def pieces_of(data: bytes) -> Iterator[bytes]:
    """The same bytes in pieces, for `scan_stream`."""
    return (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))


def _look(raw: bytes, found: Found, *, cut: bool) -> None:
    """Look into bytes, and into what is encoded in them, level by level. What was read before is not read again: bytes
    of few different digits have many readings that are nearly the same.

    Args:
        cut: whether the bytes do not end here. Then a reference at their end may not be there as a whole.
    """
    level, known = [(raw, cut)], [(raw, cut)]
    for depth in range(LEVELS + 1):
        decoded: list[tuple[bytes, bool]] = []
        for each, each_cut in level:
            _look_for_references(each, found, cut=each_cut)
            for text, text_cut in _texts(each, each_cut):
                found.names += _names(text)
                for reading in _decoded(text, text_cut) if depth < LEVELS else ():
                    if not any(reading[0] in other and other_cut <= reading[1] for other, other_cut in known):
                        decoded.append(reading)
                        known.append(reading)
        level = decoded


def _texts(raw: bytes, cut: bool) -> Iterator[tuple[bytes, bool]]:
    """All that may be names and digits in some bytes, without what is between the digits; and whether it is cut."""
    if runs := _runs(raw, _OF_TEXT, _NAME_BYTES):
        text = _APART.join(raw[start:end] for start, end in runs)
        goes_on = cut and runs[-1][1] == len(raw)
        if any(mark in text for mark in _ADDED_MARKS):
            text = _ADDED.sub(_spelled, _BACKSLASHES.sub(rb"\\", text))
            if goes_on:  # else the digits before it would seem to end there
                text = _ADDED_IN_PART.sub(b"", text)
        yield text, goes_on
    if b"\n" in raw and _CELL.search(raw if raw.isascii() else _in_columns(raw)):
        yield from _cells(raw, cut)


def _decoded(text: bytes, cut: bool) -> Iterator[tuple[bytes, bool]]:
    """What the digits in a text encode, wherever they begin."""
    if runs := _runs(text, _OF_HEX, _HEX_DIGITS):
        cut_here = cut and runs[-1][1] == len(text)
        digits = [text[start:end].translate(None, _LINE_ENDS) for start, end in runs]
        for shift in (0, 1):
            yield _APART.join(_from_hex(each[shift:]) for each in digits), cut_here
    if runs := _runs(text, _OF_BASE64, _BASE64_DIGITS):
        cut_here = cut and runs[-1][1] == len(text)
        letters = [text[start:end].translate(_URL_SAFE, _LINE_ENDS) for start, end in runs]
        for shift in range(4):
            yield _APART.join(_from_base64(each[shift:]) for each in letters), cut_here


def _cells(raw: bytes, cut: bool) -> Iterator[tuple[bytes, bool]]:
    """What may be in the cells of a table that is printed in columns: the digits in one column of successive lines.

    Digits in the next row of the table are taken for a part of the cell, too. That does no harm, because digits are
    decoded wherever they begin.
    """
    whole: list[bytes] = []
    cells: dict[int, list[bytes]] = {}
    lines = raw.split(b"\n")
    for number, line in enumerate(lines):
        shown = line if line.isascii() else _in_columns(line)
        digits = {each.start(): each[0].removeprefix(b"\\x") for each in _CELL.finditer(shown)}
        for column in cells.keys() - digits.keys():
            if goes_on := _CELL_GOES_ON.match(shown, column):
                digits[column] = goes_on[0]
            elif number < len(lines) - 1:  # the last line may be cut
                whole += _of_lines(cells.pop(column))
        for column, each in digits.items():
            # At the end of a cell, `+` may be a digit, or say that the cell goes on.
            is_digit = shown.startswith((b".", b"?"), column + len(each))
            cells.setdefault(column, []).append(each + _APART if each.endswith(b"+") and not is_digit else each)
    if whole:
        yield _APART.join(whole), False
    for parts in cells.values():
        for text in _of_lines(parts):
            yield text, cut


def _of_lines(parts: Sequence[bytes]) -> list[bytes]:
    """The two readings of a cell; none if it has one line, which is read anyway."""
    if len(parts) == 1:
        return []
    kept = b"".join(part.rstrip(_APART) for part in parts)
    without = b"".join(part.removesuffix(b"+" + _APART) for part in parts)
    return [kept] if kept == without else [kept, without]


def _in_columns(text: bytes) -> bytes:
    """One byte for each column that a text takes in a terminal."""
    return _WIDE.sub("??", text.decode(errors="replace")).encode("ascii", "replace")


def _look_for_references(raw: bytes, found: Found, *, cut: bool) -> None:
    """Look for what begins like a reference, and has no name that `_names` finds."""
    count = raw.count(PREFIX)
    if not count or count == len(_KNOWN.findall(raw)):
        return
    known = {each.start() for each in _KNOWN.finditer(raw)}
    until = len(raw) - MAX_BYTES if cut else len(raw)
    for each in re.finditer(re.escape(PREFIX), raw):
        if each.start() in known or each.start() >= until:
            continue
        following = raw.find(PREFIX, each.end(), each.start() + MAX_BYTES)
        text = raw[each.start() : following if following > 0 else each.start() + MAX_BYTES]
        if _NEWER.match(text):
            found.newer.append(text[:_SHOWN_BYTES])
        elif name := _spelled_otherwise(text):
            found.names.append(name)
        elif not _NAME.search(text):
            found.odd.append(text[:_SHOWN_BYTES])


def _spelled_otherwise(text: bytes) -> str | None:
    """The name in a reference of this version that another program has written, with JSON of another spelling."""
    if not text.startswith(PREFIX + VERSION):
        return None
    try:
        document, _ = json.JSONDecoder().raw_decode(text[len(PREFIX + VERSION) :].decode("latin-1").lstrip())
        name = document["name"]
        return name if NAME.fullmatch(name) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _names(text: bytes) -> list[str]:
    """The names in a text. The hash begins where a run of digits does, or two digits after that: ``%2F``."""
    names = []
    for start, _ in _runs(text, _OF_HASH, _HASH_DIGITS):
        around = text[max(0, start - _DAY_BYTES) : start + _HASH_DIGITS + 2 + len(REFERS)]
        names += [f"{each[1].decode()}/{each[2].decode()}" for each in _NAME.finditer(around)]
    return names


def _spelled(added: re.Match[bytes]) -> bytes:
    return _SPELLED[(added[1] or added[2] or b"").lower()]


def _from_hex(digits: bytes) -> bytes:
    return bytes.fromhex(digits[: len(digits) // 2 * 2].decode())


def _from_base64(letters: bytes) -> bytes:
    """What they encode. The last ones may be less than four."""
    rest = letters[len(letters) // 4 * 4 :]
    return base64.b64decode(
        letters[: len(letters) // 4 * 4] + (rest + b"=" * (4 - len(rest)) if len(rest) > 1 else b"")
    )


def _runs(raw: bytes, members: bytes, least: int) -> list[tuple[int, int]]:
    """Begins and ends of the longest runs of members of a class, of those that have a least length."""
    inside = np.frombuffer(raw.translate(members), dtype=bool)
    width = 1
    while width * 2 <= least:  # afterwards: whether this byte and so many after it are members
        inside = inside[:-width] & inside[width:]
        width *= 2
    if not inside.any():
        return []
    changes = np.flatnonzero(np.diff(inside, prepend=False, append=False))
    starts, ends = changes[::2], changes[1::2] + width - 1
    long = ends - starts >= least
    return list(zip(starts[long].tolist(), ends[long].tolist(), strict=True))
