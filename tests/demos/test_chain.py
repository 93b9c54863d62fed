"""How a demo decides that its flows are through: with small processes in place of flows, and no broker."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from onceflow.client.deadline import Deadline
from onceflow_workshop.demos import chain
from onceflow_workshop.demos.chain import Link
from onceflow_workshop.demos.display import Display
from onceflow_workshop.demos.outbox import OutboxChoices, OutboxWithoutKeys

# Files stand for topics and offsets, one byte for each record.
FLOWS = """
import pathlib, signal, sys, threading, time
stopped = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopped.set())
flow, folder = sys.argv[1], pathlib.Path(sys.argv[2])

def append(name, count):
    with (folder / name).open("ab") as file:
        file.write(b"." * count)

if flow == "pay-once":
    append("called", 1)  # the progress, before the call
    stopped.wait()
    time.sleep(0.5)  # the call is under way
    append("results", 1)
elif flow == "watch":
    (folder / "results").touch()
    while not stopped.wait(0.02):
        found = (folder / "results").stat().st_size
        append("watched", found - ((folder / "watched").stat().st_size if (folder / "watched").exists() else 0))
else:
    stopped.wait()
"""


def size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


class Small(OutboxWithoutKeys):
    """The flows are processes of this test."""

    def command(self, link: Link) -> list[str]:
        return [sys.executable, "-c", FLOWS, link.flow, str(self.folder)]

    def through(self, display: Display) -> bool:
        return True


def test_results_that_are_written_after_the_progress_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lag:
        def __init__(self, _: str, flow: str, __: Mapping[str, int]) -> None:
            self.flow = flow

        def read(self) -> tuple[int, int]:
            if self.flow.startswith("pay-once"):
                return size(tmp_path / "called"), 1
            if self.flow.startswith("watch"):
                return size(tmp_path / "watched"), size(tmp_path / "results")
            return 1, 1

        def close(self) -> None:
            pass

    monkeypatch.setattr(chain, "GroupLag", Lag)
    monkeypatch.setattr(chain, "_LOOK_EVERY_S", 0.1)
    demo = Small(OutboxChoices(records=1, kills=0), "127.0.0.1:1", tmp_path, Deadline(20.0, "a test"))
    monkeypatch.setattr(demo._generator, "check", lambda: True)
    try:
        demo.process(Display({"produced": 1, "intended": 1, "called": 1, "watched": 1, "kills": 0}))
    finally:
        demo.server._server.server_close()
    assert (size(tmp_path / "called"), size(tmp_path / "results"), size(tmp_path / "watched")) == (1, 1, 1)
