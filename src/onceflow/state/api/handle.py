"""``State``: the handle through which user code reads and changes the state of one key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onceflow.state.api.bounds import against_order
from onceflow.state.api.joined_table import JoinedTable
from onceflow.state.api.maps import ListState, MapState
from onceflow.state.api.scope import ABSENT, Scope
from onceflow.state.api.timers import Timers
from onceflow.state.api.user_errors import not_encoded
from onceflow.state.format import rows


class State:
    """The state of one key, for one call of ``process`` or ``on_timer``.

    Later reads in the same batch see every change. Changes are committed with the outputs of the batch. Values are
    encoded when you put them, so changing the object afterwards has no effect.

    Attributes:
        partition: the partition of the table.
        now_ms: processing time of the batch in epoch milliseconds, the same in every task.
        watermark_ms: the watermark in epoch milliseconds; older records are late. None: it is not known yet.
    """

    __slots__ = ("_key", "_lists", "_overlay", "_row_key", "_scope")

    def __init__(self, scope: Scope, key: bytes) -> None:
        self._scope = scope
        self._overlay = scope.overlay
        self._key = key
        self._row_key = b"v" + key
        self._lists: dict[str, ListState] | None = None

    @property
    def partition(self) -> int:
        return self._scope.partition

    @property
    def now_ms(self) -> int:
        self._scope.uses_clock = True
        return self._scope.now_ms

    @property
    def watermark_ms(self) -> int | None:
        return self._scope.watermark_ms

    @property
    def timers(self) -> Timers:
        """Timers of this key."""
        return Timers(self._scope, self._key)

    def get(self, default: Any = None) -> Any:
        """The value of the key, or the default."""
        row = self._overlay.get(self._row_key)
        if row is None:
            return default
        value = self._scope.read(row, self._scope.decode, None)
        return default if value is ABSENT else value

    def put(self, value: Any, ttl: str | float | None = None) -> None:
        """Set the value of the key.

        Args:
            value: anything that the ``state`` serde can encode, except None: use ``delete()``.
            ttl: how long the value lives in processing time: ``"5 minutes"``, a number of seconds, or ``"never"``.
                None: the ``ttl`` of the processor.

        Raises:
            ValueError: the value is None.
        """
        if value is None:
            raise ValueError("None cannot be put: use delete()")
        header = self._scope.header if ttl is None else self._scope.header_of(ttl)
        try:
            row = header + self._scope.encode(value)
        except Exception as error:
            not_encoded(error, "the value of state.put()", value, self._scope.value_serde, "state")
            raise
        self._overlay.put(self._row_key, row)

    def delete(self) -> None:
        """Delete the value of the key. Its maps, lists and timers stay."""
        self._overlay.put(self._row_key, None)

    def map(self, name: str, *, key: Any = None, value: Any = None) -> MapState:
        """A map of this key.

        Args:
            name: the name of the map. A key may have many maps.
            key: serde of the entry keys. None: bytes, or text in UTF-8; iteration then returns bytes.
            value: serde of the entries. None: the ``state`` serde of the processor.
        """
        return MapState(self._scope, self._key, name, key, value)

    def list(self, name: str, *, value: Any = None) -> ListState:
        """A list of this key. A list and a map may have the same name.

        Args:
            name: the name of the list. A key may have many lists.
            value: serde of the items. None: the ``state`` serde of the processor.
        """
        lists = self._lists
        if lists is None:
            lists = self._lists = {}
        found = lists.get(name)
        if found is None:
            found = lists[name] = ListState(self._scope, self._key, name, None)
        return found if value is None else ListState(self._scope, self._key, name, value, found)

    def table(self, name: str) -> JoinedTable:
        """A table that the flow joins with, as it was at the offsets of this batch.

        Args:
            name: a name in ``tables=`` of `Flow.process`.

        Raises:
            KeyError: there is no such name.
        """
        found = self._scope.tables.get(name)
        if found is None:
            known = ", ".join(map(repr, self._scope.tables)) or "none"
            raise KeyError(f"table {name!r} is not in tables= of Flow.process; it has {known}")
        return found.beside(lambda: (self._key,))

    def range(self, start: Any = None, end: Any = None, *, reverse: bool = False) -> Iterator[tuple[Any, Any]]:
        """Keys and values of this partition with ``start <= key < end``, in the order of the keys' bytes.

        Args:
            start, end: bytes, or what the ``key`` serde can encode. None: from the first, or to the last key.
            reverse: whether to go from the last to the first.

        Raises:
            ValueError: start comes before end, but not in the order of the bytes.
        """
        low = b"v" if start is None else b"v" + self._key_bytes(start)
        high = b"w" if end is None else b"v" + self._key_bytes(end)
        if why := against_order(start, end, low, high):
            raise ValueError(f"state.range(): {why}")
        self._scope.scanned = True
        return self._values(self._overlay.scan(low, high, reverse=reverse))

    def prefix(self, prefix: bytes | str) -> Iterator[tuple[Any, Any]]:
        """Keys and values of this partition whose keys begin with these bytes."""
        low = b"v" + (prefix.encode() if isinstance(prefix, str) else prefix)
        self._scope.scanned = True
        return self._values(self._overlay.scan(low, rows.after(low) or b"w"))

    def _values(self, found: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[Any, Any]]:
        scope = self._scope
        for row_key, row in found:
            value = scope.read(row, scope.decode, None)
            if value is not ABSENT:
                yield scope.key_of(row_key[1:], scope.key_serde, "a stored key"), value

    def _key_bytes(self, key: Any) -> bytes:
        if isinstance(key, bytes):
            return key
        try:
            encoded: bytes = self._scope.key_serde.encode(key)
        except Exception as error:
            not_encoded(error, "a bound of state.range()", key, self._scope.key_serde, "key")
            raise
        return encoded
