"""The processes of ``onceflow bench serve``: instances of the server, and what writes to their table."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from onceflow.testing.waiting import wait_until
from onceflow_workshop.bench.processes import stat_of
from onceflow_workshop.bench.service_process import ended, process, service
from onceflow_workshop.testing.served import ServerProcess

_SHARED_S = 90.0


class Instance:
    """A running instance of the query server."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid

    def document(self, path: str) -> Any:
        """What it answers at a path; None: it is not ready."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return json.load(answer)
        except urllib.error.HTTPError:
            return None

    def cpu_s(self) -> float:
        """CPU seconds so far; 0 where the system does not tell."""
        try:
            return stat_of(Path(f"/proc/{self.pid}/stat").read_text()).cpu_s
        except OSError:
            return 0.0


@contextmanager
def instances(servers: str, topic: str, count: int, folder: Path) -> Iterator[list[Instance]]:
    """So many instances, in a group if they are several, ready and with their shares of the partitions."""
    with ExitStack() as stack:
        found = []
        for number in range(count):
            name = f"{count}-{number}"
            arguments = [topic, "--bootstrap-servers", servers, "--state-dir", str(folder / name)]
            arguments += ["--instances", f"bench-{topic}"] if count > 1 else []
            server = ServerProcess(arguments, folder / f"{name}.log", apart=True)
            stack.callback(server.stop)
            server.start()
            found.append(Instance(server.url, server.pid))
        wait_until(
            lambda: all(_fair(each, topic, count) for each in found),
            _SHARED_S,
            lambda: f"fair shares: {[(each.document(f'/tables/{topic}'), each.document('/ready')) for each in found]}",
            poll_s=0.2,
        )
        yield found


def _fair(instance: Instance, topic: str, count: int) -> bool:
    """Whether it knows a share of the partitions of every instance, and only one instance for each."""
    document = instance.document(f"/tables/{topic}")
    holders = [each["instances"] for each in document["partitions"]] if document else []
    settled = all(len(each) == 1 for each in holders)
    owned = [sum(each == [url] for each in holders) for url in {url for each in holders for url in each}]
    return settled and len(owned) == count and max(owned) - min(owned) <= 1 and bool(instance.document("/ready"))


@contextmanager
def flow(servers: str, source: str, topic: str, trigger_ms: int, folder: Path) -> Iterator[Any]:
    """A flow that copies a topic into the table."""
    environment = {
        "B_BOOTSTRAP": servers,
        "B_NAME": f"bench-{topic}",
        "B_IN": source,
        "B_OUT": topic,
        "B_COMMIT_MS": str(trigger_ms),
        "B_STATE": str(folder / "flow"),
    }
    (folder / "flow").mkdir()
    log = folder / "flow.log"
    with service(environment, log) as started:
        yield lambda: ended(started, log)


@contextmanager
def producer(folder: Path, **argument: Any) -> Iterator[Any]:
    """``serve_writer`` with these arguments."""
    log = folder / "producer.log"
    command = [
        sys.executable,
        "-c",
        "from onceflow_workshop.bench.serve_writer import main; main()",
        json.dumps(argument),
    ]
    with process(command, log) as started:
        yield lambda: ended(started, log)
