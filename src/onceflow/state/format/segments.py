"""Where a local store keeps stamped rows: in segments, one after the other in time, so that new ids change few pages.

In one tree of all ids, every new id would change a page somewhere. Here it goes to the segment that is open, which is a
small part of the store, and ids that are forgotten are next to each other. When a segment has its share of all ids, the
next one is opened.

An id is in one segment only. It is looked for in those whose filter says that they may have it (a Bloom filter: it
never denies an id that is there, and confirms about one in a thousand of the others). Then the row itself decides, so
nothing depends on hashes but time.

Three kinds of rows: `rows.SEGMENT` with number and id, the stamped row; `rows.FILTER` with a number, the filter and a
sample of the stamps; `rows.FILTER` alone, the list of segments. Changes name the row ``v`` and the id; `placed` turns
them into these rows, inside the transaction that writes them. The engine of de-duplication knows where ids are that it
deletes. It says that with `LOCATED`, so that they need not be looked for once more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt

from onceflow.state.format import rows, stamps

_T = TypeVar("_T")
LIST = rows.FILTER
#: Key of a change that is no row: all deletes among the changes are located, that is, of `rows.SEGMENT` keys.
LOCATED = rows.FILTER + b"located"
#: About so many segments hold all ids.
SHARES = 32
#: A segment is not made for fewer ids.
LEAST_CAPACITY = 256
_FILTER_BITS_PER_ID = 24
_SAMPLE_MAX = 128
# Of a filter row, in words of eight bytes: how many stamps the sample has, every how manieth it has, and the sample.
_HEAD = 2 + _SAMPLE_MAX
_SEGMENT = struct.Struct("<IIIqq")
_NUMBER = struct.Struct(">I")
_PREFIX = len(rows.SEGMENT) + _NUMBER.size

Words = npt.NDArray[np.uint64]
Fetch = Callable[[Sequence[bytes]], Iterable["bytes | None"]]
Scan = Callable[[bytes, bytes], Iterable[tuple[bytes, bytes]]]


class Rows(Protocol):
    """A store, as far as it is read here."""

    def get(self, key: bytes, /) -> bytes | None: ...

    def get_many(self, keys: Sequence[bytes], /) -> Sequence[bytes | None]: ...

    def read_in_place(self, key: bytes, work: Callable[[bytes | memoryview | None], _T], /) -> _T: ...

    def scan(self, start: bytes, end: bytes, /) -> Iterator[tuple[bytes, bytes]]: ...


@dataclass(frozen=True)
class Segment:
    """What the list says of a segment.

    Args:
        ids: how many ids were put into it.
        capacity: for how many its filter was made; 0: it is closed.
        greatest: the greatest of all stamps.
        due: about the greatest stamp, but a few that are far greater than the others do not count.
    """

    number: int
    ids: int
    capacity: int
    greatest: int
    due: int

    @property
    def prefix(self) -> bytes:
        """What the keys of its ids begin with."""
        return rows.SEGMENT + _NUMBER.pack(self.number)

    @property
    def filter_key(self) -> bytes:
        return rows.FILTER + _NUMBER.pack(self.number)


def end_of(prefix: bytes) -> bytes:
    """The end of a segment's keys."""
    return rows.after(prefix) or b""


def listed(raw: bytes | None) -> list[Segment]:
    """The segments in the row of the list, the oldest first."""
    return [Segment(*fields) for fields in _SEGMENT.iter_unpack(raw or b"")]


