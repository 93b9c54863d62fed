"""Every error onceflow raises: what happened, to which flow, topic and batch, and the next step.

Errors cross process boundaries (a task raises, the driver reads), so each one pickles with all its
fields. Messages never carry option values: an option may be a password.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

_Error = TypeVar("_Error", bound="OnceflowError")


class OnceflowError(Exception):
    """Base of all errors raised by onceflow.

    Args:
        what: what happened, one sentence.
        next_step: what the reader can do about it, one sentence.
        flow: name of the flow it happened to.
        topic: topic it happened to; a partition is written ``topic-3``.
        batch: batch id, counted per flow since its first start.
        detail: facts worth keeping (offsets, counts, broker messages).
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
        """Fill in the places that were not known where it was raised.

        Returns:
            Itself: raised again it has one traceback, where a copy would bring two.
        """
        self.flow = flow if self.flow is None else self.flow
        self.topic = topic if self.topic is None else self.topic
        self.batch = batch if self.batch is None else self.batch
        self.args = (self._text(),)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.fields())


@dataclass(frozen=True)
class located:
    """Fills in where it happened in every onceflow error that leaves the block: see `OnceflowError.locate`.

    A class rather than a generator: it adds no frame to the traceback of the error.
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
    """Java, Spark, a jar or a package this needs is missing or too old."""


class SchemaError(OnceflowError):
    """The DataFrame has not the columns or column types that the sink takes."""


class UnsupportedQueryError(OnceflowError):
    """The query cannot be run exactly-once in this mode (for example Spark state without a checkpoint)."""


class BadRecordError(OnceflowError):
    """One record cannot be written as it is: null topic, partition out of range, too large."""


class UnknownTopicError(OnceflowError):
    """A source or output topic does not exist, or is not visible to this principal."""


class BrokerUnreachableError(OnceflowError):
    """No broker answered before the deadline."""


class BrokerUnsupportedError(OnceflowError):
    """The broker lacks an API or a feature that exactly-once needs."""


class PermissionDeniedError(OnceflowError):
    """The broker refused: this principal has not the ACL the call needs."""


class AuthenticationFailedError(OnceflowError):
    """The broker refused the credentials, or the TLS handshake failed."""


class DeadlineExceededError(OnceflowError):
    """Something was waited for, in bounded time, and did not come."""


class FencedError(OnceflowError):
    """A newer driver of the same flow has taken over its transactional id; this one stops (I6)."""


class BatchAbortedError(OnceflowError):
    """A batch was aborted and run again as often as allowed, without success. Nothing of it is visible."""


class TransactionTimeoutError(OnceflowError):
    """The broker ended the transaction because it was open for longer than its timeout."""


class ProgressConflictError(OnceflowError):
    """Progress in Kafka and what is about to be written do not continue each other (I2)."""


class DataLossError(OnceflowError):
    """Source records that were not read yet are gone (expired, truncated, or topic re-created)."""


class ProtocolError(OnceflowError):
    """The broker answered something the protocol does not allow, or an unknown error code."""


class DeadLetterLimitError(OnceflowError):
    """More records became dead letters than ``max_dead_letters`` of ``Flow.process`` allows."""


class LateRowsError(OnceflowError):
    """Spark dropped rows that were later than the watermark, and the flow was told ``late="fail"``."""


class ProcessorError(OnceflowError):
    """User code of a processor, or one of its serdes, failed; or its state cannot be read by this version of it."""
