"""Heartbeats of drivers that stand by for each other: their topic, and the records in it.

The topic is read from its end, and its records are worth something for seconds only. So it is not compacted; its
retention is an hour. The key is that of the flow's progress, so the records of a flow are in one partition, in the
order in which the drivers have written them. That order decides which standby takes over. The value is JSON. Readers
ignore fields that they do not know.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

HEARTBEATS_TOPIC = "__onceflow_heartbeats"

#: What a driver is: it runs the flow, or takes it over just now; it stands by; it has ended by itself.
ACTIVE, STANDBY, ENDED = "active", "standby", "ended"

_ROLES = (ACTIVE, STANDBY, ENDED)


@dataclass(frozen=True)
class Heartbeat:
    """What a driver says of itself.

    Args:
        flow: key of the flow's progress.
        driver: an id that this process has made up for this start of the flow.
        role: one of the constants above.
        host, pid: name of its machine, and its process id there.
        since_ms: since when it has this role, epoch milliseconds of its clock.
        network: identity of its network; whoever has the same one reaches it on the loopback address. "": not known.
        door: ``host:port`` on which it lets others know that its process lives; "": nowhere.
        warm: whether a standby has prepared what it needs to take over soon.
        reads: the topic that its program reads first; "": not known.
    """

    flow: str
    driver: str
    role: str
    host: str
    pid: int
    since_ms: int
    network: str = ""
    door: str = ""
    warm: bool = False
    reads: str = ""

    @property
    def process(self) -> str:
        """Process and host, for people."""
        return f"process {self.pid} on {self.host}"


def encode(heartbeat: Heartbeat) -> tuple[bytes, bytes]:
    """Key and value of the record."""
    return heartbeat.flow.encode(), json.dumps(asdict(heartbeat), sort_keys=True, separators=(",", ":")).encode()


def decode(key: bytes | None, value: bytes | None) -> Heartbeat | None:
    """The heartbeat in a record; None: it is none that this version understands. The topic is open to all drivers of a
    cluster, so nothing that is in it may stop one."""
    try:
        content = json.loads(value or b"")
        flow = (key or b"").decode()
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    if not isinstance(content, dict) or content.get("role") not in _ROLES or not _text(content, "driver"):
        return None
    pid, since_ms = content.get("pid"), content.get("since_ms")
    return Heartbeat(
        flow,
        _text(content, "driver"),
        content["role"],
        _text(content, "host"),
        pid if type(pid) is int else 0,
        since_ms if type(since_ms) is int else 0,
        _text(content, "network"),
        _text(content, "door"),
        content.get("warm") is True,
        _text(content, "reads"),
    )


def _text(content: dict[str, Any], name: str) -> str:
    value = content.get(name)
    return value if isinstance(value, str) else ""
