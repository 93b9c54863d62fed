"""A driver to be killed: some flows in one SparkSession, until SIGTERM.

``python -m onceflow_workshop.chaos.driver JSON`` starts it.
It writes a JSON line to stdout for the start of every flow, for every committed batch, and for the error that ends it.
All that the checker needs is written to the history files before (see ``onceflow.testing.recorder``).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from onceflow import hooks
from onceflow.clock import clock_ms
from onceflow.driver.kafka import commit
from onceflow.driver.start import takeover
from onceflow.errors import OnceflowError
from onceflow.session import session
from onceflow.testing.faults import InjectedFaultError
from onceflow.testing.recorder import Recorder
from onceflow_workshop.chaos import flows


def main() -> None:
    """Run the driver. Its argument is JSON, from ``driver_process.Driver``."""
    given = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("onceflow.state").setLevel(logging.INFO)  # where local copies are, and what is read for them
    names = flows.Names(given["prefix"], Path(given["folder"]), given["dsn"], given["versions"], given["copied"])
    choices = flows.Choices(**given["choices"])
    _shift_clock(names.clock)
    wanted = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: _stop(wanted, number, frame))
    hooks.observe(_report_commit)
    Recorder(names.history).attach()
    try:
        spark = session(app_name=names.prefix, master=given["master"], config=given["spark"])
        queries = []
        for kind in given["flows"]:
            queries.append(flows.start(kind, spark, given["bootstrap"], names, choices))
            _report(flow=names.flow(kind), engine=choices.engine(kind))
        while not wanted.is_set() and all(query.isActive for query in queries):
            wanted.wait(0.1)
        for query in queries:
            if not query.isActive:
                query.awaitTermination()  # raises what has ended it
        for query in queries:
            query.stop()
    except OnceflowError as error:
        _report(error=type(error).__name__, text=str(error)[:1000])
        sys.exit(1)
    except Exception as error:
        # Spark raises an injected exception like one of user code. Any other exception is a finding.
        planned = InjectedFaultError.__name__ in str(error) or isinstance(error, InjectedFaultError)
        name = InjectedFaultError.__name__ if planned else f"{type(error).__module__}.{type(error).__name__}"
        _report(error=name, text=str(error)[:2000], ours=planned)
        raise


def _shift_clock(file: Path) -> None:
    """Make processing time jump: the file holds the difference in milliseconds."""

    def shifted_ms() -> int:
        try:
            return clock_ms() + int(file.read_text() or 0)
        except (OSError, ValueError):
            return clock_ms()

    for module in (commit, takeover):  # they set the time of a batch
        vars(module)[clock_ms.__name__] = shifted_ms


def _report_commit(step: str, *, flow: str, batch: int | None, **facts: Any) -> None:
    if step == "end":
        _report(flow=flow, batch=batch, by_tasks="task" in facts["summary"].path)


def _report(**fields: Any) -> None:
    # One write: two queries may report at once.
    os.write(sys.stdout.fileno(), (json.dumps(fields) + "\n").encode())


def _stop(wanted: threading.Event, number: int, frame: FrameType | None) -> None:
    wanted.set()


if __name__ == "__main__":
    main()
