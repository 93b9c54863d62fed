"""Reads the rows of one table from the local stores of its partitions, in bytes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress

import pyarrow as pa

from onceflow.clock import clock_ms
from onceflow.errors import BadRecordError
from onceflow.protocol.partitioners import key_partitions
from onceflow.state.format import exact_json, rows
from onceflow.state.stores.base import Store

Stores = Mapping[int, Store]
"""The open store of each partition."""

# Up to this many partitions, to look into each of them takes less time than to compute the partition of one key.
_FEW_PARTITIONS = 8
_JSON_INDEX = rows.JSON_INDEX.decode()


class StoredRows:
    """The keys and values of a table. Expired rows are hidden.

    Args:
        stores: returns the stores of the partitions that are here; they are used while its block runs.
        partitions: how many partitions the topic has; None: unknown, then every store is searched for a key.
        clock_ms: returns the time in epoch milliseconds.
    """

    def __init__(
        self,
        stores: Callable[[], AbstractContextManager[Stores]],
        *,
        partitions: int | None = None,
        clock_ms: Callable[[], int] = clock_ms,
    ) -> None:
        self._stores = stores
        self._partitions = partitions
        self._clock_ms = clock_ms

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, or None."""
        row_key = rows.value_key(key)
        now_ms = self._clock_ms()
        with self._stores() as stores:
            if self._partitions is None or len(stores) > _FEW_PARTITIONS:
                found = (store.get(row_key) for store in self._in_order(stores, key))
                return next((value for row in found if (value := _live(row, now_ms)) is not None), None)
            everywhere = {
                at: value for at, each in stores.items() if (value := _live(each.get(row_key), now_ms)) is not None
            }
            if len(everywhere) < 2:
                return next(iter(everywhere.values()), None)
            # It was moved, because partitions were added or a producer has changed its partitioner.
            return everywhere.get(self._place(key), next(iter(everywhere.values())))

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, or None, in the order of the keys."""
        now_ms = self._clock_ms()
        found: list[bytes | None] = [None] * len(keys)
        missing = range(len(keys))
        with self._stores() as stores:
            for store, wanted in self._spread(stores, keys, missing):
                wanted = sorted((at for at in wanted if found[at] is None), key=keys.__getitem__)
                for at, row in zip(wanted, store.get_many([rows.value_key(keys[at]) for at in wanted]), strict=True):
                    if row:
                        found[at] = rows.live_payload(row, now_ms)
        return found

    def find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """As `get_many`, for keys that are JSON documents: a key that does not exist in these bytes is found if there
        is one with the same value, such as the same fields in another order.

        Raises:
            BadRecordError: there are several with the same value, none of which is in these bytes.
        """
        found = [self.get(keys[0])] if len(keys) == 1 else self.get_many(keys)
        if None not in found:
            return found
        canonical: dict[int, bytes] = {}
        for at, key in enumerate(keys):
            if found[at] is None:
                with suppress(ValueError):  # otherwise it has no value, or is nested too deeply
                    canonical[at] = exact_json.canonical(key)
        forms = {form: {form} for form in canonical.values()}
        self._add_indexed(forms)
        others = sorted({each for at, form in canonical.items() for each in forms[form] if each != keys[at]})
        if others:
            values = [self.get(others[0])] if len(others) == 1 else self.get_many(others)
            known = {form: value for form, value in zip(others, values, strict=True) if value is not None}
            for at, form in canonical.items():
                found[at] = _only(keys[at], {each: known[each] for each in forms[form] if each in known})
        return found

    def _add_indexed(self, forms: Mapping[bytes, set[bytes]]) -> None:
        """Add the keys that have a `rows.json_index`.

        Args:
            forms: canonical forms, each with the keys of this value.
        """
        with self._stores() as stores:
            # Most tables have no such key at all. Stores of older versions do not say it.
            counted = ((store, store.rows_by_kind()) for store in stores.values())
            for store in [store for store, kinds in counted if not kinds or _JSON_INDEX in kinds]:
                for form, found in forms.items():
                    prefix = rows.json_forms(form)
                    found.update(each[len(prefix) :] for each, _ in store.scan(prefix, rows.after(prefix)))

    def range(self, start: bytes, end: bytes | None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Keys with ``start <= key < end`` and their values, in order of keys over all partitions."""
        now_ms = self._clock_ms()
        first, last = rows.value_key(start), rows.after(rows.VALUE) if end is None else rows.value_key(end)
        with self._stores() as stores:
            scans = [store.scan(first, last, reverse=reverse) for store in stores.values()]
            # One partition, or one that is sorted already, needs no merge.
            merged = scans[0] if len(scans) == 1 else heapq.merge(*scans, key=_first, reverse=reverse)
            for row_key, row in merged:
                value = rows.live_payload(row, now_ms)
                if value is not None:
                    yield row_key[1:], value

    def count(self) -> int:
        """How many keys there are. Fast if no row has a time to live; otherwise all rows are read."""
        total = 0
        now_ms = self._clock_ms()
        with self._stores() as stores:
            for store in stores.values():
                others = (rows.MAP, rows.TIMER, rows.TIMER_INDEX, rows.EXPIRY_INDEX, rows.DUE_INDEX)
                if all(next(store.scan(kind, rows.after(kind)), None) is None for kind in others):
                    index = store.scan(rows.JSON_INDEX, rows.after(rows.JSON_INDEX))
                    total += store.row_count() - sum(1 for _ in index)
                else:
                    scan = store.scan(rows.VALUE, rows.after(rows.VALUE))
                    total += sum(rows.live_payload(row, now_ms) is not None for _, row in scan)
        return total

    def map_entries(self, name: str) -> Iterator[tuple[bytes, bytes, bytes]]:
        """All entries of the maps of this name: the key that the map belongs to, the entry's key, the entry's value."""
        now_ms = self._clock_ms()
        with self._stores() as stores:
            for store in stores.values():
                for row_key, row in store.scan(rows.MAP, rows.after(rows.MAP)):
                    key, found, entry = rows.map_parts(row_key)
                    value = rows.live_payload(row, now_ms)
                    if found == name.encode() and value is not None:
                        yield key, entry, value

    # ---- partitions of keys --------------------------------------------------------------------------

    def _in_order(self, stores: Stores, key: bytes) -> list[Store]:
        """The stores, that of the key's partition first.

        The producer may have used another partitioner than Kafka's default, so the others are searched, too.
        """
        if self._partitions is None:
            return list(stores.values())
        own = self._place(key)
        return (
            [stores[own], *(store for at, store in stores.items() if at != own)]
            if own in stores
            else [*stores.values()]
        )

    def _place(self, key: bytes) -> int:
        return int(key_partitions(pa.array([key], pa.binary()), self._partitions or 1)[0])

    def _spread(
        self, stores: Stores, keys: Sequence[bytes], wanted: Sequence[int]
    ) -> Iterator[tuple[Store, Sequence[int]]]:
        """The stores to look into, each with the positions of keys: first that of each key's partition, then all."""
        if self._partitions is not None and len(stores) > 1:
            placed = key_partitions(pa.array(keys, pa.binary()), self._partitions)
            for at, store in stores.items():
                yield store, [each for each in wanted if placed[each] == at]
        for store in stores.values():
            yield store, wanted


def _live(row: bytes | None, now_ms: int) -> bytes | None:
    return rows.live_payload(row, now_ms) if row else None


def _only(key: bytes, found: Mapping[bytes, bytes]) -> bytes | None:
    """The value of the only key that there is of the value of this one.

    Raises:
        BadRecordError: there are several.
    """
    if len(found) > 1:
        one, other = sorted(found)[:2]
        raise BadRecordError(
            f"The key {key!r:.100} of a table is not there in these bytes, and {len(found):,} keys have its value",
            detail=f"for example {one!r:.100} and {other!r:.100}",
            next_step="delete all but one of them in the topic, or look up the bytes that are meant, with a table "
            "whose keys are serdes.BYTES",
        )
    return next(iter(found.values()), None)


def _first(item: tuple[bytes, bytes]) -> bytes:
    return item[0]
