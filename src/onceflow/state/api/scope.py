"""What `State`, maps, lists and timers of a batch share: reading rows (with expiry and migration), and packing them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from onceflow import user_code
from onceflow.errors import ClaimCheckError, EnvironmentUnusableError, OnceflowError, ProcessorError
from onceflow.options.durations import duration_ms
from onceflow.state.api.joined_table import JoinedTable
from onceflow.state.api.record import Record
from onceflow.state.api.serdes import BYTES
from onceflow.state.api.user_errors import full_text_of, line_of, not_decoded
from onceflow.state.format import rows
from onceflow.state.stores.overlay import Overlay

#: The result of reading a row that has expired.
ABSENT: Any = object()


class Failures:
    """What a timer could not do, although the rest of its work is done.

    Args:
        check: raises what writing records would raise. It gets the key, its bytes, and the records.
        never: errors that the timer has not caused.

    Attributes:
        found: what each was about, and the error.
    """

    def __init__(self, check: Callable[[Any, bytes, list[Record]], None], never: tuple[type[Exception], ...]) -> None:
        self.check = check
        self.found: list[tuple[Mapping[str, Any], Exception]] = []
        self._never = never

    def add(self, error: Exception, about: Mapping[str, Any]) -> None:
        """Note what could not be done."""
        if isinstance(error, self._never):
            raise error
        self.found.append((about, error))


class Scope:
    """What all handles of a batch share.

    Args:
        processor: its serdes, version and migrate are used.
        overlay: rows as the batch sees them.
        partition: partition of the table.
        now_ms: processing time of the batch.
        watermark_ms: the watermark of the batch; None if it is not known.
        ttl_ms: time to live of rows that are put without one; None: forever.
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
        self.tables: Mapping[str, JoinedTable] = {}
        self.has_event_time = True
        """Whether there is a watermark, or may be one later."""
        self.handles_timers = True
        """Whether the processor defines on_timer()."""
        self.timers_left = False
        """Whether a timer of this batch has left a part of its work to one that is due at once."""
        self.uses_clock = ttl_ms is not None
        """Whether results may depend on processing time: user code has asked for it, or has set a timer of that clock
        or a time to live, even if it was taken back in the same batch."""
        self.scanned = False
        """Set when user code has read the state of other keys."""
        self.check_rows: Callable[[], None] = _nothing
        """Raises a BadRecordError if the topics of the table do not take a row that this call has put."""
        self.refusal: Callable[[Record], str] = _taken
        """Why its topic does not take a record with key and value in bytes, in words; empty: it does."""
        self.failures: Failures | None = None
        """Set while a timer that has failed runs once more: it leaves out what it cannot do, and notes it here."""
        self.fatal: OnceflowError | None = None
        """An error that no record has caused: the batch fails, even if user code has caught the error."""

    def read(self, row: bytes, decode: Callable[[bytes], Any], name: str | None) -> Any:
        """The value in a row; ABSENT if it has expired.

        Args:
            decode: ``decode`` of the value's serde.
            name: name of the map or list that the row belongs to.
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
        except EnvironmentUnusableError as error:  # of storage that cannot be reached: the batch runs again
            self.fatal = error
            raise
        except Exception as error:
            raise self.unreadable(error) from error

    def unreadable(self, error: Exception) -> ProcessorError:
        """The error for state that its serde cannot decode. It fails the batch: no record of the key has caused it, so
        none of them may become a dead letter."""
        stored = isinstance(error, ClaimCheckError)
        self.fatal = ProcessorError(
            f"the state cannot be {'read' if stored else 'decoded as the processor declares it'}: "
            f"{user_code.in_words(error)}",
            next_step=""
            if stored
            else "was its serde or state_fields changed? Then raise `version` and define migrate().",
        )
        return self.fatal

    def without_event_time(self, name: str) -> ProcessorError:
        """The error for a timer in event time of a processor that has none. It fails the batch: no record is at fault,
        and the timer would never fire."""
        self.fatal = ProcessorError(
            f"timer {name!r:.120} is to fire in event time, which the processor does not use: it would never fire",
            next_step="declare allowed_lateness (with late_topic= of Flow.process), or register the timer with "
            "clock='processing'.",
        )
        return self.fatal

    def has_expired(self, row: bytes) -> bool:
        expires_ms = rows.expiry_of(row)
        return expires_ms is not None and expires_ms <= self.now_ms

    def migrated(self, payload: bytes, version: int, name: str | None) -> Any:
        """The value of a row that another version of the processor has written.

        Raises:
            ProcessorError: a newer version has written it, or there is no migrate(), or it fails. No record is at
                fault, so the batch fails.
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
        try:
            return self._migrate(payload, version, name)
        except MemoryError:
            raise
        except EnvironmentUnusableError as error:  # of storage that cannot be reached: the batch runs again
            self.fatal = error
            raise
        except Exception as error:
            raise self.not_migrated(error, version, name) from error

    def not_migrated(self, error: Exception, version: int, name: str | None) -> ProcessorError:
        """The error for state that migrate() cannot bring to this version."""
        of_map = f", of {name!r}" if name else ""
        self.fatal = ProcessorError(
            f"migrate() failed for state of version {version}{of_map}: {full_text_of(error)}",
            detail=line_of(error),
            next_step="correct migrate(). No record is at fault, so there are no dead letters of them.",
        )
        return self.fatal

    def key_of(self, raw_key: bytes, serde: Any, what: str) -> Any:
        """A stored key, decoded. It fails the batch if that is not possible: no record has caused it.

        Args:
            serde: of the key; None: it is bytes. what: the key, for the error.
        """
        if serde is None:
            return raw_key
        try:
            return serde.decode(raw_key)
        except (EnvironmentUnusableError, MemoryError):
            raise
        except Exception as error:
            not_decoded(error, what, raw_key, serde)
            self.fatal = ProcessorError(
                full_text_of(error),
                next_step="was the serde of the key changed? Declare the one that has written it, or reset the flow's "
                "state. No record is at fault, so there are no dead letters of them.",
            )
            raise self.fatal from error

    def without_on_timer(self) -> ProcessorError:
        """The error for a timer that no method handles. It fails the batch, before a timer is registered."""
        self.fatal = ProcessorError(
            "the processor registers a timer, but does not define on_timer()",
            next_step="define on_timer(self, key, timer, state). No record is at fault, so there are no dead letters "
            "of them.",
        )
        return self.fatal

    def header_of(self, ttl: str | float | None) -> bytes:
        """The beginning of a row with this time to live."""
        if ttl is None:
            return self.header
        if ttl == "never":
            return rows.pack(b"", None, self.version)
        ttl_ms = duration_ms(ttl)
        if ttl_ms <= 0:
            raise ValueError(f"ttl {ttl!r} is not positive")
        self.uses_clock = True
        return rows.pack(b"", _later(self.now_ms, ttl_ms), self.version)


def _nothing() -> None:
    """There are no limits."""


def _taken(record: Record) -> str:
    """What topics take is not known."""
    return ""


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
