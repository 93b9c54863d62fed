"""A flow with large values in a claim check, for crash tests. ``drivers.py`` starts it in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyspark import cloudpickle

import onceflow
from onceflow.planning import placement


class Enlarge(onceflow.Processor):
    """Every record becomes a large value, another one in every attempt, which is also the new state of its key.

    Args:
        die_at: at this record the process is killed, after it has stored some values and before they are written.
        once_file: it happens once.
    """

    def __init__(self, claim: onceflow.ClaimCheck, die_at: str | None, once_file: str) -> None:
        self.output = self.state = claim
        self.die_at, self.once_file = die_at, once_file

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        for record in records:
            value = f"{record.value.decode()} {uuid.uuid4()} ".encode() * 40
            state.put(value)
            yield onceflow.Record(key, value)
            if record.value.decode() == self.die_at and not Path(self.once_file).exists():
                Path(self.once_file).touch()
                os.kill(os.getpid(), signal.SIGKILL)


def start(given: dict[str, Any], spark: Any) -> Any:
    """Start the flow."""
    placement.TASK_ROWS = given.get("task_rows", 200)
    claim = onceflow.ClaimCheck(given["store"], above=500, storage_options=given.get("storage_options"))
    flow = onceflow.Flow(given["flow"], spark, bootstrap_servers=given["bootstrap"])
    try:
        outputs = flow.process(
            flow.read(given["source"], max_records_per_batch=given.get("records_per_batch", 500)),
            Enlarge(claim, given.get("die_at"), given["once_file"]),
            table=given["table_topic"],
            state_dir=given["state_dir"],
        )
        return flow.write(outputs, topic=given["target"], **given.get("write", {})).start()
    except BaseException:
        flow.close()
        raise


def use() -> None:
    """Make tasks get this module's classes with their code."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
