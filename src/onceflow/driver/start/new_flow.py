"""Says so when a flow without progress begins anew beside a flow of a similar name that reads the same topics.

Its program may have been meant as a copy of that flow, which `onceflow fork` was to make: it was not confirmed, or has
failed. As a new flow it would read everything again, and write it again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.driver.record.committed_progress import CommittedProgress
from onceflow.errors import OnceflowError
from onceflow.protocol.names import Names
from onceflow.protocol.progress import Progress, decode

log = logging.getLogger("onceflow")

_SECONDS = 3.0
#: What names of versions end with.
_VERSION = re.compile(r"[-_.]?(v?\d+|next|new|copy|fork|test|beta|green|blue)$")


def warn_of_similar(cluster: Cluster, progress: Progress, names: Names) -> None:
    """Log a warning if a flow of a similar name reads the same topics.

    Args:
        progress: with which the new flow begins.
    """
    try:
        found = CommittedProgress().read(cluster, Deadline(_SECONDS, "looking for flows of a similar name"))
    except OnceflowError as problem:
        log.debug("flow %s: no flows of a similar name: %s", names.flow, problem)
        return
    alike = {}
    for key, (_, record) in found.items():
        other = key.decode(errors="replace")
        if other != progress.flow and _is_alike(other, progress.flow) and record.value is not None:
            try:
                alike[other] = decode(key, record.value)
            except OnceflowError:  # of a later version
                continue
    if (warning := warning_of(progress, alike, names.flow)) is not None:
        log.warning("flow %s: %s", names.flow, warning)


def warning_of(progress: Progress, others: Mapping[str, Progress], flow: str) -> str | None:
    """The warning about a new flow; None: there is no reason for one.

    Args:
        others: progress of flows of a similar name.
    """
    for name, other in sorted(others.items()):
        same = sorted(topic for topic in progress.offsets if topic in other.offsets)
        if same and other.became is None and other.batch_id > 0:
            return (
                f"it has no progress, so it begins as a new flow. Flow {name} reads {', '.join(same)}, too, and is at "
                f"batch {other.batch_id}. If {flow} is to be a copy of it that continues there: stop it, run "
                f"`onceflow reset {flow}`, delete its tables and outputs, and run `onceflow fork {name} {flow}`"
            )
    return None


def _is_alike(one: str, other: str) -> bool:
    """Whether both may be versions of one flow by their names: ``orders``, ``orders-v2``, ``orders-next``."""
    names = {one, _VERSION.sub("", one)}
    return other in names or _VERSION.sub("", other) in names
