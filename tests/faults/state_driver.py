"""A driver process for crash tests of state: one flow with a process step. Argument: JSON, see ``StatePipe.driver``."""

from __future__ import annotations

import json
import sys
from typing import Any

import ledger
from driver import session

import onceflow
from onceflow.planning import placement


def start(given: dict[str, Any], spark: Any) -> Any:
    ledger.use()
    placement.TASK_ROWS = given.get("task_rows", 400)
    flow = onceflow.Flow(given["flow"], spark, bootstrap_servers=given["bootstrap"])
    source = flow.read(given["source"], max_records_per_batch=given.get("records_per_batch", 1000))
    processor = getattr(ledger, given.get("processor", "Ledger"))()
    output = flow.process(
        source, processor, **{"table": given["table"], "state_dir": given["state_dir"], **given.get("process", {})}
    )
    if given.get("inside"):
        output = output.where("value is not null")
    return flow.write(output, topic=given["target"], **given.get("write", {})).start()


def main() -> None:
    given = json.loads(sys.argv[1])
    query = start(given, session(given))
    print("started", flush=True)
    if given.get("forever"):
        query.awaitTermination()
    query.processAllAvailable()
    query.stop()
    print("done", [(b.batch, b.attempts, b.path) for b in query.batches], flush=True)


if __name__ == "__main__":
    main()
