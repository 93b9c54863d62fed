"""The table "Requests of a batch" in docs/internals.md, counted on real brokers of both transaction versions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onceflow import Flow, hooks
from onceflow.broker.local import LocalBroker, free_ports
from onceflow.testing.broker import create_topic
from onceflow_workshop.testing.network import REQUEST, Network
from onceflow_workshop.testing.proxy import Proxy, proxied_properties

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[2] / "docs" / "internals.md"
BATCHES = 12


def of_the_page(version: int) -> dict[str, range]:
    """How often each request may be made."""
    rows = re.findall(r"^\| `(\w+)` \| ([\d to]+) \| ([\d to]+) \|$", PAGE.read_text(), re.MULTILINE)
    found = {}
    for name, *columns in rows:
        least, _, most = columns[0 if version == 2 else 1].partition(" to ")
        found[name] = range(int(least), int(most or least) + 1)
    return found


@pytest.mark.parametrize("version", [2, pytest.param(1, marks=pytest.mark.long)])
def test_requests_of_a_batch(version: int, make_pipe: Callable[..., Any], tmp_path: Path) -> None:
    expected = of_the_page(version)
    assert len(expected) == 6
    port, upstream_port = free_ports(2)
    network = Network(1, [])
    seen: list[dict[str, int]] = []

    def count(step: str, **facts: Any) -> None:
        if step == "end":
            seen.append({api: network.frames(api, REQUEST) for api in expected})

    broker = LocalBroker(
        tmp_path, features={"transaction.version": version}, properties=proxied_properties(port, upstream_port)
    )
    with broker:
        proxy = Proxy(port, upstream_port)
        pipe = replace(make_pipe(), bootstrap=broker.bootstrap_servers)
        for topic in (pipe.source, pipe.target):
            create_topic(pipe.bootstrap, topic, 4)
        pipe.fill(BATCHES * 100)
        proxy.faults(network)
        flow = Flow(pipe.flow, pipe.spark, bootstrap_servers=f"127.0.0.1:{port}")
        df = flow.read(pipe.source, max_records_per_batch=100).select("key", "value")
        stop = hooks.observe(count)
        try:
            # Batches of the driver follow so soon that version 1 often has to repeat InitProducerId: the markers of the
            # batch before are still being written.
            engine = "driver" if version == 2 else "tasks"
            flow.write(df, topic=pipe.target, once=True, engine=engine).start().awaitTermination()
        finally:
            stop()
            proxy.close()
        pipe.check()
    right = [
        all(after[api] - before[api] in counts for api, counts in expected.items())
        for before, after in itertools.pairwise(seen[2:])
    ]
    assert len(right) >= BATCHES - 4
    assert sum(right) > len(right) / 2, seen  # a request may be repeated now and then
