"""The check of the reports of one stage, with what Spark knows of its attempts."""

from __future__ import annotations

from onceflow.driver.audit import Audit, Part, audit
from onceflow.driver.fetched_rows import Rows
from onceflow.errors import BatchAbortedError
from onceflow.spark import jvm


def audit_part(rows: Rows, part: Part, *, flow: str, batch: int) -> Audit:
    """Check the reports of one stage, or of the driver. Errors are those of `audit`."""
    written = part.reports
    stages = {report.stage for report in written}
    attempts = jvm.stage_attempts(rows.sparkSession, stages) if part.shuffled else {}
    if part.tasks is not None and any(isinstance(report.error, BatchAbortedError) for report in written):
        # A second attempt of a task refused to write. The user has to know why the first one failed.
        why = jvm.failed_task_message(rows.sparkSession, stages)
        written = tuple(report.explained(why) for report in written)
    return audit(written, tasks=part.tasks, stage_attempts=attempts, flow=flow, batch=batch)
