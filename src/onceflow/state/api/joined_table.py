"""``JoinedTable``: the handle through which user code looks up rows of a table that the flow joins with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import pyarrow as pa

from onceflow import user_code
from onceflow.errors import EnvironmentUnusableError
from onceflow.protocol.partitioners import key_partitions
from onceflow.state.api.bounds import against_order
from onceflow.state.api.equal_keys import ambiguous
from onceflow.state.api.serdes import BYTES, DOUBLE, JSON, LONG, STRING
from onceflow.state.api.user_errors import not_encoded
from onceflow.state.format import exact_json, rows
from onceflow.state.stores.stored_rows import StoredRows, Stores


class JoinedTable:
    """A table that the flow joins with, as it was at the offsets of this batch. It can only be read.

    All tasks and all attempts of a batch see the same rows. Get it as ``state.table(name)``, or in a
    `ColumnProcessor` as ``context.tables[name]``.

    Attributes:
        position: the offsets, as a short text.
    """

    def __init__(
        self,
        name: str,
        stores: Callable[[], AbstractContextManager[Stores]],
        *,
        partitions: int,
        key: Any,
        value: Any,
        now_ms: int,
        position: str,
        own_partition: int | None,
    ) -> None:
        self._name = name
        self._rows = StoredRows(stores, partitions=partitions, clock_ms=lambda: now_ms)
        self._partitions = partitions
        self._key, self._value = key, value
        self._own_partition = own_partition
        self._by_value = key == JSON  # documents of the same value in other bytes are the same key
        # Whether a key that was read is the same bytes when it is written; or it is found by its value anyway.
        self._keeps_bytes = key is None or key in (BYTES, DOUBLE, JSON, LONG, STRING)
        self._record_keys: Callable[[], Sequence[bytes]] = tuple
        self._own: tuple[Sequence[bytes], dict[bytes, bytes]] = (), {}
        self.position = position

    def beside(self, record_keys: Callable[[], Sequence[bytes]]) -> JoinedTable:
        """The table as user code gets it together with records.

        Args:
            record_keys: returns the keys of the records, in the bytes in which they came; the same object as long as
                they are the same. What a serde writes for such a key may be other bytes, which belong to another
                partition. It is the record's own key nevertheless.
        """
        if self._own_partition is None and self._keeps_bytes:
            return self
        found = copy.copy(self)
        found._record_keys = record_keys
        return found

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key, or the default.

        Args:
            key: bytes or text; or what the key serde of the table takes, if it has one.

        Raises:
            ValueError: the table is co-partitioned, and the key belongs to another partition than this one.
        """
        raw = self._found(key)
        return default if raw is None else self._decoded(raw, key)

    def multi_get(self, keys: Sequence[Any]) -> dict[Any, Any]:
        """The values of those of these keys that exist.

        Raises:
            TypeError: the keys are one text, or bytes.
            ValueError: two of them are one key of a dict, such as 1 and True, but have different values here; or one
                cannot be a key of a dict, such as a dict.
        """
        if isinstance(keys, (str, bytes)):
            raise TypeError(
                f"multi_get() of table {self._name!r} takes a list of keys, got {type(keys).__name__}: {keys!r:.100}; "
                "get() looks up one key"
            )
        raws = self._found_all([self._bytes(key) for key in keys])
        if why := ambiguous(keys, raws):
            raise ValueError(f"multi_get() of table {self._name!r}: {why}: look them up with get()")
        return {key: self._decoded(raw, key) for key, raw in zip(keys, raws, strict=True) if raw is not None}

    def __contains__(self, key: Any) -> bool:
        return self._found(key) is not None

    def values_of(self, keys: Any) -> pa.Array:
        """The values of a whole column of keys.

        Args:
            keys: an Arrow array of binary or string keys; each distinct key is looked up once.

        Returns:
            Values in bytes (a binary array); null where the key is null or does not exist.
        """
        if isinstance(keys, pa.ChunkedArray):
            keys = keys.combine_chunks()
        encoded = keys.cast(pa.binary()).dictionary_encode()
        distinct = encoded.dictionary
        found = pa.array(self._found_all(distinct.to_pylist()), pa.binary())
        return found.take(encoded.indices)

    def range(self, start: Any = None, end: Any = None, *, reverse: bool = False) -> Iterator[tuple[Any, Any]]:
        """Keys and values with ``start <= key < end``, in the order of the keys' bytes.

        A co-partitioned table shows only the partition of this task.

        Raises:
            ValueError: start comes before end, but not in the order of the bytes.
        """
        low = b"" if start is None else self._bytes(start)
        high = None if end is None else self._bytes(end)
        if high is not None and (why := against_order(start, end, low, high)):
            raise ValueError(f"range() of table {self._name!r}: {why}")
        return self._pairs(low, high, reverse)

    def prefix(self, prefix: bytes | str, *, reverse: bool = False) -> Iterator[tuple[Any, Any]]:
        """Keys and values whose keys begin with these bytes, in the order of the keys' bytes."""
        low = prefix.encode() if isinstance(prefix, str) else prefix
        return self._pairs(low, rows.after(low), reverse)

    def _pairs(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[tuple[Any, Any]]:
        for raw_key, raw in self._rows.range(low, high, reverse=reverse):
            key = raw_key if self._key is None else self._key.decode(raw_key)
            yield key, self._decoded(raw, key)

    def _found(self, key: Any) -> bytes | None:
        if self._by_value or self._own_partition is not None or not self._keeps_bytes:
            return self._found_all([self._bytes(key)])[0]
        return self._rows.get(self._bytes(key))

    def _found_all(self, keys: list[bytes]) -> list[bytes | None]:
        """The value of each key.

        Raises:
            ValueError: the table is co-partitioned, and a key that is not in this partition belongs to another one.
        """
        found = self._rows.find(keys) if self._by_value else self._rows.get_many(keys)
        if None in found and not (self._own_partition is None and self._keeps_bytes):
            self._find_own(keys, found)
        return found

    def _find_own(self, keys: list[bytes], found: list[bytes | None]) -> None:
        """Look for keys that were not found as those of the records: in the bytes in which they came.

        Raises:
            ValueError: another one belongs to another partition than the only one that is here.
        """
        missing = [at for at, raw in enumerate(found) if raw is None]
        away: dict[int, int] = {}
        if self._own_partition is not None:
            places = key_partitions(pa.array([keys[at] for at in missing], pa.binary()), self._partitions).tolist()
            here = (-1, self._own_partition)
            away = {at: place for at, place in zip(missing, places, strict=True) if place not in here}
        asked = away if self._keeps_bytes else missing
        own = self._own_keys() if asked else {}
        for at in asked:
            if (record_key := own.get(self._form(keys[at]))) is not None:
                found[at] = self._rows.get(record_key)
            elif at in away:
                raise ValueError(
                    f"key {keys[at]!r:.100} of table {self._name!r} is in partition {away[at]}, but this task "
                    f"has partition {self._own_partition}: look up the record's own key, or leave co_partitioned out"
                )

    def _own_keys(self) -> dict[bytes, bytes]:
        """The keys of the records by their form."""
        keys = self._record_keys()
        if self._own[0] is not keys:
            self._own = keys, {self._own_form(raw): raw for raw in keys}
        return self._own[1]

    def _bytes(self, key: Any) -> bytes:
        if self._key is not None:
            try:
                return bytes(self._key.encode(key))
            except Exception as error:
                not_encoded(error, f"a key of table {self._name!r}", key, self._key, "its")
                raise
        if isinstance(key, str):
            return key.encode()
        if isinstance(key, bytes):
            return key
        raise TypeError(f"keys of table {self._name!r} are bytes or str, got {type(key).__name__}: give it a key serde")

    def _form(self, key: bytes) -> bytes:
        """What is the same for keys that are the same."""
        if self._by_value:
            with suppress(ValueError):
                return exact_json.canonical(key)
        return key

    def _own_form(self, raw: bytes) -> bytes:
        """The form of a record's key, as the serde of the table writes it."""
        if self._key is not None and not self._by_value:
            with suppress(Exception):  # it may be no such key
                return bytes(self._key.encode(self._key.decode(raw)))
        return self._form(raw)

    def _decoded(self, raw: bytes, key: Any) -> Any:
        try:
            return self._value.decode(raw)
        except EnvironmentUnusableError:  # of storage or of a registry that does not answer
            raise
        except Exception as error:
            raise ValueError(
                f"the value of key {key!r:.100} of table {self._name!r} cannot be decoded: {user_code.in_words(error)}"
            ) from error
