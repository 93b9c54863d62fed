"""What user code gets of its state: one handle per call, for one key."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from onceflow.durations import duration_ms
from onceflow.errors import ProcessorError
from onceflow.state import rows
from onceflow.state.api.maps import ABSENT, ListState, MapState
from onceflow.state.api.serdes import BYTES
from onceflow.state.api.timers import Timers
from onceflow.state.api.user_errors import not_encoded
from onceflow.state.stores.overlay import Overlay


class Scope:
    """What all handles of a batch share.

    Args:
        processor: for its serdes, version and migrate.
        overlay: rows as the batch sees them.
        partition: of the table.
        now_ms: processing time of the batch.
        watermark_ms: event time of the batch; None when unknown.
        ttl_ms: of rows that are put without one; None: for ever.
    """

    def __init__(
        self,
        processor: Any,
        overlay: Overlay,
        *,
        partition: int,
        now_ms: int,
        watermark_ms: int | None,
        ttl_ms: int | None,
    ) -> None:
        self.overlay = overlay
        self.partition = partition
        self.now_ms = now_ms
        self.watermark_ms = watermark_ms
        self.version: int = processor.version
        self.key_serde = getattr(processor, "key", BYTES)
        self.value_serde = getattr(processor, "state", BYTES)
        self.encode: Callable[[Any], bytes] = self.value_serde.encode
        self.decode: Callable[[bytes], Any] = self.value_serde.decode
        self.header = rows.pack(b"", None if ttl_ms is None else _later(now_ms, ttl_ms), self.version)
        self._migrate = _migration(processor)
        self.fatal: ProcessorError | None = None
        """An error that is not a record's fault: the batch fails, even if user code caught it."""

    def read(self, row: bytes, decode: Callable[[bytes], Any], name: str | None) -> Any:
        """The value in a row; ABSENT when it has expired.

        Args:
            decode: of the value's serde.
            name: of the map or list it belongs to.
        """
        if row[0]:
            payload, expires_ms, version = rows.unpack(row)
            if expires_ms is not None and expires_ms <= self.now_ms:
                return ABSENT
        else:
            payload, version = row[1:], 0
        if version != self.version:
            return self.migrated(payload, version, name)
        try:
            return decode(payload)
        except Exception as error:
            raise self.unreadable(error) from error

    def unreadable(self, error: Exception) -> ProcessorError:
        """State that its serde cannot decode is nobody's bad record: else all records of its key were dead letters."""
        self.fatal = ProcessorError(
            f"the state cannot be decoded as the processor declares it: {type(error).__name__}: {error}",
            next_step="was its serde or state_fields changed? Then raise `version` and define migrate().",
        )
        return self.fatal

    def has_expired(self, row: bytes) -> bool:
        expires_ms = rows.expiry_of(row)
        return expires_ms is not None and expires_ms <= self.now_ms

    def migrated(self, payload: bytes, version: int, name: str | None) -> Any:
        """The value of a row that another version wrote.

        Raises:
            ProcessorError: a newer version wrote it, or there is no migrate().
        """
        if version > self.version:
            self.fatal = ProcessorError(
                f"the state was written by version {version} of the processor, this is version {self.version}",
                next_step="run the newer processor, or reset the flow's state.",
            )
            raise self.fatal
        if self._migrate is None:
            self.fatal = ProcessorError(
                f"the state was written by version {version} of the processor; version {self.version} has no migrate()",
                next_step="define migrate(self, payload, from_version) on the processor.",
            )
            raise self.fatal
        return self._migrate(payload, version, name)

    def header_of(self, ttl: str | float | None) -> bytes:
        """The beginning of a row with this time to live."""
        if ttl is None:
            return self.header
        if ttl == "never":
            return rows.pack(b"", None, self.version)
        ttl_ms = duration_ms(ttl)
        if ttl_ms <= 0:
            raise ValueError(f"ttl {ttl!r} is not positive")
        return rows.pack(b"", _later(self.now_ms, ttl_ms), self.version)

    @staticmethod
    def checked(row_key: bytes) -> bytes:
        """The row key, if the store can take it."""
        if len(row_key) > rows.ROW_KEY_BYTES_MAX:
            raise ValueError(
                f"key, name and entry key have {len(row_key)} bytes together; {rows.ROW_KEY_BYTES_MAX} are the most "
                "(zero bytes count twice)"
            )
        return row_key


