"""Every error that onceflow raises. It says what happened, to which flow, topic and batch, and what to do next.

Errors cross process boundaries (a task raises, the driver reads), so each one can be pickled with all its fields.
Messages never contain the values of options, because an option may be a password.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

_Error = TypeVar("_Error", bound="OnceflowError")


def counted(count: int, noun: str = "record") -> str:
    """How a text says how many there are: ``1 record``, ``2,000 records``."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}{ending}"


class OnceflowError(Exception):
    """Base of all errors raised by onceflow.

    Args:
        what: what happened, in one sentence.
        next_step: what the reader can do about it, in one sentence.
        flow: the name of the flow.
        topic: the topic; a partition is written ``topic-3``.
        batch: the number of the batch, counted since the first start of the flow.
        detail: facts such as offsets, counts, and messages of the broker.
    """

    def __init__(
        self,
        what: str,
        *,
        next_step: str = "",
        flow: str | None = None,
        topic: str | None = None,
        batch: int | None = None,
        detail: str = "",
    ) -> None:
        self.what = what
        self.next_step = next_step
        self.flow = flow
        self.topic = topic
        self.batch = batch
        self.detail = detail
        super().__init__(self._text())

    def _text(self) -> str:
        where = [
            f"{name}={value}"
            for name, value in (("flow", self.flow), ("topic", self.topic), ("batch", self.batch))
            if value is not None
        ]
        text = f"{self.what} [{', '.join(where)}]" if where else self.what
        if self.detail:
            text += f"\n  detail: {self.detail}"
        if self.next_step:
            text += f"\n  next step: {self.next_step}"
        return text

    def fields(self) -> dict[str, Any]:
        """The constructor's keyword arguments, to copy or complete an error."""
        return {
            "next_step": self.next_step,
            "flow": self.flow,
            "topic": self.topic,
            "batch": self.batch,
            "detail": self.detail,
        }

    def locate(self: _Error, *, flow: str | None = None, topic: str | None = None, batch: int | None = None) -> _Error:
        """Fill in flow, topic and batch if they were not known where the error was raised.

        Returns:
            The error itself. If it is raised again it has one traceback; a copy would have two.
        """
        self.flow = flow if self.flow is None else self.flow
        self.topic = topic if self.topic is None else self.topic
        self.batch = batch if self.batch is None else self.batch
        self.args = (self._text(),)
        return self

    def with_detail(self: _Error, detail: str) -> _Error:
        """Replace the detail, also in the text of the error. Returns the error itself, as `locate` does."""
        self.detail = detail
        return self.locate()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.fields())


@dataclass(frozen=True)
class located:
    """Fills in flow, topic and batch in every onceflow error that is raised in the block: see `OnceflowError.locate`.

    It is a class, not a generator, so that it adds no frame to the traceback of the error.
    """

    flow: str | None = None
    topic: str | None = None
    batch: int | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, OnceflowError):
            error.locate(flow=self.flow, topic=self.topic, batch=self.batch)


def _rebuild(kind: type[OnceflowError], what: str, fields: dict[str, Any]) -> OnceflowError:
    return kind(what, **fields)


class OptionError(OnceflowError):
    """An option or argument is unknown, misspelled or has an unusable value."""


class EnvironmentUnusableError(OnceflowError):
    """Java, Spark, a jar, a package or a local folder is missing, unusable or of an unsupported version."""


class SchemaError(OnceflowError):
    """The DataFrame lacks a column that the sink needs, or a column has an unsupported type."""


class UnsupportedQueryError(OnceflowError):
    """The query cannot be run exactly-once in this mode (for example Spark state without a checkpoint)."""


class BadRecordError(OnceflowError):
    """A record cannot be written, for example because its topic is null, or because it is too large.

    Attributes:
        row: its number among the rows that were to be encoded; -1: not known.
    """

    row = -1


class UnknownTopicError(OnceflowError):
    """A topic does not exist, or this principal has no permission to see it."""


class BrokerUnreachableError(OnceflowError):
    """No broker answered before the deadline."""


class BrokerUnsupportedError(OnceflowError):
    """The broker lacks an API or a feature that exactly-once needs."""


