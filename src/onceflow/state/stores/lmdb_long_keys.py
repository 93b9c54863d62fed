"""Keys that are longer than LMDB allows (511 bytes), in their place in the order of all keys.

A key of up to `SHORT_KEY_BYTES_MAX` bytes is stored as it is. Of a longer one, the first part is stored with a zero
byte behind it, and its row is the number of a node. In the database of nodes, the key goes on behind the number of its
node: as it is if that is short enough, or else again with its first part and the number of another node.

So a stored key of the greatest length always refers to a node. Such a key comes behind all shorter ones that are a
beginning of it, and before all others that are greater: the whole is a tree in the order of the keys.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import lmdb

from onceflow.state.stores.base import StoreCorruptError

#: Longer keys are stored in parts.
SHORT_KEY_BYTES_MAX = 510

_REFERENCE = b"\0"
_NODE = struct.Struct(">Q")


@dataclass
class _Level:
    """A node in which a scan is, or the rows themselves.

    Args:
        items: stored keys and values from the place of the scan on.
        node: what the keys of this node begin with.
        part: what its keys have in front of those in this node, and behind those of the level above.
        bound: where the scan begins in the node to which the next item refers; None: it has no bound in it.
    """

    items: Iterator[tuple[Any, Any]]
    node: bytes
    part: bytes
    bound: bytes | None


class LongKeys:
    """Rows of short and long keys in one transaction.

    Args:
        rows, nodes: the databases.
    """

    def __init__(self, txn: Any, rows: Any, nodes: Any) -> None:
        self._txn = txn
        self._rows, self._nodes = rows, nodes
        self._last_node: int | None = None

    @property
    def are_there(self) -> bool:
        """Whether there is any long key."""
        return bool(self._txn.cursor(self._nodes).first())

    def get(self, key: bytes) -> Any:
        """The row, or None."""
        database = self._rows
        while len(key) > SHORT_KEY_BYTES_MAX:
            node = self._txn.get(key[:SHORT_KEY_BYTES_MAX] + _REFERENCE, db=database)
            if node is None:
                return None
            key, database = bytes(node) + key[SHORT_KEY_BYTES_MAX:], self._nodes
        return self._txn.get(key, db=database)

    def get_many(self, cursor: Any, keys: Sequence[bytes]) -> list[bytes | None]:
        """The row of each key.

        Args:
            cursor: of the database of rows.
        """
        if not self.are_there:  # then no stored key is a reference, and LMDB refuses longer ones
            with suppress(lmdb.BadValsizeError):
                return list(map(cursor.get, keys))
        elif max(map(len, keys), default=0) <= SHORT_KEY_BYTES_MAX:
            return list(map(cursor.get, keys))
        return list(map(self.get, keys))

    def put(self, key: bytes, row: bytes) -> None:
        database = self._rows
        while len(key) > SHORT_KEY_BYTES_MAX:
            reference = key[:SHORT_KEY_BYTES_MAX] + _REFERENCE
            node = self._txn.get(reference, db=database)
            if node is None:
                node = self._new_node()
                self._txn.put(reference, node, db=database)
            key, database = node + key[SHORT_KEY_BYTES_MAX:], self._nodes
        self._txn.put(key, row, db=database)

    def delete(self, key: bytes) -> None:
        """Delete a row, and the nodes that are empty without it."""
        database = self._rows
        path = []
        while len(key) > SHORT_KEY_BYTES_MAX:
            reference = key[:SHORT_KEY_BYTES_MAX] + _REFERENCE
            node = self._txn.get(reference, db=database)
            if node is None:
                return
            path.append((database, reference, node))
            key, database = node + key[SHORT_KEY_BYTES_MAX:], self._nodes
        self._txn.delete(key, db=database)
        cursor = self._txn.cursor(self._nodes)
        for database, reference, node in reversed(path):
            if cursor.set_range(node) and cursor.key().startswith(node):
                return
            self._txn.delete(reference, db=database)

    def scan(
        self, start: bytes = b"", end: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Any]]:
        """Rows with ``start <= key < end``.

        Args:
            reverse: the last one first.
        """
        enter = self._before if reverse else self._from
        levels = [enter(self._rows, b"", b"", end if reverse else start)]
        before = b""  # what all keys of the level begin with; only the last level has it, because keys may be long
        while levels:
            level = levels[-1]
            node = level.node
            for stored, value in level.items:
                key = bytes(stored)
                if node and not key.startswith(node):
                    levels.pop()
                    break
                if len(key) > SHORT_KEY_BYTES_MAX:
                    bound, level.bound = level.bound, None
                    levels.append(enter(self._nodes, *_referred(level, key, value), bound))
                    break
                if len(levels) > 1 and not before:
                    before = b"".join(each.part for each in levels)
                whole = before + key[len(node) :]
                if whole < start if reverse else end is not None and whole >= end:
                    return
                yield whole, value
            else:
                levels.pop()
            before = b""

    def _from(self, database: Any, node: bytes, part: bytes, start: bytes | None) -> _Level:
        """A level at its first key that is not less than this one."""
        cursor = self._txn.cursor(database)
        place, bound = _place(node + (start or b""))
        found = cursor.set_range(place) if place else cursor.first()
        if bound is not None and found and cursor.key() != place:
            bound = None
        return _Level(cursor.iternext() if found else iter(()), node, part, bound)

    def _before(self, database: Any, node: bytes, part: bytes, end: bytes | None) -> _Level:
        """A level at its last key that is less than this one."""
        cursor = self._txn.cursor(database)
        bound = None
        if end is not None:
            place, bound = _place(node + end)
            found = bool(place) and cursor.set_range(place)
            if not (found and bound is not None and cursor.key() == place):
                bound = None
                found = bool(place) and (cursor.prev() if found else cursor.last())
        else:
            behind = _NODE.pack(_NODE.unpack(node)[0] + 1) if node else b""
            found = cursor.prev() if behind and cursor.set_range(behind) else cursor.last()
        return _Level(cursor.iterprev() if found else iter(()), node, part, bound)

    def _new_node(self) -> bytes:
        """A number that is greater than all that are there: so a node only refers to later ones."""
        if self._last_node is None:
            cursor = self._txn.cursor(self._nodes)
            self._last_node = _NODE.unpack(cursor.key()[: _NODE.size])[0] if cursor.last() else 0
        self._last_node = self._last_node + 1
        return _NODE.pack(self._last_node)


def _place(key: bytes) -> tuple[bytes, bytes | None]:
    """The stored key at which a key is, and what follows in the node to which that one refers."""
    if len(key) <= SHORT_KEY_BYTES_MAX:
        return key, None
    return key[:SHORT_KEY_BYTES_MAX] + _REFERENCE, key[SHORT_KEY_BYTES_MAX:]


def _referred(level: _Level, key: bytes, value: Any) -> tuple[bytes, bytes]:
    """The node to which a stored key refers, and the part of the keys in it that the stored key has.

    Raises:
        StoreCorruptError: it is no later node, so that a scan might not end.
    """
    node = bytes(value)
    if len(node) != _NODE.size or node <= level.node or not key.endswith(_REFERENCE):
        raise StoreCorruptError("a long key of the local store is damaged")
    return node, key[len(level.node) : -1]
