"""The three steps of ``Flow.join_foreign_key``.

A left row has a *generation*, which is larger after each change. A change of the foreign key and a change of the right
row that the old one named may be in one batch. They are handled in two partitions, and nobody knows which one is first.
The last step drops the result of the older generation. (Kafka Streams compares hashes of the left rows for that.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from onceflow.state.api.processor import Repacked
from onceflow.state.api.record import Record
from onceflow.state.foreign_keys import messages
from onceflow.state.format import rows

if TYPE_CHECKING:
    from onceflow.state.api.handle import State

# Rows of what is gone are kept for so long: until the batch is over, and the clock of the next one is later.
_GONE_FOR = "1 hour"
_LEFT_ROWS = "left"


class _ForeignKeyStep(Repacked):
    """What the steps share.

    Args:
        keeps_left: whether a left row without a right one is in the result.
    """

    def __init__(self, *, keeps_left: bool) -> None:
        self.keeps_left = keeps_left

    @property
    def kept(self) -> str:
        how = "left" if self.keeps_left else "inner"
        return f"{how} foreign-key join with {type(self).__name__}"

    def as_read(self, record: Record) -> Record:
        return record

    def largest_row(self, key: bytes, value: bytes) -> tuple[bytes, bytes]:
        return rows.value_key(key), rows.pack(value)


class LeftRows(_ForeignKeyStep):
    """By left key: tells the partition of the foreign key who refers to it. The state is generation and foreign key."""

    def as_read(self, record: Record) -> Record:
        record.value = messages.left_row(record.value).value
        return record

    def largest_row(self, key: bytes, value: bytes) -> tuple[bytes, bytes]:
        row = messages.left_row(value)
        row_key = rows.map_key(row.foreign_key or b"", _LEFT_ROWS.encode(), key)
        return row_key, rows.pack(messages.subscription(key, 0, row.value or b""))

    def process(self, key: bytes, records: Sequence[Record], state: State) -> Iterator[Record]:
        row = messages.left_row(records[-1].value)  # the others are replaced
        known = state.get()
        generation = state.now_ms if known is None else max(messages.number(known) + 1, state.now_ms)
        old = None if known is None else messages.left_row(messages.behind_number(known)).foreign_key
        if old is not None and old != row.foreign_key:
            yield Record(old, messages.unsubscription(key))
        if row.value is None:
            state.put(messages.numbered(generation, messages.DELETED), ttl=_GONE_FOR)
            yield Record(key, messages.passed(key, generation, None))
            return
        if row.foreign_key is None:
            state.put(messages.numbered(generation, messages.WITHOUT_KEY))
            made = messages.joined(row.value, None) if self.keeps_left else None
            yield Record(key, messages.passed(key, generation, made))
            return
        kept = records[-1].value[: len(records[-1].value) - len(row.value)]
        state.put(messages.numbered(generation, kept))
        yield Record(row.foreign_key, messages.subscription(key, generation, row.value))


class RightRows(_ForeignKeyStep):
    """By foreign key: joins. The state is the right value, and a map of the left rows that refer to it."""

    def as_read(self, record: Record) -> Record:
        kind = (record.value or b"")[:1]
        if kind in (messages.RIGHT, messages.RIGHT_DELETED):
            record.value = record.value[1:] if kind == messages.RIGHT else None
        return record

    def process(self, key: bytes, records: Sequence[Record], state: State) -> Iterator[Record]:
        left_rows = state.map(_LEFT_ROWS)
        changed = dict[bytes, bytes]()
        right_has_changed = False
        for record in records:
            message = record.value
            kind = message[:1]
            if kind in (messages.RIGHT, messages.RIGHT_DELETED):
                right_has_changed = True
                if kind == messages.RIGHT:
                    state.put(message)
                else:
                    state.delete()
                continue
            left_key, rest = messages.left_key_and_rest(message)
            if kind == messages.PASS:
                yield Record(left_key, rest)
            elif kind == messages.SUBSCRIBE:
                left_rows.put(left_key, rest)
                changed[left_key] = rest
            else:
                left_rows.delete(left_key)
                changed.pop(left_key, None)
        right = state.get()
        for left_key, row in left_rows.items() if right_has_changed else changed.items():
            generation, left = messages.number(row), messages.behind_number(row)
            made = messages.joined(left, None if right is None else right[1:])
            there = right is not None or self.keeps_left
            yield Record(left_key, messages.numbered(generation, made if there else b""))


class Results(_ForeignKeyStep):
    """By left key: writes what has changed. The state is the generation, and whether there is a row."""

    def process(self, key: bytes, records: Sequence[Record], state: State) -> Iterator[Record]:
        known = state.get()
        latest, there = (-1, False) if known is None else (messages.number(known), known[-1:] == b"\1")
        for record in records:
            found = messages.result(record.value)
            if found.generation < latest:
                continue
            if found.joined is not None or there:
                yield Record(key, found.joined)
            latest, there = found.generation, found.joined is not None
        state.put(messages.numbered(latest, b"\1" if there else b"\0"), ttl="never" if there else _GONE_FOR)