class PermissionDeniedError(OnceflowError):
    """The broker refused a request, because this principal lacks an ACL."""


class AuthenticationFailedError(OnceflowError):
    """The broker refused the credentials, the TLS handshake failed, or there is no valid token."""


class DeadlineExceededError(OnceflowError):
    """A wait reached its time limit."""


class FencedError(OnceflowError):
    """A newer driver of the same flow has fenced this one, so this one stops (invariant I6).

    Attributes:
        exit_code: with which it ends the program if nobody catches it, so that a supervisor does not start it again:
            the two drivers would fence each other for ever. No convention of sysexits.h, systemd or Spark uses this
            number.
    """

    exit_code = 79


class BatchAbortedError(OnceflowError):
    """A batch has failed in all of its attempts. Every attempt was aborted, so nothing of the batch is visible."""


class TransactionTimeoutError(OnceflowError):
    """The broker aborted the transaction, because it was open for longer than its timeout."""


class ProgressConflictError(OnceflowError):
    """What is about to be written does not continue the flow's progress in Kafka (invariant I2)."""


class DataLossError(OnceflowError):
    """Records are lost: source records expired before they were read, or records of a batch may be lost."""


class ProtocolError(OnceflowError):
    """A response is not allowed by the protocol or has an unknown error code, or a stored record cannot be decoded."""


class DeadLetterLimitError(OnceflowError):
    """More records became dead letters than ``max_dead_letters`` of ``Flow.process`` allows."""


class LateRowsError(OnceflowError):
    """Spark has dropped rows that were later than its watermark, and ``late="fail"`` was given to ``Flow.write``."""


class CallTimeoutError(OnceflowError):
    """A call that `concurrently` has made did not return in time."""


class CircuitOpenError(OnceflowError):
    """A call was not made, because many calls before it have failed: see `Breaker`."""


class StorageUnavailableError(EnvironmentUnusableError):
    """The store of a claim check cannot be reached, or refuses a request. No record is to blame."""


class RegistryUnavailableError(EnvironmentUnusableError):
    """A schema registry does not answer, or refuses to. No record is to blame."""


class ClaimCheckError(OnceflowError):
    """A stored value is missing or was altered, or the reference to it cannot be read."""


class ProcessorError(OnceflowError):
    """A processor, one of its serdes or a function of ``Flow.map`` raised, or the state cannot be read by it."""


def data_loss(place: str, lost: str, flow: str | None = None) -> DataLossError:
    """The error for records that have expired. Args: place: topic and partition. lost: which offsets, as a text."""
    return DataLossError(
        "Source records have expired before this flow has read them",
        flow=flow,
        topic=place,
        detail=lost,
        next_step="if that loss is acceptable, read with fail_on_data_loss=False once: the gap is logged and skipped. "
        "To prevent such losses, raise the topic's retention",
    )


def log_replaced(place: str, end: int, read: int, flow: str | None = None) -> DataLossError:
    """The error for a log whose end was replaced by other records. Args: place: topic and partition. end: the first
    offset whose record may be another one. read: the first offset that was not read."""
    topic, _, partition = place.rpartition("-")
    return DataLossError(
        f"The log was truncated at offset {end}, and may have other records there now: offsets {end} to {read - 1} "
        "were read before that",
        flow=flow,
        topic=place,
        detail="its leader does not know the records that were read (an unclean leader election, or a restored "
        "backup): what was made of them is in the outputs, and the records in their place were not read",
        next_step=f"find out what is missing. `onceflow reset {flow or 'FLOW'} --to offsets={topic}:{partition}={end}` "
        "lets the flow read what is there now, also what was written since",
    )


def log_too_short(place: str, last: int, seen: str, detail: str) -> DataLossError:
    """The error for a log that has lost its end. Args: place: topic and partition. last: where it ends. seen: what was
    done with records after that."""
    return DataLossError(
        f"The log ends at offset {last}, although records after it were {seen}",
        topic=place,
        detail=detail,
        next_step="find out whether the topic was deleted and created again, or whether records were lost in an "
        "unclean leader election",
    )
