"""The errors of a batch: what has happened to it, and what to do."""

from __future__ import annotations

import re

from onceflow import user_code
from onceflow.errors import (
    AuthenticationFailedError,
    BadRecordError,
    BatchAbortedError,
    BrokerUnreachableError,
    ClaimCheckError,
    DataLossError,
    DeadlineExceededError,
    EnvironmentUnusableError,
    FencedError,
    OnceflowError,
    OptionError,
    PermissionDeniedError,
    ProcessorError,
    ProtocolError,
    RegistryUnavailableError,
    SchemaError,
    StorageUnavailableError,
    TransactionTimeoutError,
    UnknownTopicError,
    UnsupportedQueryError,
    counted,
    data_loss,
)
from onceflow.protocol import timestamps
from onceflow.spark import jvm

_CLAIM = re.compile(r"ClaimCheckError: ([^\n]+)(?:\n  detail: ([^\n]+))?(?:\n  next step: ([^\n]+))?")

WORTH_A_RERUN = (
    BatchAbortedError,
    TransactionTimeoutError,
    DeadlineExceededError,
    BrokerUnreachableError,
    StorageUnavailableError,
    RegistryUnavailableError,
    FencedError,  # tasks get it after a transaction timeout; the abort has shown that no other driver owns the id
)
"""Another attempt may help: it has a new epoch, and its transaction timeout starts again."""

_RAISED_THERE: tuple[type[OnceflowError], ...] = (
    DeadlineExceededError,
    ProcessorError,
    EnvironmentUnusableError,
    StorageUnavailableError,
    RegistryUnavailableError,
    SchemaError,
    DataLossError,
    BadRecordError,
    UnknownTopicError,
    OptionError,
    UnsupportedQueryError,
    PermissionDeniedError,
    AuthenticationFailedError,
    ProtocolError,
)
_CLASSES = {each.__name__: each for each in _RAISED_THERE}
# An error as the worker of a task has written it, see `OnceflowError`.
_RAISED = re.compile(
    rf"^onceflow\.errors\.({'|'.join(_CLASSES)}): (.+?)"
    r"(?: \[(?:flow=[^,\]]*)?(?:, )?(?:topic=([^\]]*))?\])?\n  detail: (.*?)\n  next step: ([^\n]*)",
    re.MULTILINE | re.DOTALL,
)
# What Spark's Kafka source says of records that have expired, with failOnDataLoss: KafkaDataConsumer.scala of Spark
# 3.5, and KAFKA_DATA_LOSS in kafka-error-conditions.json of Spark 4.
_EXPIRED = re.compile(
    r"(?:Cannot fetch records in|Could not read records in offset) \[(\d+),\s*(\d+)\)"
    r"\s+(?:for topic partition|\(GroupId: .*?, TopicPartition:) ([\w.-]+-\d+)"
    r"|Cannot fetch offset (\d+)\s+\(GroupId: .*?, TopicPartition: ([\w.-]+-\d+)\)"
)
# What it says of a timestamp that is no time in microseconds: in Spark 4.2, and before, when it called DateTimeUtils in
# KafkaRecordToRowConverter.scala.
_NO_TIME = re.compile(
    r"Record at topic (\S+) partition (\d+) offset (\d+) has timestamp value (\d+) that overflows"
    r"|ArithmeticException: long overflow(?=.*KafkaRecordToRowConverter)",
    re.DOTALL,
)
# How the texts of errors of ``Flow.map`` begin.
_MAP = "Flow.map: "
# How a next step says that the flow is started again.
_AGAIN = re.compile(
    r"\bstart (?:(?:the|this) (?:flow|driver) )?again\b|\bstarted again\b|\bnext start\b", re.IGNORECASE
)


def of_task(problem: BaseException) -> OnceflowError | None:
    """The error in a task, if Spark's job has failed by it and no attempt helps.

    It is one of onceflow's own that another attempt would meet as well, or Spark's Kafka source cannot express the time
    of a record, or records have expired before the task or that source has read them.
    """
    if isinstance(problem, OnceflowError):
        return None
    text = str(problem)
    found = _CLAIM.search(text)
    if found is not None:
        return ClaimCheckError(found[1], detail=found[2] or "", next_step=found[3] or "")
    raised = raised_error(text)
    if raised is None:
        return _expired(text) or _no_time(text)
    if raised.what.startswith(_MAP):
        return raised
    # Another executor may have what one lacks.
    return None if isinstance(raised, (*WORTH_A_RERUN, EnvironmentUnusableError)) else raised


def raised_error(text: str) -> OnceflowError | None:
    """The error that a task has raised, from the text of Spark's error.

    None: it is another one.
    """
    found = _RAISED.search(text)
    if found is None:
        return None
    name, what, topic, detail, next_step = found.groups()
    return _CLASSES[name](what, topic=topic, detail=detail, next_step=next_step)


def _expired(text: str) -> DataLossError | None:
    """The error of Spark's Kafka source in a task, if records have expired."""
    found = _EXPIRED.search(text)
    if found is None:
        return None
    start, end, place, offset, place_of_offset = found.groups()
    lost = f"offset {offset}" if start is None else f"offsets {start} to {int(end) - 1}"
    return data_loss(place or place_of_offset, f"{lost}: not available any more, says Spark's Kafka source")


