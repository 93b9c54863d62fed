"""``Flow.enrich`` in tasks: calls a function for each row, and makes records of the results."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.accumulators import AccumulatorParam

from onceflow import user_code
from onceflow.calls.concurrently import Calls
from onceflow.calls.runner import CallRunner
from onceflow.calls.target import Call, Outcome
from onceflow.clock import clock_ms
from onceflow.errors import EnvironmentUnusableError, ProcessorError
from onceflow.messages import CALLS_PROPERTY, batch_property
from onceflow.protocol.output_limits import OutputLimits, WriteLimits
from onceflow.spark import function_names
from onceflow.state.api import user_errors
from onceflow.state.api.record import Record
from onceflow.state.engine import dead_letters, input_batch
from onceflow.state.engine.output_collector import NotRecordsError, OutputCollector
from onceflow.task.step_outputs import output_rows


@dataclass
class CallReport:
    """What a task of ``Flow.enrich`` has done.

    Args:
        records: how many rows it has read. dead_letters: how many of them became dead letters.
        causes: by class of the cause: the number of dead letters, and a description of the first one.
    """

    records: int = 0
    dead_letters: int = 0
    causes: dict[str, tuple[int, str]] = field(default_factory=dict)


#: Reports by attempt of the batch, number of the task, and attempt of the task. A task that reads several partitions of
#: its input has several.
Reports = dict[tuple[str, int, int], list[CallReport]]


class CallReports(AccumulatorParam[Reports]):
    """An accumulator for the reports."""

    def zero(self, value: Reports) -> Reports:
        return {}

    def addInPlace(self, value1: Reports, value2: Reports) -> Reports:
        return {key: value1.get(key, []) + value2.get(key, []) for key in {**value1, **value2}}


def reports_of(reports: Reports, attempt: str) -> list[CallReport]:
    """The reports of one attempt of a batch. A task that Spark has run twice counts once."""
    by_task = {task: found for (given, task, _), found in sorted(reports.items()) if given == attempt}
    return [report for found in by_task.values() for report in found]


@dataclass(frozen=True)
class CallOrder:
    """What the tasks of ``Flow.enrich`` do; see there.

    Args:
        reports: the accumulator for the reports of the tasks, see `CallReports`.
    """

    calls: Calls
    topic: str
    dead_letter_topic: str | None
    value: Any
    output: Any
    flow: str
    reports: Any = None
    max_dead_letters: int | float | None = None


@dataclass(frozen=True)
class _Moment:
    """The attempt of a batch in which a task runs.

    Args:
        limit_s: how long its calls may take in all; None: as long as they like.
        limits: what topics take, as far as it is known.
    """

    attempt: str
    task: int
    task_attempt: int
    limit_s: float | None
    limits: Mapping[str, OutputLimits] = field(default_factory=dict)

    @classmethod
    def now(cls) -> _Moment:
        """The moment of the task in which this code runs."""
        from pyspark import TaskContext

        context, described = TaskContext.get(), batch_property(CALLS_PROPERTY)
        if described is None:  # a batch that is drained: nothing of it is written
            return cls("", -1, 0, None)
        given = json.loads(described)
        limit_s = float(given["limit_s"])
        if context is not None and context.attemptNumber():  # the time of Spark's first attempt counts, too
            limit_s = max(0.001, limit_s - max(0, clock_ms() - given["begun_ms"]) / 1000)
        limits = {each["topic"]: OutputLimits.of(each) for each in given["limits"]}
        if context is None:
            return cls(given["attempt"], -1, 0, limit_s, limits)
        return cls(given["attempt"], context.partitionId(), context.attemptNumber(), limit_s, limits)


class CallRows:
    """The function given to ``mapInArrow``. In a small batch the driver calls it.

    Args:
        number: of the function in its flow, for its name in plans.
    """

    def __init__(self, order: CallOrder, number: int = 0) -> None:
        self.order = order
        name = function_names.calls_name(order.calls.target.name, dead_letters=order.dead_letter_topic is not None)
        self.__name__ = f"{name}-{number}"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        moment, report = _Moment.now(), CallReport()
        with closing(CallRunner(moment.limit_s, self.order.flow)) as runner:
            for batch in batches:
                records = _records(batch)
                outcomes = _Round(self.order, runner).outcomes(records)
                found = self._written(records, outcomes, report, moment.limits)
                if found is not None:
                    at = found.schema.get_field_index("topic")
                    yield output_rows(found.set_column(at, "topic", pc.fill_null(found.column(at), self.order.topic)))
        if self.order.reports is not None and moment.attempt:  # else nobody asks for them
            self.order.reports.add({(moment.attempt, moment.task, moment.task_attempt): [report]})

    def _written(
        self, records: list[Record], outcomes: list[Outcome], report: CallReport, limits: Mapping[str, OutputLimits]
    ) -> pa.RecordBatch | None:
        """The results in the order of the rows, with dead letters at their places. Both are counted.

        Args:
            limits: what topics take. A result that its topic does not take is that of a call that has failed.
        """
        report.records += len(records)
        of_topic = WriteLimits(lambda topic: limits.get(topic or self.order.topic))
        collector = OutputCollector(output=self.order.output, limits=of_topic)
        for record, outcome in zip(records, outcomes, strict=True):
            mark = collector.mark()
            try:
                collector.extend(self._records(outcome.get(), record), record.key, record.key)
            except NotRecordsError as error:
                raise self._failed(record, error) from error
            except Exception as error:
                collector.truncate(mark)
                if isinstance(error, EnvironmentUnusableError):  # such as storage: the batch runs again
                    error.detail = error.detail or dead_letters.described(record, error)
                    raise error.locate(flow=self.order.flow, topic=record.topic) from error.__cause__
                if self.order.dead_letter_topic is None or isinstance(error, MemoryError):
                    raise self._failed(record, error) from error
                letter = dead_letters.dead_letter(record, self.order.dead_letter_topic, error, self.order.flow)
                collector.extend([dead_letters.fitted(letter, limits.get(letter.topic or ""))], as_read=True)
                report.dead_letters += 1
                cause = user_code.cause_of(error)
                count, first = report.causes.get(cause, (0, ""))
                report.causes[cause] = count + 1, first or dead_letters.described(record, error)
        return collector.take()

    def _records(self, result: Any, record: Record) -> Any:
        """As `_as_records`.

        Raises:
            ValueError: the result is an empty list, which may be a value as well as no records.
        """
        if isinstance(result, (list, tuple)) and not result and self._takes(result):
            raise ValueError(
                "the result is an empty list, which can be a value or no records: return None if nothing is to be "
                "written, or Record(record.key, []) if the list is the value"
            )
        return _as_records(result, record)

    def _takes(self, value: Any) -> bool:
        try:
            self.order.output.encode(value)
        except Exception:
            return False
        return True

    def _failed(self, record: Record, error: Exception) -> ProcessorError:
        return ProcessorError(
            f"{self.order.calls.target.name} failed for a record: {user_errors.full_text_of(error)}",
            flow=self.order.flow,
            topic=record.topic,
            detail=dead_letters.described(record, error),
            next_step="correct the function or the record; with dead_letter_topic= such records go to a topic instead",
        )


class _Round:
    """The calls for the rows of one Arrow batch. All are done before the next one is read, so memory is limited."""

    def __init__(self, order: CallOrder, runner: CallRunner) -> None:
        self._order = order
        self._runner = runner
        self._found: dict[int, Outcome] = {}

    def outcomes(self, records: list[Record]) -> list[Outcome]:
        """The outcome of the call for each record."""
        queues: dict[Any, Iterator[int]] = {}
        for keys in _in_turn(records, by_key=self._order.calls.order == "key"):
            queues[keys[0]] = iter(keys)
            self._next(queues[keys[0]], records)
        self._runner.settle()
        return [self._found[at] for at in range(len(records))]

    def _next(self, queue: Iterator[int], records: list[Record]) -> None:
        for at in queue:
            try:
                asked = _decoded(records[at], self._order.value)
            except Exception as error:
                user_errors.not_decoded(error, "the value of the record", records[at].value or b"", self._order.value)
                self._found[at] = Outcome(None, error, 0)
                continue

            def done(call: Call, at: int = at) -> None:
                assert call.outcome is not None
                self._found[at] = call.outcome
                self._next(queue, records)

            self._runner.start(Call(self._order.calls.target, (asked,), done=done))
            return


def _in_turn(records: list[Record], *, by_key: bool) -> list[list[int]]:
    """Numbers of records in groups. Within a group, calls are made one after the other."""
    groups: dict[Any, list[int]] = {}
    for at, record in enumerate(records):
        groups.setdefault(record.key if by_key and record.key is not None else at, []).append(at)
    return list(groups.values())


def _records(batch: pa.RecordBatch) -> list[Record]:
    rows = input_batch.normalised(batch)
    columns = rows.column("key").to_pylist(), rows.column("value").to_pylist(), *input_batch.metadata(rows, None)
    return list(starmap(Record, zip(*columns, strict=False)))  # what is not known is repeated without an end


def _decoded(record: Record, serde: Any) -> Record:
    value = None if record.value is None else serde.decode(record.value)
    found = copy.copy(record)
    found.value = value
    return found


def _as_records(result: Any, record: Record) -> Any:
    """What is written for the result of a function: nothing, records, or a value under the key of the record."""
    if result is None:
        return ()
    if isinstance(result, Record):
        return (result,)
    if isinstance(result, (list, tuple)) and all(isinstance(each, Record) for each in result):
        return result
    return (Record(record.key, result),)
