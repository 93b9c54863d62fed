"""A driver process for crash tests of state: one flow with a process step. Argument: JSON, see ``StatePipe.driver``."""

from __future__ import annotations

import json
import sys
from typing import Any

import dedup_ledger
import join_ledger
import ledger
from driver import session

import onceflow
from onceflow.driver.standby import wait
from onceflow.planning import placement


def start(given: dict[str, Any], spark: Any) -> Any:
    ledger.use()
    if given.get("elsewhere"):  # as on a machine that neither sees the locks nor reaches the doors of the others
        wait.is_free = lambda driver: False
        wait.reaches = lambda door, network: False
    placement.TASK_ROWS = given.get("task_rows", 400)
    flow = onceflow.Flow(given["flow"], spark, bootstrap_servers=given["bootstrap"], **given.get("flow_options", {}))
    source = flow.read(given["source"], max_records_per_batch=given.get("records_per_batch", 1000))
    if "deduplicate" in given:
        output = deduplicated(flow, source, given)
    elif "joined" in given:
        output = join_ledger.joined(flow, source, given["table"], given["state_dir"], **given["joined"])
    else:
        output = processed(flow, source, given)
    if given.get("inside"):
        output = output.where("value is not null")
    return flow.write(output, topic=given["target"], **given.get("write", {})).start()


def deduplicated(flow: Any, source: Any, given: dict[str, Any]) -> Any:
    rows = source.selectExpr("*", *dedup_ledger.COLUMNS)
    return flow.deduplicate(rows, table=given["table"], state_dir=given["state_dir"], **given["deduplicate"])


def processed(flow: Any, source: Any, given: dict[str, Any]) -> Any:
    processor = getattr(ledger, given.get("processor", "Ledger"))(**given.get("arguments", {}))
    return flow.process(
        source, processor, **{"table": given["table"], "state_dir": given["state_dir"], **given.get("process", {})}
    )


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