class Segments:
    """The segments of a store that nothing writes to in the meantime."""

    def __init__(self, store: Rows) -> None:
        self._store = store
        self.listed = listed(store.get(LIST))

    @property
    def greatest(self) -> int | None:
        """The greatest stamp; None: there are no ids."""
        return max((segment.greatest for segment in self.listed), default=None)

    def due(self, stamp: int) -> list[Segment]:
        """The segments in which nearly all stamps are smaller."""
        return [segment for segment in self.listed if segment.due < stamp]

    def first_of(self, segment: Segment, limit: int) -> list[tuple[bytes, bytes]]:
        """The first ids of a segment, in the order of ids, and their rows."""
        found = self._store.scan(segment.prefix, end_of(segment.prefix))
        return [(key[_PREFIX:], row) for key, row in islice(found, limit)]

    def find(self, ids: Sequence[bytes], places: list[bytes] | None = None) -> list[bytes | None]:
        """The row of each id, or None.

        Args:
            places: the keys of the rows that are found are added to it.
        """
        found: list[bytes | None] = [None] * len(ids)
        hashes = _Hashes(ids)
        for segment in reversed(self.listed):
            maybe = self._store.read_in_place(segment.filter_key, hashes.may_be_in)
            wanted = sorted((at for at in maybe if found[at] is None), key=ids.__getitem__)
            prefix = segment.prefix
            for at, row in zip(wanted, self._store.get_many([prefix + ids[at] for at in wanted]), strict=True):
                found[at] = row
                if places is not None and row is not None:
                    places.append(prefix + ids[at])
        return found


class Placed(NamedTuple):
    """What changes of stamped rows become.

    Args:
        changes: of the rows of the store. known: the current rows of some of their keys; None: there is no row.
    """

    changes: dict[bytes, bytes | None]
    known: dict[bytes, bytes | None]


def placed(changes: Mapping[bytes, bytes | None], fetch: Fetch, scan: Scan, flags: Container[int]) -> Placed | None:
    """The changes of the store that changes of stamped rows become; None: this is no store of stamped rows.

    Args:
        changes: of ``v`` rows; or with `LOCATED` of ``v`` rows that are new, `rows.SEGMENT` keys with None for rows
            that are gone, those with an empty row for all rows of the segment up to this one, and `rows.FILTER` keys
            for their segments: None if no id is left in it, and an empty row if it is to be closed.
        fetch: returns the current rows for keys. scan: those with ``start <= key < end``.
        flags: of the changed rows.
    """
    (raw,) = fetch([LIST])
    new: dict[bytes, bytes] = {}
    if rows.STAMPED in flags:
        new = {key[1:]: row for key, row in changes.items() if row is not None and row[:1] == stamps.FLAGS}
    if raw is None and not new:
        return None
    segments = listed(raw)
    left = [segment for segment in segments if changes.get(segment.filter_key, b"") is not None]
    left = [replace(each, capacity=0) if each.filter_key in changes else each for each in left]
    is_located = LOCATED in changes
    result, known = _located(changes, scan) if is_located else (_searched(changes, segments, fetch), {})
    if new:
        before = set(result)
        number = segments[-1].number + 1 if segments else 0
        left, keys, filter_ = _put(left, number, list(new), list(new.values()), fetch)
        if is_located:
            known.update(dict.fromkeys(key for key in keys if key not in before))
        result.update(zip(keys, new.values(), strict=True))
        result[left[-1].filter_key] = filter_
    result[LIST] = _packed(left) or None
    return Placed(result, known)


