"""How a standby knows that the process of another driver has ended: locks, and doors."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onceflow.driver.standby import door as doors
from onceflow.driver.standby import process_lock
from onceflow.driver.standby.door import Caller, Door, network, reaches
from onceflow.driver.standby.process_lock import ProcessLock, is_free, remove_left
from onceflow.errors import OptionError
from onceflow.testing.waiting import wait_until

HOLDER = """
import os, sys, time
from onceflow.driver.standby.door import Door
from onceflow.driver.standby.process_lock import ProcessLock
lock, door = ProcessLock("other"), Door("127.0.0.1", "other", flow="flow")
if sys.argv[1] == "forks" and os.fork() == 0:
    os.close(1)  # a child that lives on
    time.sleep(float(sys.argv[2]))
    os._exit(0)
print(door.address, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def other(folder: Path) -> Iterator[Callable[..., tuple[Any, str]]]:
    """Starts another driver's process; returns it and its door."""
    started = []

    def start(*how: str) -> tuple[Any, str]:
        command = [sys.executable, "-c", HOLDER, *(how or ("plain",))]
        environment = {**os.environ, "TMPDIR": str(folder)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def watched(door: str, driver: str = "other", *, same_network: bool = True) -> Callable[[], bool]:
    caller = Caller(door, driver, same_network=same_network)
    return lambda: caller.is_gone(time.monotonic())


def settled(is_gone: Callable[[], bool], seconds: float = 0.25) -> bool:
    """Whether it is gone, after some looks."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if is_gone():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.slow
def test_a_process_that_dies_is_known_at_once(other: Callable[..., tuple[Any, str]]) -> None:
    process, door = other()
    is_gone = watched(door)
    assert not is_free("other")
    assert not settled(is_gone)
    process.send_signal(signal.SIGSTOP)
    assert not is_free("other"), "it may go on"
    assert not settled(is_gone)
    process.kill()
    process.wait()
    wait_until(lambda: is_free("other"), 5, "its lock is free")
    wait_until(is_gone, 5, "its port refuses connections")


@pytest.mark.slow
def test_a_child_of_it_keeps_the_port_and_not_the_lock(other: Callable[..., tuple[Any, str]]) -> None:
    """Then the port tells nothing, and no harm is done: heartbeats decide."""
    process, door = other("forks", "1.5")
    is_gone = watched(door)
    assert not settled(is_gone, 0.2)
    process.kill()
    process.wait()
    wait_until(lambda: is_free("other"), 5, "its lock is free")
    assert not settled(is_gone, 0.3)
    wait_until(is_gone, 10, "the child has ended")


def test_locks_of_this_process_and_of_nobody_are_not_free(folder: Path) -> None:
    lock = ProcessLock("own")
    assert not is_free("own")
    lock.release()
    assert not is_free("own"), "it has said itself that it has ended"
    assert not is_free("neverseen")
    for strange in ("../../never-seen", "", "a\0b", "/", ".", "é"):
        assert not is_free(strange)


def test_files_of_dead_processes_are_removed(other: Callable[..., tuple[Any, str]]) -> None:
    process, _ = other()
    own = ProcessLock("own")
    process.kill()
    process.wait()
    wait_until(lambda: is_free("other"), 5, "its lock is free")
    remove_left()
    assert not is_free("other"), "its file is gone"
    assert sorted(path.name for path in process_lock._path("x").parent.iterdir()) == ["own.lock"]  # type: ignore[union-attr]
    own.release()


def test_without_a_folder_there_is_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    lock = ProcessLock("own")
    assert not is_free("own")
    remove_left()
    lock.release()


def test_another_process_behind_the_port_is_not_the_driver() -> None:
    door = Door("127.0.0.1", "new", flow="flow")
    assert not settled(watched(door.address, "new"))
    assert settled(watched(door.address, "old"))
    assert not settled(watched(door.address, "old", same_network=False)), "it was never reached"
    door.close()


def test_a_refusal_from_elsewhere_is_believed_if_the_door_was_reached_before() -> None:
    door = Door("127.0.0.1", "other", flow="flow")
    never = watched("127.0.0.1:1", same_network=False)
    assert not settled(never)
    is_gone = watched(door.address, same_network=False)
    assert not settled(is_gone)
    door.close()
    wait_until(is_gone, 5, "its port refuses connections")


def test_a_connection_that_is_cut_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door("127.0.0.1", "other", flow="flow")
    is_gone = watched(door.address)
    assert not settled(is_gone, 0.2)
    for each in list(door._callers):
        each.shutdown(socket.SHUT_RDWR)
    assert not settled(is_gone), "the next connection is answered"
    door.close()


def test_many_who_connect_do_not_keep_a_standby_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "_CONNECTIONS_MAX", 3)
    door = Door("127.0.0.1", "other", flow="flow")
    host, port = door.address.split(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(6)]
    for each in strangers:
        each.sendall(b"GET / HTTP/1.1\r\n\r\n")
    is_gone = watched(door.address)
    assert not settled(is_gone)
    assert len(door._callers) <= 3
    for each in strangers:
        each.close()
    door.close()
    wait_until(is_gone, 5, "it was closed")


STRANGE = ["", "nowhere", "nowhere:port", "::::", "127.0.0.1:99999", "a\0b:1", "\ud800:1", "h:" + "9" * 5000]


@pytest.mark.parametrize("address", STRANGE, ids=range(len(STRANGE)))
def test_an_address_that_is_none_says_nothing(address: str) -> None:
    assert not settled(watched(address), 0.05)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "no-such-host.invalid", "", "a" * 300, "\0", None])
def test_an_address_that_nobody_reaches_is_refused(host: Any) -> None:
    with pytest.raises(OptionError, match=re.escape(f"cannot listen on standby_host={host!r}")):
        Door(host, "other", flow="flow")


def test_a_loopback_address_is_that_of_one_network() -> None:
    for loopback in ("127.0.0.1:5", "localhost:5", "[::1]:5", "127.9.9.9:5"):
        assert reaches(loopback, network())
        assert not reaches(loopback, "another")
    assert reaches("192.0.2.1:5", "another")
