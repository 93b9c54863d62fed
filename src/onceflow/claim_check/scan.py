"""Finds the names of stored objects in bytes of any kind: what refers to an object must not be overlooked.

A reference travels in many forms: as a value, inside a value of another format, in a dead letter whose value is JSON
with bytes in base64, in a snapshot of a table, in a column of a database that prints bytes as hexadecimal digits. What
all have in common is the name of the object: a day, a slash, and 64 hexadecimal digits. So this module looks for names,
and not for references. Where there are runs of base64 or hexadecimal digits that are long enough for a name, it decodes
them, whatever they begin with, and looks into the result in the same way.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator

import numpy as np

from onceflow.claim_check.reference import MARK, MAX_BYTES, PREFIX, REFERS, unreadable

#: The name of an object, also in a URL.
_NAME = re.compile(rb"(\d{4}-\d\d-\d\d)(?:/|%2[Ff])([0-9a-f]{64}(?:" + REFERS.encode() + rb")?)")
#: The beginning of a reference that this version can read.
_KNOWN = re.compile(re.escape(PREFIX) + rb'1 \{"name":"\d{4}-\d\d-\d\d/[0-9a-f]{64}(?:' + REFERS.encode() + rb')?"')
_HASH_DIGITS = 64
_NAME_BYTES = 75
_HEX_DIGITS = 2 * _NAME_BYTES
# Each of the characters of a name has a part in four characters of base64 at the most.
_BASE64_DIGITS = _NAME_BYTES * 4 // 3
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
#: What JSON adds to base64: escaped ends of lines, and before slashes. JSON in JSON has more of the backslashes.
_ESCAPES = re.compile(rb"\\+(?:[rn]|(?=/))")

_HEX, _BASE64 = 1, 2
_CLASSES = np.zeros(256, dtype=np.uint8)
_CLASSES[list(b"0123456789abcdefABCDEF")] |= _HEX
_CLASSES[list(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+/-_\r\n")] |= _BASE64

#: So many bytes of a stream are looked at twice, so that no name is cut in two, whatever form it has.
_OVERLAP = 1 << 16


def names_in(raw: bytes) -> list[str]:
    """The names of all objects that these bytes may refer to, each as often as it is there.

    Raises:
        ClaimCheckError: there is a reference that this version cannot read.
    """
    return [name for layer in _layers(raw) for name in _names(layer)]


def names_in_stream(chunks: Iterable[bytes]) -> Iterator[str]:
    """As `names_in`, for bytes that are too many for memory. A name may come more than once.

    Raises:
        ClaimCheckError: there is a reference that this version cannot read.
    """
    rest = b""
    for chunk in chunks:
        window = rest + chunk
        rest = window[-_OVERLAP:]
        for layer in _layers(window):
            yield from _names(layer, ends=False)
    for layer in _layers(rest):
        yield from _names(layer)


def _names(layer: bytes, *, ends: bool = True) -> list[str]:
    """The names in one layer.

    Args:
        ends: whether the bytes end here. Otherwise a reference at their end may not be there as a whole.
    """
    if layer.count(PREFIX) != len(_KNOWN.findall(layer)):
        known = {found.start() for found in _KNOWN.finditer(layer)}
        until = len(layer) if ends else len(layer) - MAX_BYTES
        for found in re.finditer(re.escape(PREFIX), layer):
            if found.start() < until and found.start() not in known:
                raise unreadable(layer[found.start() :], "its form is not known")
    return [_name(found) for found in _NAME.finditer(layer)]


def _name(found: re.Match[bytes]) -> str:
    return f"{found[1].decode()}/{found[2].decode()}"


def _layers(raw: bytes) -> Iterator[bytes]:
    """Those parts of the bytes that may have names: the bytes themselves, and what is encoded in them.

    What is decoded is shorter than what it was decoded from, so this ends.
    """
    if len(raw) < _NAME_BYTES:
        return
    given = _ESCAPES.sub(b"", raw) if b"\\" in raw else raw
    classes = _CLASSES[np.frombuffer(given, dtype=np.uint8)]
    if _runs(classes, _HEX, _HASH_DIGITS).size or PREFIX in given:
        yield given
    for start, end in _runs(classes, _HEX, _HEX_DIGITS).tolist():
        for shift in (0, 1):
            digits = given[start + shift : end]
            yield from _layers(bytes.fromhex(digits[: len(digits) // 2 * 2].decode()))
    for start, end in _runs(classes, _BASE64, _BASE64_DIGITS).tolist():
        letters = given[start:end].translate(_URL_SAFE, delete=b"\r\n")
        for shift in range(4):
            digits = letters[shift:]
            yield from _layers(base64.b64decode(digits[: len(digits) // 4 * 4] + _rest(digits)))


def _rest(digits: bytes) -> bytes:
    """The last digits of base64 that are not four, with what makes them four."""
    rest = digits[len(digits) // 4 * 4 :]
    return rest + b"=" * (4 - len(rest)) if len(rest) > 1 else b""


def _runs(classes: np.ndarray, which: int, least: int) -> np.ndarray:
    """Begins and ends of the longest runs of bytes of a class that have a least length."""
    inside = np.concatenate(([0], (classes & which) != 0, [0])).astype(np.int8)
    changes = np.flatnonzero(np.diff(inside)).reshape(-1, 2)
    return changes[changes[:, 1] - changes[:, 0] >= least]


def _encoded(mark: bytes) -> list[bytes]:
    """How bytes look in base64, at its three alignments, whatever is around them."""
    found = []
    for shift in range(3):
        text = base64.b64encode(bytes(shift) + mark)
        first = (0, 2, 3)[shift]
        found.append(text[first : (shift + len(mark)) * 8 // 6])
    return found


_ONCE = _encoded(MARK)
_TWICE = [twice for one in _ONCE for twice in _encoded(one)]
_MARKS = (MARK, MARK.hex().encode(), MARK.hex().upper().encode(), *_ONCE, *_TWICE)


def may_refer(raw: bytes) -> bool:
    """Whether there may be references in a value, fast: also in base64, also of JSON with base64, and in digits."""
    return any(mark in raw for mark in _MARKS)


MARK_BYTES = max(map(len, _MARKS))
"""So many bytes of the last chunk belong in front of the next one, if `may_refer` is asked chunk by chunk."""
