"""Drivers that stand by for each other, as processes: the active one is killed or stopped, and another takes over.

An independent consumer and a fold over the input check that nothing is lost or doubled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.driver.standby.heartbeats import read_tail
from onceflow.errors import FencedError, UnknownTopicError
from onceflow.protocol.heartbeats import ACTIVE, STANDBY
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.faults]

WAIT_S = 120
#: How drivers see that another one has died.
BY_LOCK: dict[str, Any] = {}
BY_DOOR: dict[str, Any] = {"own_tmp": True}  # each has a temporary folder of its own, as with PrivateTmp= of systemd
BY_SILENCE: dict[str, Any] = {"elsewhere": True}


class Drivers:
    """The driver processes of one flow.

    Args:
        how: one of the constants above.
    """

    def __init__(self, pipe: Any, run: Callable[..., subprocess.Popen[str]], how: dict[str, Any]) -> None:
        self.pipe = pipe
        self._run = run
        self._how = how
        self._cluster = Cluster(ClientSettings(pipe.bootstrap, {}))
        self.all: dict[int, subprocess.Popen[str]] = {}

    def start(self) -> int:
        options = {"flow_options": {"standby": True}, "forever": True, "write": {"trigger": "50 milliseconds"}}
        own: Path | None = None
        if self._how.get("own_tmp"):
            own = self.pipe.tmp_path / f"tmp-{len(self.all)}"
            own.mkdir()
        with tmpdir(own):
            process = self._run(None, **options, **self._how)
        self.all[process.pid] = process
        return process.pid

    def roles(self) -> dict[int, str]:
        """What each of the processes that run was last."""
        with contextlib.suppress(UnknownTopicError):
            found, _, _ = read_tail(self._cluster, self.pipe.flow, Deadline(30, "test"))
            last = {each.pid: each.role for each, _ in found}
            return {pid: last.get(pid, "") for pid, process in self.all.items() if process.poll() is None}
        return {}

    def await_roles(self, *standbys: int) -> int:
        """Wait until these stand by, and one other driver is active. Returns that one."""

        def found() -> list[int]:
            roles = self.roles()
            active = [pid for pid, role in roles.items() if role == ACTIVE]
            good = len(active) == 1 and all(roles.get(pid) == STANDBY for pid in standbys)
            return active if good else []

        return wait_until(found, WAIT_S, lambda: f"{standbys} stand by: {self.roles()}", poll_s=0.1)[0]

    def await_outputs(self) -> None:
        """Wait until all records that were sent have been processed."""
        pipe = self.pipe
        ends = independent.end_offsets(pipe.bootstrap, pipe.source)
        wait_until(
            lambda: independent.committed_offsets(pipe.bootstrap, pipe.flow) == ends,
            WAIT_S,
            lambda: f"all is processed: {self.roles()}",
            poll_s=0.1,
        )

    def kill(self, pid: int) -> None:
        """The driver and its JVM are gone, as if its machine had died."""
        os.killpg(pid, signal.SIGKILL)
        self.all[pid].wait()

    def close(self) -> None:
        for process in self.all.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
            self.pipe.end_driver(process)
            process.wait(30)
        self._cluster.close()


@contextlib.contextmanager
def tmpdir(folder: Path | None) -> Iterator[None]:
    """Processes that are started in it have this temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        if folder is not None:
            patch.setenv("TMPDIR", str(folder))
        yield


@pytest.fixture
def drivers(make_state_pipe: Any) -> Iterator[Callable[..., Drivers]]:
    made: list[Drivers] = []

    def make(how: dict[str, Any]) -> Drivers:
        pipe = make_state_pipe(spark=False)
        made.append(Drivers(pipe, pipe.driver, how))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_the_active_driver_is_killed(drivers: Callable[..., Drivers]) -> None:
    """Two that were started at the same time: one is active, the other one takes over in the middle of batches."""
    group = drivers(BY_LOCK)
    group.pipe.fill(500)
    both = {group.start(), group.start()}
    (active,) = wait_until(lambda: {pid for pid in both if group.roles().get(pid) == ACTIVE}, WAIT_S, "one is active")
    (standby,) = both - {active}
    assert group.await_roles(standby) == active
    group.pipe.fill(2000)
    group.kill(active)
    group.pipe.fill(500)
    group.await_outputs()
    assert group.await_roles() == standby
    group.pipe.check(local=False)


@pytest.mark.long
def test_one_of_three_is_killed_and_another_one_stopped(drivers: Callable[..., Drivers]) -> None:
    """In the middle of batches. One that was stopped finds itself fenced when it goes on, and ends with exit code 79:
    its supervisor starts it again, and it becomes the standby."""
    group = drivers(BY_LOCK)
    group.pipe.fill(500)
    first = group.start()
    group.await_roles()
    second = group.start()
    assert group.await_roles(second) == first
    third = group.start()
    assert group.await_roles(second, third) == first
    group.pipe.fill(2000)
    group.kill(first)
    group.pipe.fill(500)
    group.await_outputs()
    active = group.await_roles()
    assert active in (second, third)
    (left,) = {second, third} - {active}
    assert group.roles()[left] == STANDBY
    os.killpg(active, signal.SIGSTOP)
    group.pipe.fill(1000)
    group.await_outputs()
    assert group.roles()[left] == ACTIVE
    os.killpg(active, signal.SIGCONT)
    assert group.all[active].wait(WAIT_S) == FencedError.exit_code
    again = group.start()
    assert group.await_roles(again) == left
    group.pipe.fill(500)
    group.await_outputs()
    group.pipe.check(local=False)


@pytest.mark.long
@pytest.mark.parametrize("how", [BY_LOCK, BY_DOOR, BY_SILENCE], ids=["lock", "door", "silence"])
def test_drivers_are_killed_again_and_again(drivers: Callable[..., Drivers], how: dict[str, Any]) -> None:
    """Those that were killed are started again, and stand by for the others."""
    group = drivers(how)
    group.pipe.fill(500)
    group.start()
    group.await_roles()
    standby = group.start()
    for _ in range(5):
        active = group.await_roles(standby)
        group.pipe.fill(1000)
        group.kill(active)
        group.pipe.fill(500)
        group.await_outputs()
        assert group.await_roles() == standby
        standby = group.start()
    group.await_roles(standby)
    group.pipe.check(local=False)


@pytest.mark.long
@pytest.mark.parametrize("how", [BY_LOCK, BY_SILENCE], ids=["lock", "silence"])
def test_nobody_takes_over_needlessly(drivers: Callable[..., Drivers], how: dict[str, Any]) -> None:
    """Idle, and with records; the standbys are stopped for longer than a driver may be silent."""
    group = drivers(how)
    group.pipe.fill(100)
    active = group.start()
    group.await_roles()
    standbys = [group.start(), group.start()]
    assert group.await_roles(*standbys) == active
    for _ in range(10):
        for pid in standbys:
            os.killpg(pid, signal.SIGSTOP)
        group.pipe.fill(100)
        group.await_outputs()
        with contextlib.suppress(subprocess.TimeoutExpired):
            group.all[active].wait(3)
        for pid in standbys:
            os.killpg(pid, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            group.all[active].wait(3)
        assert group.await_roles(*standbys) == active
    group.pipe.check(local=False)
