"""Where a demo runs: a folder, and a broker of its own unless there is a cluster."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.broker.local import LocalBroker
from onceflow_workshop.testing.librdkafka import admin_client


@dataclass
class Workplace:
    """Where a demo runs.

    Args:
        servers: of a broker of its own, or of a cluster that was there.
        folder: for logs and data. It is kept if the demo fails.
    """

    servers: str
    folder: Path
    shared: bool
    keep: bool = True

    def end(self, result: Mapping[str, Any], topics: Sequence[str]) -> None:
        """The demo has a result: remove what is not needed any more if it has passed."""
        self.keep = result["verdict"] != "passed"
        if self.shared and not self.keep:
            _delete(self.servers, topics)


@contextlib.contextmanager
def workplace(bootstrap_servers: str | None) -> Iterator[Workplace]:
    """A folder, and a broker if none is given. What was not ended is kept, unless it was interrupted."""
    folder = Path(tempfile.mkdtemp(prefix="onceflow-demo-"))
    keep = False
    try:
        with contextlib.ExitStack() as stack:
            servers = bootstrap_servers
            if servers is None:
                sys.stderr.write("starting a broker\n")
                servers = stack.enter_context(LocalBroker(folder / "broker", heap="512m")).bootstrap_servers
            place = Workplace(servers, folder, bootstrap_servers is not None)
            yield place
            keep = place.keep
    except Exception:
        keep = True
        raise
    finally:
        if keep:
            sys.stderr.write(f"logs and data are kept in {folder}\n")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _delete(bootstrap_servers: str, topics: Sequence[str]) -> None:
    with admin_client(bootstrap_servers, {}) as admin:
        for future in admin.delete_topics(list(topics), operation_timeout=30).values():
            with contextlib.suppress(Exception):  # the audit is done; a topic that stays does no harm
                future.result(30)
