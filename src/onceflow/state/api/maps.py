"""Maps and lists of a key. Every entry is a row of its own, so a call reads and writes only the entries it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

from onceflow.state.api.bounds import against_order
from onceflow.state.api.scope import ABSENT, Scope
from onceflow.state.api.serdes import JSON
from onceflow.state.api.user_errors import not_encoded
from onceflow.state.format import exact_json, rows

# Lists are maps whose name begins with a byte that no UTF-8 text has.
_LIST = b"\xff"


class MapState:
    """A map of one key; get it as ``state.map(name)``. Entries are ordered by the bytes of their keys."""

    __slots__ = ("_decode", "_encode_key", "_key_serde", "_name", "_prefix", "_scope", "_serde")

    def __init__(self, scope: Scope, key: bytes, name: str, key_serde: Any, value_serde: Any) -> None:
        serde = scope.value_serde if value_serde is None else value_serde
        self._scope = scope
        self._name = name
        self._prefix = rows.map_key(key, name.encode())
        self._key_serde = key_serde
        self._encode_key = None if key_serde is None else _json_key if key_serde == JSON else key_serde.encode
        self._serde = serde
        self._decode = serde.decode

    def get(self, key: Any, default: Any = None) -> Any:
        """The entry's value, or the default."""
        row = self._scope.overlay.get(self._row_key(key))
        if row is None:
            return default
        value = self._scope.read(row, self._decode, self._name)
        return default if value is ABSENT else value

    def __contains__(self, key: Any) -> bool:
        row = self._scope.overlay.get(self._row_key(key))
        return row is not None and not self._scope.has_expired(row)

    def put(self, key: Any, value: Any, ttl: str | float | None = None) -> None:
        """Set an entry.

        Args:
            key: bytes or text, or what the key serde of the map can encode.
            value: anything that the value serde of the map can encode, except None: use ``delete()``.
            ttl: see `State.put`.

        Raises:
            ValueError: the value is None.
        """
        put(self, self._row_key(key), value, ttl)

    def delete(self, key: Any) -> None:
        """Delete an entry, if there is one."""
        self._scope.overlay.put(self._row_key(key), None)

    def items(self, start: Any = None, end: Any = None, *, reverse: bool = False) -> Iterator[tuple[Any, Any]]:
        """Keys and values of the entries with ``start <= key < end`` as they are now. You may change the map meanwhile.

        Args:
            start, end: None: from the first, or to the last entry.
            reverse: whether to go from the last to the first.

        Raises:
            ValueError: start comes before end, but not in the order of the bytes.
        """
        low = self._prefix if start is None else self._prefix + self._key_bytes(start)
        high = rows.after(self._prefix) if end is None else self._prefix + self._key_bytes(end)
        if high is not None and (why := against_order(start, end, low, high)):
            raise ValueError(f"items() of map {self._name!r}: {why}")
        return self._entries(low, high, reverse)

    def prefix(self, prefix: bytes | str) -> Iterator[tuple[Any, Any]]:
        """Keys and values of the entries whose keys begin with these bytes."""
        low = self._prefix + (prefix.encode() if isinstance(prefix, str) else prefix)
        return self._entries(low, rows.after(low), False)

    def clear(self) -> None:
        """Delete all entries."""
        clear(self._scope, self._prefix)

    def _entries(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[tuple[Any, Any]]:
        what = f"a key of map {self._name!r}"
        for row_key, value in values(self._scope, low, high, reverse, self._decode, self._name):
            yield self._scope.key_of(row_key[len(self._prefix) :], self._key_serde, what), value

    def _row_key(self, key: Any) -> bytes:
        return self._prefix + self._key_bytes(key)

    def _key_bytes(self, key: Any) -> bytes:
        if self._encode_key is not None:
            try:
                encoded: bytes = self._encode_key(key)
            except Exception as error:
                not_encoded(error, f"the key for map {self._name!r}", key, self._key_serde, "its")
                raise
            return encoded
        if isinstance(key, str):
            return key.encode()
        if isinstance(key, bytes):
            return key
        raise TypeError(f"keys of map {self._name!r} are bytes or str, got {type(key).__name__}: give it a key serde")


class ListState:
    """A list of one key; get it as ``state.list(name)``."""

    __slots__ = ("_decode", "_name", "_next", "_prefix", "_scope", "_serde")

    def __init__(self, scope: Scope, key: bytes, name: str, value_serde: Any, other: ListState | None = None) -> None:
        serde = scope.value_serde if value_serde is None else value_serde
        self._scope = scope
        self._name = name
        self._prefix = rows.map_key(key, _LIST + name.encode())
        self._serde = serde
        self._decode = serde.decode
        # Index of the next item, once it is known. All handles of a list share it, or two would take the same one.
        self._next: list[int] = [] if other is None else other._next

    def append(self, value: Any, ttl: str | float | None = None) -> None:
        """Add an item at the end.

        Args:
            value: anything that the value serde of the list can encode, except None.
            ttl: see `State.put`.
        """
        scope, prefix = self._scope, self._prefix
        at = self._next
        if not at:
            last = next(scope.overlay.scan(prefix, _end(prefix), reverse=True), None)
            at.append(0 if last is None else int.from_bytes(last[0][len(prefix) :], "big") + 1)
        put(self, prefix + at[0].to_bytes(8, "big"), value, ttl)
        at[0] += 1

    def extend(self, items: Iterable[Any], ttl: str | float | None = None) -> None:
        """Add items at the end."""
        for value in items:
            self.append(value, ttl)

    def items(self) -> Iterator[Any]:
        """The items in order, as they are now. You may change the list meanwhile."""
        prefix = self._prefix
        return (value for _, value in values(self._scope, prefix, _end(prefix), False, self._decode, self._name))

    __iter__ = items

    def __len__(self) -> int:
        found = self._scope.overlay.scan(self._prefix, _end(self._prefix))
        return sum(1 for _, row in found if not self._scope.has_expired(row))

    def __bool__(self) -> bool:
        return next(self.items(), None) is not None

    def clear(self) -> None:
        """Delete all items."""
        clear(self._scope, self._prefix)
        self._next[:] = [0]


def _json_key(key: Any) -> bytes:
    """A key of entries as JSON: equal numbers are one key, and so are objects whatever the order of their fields."""
    raw = exact_json.dumps(key)
    if type(key) is str or type(key) is int:
        return raw
    if type(key) is float:  # ranges go by the text, so it stays as it is written, as far as this can be
        return exact_json.dumps(int(key)) if key.is_integer() else raw
    if type(key) is Decimal and type(value := exact_json.loads(raw)) is float:
        return _json_key(value)
    return exact_json.canonical(raw)


def put(place: MapState | ListState, row_key: bytes, value: Any, ttl: str | float | None) -> None:
    if value is None:
        raise ValueError("None cannot be put: use delete()")
    scope, serde = place._scope, place._serde
    header = scope.header_of(ttl)
    try:
        row = header + serde.encode(value)
    except Exception as error:
        kind = "map" if isinstance(place, MapState) else "list"
        role = "state" if serde is scope.value_serde else "its"
        not_encoded(error, f"the value put into {kind} {place._name!r}", value, serde, role)
        raise
    scope.overlay.put(row_key, row)


def values(
    scope: Scope, low: bytes, high: bytes | None, reverse: bool, decode: Any, name: str
) -> Iterator[tuple[bytes, Any]]:
    """Row keys and values of the rows that have not expired, as of this call."""
    found = scope.overlay.scan(low, high or _end(low), reverse=reverse)

    def read() -> Iterator[tuple[bytes, Any]]:
        for row_key, row in found:
            value = scope.read(row, decode, name)
            if value is not ABSENT:
                yield row_key, value

    return read()


def clear(scope: Scope, prefix: bytes) -> None:
    for row_key, _ in scope.overlay.scan(prefix, _end(prefix)):
        scope.overlay.put(row_key, None)


def _end(prefix: bytes) -> bytes:
    end = rows.after(prefix)
    assert end is not None  # row keys begin with a letter
    return end
