"""The service that ``onceflow bench cluster`` measures: balances of accounts, processed by tasks of a cluster.

``python -m onceflow_workshop.bench.cluster_service ARGUMENT`` runs until SIGTERM. It adds a JSON line to a file for
each committed batch, see `BatchLog`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

from onceflow import Flow, hooks
from onceflow.driver.step.table_state import TableState
from onceflow.session import session
from onceflow.state.spec import StateReport
from onceflow_workshop.bench.balances import ColumnBalance
from onceflow_workshop.bench.service import run_until_stopped


@dataclass(frozen=True)
class Argument:
    """What the service is given, as JSON.

    Args:
        config: of the session. copies: given to ``Flow.process`` if it is more than one.
        log: the file for the lines. parent: the service ends when this process has ended.
    """

    servers: str
    flow: str
    source: str
    target: str
    master: str
    config: Mapping[str, str]
    trigger_ms: int
    copies: int
    log: str
    parent: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Batch:
    """One committed batch, as a line of the file.

    Args:
        at: of `time.monotonic`, which all processes of a machine share.
        records: written, and so processed.
        read_again: records of the table that were read to bring copies up to date. read_in_batch: those of them that
            the tasks of the batch have read.
        aborted: attempts since the batch before.
        homes: where each partition was processed.
    """

    batch: int
    at: float
    records: int
    read_again: int
    read_in_batch: int
    aborted: int
    homes: Mapping[int, str]
    seconds: Mapping[str, float]
    path: str

    @classmethod
    def of_line(cls, line: str) -> Batch:
        fields = json.loads(line)
        return cls(**{**fields, "homes": {int(partition): home for partition, home in fields["homes"].items()}})


class BatchLog:
    """Observes the steps of the driver, and writes a line for each batch."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._read_again = self._read_in_batch = self._aborted = 0
        self._homes: dict[int, str] = {}
        self._lock = threading.Lock()  # copies are also brought up beside the batches

    def observed(self, step: str, **facts: Any) -> None:
        """See `hooks.Observer`."""
        with self._lock:
            self._observed(step, **facts)

    def reported(self, reports: Sequence[StateReport]) -> None:
        """These partitions were processed by a batch that is committed."""
        with self._lock:
            self._homes.update({report.partition: report.location for report in reports})
            self._read_in_batch += sum(report.restored for report in reports)

    def _observed(self, step: str, **facts: Any) -> None:
        if step == hooks.RESTORED:
            self._read_again += facts["records"]
        elif step == hooks.ABORTED:
            self._aborted += 1
        elif step == "end" and "summary" in facts:
            summary = facts["summary"]
            line = Batch(
                batch=summary.batch,
                at=time.monotonic(),
                records=summary.records,
                read_again=self._read_again,
                read_in_batch=self._read_in_batch,
                aborted=self._aborted,
                homes=self._homes,
                seconds={name: round(seconds, 4) for name, seconds in summary.seconds.items()},
                path=summary.path,
            )
            print(json.dumps(asdict(line)), file=self._file, flush=True)
            self._read_again, self._read_in_batch, self._aborted, self._homes = 0, 0, 0, {}


def watched_reports(told: Callable[[Sequence[StateReport]], None]) -> Any:
    """A context manager: while it is open, ``told`` is called with the reports of each committed batch.

    No hook announces them. It is called before the step ``end`` is announced.
    """
    on_commit = TableState.on_commit

    def watched(table: TableState, reports: Sequence[StateReport], moment: Any) -> None:
        on_commit(table, reports, moment)
        told(reports)

    return mock.patch.object(TableState, "on_commit", watched)


def main() -> None:
    """Run the service."""
    argument = Argument(**json.loads(sys.argv[1]))
    with ExitStack() as stack:
        log = BatchLog(stack.enter_context(Path(argument.log).open("a")))
        stack.callback(hooks.observe(log.observed))
        stack.enter_context(watched_reports(log.reported))
        run_until_stopped(_started(argument), argument.parent)


def _started(argument: Argument) -> Any:
    spark = session(argument.flow, argument.master, argument.config)
    flow = Flow(argument.flow, spark, bootstrap_servers=argument.servers)
    copies: dict[str, Any] = {"copies": argument.copies} if argument.copies > 1 else {}
    df = flow.process(flow.read(argument.source), ColumnBalance(), table=f"{argument.flow}-table", **copies)
    trigger = f"{argument.trigger_ms} milliseconds"
    return flow.write(df, topic=argument.target, trigger=trigger, engine="tasks").start()


if __name__ == "__main__":
    main()
