"""A driver of a chaos run with a broken local store: changes of a batch that was aborted are applied, too."""

from __future__ import annotations

from typing import Any

from onceflow.state.local import catch_up
from onceflow.state.local.format import COMMIT_RECORD, PENDING, Pending
from onceflow_workshop.chaos import driver

step = catch_up.CatchUp._step


def applies_all_that_is_pending(self: Any, store: Any) -> str:
    pending = Pending.decode(store.blob(PENDING))
    raw = store.blob(COMMIT_RECORD)
    if raw is not None and pending is not None:
        store.write(pending.changes, {COMMIT_RECORD: raw}, (COMMIT_RECORD, raw), index=True)
    return step(self, store)


broken: Any = catch_up.CatchUp
broken._step = applies_all_that_is_pending

if __name__ == "__main__":
    driver.main()
