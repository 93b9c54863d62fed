"""Checks that the pages of an LMDB file are consistent, which LMDB itself does not check.

A scan of all rows shows that the rows are unchanged. It does not detect a flipped bit in the key of a branch page (rows
exist but are not found), in the list of free pages (the next write overwrites pages in use), or in a page's record of
its free space. So this module walks the tree in plain Python over a read-only memory map. No content of the file can
crash it, whereas LMDB does not check its pages.

It supports the format of LMDB 0.9 on 64-bit machines. Files of another format are only checked by the scan.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from onceflow.state.stores.base import StoreCorruptError

_MAGIC, _FORMAT = 0xBEEF_C0DE, 1
# Page: number, padding, flags, lower and upper bound of the free space (in an overflow page: its length in pages).
_PAGE = struct.Struct("=QHHHH")
_PAGES_LONG = struct.Struct("=I")
# Meta, after the page's header: magic, version, address, map size, two trees, last page, transaction.
_META = struct.Struct("=IIQQ48s48sQQ")
# Tree: padding (in the first tree: page size), flags, depth, three counts of pages, entries, root.
_TREE = struct.Struct("=IHHQQQQQ")
# Node: size of data (in a branch: number of the child page), flags, size of key.
_NODE = struct.Struct("=IHH")
_PAGE_NUMBER = struct.Struct("=Q")
_PAGE_BYTES, _NODE_BYTES, _NUMBER_BYTES = 16, 8, 8
_PAGE_BYTES_OF_LATER = 24  # LMDB 1.0
_PAGE_SIZES = (4096, 8192, 16384, 32768)
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_IN_OVERFLOW, _SUBTREE = 1, 2
_INTEGER_KEYS = 8
_NO_PAGE = (1 << 64) - 1
_DEPTH_MAX = 32
_METAS = 2
_MIN_BYTES = 2 * 4096


class Meta(NamedTuple):
    """The last commit, as its meta page describes it."""

    page_size: int
    last_page: int
    transaction: int
    free: bytes
    main: bytes


def read_meta(path: Path) -> Meta | None:
    """The file's last commit; None if the format is not supported here.

    Raises:
        StoreCorruptError: this is not an LMDB file, or a part of it is missing.
    """
    with open(path, "rb") as file:
        size = path.stat().st_size
        if size < _MIN_BYTES:
            raise StoreCorruptError(f"the data file has {size} bytes")
        page = file.read(_MIN_BYTES // 2)
        if _magic(page, _PAGE_BYTES_OF_LATER) == _MAGIC:
            return None
        first = _meta(page, 0)
        file.seek(first.page_size)
        second = _meta(file.read(_MIN_BYTES // 2), 1)
    if second.page_size != first.page_size:
        raise StoreCorruptError("the data file's two meta pages differ")
    last = second if second.transaction > first.transaction else first
    if size < (last.last_page + 1) * last.page_size:
        raise StoreCorruptError(f"the data file is cut off: {size} bytes, {last.last_page + 1} pages")
    return last


def _magic(page: bytes, at: int) -> int:
    return _META.unpack_from(page, at)[0] if len(page) >= at + _META.size else 0


def _meta(page: bytes, number: int) -> Meta:
    if _magic(page, _PAGE_BYTES) != _MAGIC:
        raise StoreCorruptError("a meta page is not LMDB's")
    own_number, _, flags, _, _ = _PAGE.unpack_from(page)
    _, version, _, _, free, main, last_page, transaction = _META.unpack_from(page, _PAGE_BYTES)
    page_size, tree_flags = _TREE.unpack(free)[:2]
    sound = (own_number, flags, version, tree_flags) == (number, _META_PAGE, _FORMAT, _INTEGER_KEYS)
    # Transactions alternate between the two meta pages: the last bit of the number decides. A new file has 0 in both.
    in_turn = not transaction or transaction % _METAS == number
    if not (sound and in_turn and page_size in _PAGE_SIZES and last_page):
        raise StoreCorruptError("a meta page is damaged")
    return Meta(page_size, last_page, transaction, free, main)


def check_pages(path: Path) -> None:
    """Walks all trees of the file. There must be no writer in the meantime.

    Raises:
        StoreCorruptError: the pages are not consistent.
    """
    meta = read_meta(path)
    if meta is None:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        try:
            _Walk(view, meta).check()
        except (struct.error, IndexError, ValueError, OverflowError) as outside:
            raise StoreCorruptError("a page of the data file points outside of the file") from outside


class _Walk:
    """One walk over the file. Each page must be found only once."""

    def __init__(self, view: mmap.mmap, meta: Meta) -> None:
        self._view = view
        self._size = meta.page_size
        self._meta = meta
        self._met = bytearray(meta.last_page + 1)
        self._met[:_METAS] = b"\1" * _METAS

    def check(self) -> None:
        # The file may have more pages than its last commit. The rest does not matter, because nothing refers to it.
        for _, name, raw in self._leaf_nodes(self._meta.main, subtrees=True):
            if name not in (b"rows", b"blobs", b"nodes"):
                raise StoreCorruptError("the data file holds an unknown table")
            for _ in self._leaf_nodes(raw):
                pass
        for _, key, raw in self._leaf_nodes(self._meta.free, integer_keys=True, wanted=True):
            count = _PAGE_NUMBER.unpack_from(raw)[0]
            if len(key) != _NUMBER_BYTES or count >= len(raw) // _NUMBER_BYTES:
                raise StoreCorruptError("the list of free pages is damaged")
            pages = struct.unpack_from(f"={count}Q", raw, _NUMBER_BYTES)
            if any(map(int.__le__, pages, pages[1:])):
                raise StoreCorruptError("the list of free pages is out of order")
            for number in pages:
                self._meet(number)

    def _meet(self, number: int, count: int = 1) -> None:
        last = number + count - 1
        if last > self._meta.last_page or any(self._met[number : last + 1]):
            raise StoreCorruptError("a page of the data file is used twice, or is not there")
        self._met[number : last + 1] = b"\1" * count

    def _leaf_nodes(
        self, raw_tree: bytes, *, subtrees: bool = False, integer_keys: bool = False, wanted: bool = False
    ) -> Iterator[tuple[int, bytes, bytes]]:
        """Checks the pages of a tree from left to right. Yields the nodes if they are wanted or are subtrees."""
        _, flags, tree_depth, _, _, _, _, root = _TREE.unpack(raw_tree)
        if flags != (_INTEGER_KEYS if integer_keys else 0):
            raise StoreCorruptError("a table of the data file has wrong flags")
        if root == _NO_PAGE:
            return
        # Each entry: page, smallest possible key, upper bound of the keys (exclusive), depth.
        waiting: list[tuple[int, bytes, bytes | None, int]] = [(root, b"", None, 1)]
        while waiting:
            number, low, high, depth = waiting.pop()
            self._meet(number)
            page = self._view[number * self._size : (number + 1) * self._size]
            kind, places = _head(page, number)
            if kind == _LEAF:
                if depth != tree_depth:
                    raise StoreCorruptError("leaves of the data file are at different depths")
                if not integer_keys and not _within(page, places, low, high):
                    raise StoreCorruptError("a page of the data file holds keys of another one")
                # Look at the nodes if the low byte of any node's flags is set.
                if wanted or subtrees or any(map(page.__getitem__, [place + 4 for place in places])):
                    yield from self._nodes(page, places, subtrees=subtrees)
                continue
            if depth >= _DEPTH_MAX:
                raise StoreCorruptError("the data file's tree is deeper than it can be")
            keys = [_key(page, place) for place in places]
            below = [struct.unpack_from("=HHH", page, place) for place in places]
            if not integer_keys and not all(map(bytes.__lt__, keys[1:], keys[2:])):
                raise StoreCorruptError("a branch of the data file is out of order")
            # The first key of a branch is not used, and may contain anything.
            bounds = [low, *keys[1:], high]
            waiting.extend(
                (lo | mid << 16 | top << 32, bounds[at] or b"", bounds[at + 1], depth + 1)
                for at, (lo, mid, top) in reversed(list(enumerate(below)))
            )

    def _nodes(self, page: bytes, places: tuple[int, ...], *, subtrees: bool) -> Iterator[tuple[int, bytes, bytes]]:
        for place in places:
            size, flags, key_size = _NODE.unpack_from(page, place)
            data_at = place + _NODE_BYTES + key_size
            key = page[place + _NODE_BYTES : data_at]
            if flags != _SUBTREE if subtrees else flags not in (0, _IN_OVERFLOW):
                raise StoreCorruptError("an entry of the data file has wrong flags")
            if not flags & _IN_OVERFLOW:
                if data_at + size > self._size:
                    raise StoreCorruptError("an entry of the data file does not fit its page")
                yield flags, key, page[data_at : data_at + size]
                continue
            number = _PAGE_NUMBER.unpack_from(page, data_at)[0]
            start = number * self._size
            own_number, _, kind, _, _ = _PAGE.unpack_from(self._view, start)
            long = _PAGES_LONG.unpack_from(self._view, start + 12)[0]
            if (own_number, kind, long) != (number, _OVERFLOW, (_PAGE_BYTES - 1 + size) // self._size + 1):
                raise StoreCorruptError("an overflow page of the data file is damaged")
            self._meet(number, long)
            yield flags, key, self._view[start + _PAGE_BYTES : start + _PAGE_BYTES + size]


def _head(page: bytes, number: int) -> tuple[int, tuple[int, ...]]:
    """The kind of a page of a tree, and the positions of its nodes."""
    own_number, _, kind, lower, upper = _PAGE.unpack_from(page)
    count = (lower - _PAGE_BYTES) // 2
    if own_number != number or kind not in (_BRANCH, _LEAF) or count < 1 or lower % 2 or lower > upper:
        raise StoreCorruptError("the head of a page of the data file is damaged")
    places: tuple[int, ...] = struct.unpack_from(f"={count}H", page, _PAGE_BYTES)
    if min(places) < upper or max(places) + _NODE_BYTES > len(page):
        raise StoreCorruptError("the free room of a page of the data file is damaged")
    return kind, places


def _within(page: bytes, places: tuple[int, ...], low: bytes, high: bytes | None) -> bool:
    return _key(page, places[0]) >= low and (high is None or _key(page, places[-1]) < high)


def _key(page: bytes, place: int) -> bytes:
    at = place + _NODE_BYTES
    return page[at : at + (page[place + 6] | page[place + 7] << 8)]