def _no_time(text: str) -> BadRecordError | None:
    """The error of Spark's Kafka source in a task, if it cannot express the timestamp of a record."""
    found = _NO_TIME.search(text)
    if found is None:
        return None
    topic, partition, offset, stamp = found.groups()
    return BadRecordError(
        "A source record has a timestamp that Spark cannot express",
        topic=None if topic is None else f"{topic}-{partition}",
        detail="" if topic is None else f"{stamp} ms since 1970 ({timestamps.in_utc(int(stamp))}) at offset {offset}",
        next_step="leave out checkpoint= if the query keeps no state in Spark: the direct engine reads such records; "
        "or pass this offset with `onceflow reset FLOW --to`",
    )


def in_short(problem: BaseException) -> str:
    """The error in one line, for a log. Of an error that code of the user has raised, with class and place."""
    if isinstance(problem, OnceflowError):
        return f"{problem.what} ({problem.detail})" if problem.detail else problem.what
    text = jvm.first_line(problem)
    if isinstance(problem, jvm.SPARK_ERRORS):
        return text  # it tells the exception of the user's function, and its line
    frame = user_code.innermost(user_code.frames_of(problem.__traceback__))
    if frame is None or not user_code.is_of_user(frame.filename):
        return text
    return f"{type(problem).__name__}: {text} (raised in {user_code.place(frame)})"


def fenced(flow: str, when: str, detail: str) -> FencedError:
    """A newer driver owns the flow."""
    return FencedError(
        f"A newer driver of flow {flow!r} has taken over, {when}",
        flow=flow,
        detail=detail,
        next_step="with standby=True, start this driver again: it becomes the standby. Otherwise find out who has "
        "started the flow twice, or has run a command that stops it, such as `onceflow reset`: a flow has one driver. "
        "Nothing was lost or written twice",
    )


def timed_out(open_s: float, limit_s: float) -> TransactionTimeoutError:
    """The broker has aborted the transaction."""
    if open_s < limit_s / 2:  # the timeout was not the cause
        return TransactionTimeoutError(
            f"The transaction was ended by somebody else, {open_s:.1f} s after it had begun",
            next_step="nothing is lost, the batch runs again; if it repeats, find out who else starts the flow, or "
            "runs `onceflow transactions abort`",
        )
    return TransactionTimeoutError(
        f"The broker had ended the transaction: it was open for {open_s:.1f} s, its timeout is {limit_s:g} s",
        next_step="nothing is lost, the batch runs again; if it repeats, lower max_records_per_batch of Flow.read "
        "or raise transaction_timeout of Flow.write (broker limit: transaction.max.timeout.ms)",
    )


def stopped(flow: str, batch: int, problem: BaseException | None, *, on_purpose: bool) -> BatchAbortedError:
    """The batch was interrupted: the query is being stopped, or Spark has failed."""
    what = "the query is being stopped" if on_purpose else "Spark failed"
    return BatchAbortedError(
        f"Batch {batch} was aborted: {what}; nothing of it is visible",
        flow=flow,
        batch=batch,
        detail="" if problem is None else jvm.first_line(problem),
        next_step="start the flow again: it continues at this batch",
    )


def given_up(flow: str, batch: int, attempts: int, last: BaseException | None, record: str = "") -> OnceflowError:
    """All attempts have failed.

    Args:
        record: place and key of the first record that the query fails for; empty: not known.
    """
    if isinstance(last, TransactionTimeoutError):
        return last
    cure = last.next_step if isinstance(last, OnceflowError) else ""
    if not cure or cure.startswith("none"):
        cure = "remove the cause"
    return BatchAbortedError(
        f"Batch {batch} was aborted {counted(attempts, 'time')}; nothing of it is visible",
        flow=flow,
        batch=batch,
        detail="; ".join(filter(None, [f"record {record}" if record else "", "" if last is None else in_short(last)])),
        next_step=then_again(cure, "at this batch"),
    )


def then_again(cure: str, where: str) -> str:
    """The next step of a flow that has ended: what to do first, and that it is started again after that.

    Args:
        cure: the next step of the error that has ended it. It may say that it is started again, in its own words.
        where: the flow continues.
    """
    if _AGAIN.search(cure):
        return cure
    return f"{cure.rstrip('. ')}. Then start the flow again: it continues {where}"


def not_computable(
    flow: str, batch: int, problem: BaseException, record: str = "", *, of_function: bool = False
) -> BatchAbortedError:
    """Spark cannot evaluate the query over the rows of a batch.

    Args:
        record: place and key of the first record that it fails for; empty: not known.
        of_function: a user function has failed, not an expression of SQL.
    """
    expression = jvm.expression(problem)
    parts = [f"record {record}" if record else "", in_short(problem), f"in {expression}" if expression else ""]
    cure = "correct the expression, or leave out rows that it cannot take (try_cast, try_divide, where)"
    if of_function:
        cure = "correct the function, or leave out rows that it cannot take (where)"
    return BatchAbortedError(
        f"Batch {batch} was aborted: the query cannot be evaluated over its rows; nothing of it is visible",
        flow=flow,
        batch=batch,
        detail="; ".join(filter(None, parts)),
        next_step=f"{cure}. Then start the flow again: it continues at this batch",
    )


def sink_failed(target: str, step: str, problem: BaseException) -> EnvironmentUnusableError:
    """A sink has failed in a way that another attempt would meet as well."""
    return EnvironmentUnusableError(
        f"{target} has failed at the step {step}: {in_short(problem)}",
        next_step="correct the query, the sink, or what it writes to. Then start the flow again: "
        "it continues at this batch",
    )


def after(problem: OnceflowError, earlier: BaseException) -> OnceflowError:
    """The same error, whose detail also names the error of the attempt before."""
    fields = problem.fields()
    fields["detail"] = "; ".join(filter(None, [fields["detail"], f"the attempt before failed: {in_short(earlier)}"]))
    return type(problem)(problem.what, **fields)
