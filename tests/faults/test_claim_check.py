"""Flows with large values, killed at every step: what a reader can see has its objects, and the rest is collected.

The readers are confluent-kafka, and the objects are looked at without the claim check's own code.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

import onceflow
from onceflow import hooks
from onceflow.admin.records.claim_collector import Collector
from onceflow.claim_check.objects import DAY_MS, ObjectStore
from onceflow.client.settings import ClientSettings
from onceflow.clock import clock_ms
from onceflow.planning import placement
from onceflow.testing import independent

pytestmark = [pytest.mark.integration, pytest.mark.faults]


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow's module changes this number, in the process of the tests, too."""
    monkeypatch.setattr(placement, "TASK_ROWS", placement.TASK_ROWS)


PREFIX = b"\xffonceflow-claim-check/1 "


@dataclass
class Claims:
    """A flow from a topic, with values in a store of its own, and what must be there."""

    pipe: Any
    module: Any
    store: str
    storage_options: dict[str, Any]

    @property
    def flow(self) -> str:
        return self.pipe.flow

    @property
    def table(self) -> str:
        return f"table-{self.pipe.source}"

    def arguments(self, **options: Any) -> dict[str, Any]:
        return {
            **self.pipe.arguments(),
            "store": self.store,
            "storage_options": self.storage_options,
            "table_topic": self.table,
            "state_dir": str(self.pipe.tmp_path / "state"),
            "once_file": str(self.pipe.tmp_path / f"died-{self.flow}"),
            **options,
        }

    def run(self, **options: Any) -> Any:
        query = self.module.start(self.arguments(**options), self.pipe.spark)
        try:
            query.processAllAvailable()
        finally:
            query.stop()
        return query

    def objects(self) -> set[str]:
        files = fsspec.filesystem(self.store.partition("://")[0] if "://" in self.store else "file", **self.files)
        root = self.store.rpartition("://")[2]
        return {"/".join(path.split("/")[-2:]) for path in files.find(root) if not path.endswith(".json")}

    @property
    def files(self) -> dict[str, Any]:
        """Options of fsspec, which is not what the claim check uses."""
        given = self.storage_options
        if not given:
            return {}
        names = {"key": "aws_access_key_id", "secret": "aws_secret_access_key", "endpoint_url": "aws_endpoint_url"}
        return {"use_listings_cache": False, **{name: given[other] for name, other in names.items()}}

    def content(self, name: str) -> bytes:
        with fsspec.open(f"{self.store}/{name}", "rb", **self.files) as file:
            found: bytes = file.read()
            return found

    def referred(self, topic: str, *, decided: bool = False) -> list[tuple[bytes, str]]:
        """The values that a reader sees, and their objects. Every one is there, and is what was stored."""
        found = []
        for record in independent.read_topic(self.pipe.bootstrap, topic, decided=decided):
            assert record.value is not None
            assert record.value.startswith(PREFIX), record.value[:100]
            document = json.loads(record.value.removeprefix(PREFIX))
            content = self.content(document["name"])
            assert (len(content), hashlib.sha256(content).hexdigest()) == (document["size"], document["sha256"])
            found.append((content, document["name"]))
        return found

    def check(self) -> None:
        """Every record once, and all references lead to their values."""
        seen = [content.partition(b" ")[0] for content, _ in self.referred(self.pipe.target, decided=True)]
        assert Counter(seen) == Counter(value for _, value in self.pipe.sent)

    def collect(self) -> int:
        """In a month: the orphans go, and everything that a record refers to stays."""
        referred = {name for topic in (self.pipe.target, self.table) for _, name in self.referred(topic, decided=True)}
        before = self.objects()
        assert referred <= before
        with Collector(
            ClientSettings(self.pipe.bootstrap),
            ObjectStore(self.store, self.storage_options),
            [self.pipe.target, self.table],
            older_than_ms=7 * DAY_MS,
            now_ms=clock_ms() + 30 * DAY_MS,
        ) as collector:
            collector.find()
            collector.delete()
        assert self.objects() == referred
        return len(before) - len(referred)


@pytest.fixture
def make_claims(make_pipe: Callable[..., Any], claim_check_flow: Any, tmp_path: Path) -> Callable[..., Claims]:
    """``make_claims(store=..., storage_options=...)``: an empty topic, an empty store and a flow name."""

    def make(store: str | None = None, storage_options: dict[str, Any] | None = None) -> Claims:
        pipe = make_pipe()
        return Claims(pipe, claim_check_flow, store or str(tmp_path / pipe.flow), storage_options or {})

    return make


@pytest.mark.long
@pytest.mark.parametrize("steps", [("write",), hooks.STEPS])
def test_driver_killed(
    make_claims: Callable[..., Claims], killed_together: Any, s3: Any, steps: tuple[str, ...]
) -> None:
    """One SIGKILL meets flows of one driver at different steps; one keeps its values in a bucket."""
    flows = {step: make_claims() for step in steps}
    flows["audit"] = make_claims(f"s3://{s3.make_bucket()}/claims", s3.options)
    for flow in flows.values():
        flow.pipe.fill(100)
    small = {step: {"engine": "driver" if hooks.STEPS.index(step) % 2 else "tasks"} for step in flows}
    killed_together(flows, {step: {"write": small[step], "records_per_batch": 50} for step in flows})
    for step, flow in flows.items():
        seen = len(flow.referred(flow.pipe.target))
        # Markers of the transaction that is decided at `end` may still be on their way.
        assert seen in {"init": (0,), "end": (50, 100)}.get(step, (50,)), step

    def recover(step: str) -> int:
        flows[step].pipe.fill(20)
        flows[step].run(write=small[step])
        flows[step].check()
        return flows[step].collect()

    with ThreadPoolExecutor(2) as pool:
        orphans = dict(zip(flows, pool.map(recover, flows), strict=True))
    assert orphans == {step: 50 if step in ("write", "audit", "progress") else 0 for step in flows}


@pytest.mark.long
def test_worker_killed_after_storing(make_claims: Callable[..., Claims]) -> None:
    """Values were stored, but no record of them was written: the batch runs again, and they are orphans."""
    claims = make_claims()
    claims.pipe.fill(300)
    query = claims.run(die_at="000000150", write={"engine": "tasks"})
    assert Path(claims.arguments()["once_file"]).exists()
    assert [batch.attempts for batch in query.batches] == [2]
    claims.check()
    assert claims.collect() > 0


def test_the_store_is_away_for_a_while(make_claims: Callable[..., Claims], caplog: pytest.LogCaptureFixture) -> None:
    """The flow stops, names the store, and has written nothing of the batch; it continues when the store is back."""
    claims = make_claims()
    claims.pipe.fill(100)
    Path(claims.store).write_text("not a folder")
    with pytest.raises(onceflow.EnvironmentUnusableError, match="cannot be a store") as caught:
        claims.run()
    assert str(claims.store) in str(caught.value)
    assert claims.referred(claims.pipe.target) == []
    Path(claims.store).unlink()
    claims.run()
    claims.check()
    assert claims.collect() == 0
