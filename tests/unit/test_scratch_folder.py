"""Scratch checkpoints: one per run, those of killed drivers removed, nobody else's touched."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from onceflow.driver.checkpoint_location import scratch_folder


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def dead() -> int:
    """The id of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait(timeout=30)
    return ended.pid


def make(folder: Path, name: str) -> Path:
    (folder / name / "offsets").mkdir(parents=True)
    (folder / name / "offsets" / "0").write_text("v1")
    return folder / name


def test_every_run_has_a_new_folder(folder: Path) -> None:
    first, second = scratch_folder("orders"), scratch_folder("orders")
    assert first != second
    for one in (first, second):
        assert one.parent == folder
        assert one.name.startswith(f"onceflow-orders-pid{os.getpid()}-")
        assert list(one.iterdir()) == []


@pytest.mark.skipif(not Path("/proc").exists(), reason="whether a process lives is asked from /proc")
@pytest.mark.parametrize("flow", ["orders", "a.b_c-D"])
def test_folders_of_killed_drivers_are_removed(folder: Path, dead: int, flow: str) -> None:
    old = [make(folder, f"onceflow-{flow}-pid{dead}-{end}") for end in ("abc12_x9", "q")]
    new = scratch_folder(flow)
    assert not any(one.exists() for one in old)
    assert list(folder.iterdir()) == [new]


def test_folders_of_others_are_kept(folder: Path, dead: int) -> None:
    kept = [
        make(folder, name)
        for name in (
            f"onceflow-a.b-pid{os.getpid()}-abc",  # lives
            f"onceflow-a.b-pid{os.getppid()}-abc",
            f"onceflow-a.bc-pid{dead}-abc",  # other flows
            f"onceflow-a.b-c-pid{dead}-abc",
            f"onceflow-a.b-pid{dead}-pid{dead}-abc",  # of a flow called a.b-pid<dead>
            f"onceflow-aXb-pid{dead}-abc",
            f"onceflow-a.b-pid{dead}",  # not of our making
            "onceflow-a.b-pidx-abc",
            f"other-a.b-pid{dead}-abc",
        )
    ]
    new = scratch_folder("a.b")
    assert set(folder.iterdir()) == {*kept, new}
    assert all((one / "offsets" / "0").exists() for one in kept)
