"""A service for ``spark-submit``. Arguments: bootstrap servers, flow, source, target, table."""

from __future__ import annotations

import os
import sys
from typing import Any

import ledger

import onceflow


def main() -> None:
    bootstrap_servers, name, source, target, table = sys.argv[1:]
    spark = onceflow.session(name)
    flow = onceflow.Flow(name, spark, bootstrap_servers=bootstrap_servers)
    records = flow.read(source, max_records_per_batch=2000)
    rows = flow.process(records, ledger.Ledger(), table=table)
    # Batches are small here, and the driver would keep them for itself.
    query = flow.write(rows, topic=target, trigger="200 milliseconds", engine="tasks").start()
    # As deploy/kubernetes.yaml asks for, but for other hosts' sake not at all addresses.
    pod = os.environ.get("POD_IP")
    metrics: dict[str, Any] = {"metrics_port": 9404, "metrics_host": pod} if pod else {}
    onceflow.serve(query, more=attempts, **metrics)


def attempts(query: Any) -> dict[str, Any]:
    return {"attempts": {batch.batch: batch.attempts for batch in query.batches[-20:]}}


if __name__ == "__main__":
    main()
