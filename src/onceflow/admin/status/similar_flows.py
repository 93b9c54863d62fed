"""Flows of a similar name, for errors about a flow that has no progress."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Sequence

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.driver.record.committed_progress import CommittedProgress
from onceflow.errors import OnceflowError
from onceflow.protocol.names import Names

log = logging.getLogger("onceflow.admin")

_ALIKE_SHARE = 0.6
_MOST = 3
_SECONDS = 10.0


def alike(name: str, known: Iterable[str]) -> list[str]:
    """Those of the names that are similar, the most similar first."""
    return difflib.get_close_matches(name, sorted(known), _MOST, _ALIKE_SHARE)


def similar_flows(cluster: Cluster, names: Names) -> list[str]:
    """Flows with progress here whose name is similar, the most similar first. Empty if they cannot be read.

    A flow with the prefix of these names is named without it: as it would be given to the same command.
    """
    try:
        found = CommittedProgress().read(cluster, Deadline(_SECONDS, "looking for flows of a similar name"))
    except OnceflowError as problem:
        log.debug("no flows of a similar name: %s", problem)
        return []
    prefix = names.transactional_id_prefix
    keys = [key.decode(errors="replace") for key in found]
    return alike(names.flow, {key.removeprefix(prefix) for key in keys if key.startswith(prefix)} - {names.flow})


def meant(flows: Sequence[str], step: str) -> str:
    """The next step of an error, with the question whether the most similar flow was meant.

    Args:
        step: what to do if it was not.
    """
    return f"did you mean {flows[0]}? If not, {step}" if flows else step


def named(flows: Sequence[str]) -> str:
    """The detail of an error; empty if there are none."""
    return f"flows of a similar name: {', '.join(flows)}" if flows else ""
