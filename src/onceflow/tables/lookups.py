"""Lookups in a table: by key, by range and by prefix, with keys and values decoded."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from onceflow.errors import BadRecordError, EnvironmentUnusableError, OptionError
from onceflow.state.api import serdes
from onceflow.state.api.bounds import against_order
from onceflow.state.api.equal_keys import ambiguous
from onceflow.state.api.serdes import JSON, is_serde
from onceflow.state.api.whole_numbers import with_nullable_integers
from onceflow.state.format import rows
from onceflow.state.stores.stored_rows import StoredRows

_BYTES = (bytes, bytearray, memoryview)

_TYPES: dict[Any, pa.DataType] = {
    serdes.BYTES: pa.binary(),
    serdes.STRING: pa.string(),
    serdes.LONG: pa.int64(),
    serdes.DOUBLE: pa.float64(),
}


class Lookups(abc.ABC):
    """What can be read from a table. Subclasses say where its rows are.

    Args:
        key, value: serdes of keys and values.
    """

    def __init__(self, key: Any, value: Any) -> None:
        check_serde("key", key)
        check_serde("value", value)
        self._key, self._value = key, value
        self._by_value = key == JSON  # documents of the same value in other bytes are the same key

    @property
    @abc.abstractmethod
    def topic(self) -> str:
        """The name of the topic."""

    @abc.abstractmethod
    def _readable(self) -> StoredRows:
        """The rows. Raises an error if they cannot be read now."""

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key, or the default."""
        raw = self._found(self._encoded(key, "key for get()"))
        return default if raw is None else self._decoded(raw, key)

    def multi_get(self, keys: Sequence[Any]) -> dict[Any, Any]:
        """The values of those of these keys that exist, in the order of the keys.

        Raises:
            OptionError: the keys are one text, or bytes; or two of them are one key of a dict, such as 1 and True, but
                have different values here; or one cannot be a key of a dict, such as a dict.
        """
        if isinstance(keys, (str, *_BYTES)):
            raise OptionError(
                f"multi_get() takes a list of keys, got {type(keys).__name__}: {keys!r:.100}",
                next_step="give a list, or look up one key with get()",
            )
        encoded = [self._encoded(key, "key for multi_get()") for key in keys]
        raws = self._readable().find(encoded) if self._by_value else self._readable().get_many(encoded)
        if why := ambiguous(keys, raws):
            raise OptionError(f"multi_get() of table {self.topic}: {why}", next_step="look them up with get()")
        return {key: self._decoded(raw, key) for key, raw in zip(keys, raws, strict=True) if raw is not None}

    def range(self, start: Any = None, end: Any = None, *, reverse: bool = False) -> Iterator[tuple[Any, Any]]:
        """Keys with ``start <= key < end`` and their values, in the order of the keys' bytes over all partitions.

        A key that several partitions have, because its producer has changed its partitioner, comes once for each.

        Args:
            start, end: None: from the first key, or to the last one.
            reverse: the last key first.

        Raises:
            OptionError: start comes before end, but not in the order of the bytes.
        """
        low = b"" if start is None else self._encoded(start, "start for range()")
        high = None if end is None else self._encoded(end, "end for range()")
        if high is not None and (why := against_order(start, end, low, high)):
            what, _, next_step = why.partition(": ")
            raise OptionError(f"range() of table {self.topic}: {what}", next_step=next_step)
        return self._pairs(low, high, reverse)

    def prefix(self, prefix: Any, *, reverse: bool = False) -> Iterator[tuple[Any, Any]]:
        """Keys that begin with a prefix, and their values, in the order of the keys' bytes.

        Args:
            prefix: bytes; or text, if the keys are text, also as JSON.
        """
        if not isinstance(prefix, _BYTES):
            is_text = isinstance(prefix, str)
            prefix = self._encoded(prefix, "prefix")
            if is_text and self._by_value:
                prefix = prefix[:-1]  # a key of JSON that begins with it has its quote somewhere behind
        return self._pairs(bytes(prefix), rows.after(bytes(prefix)), reverse)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """All keys and values, in the order of the keys' bytes."""
        return self.range()

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self.items())

    def __contains__(self, key: Any) -> bool:
        return self._found(self._encoded(key, "key")) is not None

    def __getitem__(self, key: Any) -> Any:
        raw = self._found(self._encoded(key, "key"))
        if raw is None:
            raise KeyError(key)
        return self._decoded(raw, key)

    def count(self) -> int:
        """How many keys there are. Fast, unless rows have a time to live: then all of them are read.

        A key that several partitions have counts once for each.
        """
        return self._readable().count()

    def map_entries(self, name: str) -> Iterator[tuple[Any, bytes, bytes]]:
        """All entries of the maps of this name: the key that the map belongs to, the entry's key, the entry's value.

        Maps are in the companion topic of a flow's table. So this works for `Table.of_flow` only.
        """
        if not isinstance(name, str):
            raise _wrong("name for map_entries()", name, "str")
        found = self._readable().map_entries(name)
        return ((self._decoded_key(key), entry, value) for key, entry, value in found)

    def to_arrow(self) -> pa.Table:
        """All rows as an Arrow table with the columns ``key`` and ``value``, in the order of the keys' bytes.

        Raises:
            BadRecordError: the values have no common type.
        """
        found = list(self.items())
        keys = column([key for key, _ in found], self._key, "key", self.topic)
        return pa.table({"key": keys, "value": column([value for _, value in found], self._value, "value", self.topic)})

    def to_pandas(self) -> Any:
        """All rows as a pandas DataFrame with the columns ``key`` and ``value``.

        Integers stay integers where others are missing: with the type ``Int64``, or as Python's in documents and lists.
        """
        return with_nullable_integers(self.to_arrow()).to_pandas(integer_object_nulls=True)

    # ---- inside --------------------------------------------------------------------------------------

    def _found(self, key: bytes) -> bytes | None:
        return self._readable().find([key])[0] if self._by_value else self._readable().get(key)

    def _pairs(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[tuple[Any, Any]]:
        for raw_key, raw in self._readable().range(low, high, reverse=reverse):
            key = self._decoded_key(raw_key)
            yield key, self._decoded(raw, key)

    def _encoded(self, key: Any, what: str) -> bytes:
        try:
            return bytes(self._key.encode(key))
        except Exception as refused:
            raise _wrong(what, key, _name(self._key), refused) from refused

    def _decoded_key(self, raw: bytes) -> Any:
        return self._read(self._key, raw, "key", raw)

    def _decoded(self, raw: bytes, key: Any) -> Any:
        return self._read(self._value, raw, "value", key)

    def _read(self, serde: Any, raw: bytes, what: str, key: Any) -> Any:
        try:
            return serde.decode(raw)
        except EnvironmentUnusableError:  # of storage or of a registry that does not answer: the row is not at fault
            raise
        except Exception as unreadable:
            raise BadRecordError(
                f"A {what} of table {self.topic} is not {_name(serde)}",
                topic=self.topic,
                detail=f"key {key!r:.100}: {type(unreadable).__name__}: {unreadable}; it begins with {raw[:40]!r}",
                next_step=f"give the table the serde that its writer uses: Table(..., {what}=...)",
            ) from unreadable


def check_serde(what: str, serde: Any) -> None:
    if not is_serde(serde):
        raise OptionError(f"{what}={serde!r} is not a serde", next_step="give serdes.STRING, serdes.JSON, ...")


def _name(serde: Any) -> str:
    return getattr(serde, "name", type(serde).__name__)


def _wrong(what: str, given: object, expected: str, cause: Exception | None = None) -> OptionError:
    return OptionError(
        f"The {what} of a Table is {expected}, got {type(given).__name__}: {given!r:.100}",
        detail="" if cause is None else f"{type(cause).__name__}: {cause}",
        next_step="keys are encoded by the table's key serde: Table(..., key=serdes.STRING) takes text",
    )


def column(values: Sequence[Any], serde: Any, what: str, topic: str) -> pa.Array:
    """Decoded values as an Arrow array. The type of JSON documents and of own serdes is inferred by Arrow.

    Raises:
        BadRecordError: the values have no common type.
    """
    known = _TYPES.get(serde) if isinstance(serde, serdes.Serde) else None
    try:
        return pa.array(values, known)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as mixed:
        raise BadRecordError(
            f"The {what}s of table {topic} have no common type, so they cannot be an Arrow column",
            topic=topic,
            detail=str(mixed),
            next_step=f"read them with {what}=serdes.BYTES and decode them yourself, or use items()",
        ) from mixed
