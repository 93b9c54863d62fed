"""A driver process of many flows, until somebody kills it. Argument: a JSON list, see ``killed_together``."""

from __future__ import annotations

import json
import sys
import threading

import call_flow
import claim_check_flow
import driver
import external_flow
import state_driver


def main() -> None:
    flows = json.loads(sys.argv[1])
    external_flow.use()
    spark = driver.session({})
    for given in flows:
        kinds = {"table": state_driver, "database": external_flow, "store": claim_check_flow, "failed": call_flow}
        start = next((kind.start for name, kind in kinds.items() if name in given), driver.start)
        # In a thread of its own: the start of a flow that is to die at its first step does not return.
        threading.Thread(target=start, args=(given, spark), daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
