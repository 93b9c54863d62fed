"""The patches for kafka-python: each applies to the pinned version, and mends a defect that this version has.

If a later version does not have the defect any more, the class of ours that corrects it can go.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import kafka
import pytest

pytestmark = pytest.mark.slow

PATCHES = Path(__file__).parents[2] / "docs" / "adr" / "kafka-python"

#: By patch: a program that prints what happens, what it prints with the defect, and what it prints without it.
PROGRAMS = {
    "0001-pass-on-what-came-before-the-end.patch": (
        """
import socket
from kafka.net.selector import NetworkSelector
from kafka.net.transport import KafkaTCPTransport

class Protocol:
    _sensors = None
    def data_received(self, data):
        print("received", data.decode())
    def connection_lost(self, error):
        print("lost")

net = NetworkSelector()
ours, theirs = socket.socketpair()
ours.setblocking(False)
transport = KafkaTCPTransport(net, ours)
transport.set_protocol(Protocol())
theirs.sendall(b"refused")
theirs.close()
transport.resume_reading()
for _ in range(5):
    net.poll(timeout_ms=100)
""",
        "lost",
        "received refused\nlost",
    ),
    "0002-limit-the-time-of-the-handshake.patch": (
        """
import socket, time
from types import SimpleNamespace
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector

silent = socket.create_server(("127.0.0.1", 0))
port = silent.getsockname()[1]
net = NetworkSelector()
manager = KafkaConnectionManager(net, bootstrap_servers=f"127.0.0.1:{port}", security_protocol="SSL")
node = SimpleNamespace(host="127.0.0.1", port=port)
built = net.call_soon_with_future(manager._build_transport, node, time.monotonic() + 0.2)
net.poll(timeout_ms=3000, future=built)
print(type(built.exception).__name__ if built.is_done else "waits")
""",
        "waits",
        "KafkaConnectionError",
    ),
    "0003-raise-keyboard-interrupt.patch": (
        """
from kafka.net.selector import NetworkSelector

def interrupted():
    raise KeyboardInterrupt

net = NetworkSelector()
net.call_soon(interrupted)
try:
    net.poll(timeout_ms=100)
    print("goes on")
except KeyboardInterrupt:
    print("interrupted")
net.call_soon(lambda: print("the next task"))
net.poll(timeout_ms=100)
""",
        "goes on\nthe next task",
        "interrupted\nthe next task",
    ),
}


@pytest.mark.parametrize("patch", PROGRAMS)
def test_a_patch_mends_what_the_pinned_version_does(tmp_path: Path, patch: str) -> None:
    program, before, after = PROGRAMS[patch]
    shutil.copytree(Path(kafka.__file__).parent, tmp_path / "kafka", ignore=shutil.ignore_patterns("__pycache__"))
    assert _printed(program, tmp_path) == before
    applied = subprocess.run(
        ["git", "apply", str(PATCHES / patch)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert not applied.returncode, applied.stderr
    assert _printed(program, tmp_path) == after


def test_all_patches_are_tried() -> None:
    assert sorted(PROGRAMS) == sorted(each.name for each in PATCHES.glob("*.patch"))


def _printed(program: str, folder: Path) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not ran.returncode, ran.stderr
    return ran.stdout.strip()
