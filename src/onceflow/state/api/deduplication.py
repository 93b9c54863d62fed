"""``Deduplication``: what ``Flow.deduplicate`` gives to its engine in place of user code."""

from __future__ import annotations

from onceflow.state.api.processor import MAX_AHEAD, ColumnProcessor

#: Columns of the rows of a de-duplication, besides those of every step. ``key`` is the id there.
RECORD_KEY, EVENT_TIME = "record_key", "event_time"

SOURCE_COLUMNS = {"topic": "source_topic", "partition": "source_partition", "offset": "source_offset"}
"""Where a record was read, and the columns that say so behind the step. There, ``topic`` and ``partition`` would say
where to write."""


class Deduplication(ColumnProcessor):
    """How long ids are remembered.

    The state of an id is one number: the event time of the record that was passed on (with ``within``), or how many ids
    its partition had seen before (with ``records``).

    Args:
        within_ms: for how long, in milliseconds of stream time; None: ``records`` is given.
        records: how many ids each partition of the table remembers; None: ``within_ms`` is given.
        duplicates_topic: the topic of duplicates; None: they are dropped.
        id_name: the column with the id, for messages.
        id_is_key: whether the id is the record's key, so that ``RECORD_KEY`` is null but for keys that are hashed.
        max_ahead: as in `Processor`.
    """

    def __init__(
        self,
        *,
        within_ms: int | None = None,
        records: int | None = None,
        duplicates_topic: str | None = None,
        id_name: str = "key",
        id_is_key: bool = True,
        max_ahead: str | float | None = MAX_AHEAD,
    ) -> None:
        self.within_ms, self.records = within_ms, records
        self.duplicates_topic = duplicates_topic
        self.id_name, self.id_is_key = id_name, id_is_key
        self.max_ahead = max_ahead
        # The watermark of the flow is then stream time minus ``within``: older records are late, older ids forgotten.
        self.allowed_lateness = None if within_ms is None else within_ms / 1000
        # A table is of one kind or the other: progress knows the fields, and a start with others is refused.
        self.state_fields = {"number" if within_ms is None else "seen_ms": "int64"}