class State:
    """State of one key, for one call of ``process`` or ``on_timer``.

    Every change is seen by later reads of the batch and committed with the batch's output. Values are encoded when they
    are put: changing an object afterwards changes nothing.

    Attributes:
        partition: of the table.
        now_ms: processing time of the batch, the same in every task, epoch milliseconds.
        watermark_ms: no records older than this are expected; None while unknown.
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
        return self._scope.now_ms

    @property
    def watermark_ms(self) -> int | None:
        return self._scope.watermark_ms

    @property
    def timers(self) -> Timers:
        """Timers of this key."""
        return Timers(self._scope, self._key)

    def get(self, default: Any = None) -> Any:
        """The key's value, or the default."""
        row = self._overlay.get(self._row_key)
        if row is None:
            return default
        value = self._scope.read(row, self._scope.decode, None)
        return default if value is ABSENT else value

    def put(self, value: Any, ttl: str | float | None = None) -> None:
        """Set the key's value.

        Args:
            value: anything the ``state`` serde takes, but None: use delete().
            ttl: "5 minutes" or seconds, by processing time; None: the processor's; "never".
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
        """Delete the key's value; its maps, lists and timers stay."""
        self._overlay.put(self._row_key, None)

    def map(self, name: str, *, key: Any = None, value: Any = None) -> MapState:
        """A map of this key.

        Args:
            name: one key may have many maps.
            key: serde of the entry keys; None: bytes, or text in UTF-8, and iteration gives bytes.
            value: serde of the entries; None: the processor's ``state``.
        """
        return MapState(self._scope, self._key, name, key, value)

    def list(self, name: str, *, value: Any = None) -> ListState:
        """A list of this key. Lists and maps do not share names.

        Args:
            name: one key may have many lists.
            value: serde of the items; None: the processor's ``state``.
        """
        lists = self._lists
        if lists is None:
            lists = self._lists = {}
        found = lists.get(name)
        if found is None or value is not None:
            found = lists[name] = ListState(self._scope, self._key, name, value)
        return found

    def range(self, start: Any = None, end: Any = None, *, reverse: bool = False) -> Iterator[tuple[Any, Any]]:
        """Keys and values of all keys of this partition with start <= key < end, in the order of the keys' bytes.

        Args:
            start, end: None: from the first, to the last; bytes, or what the ``key`` serde encodes.
            reverse: from the last to the first.
        """
        low = b"v" if start is None else b"v" + self._key_bytes(start)
        high = b"w" if end is None else b"v" + self._key_bytes(end)
        return self._values(self._overlay.scan(low, high, reverse=reverse))

    def prefix(self, prefix: bytes | str) -> Iterator[tuple[Any, Any]]:
        """Keys and values of all keys of this partition whose bytes begin with the prefix."""
        low = b"v" + (prefix.encode() if isinstance(prefix, str) else prefix)
        return self._values(self._overlay.scan(low, rows.after(low) or b"w"))

    def _values(self, found: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[Any, Any]]:
        scope, decode_key = self._scope, self._scope.key_serde.decode
        for row_key, row in found:
            value = scope.read(row, scope.decode, None)
            if value is not ABSENT:
                yield decode_key(row_key[1:]), value

    def _key_bytes(self, key: Any) -> bytes:
        if isinstance(key, bytes):
            return key
        try:
            encoded: bytes = self._scope.key_serde.encode(key)
        except Exception as error:
            not_encoded(error, "a bound of state.range()", key, self._scope.key_serde, "key")
            raise
        return encoded


def _later(now_ms: int, ttl_ms: int) -> int:
    return min(now_ms + ttl_ms, (1 << 63) - 1)  # rows keep times in 64 bits


def _migration(processor: Any) -> Callable[[bytes, int, str | None], Any] | None:
    migrate = getattr(processor, "migrate", None)
    if migrate is None:
        return None
    try:
        inspect.signature(migrate).bind(b"", 0, None)
    except TypeError:
        return lambda payload, version, name: migrate(payload, version)
    return migrate  # type: ignore[no-any-return]
