"""Messages between the steps of a foreign-key join: values of the records that pass from one to the next.

Numbers are big-endian. All messages of a batch are handled in the same batch, so their format may change.
"""

from __future__ import annotations

from typing import NamedTuple

# A left row, as the first step gets it: see `planning.foreign_keys`, where SQL makes it.
DELETED, WITHOUT_KEY, WITH_KEY = b"D", b"N", b"F"
# What the second step gets.
SUBSCRIBE, UNSUBSCRIBE, PASS, RIGHT, RIGHT_DELETED = b"S", b"U", b"P", b"R", b"T"

_LENGTH, _NUMBER = 4, 8


class LeftRow(NamedTuple):
    """A left row.

    Args:
        foreign_key: None: it has none.
        value: None: the row is deleted.
    """

    foreign_key: bytes | None
    value: bytes | None


def left_row(raw: bytes) -> LeftRow:
    kind, rest = raw[:1], raw[1:]
    if kind == DELETED:
        return LeftRow(None, None)
    if kind == WITHOUT_KEY:
        return LeftRow(None, rest)
    return LeftRow(*_parted(rest))


class Result(NamedTuple):
    """What the row of a left key is now.

    Args:
        generation: that of the left row. Of two results in one batch, the one of the later generation holds.
        joined: what `joined` has made; None: there is no row.
    """

    generation: int
    joined: bytes | None


def result(raw: bytes) -> Result:
    return Result(number(raw), raw[_NUMBER:] or None)


def subscription(left_key: bytes, generation: int, value: bytes) -> bytes:
    """The left row refers to the right row of the message's key from now on."""
    return SUBSCRIBE + _with_length(left_key) + numbered(generation, value)


def unsubscription(left_key: bytes) -> bytes:
    """The left row does not refer to it any more."""
    return UNSUBSCRIBE + _with_length(left_key)


def passed(left_key: bytes, generation: int, made: bytes | None) -> bytes:
    """A result for which no right row is needed."""
    return PASS + _with_length(left_key) + numbered(generation, made or b"")


def left_key_and_rest(raw: bytes) -> tuple[bytes, bytes]:
    """The left key of one of the three messages above, and what follows it."""
    return _parted(raw[1:])


def joined(left: bytes, right: bytes | None) -> bytes:
    """A row of the result: whether there is a right value, the length of the left one, and both."""
    return (b"\0" if right is None else b"\1") + _with_length(left) + (right or b"")


def numbered(generation: int, rest: bytes) -> bytes:
    return generation.to_bytes(_NUMBER, "big") + rest


def number(raw: bytes) -> int:
    return int.from_bytes(raw[:_NUMBER], "big")


def behind_number(raw: bytes) -> bytes:
    return raw[_NUMBER:]


def _with_length(part: bytes) -> bytes:
    return len(part).to_bytes(_LENGTH, "big") + part


def _parted(raw: bytes) -> tuple[bytes, bytes]:
    end = _LENGTH + int.from_bytes(raw[:_LENGTH], "big")
    return raw[_LENGTH:end], raw[end:]
