"""Ctrl-C of ``onceflow claim-check collect``: one line, no traceback, and the next run finishes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onceflow import ClaimCheck
from onceflow.testing import independent

pytestmark = pytest.mark.integration

# It presses Ctrl-C once, in the middle of what it is given.
_COMMAND = """
import os, signal, sys
from onceflow.admin.records import claim_collector
from onceflow.claim_check.objects import ObjectStore
from onceflow.cli.main import main

claim_collector._DELETED_AT_ONCE = 10
name, *arguments = sys.argv[1:]
owner = ObjectStore if hasattr(ObjectStore, name) else claim_collector.Collector
before, calls = getattr(owner, name, None), []

def pressed(self, *given):
    calls.append(name)
    if len(calls) == (2 if name == "delete" else 1):
        os.kill(os.getpid(), signal.SIGINT)
    return before(self, *given)

if before is not None:
    setattr(owner, name, pressed)
main(["claim-check", "collect", *arguments])
"""


@pytest.mark.long_but("delete")
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.long) for name in ("_listed", "_refer")), "_write_marker", "delete"]
)
def test_ctrl_c(onceflow_broker: str, make_topic: Callable[..., str], tmp_path: Path, name: str) -> None:
    claim, topic = ClaimCheck(tmp_path / "store", above=10), make_topic("claims", 1)
    independent.fill(onceflow_broker, topic, [(b"k", claim.encode(b"in use" * 10))])
    folder = tmp_path / "store" / "2026-01-01"
    folder.mkdir()
    for n in range(30):
        (folder / hashlib.sha256(b"%d" % n).hexdigest()).write_bytes(b"%d" % n)

    def run(pressed: str) -> subprocess.CompletedProcess[str]:
        given = ["--store", str(tmp_path / "store"), "--topic", topic, "--bootstrap-servers", onceflow_broker, "--yes"]
        command = [sys.executable, "-c", _COMMAND, pressed, *given]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    ended = run(name)
    assert ended.returncode == 130, ended.stderr
    assert ended.stderr.split("\n")[-2:] == ["onceflow: interrupted", ""], ended.stderr
    assert "Traceback" not in ended.stderr
    left = len(list(folder.iterdir()))
    assert left == 30 if name != "delete" else 10 <= left <= 20
    whole = run("nothing")
    assert whole.returncode == 0, whole.stderr
    assert not folder.exists()
    assert len([path for path in (tmp_path / "store").rglob("*") if path.is_file()]) == 2, "the marker, and one value"
    assert not list((tmp_path / "store").rglob(".unfinished*"))