def first(ids: list[bytes], found: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The sorted keys of a store that has no rows yet, and its rows, for sorted ids and their stamped rows."""
    left, keys, filter_ = _put([], 0, ids, found, lambda keys: ())
    return [LIST, left[-1].filter_key, *keys], [_packed(left), filter_, *found]


def _packed(segments: list[Segment]) -> bytes:
    """The row of the list."""
    return b"".join(_SEGMENT.pack(*vars(segment).values()) for segment in segments)


def _located(
    changes: Mapping[bytes, bytes | None], scan: Scan
) -> tuple[dict[bytes, bytes | None], dict[bytes, bytes | None]]:
    """The deletes, and the rows that are known because they were in a range."""
    known: dict[bytes, bytes | None] = {}
    gone = [key for key, row in changes.items() if row is None]
    for key, row in changes.items():
        if key[:1] == rows.SEGMENT and row is not None:
            known.update(scan(key[:_PREFIX], key + b"\0"))
    return dict.fromkeys([*known, *gone]), known


def _searched(changes: Mapping[bytes, bytes | None], known: list[Segment], fetch: Fetch) -> dict[bytes, bytes | None]:
    """The deletes of all rows that the changed ids may have. Keys that do not exist do no harm."""
    if not known:
        return {}
    ids = [key[1:] for key in changes if key[:1] == rows.VALUE]
    result: dict[bytes, bytes | None] = {}
    hashes = _Hashes(ids)
    for segment, filter_ in zip(known, fetch([segment.filter_key for segment in known]), strict=True):
        prefix = segment.prefix
        result.update(dict.fromkeys([prefix + ids[at] for at in hashes.may_be_in(filter_)]))
    return result


def _put(
    left: list[Segment], next_number: int, ids: list[bytes], found: list[bytes], fetch: Fetch
) -> tuple[list[Segment], list[bytes], bytes]:
    """Adds new ids and their rows to the open segment, or to the next one. Returns the list as it is then, the keys of
    the ids, and the filter row of the last segment."""
    if left and left[-1].ids + len(ids) <= left[-1].capacity:
        *closed, segment = left
        (raw,) = fetch([segment.filter_key])
        words = np.frombuffer(raw or b"", "<u8").astype(np.uint64)
    else:
        closed = left
        capacity = max(LEAST_CAPACITY, len(ids), sum(each.ids for each in left) // SHARES)
        segment = Segment(next_number, 0, capacity, 0, 0)
        words = np.zeros(_HEAD + -(-capacity * _FILTER_BITS_PER_ID // 64), np.uint64)
        words[1] = 1
    values = stamps.stamps_of(found)
    greatest = max(segment.greatest, int(values.max()))
    due = min(greatest, _sampled(words, segment.ids, values))
    segment = replace(segment, ids=segment.ids + len(ids), greatest=greatest, due=due)
    _Hashes(ids).add_to(words[_HEAD:])
    return [*closed, segment], list(map(segment.prefix.__add__, ids)), words.astype("<u8").tobytes()


def _sampled(words: Words, before: int, values: npt.NDArray[np.int64]) -> int:
    """Adds stamps to the sample of a filter row. Returns `Segment.due`, from the quartiles of the sample: it is the
    greatest stamp if they came in their order, and a quarter of them may be anything."""
    count, stride = int(words[0]), int(words[1])
    sample = np.concatenate([words[2 : 2 + count].astype(np.int64), values[-before % stride :: stride]])
    while len(sample) > _SAMPLE_MAX:
        sample, stride = sample[::2], 2 * stride
    words[0], words[1] = len(sample), stride
    words[2 : 2 + len(sample)] = sample.astype(np.uint64)
    in_order = np.sort(sample)
    middle, upper = int(in_order[len(sample) // 2]), int(in_order[3 * len(sample) // 4])
    return upper + (upper - middle) * 5 // 4  # a quarter is missing, and the sample is coarse


class _Hashes:
    """Hashes of ids: which word of a filter, and which five bits of it."""

    def __init__(self, ids: Sequence[bytes]) -> None:
        mixed = np.fromiter(map(crc32, ids), np.uint64, len(ids))
        for factor in (0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9):
            mixed = (mixed + np.uint64(1)) * np.uint64(factor)
            mixed ^= mixed >> np.uint64(29)
        self._words = mixed >> np.uint64(32)
        self._bits = np.zeros(len(ids), np.uint64)
        for shift in range(0, 30, 6):
            self._bits |= np.uint64(1) << ((mixed >> np.uint64(shift)) & np.uint64(63))

    def may_be_in(self, filter_: bytes | memoryview | None) -> list[int]:
        """The places of the ids that a segment may have, from its filter row. None: it is gone."""
        if filter_ is None or not len(self._bits):
            return []
        words = np.frombuffer(filter_, "<u8")[_HEAD:]
        return np.flatnonzero(words[self._at(words)] & self._bits == self._bits).tolist()

    def add_to(self, words: Words) -> None:
        np.bitwise_or.at(words, self._at(words), self._bits)

    def _at(self, words: Words) -> npt.NDArray[np.int64]:
        return ((self._words * np.uint64(len(words))) >> np.uint64(32)).astype(np.int64)
