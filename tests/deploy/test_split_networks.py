"""Two drivers and a broker on three hosts whose network splits: between drivers, from the broker, and altogether.

The hosts are network namespaces on this machine, joined by a bridge. What is cut off gets no answer, not even a
refusal. An independent read_committed consumer checks that every record was counted exactly once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onceflow.broker.local import LocalBroker, free_ports
from onceflow.client.cluster import Cluster
from onceflow.client.settings import ClientSettings
from onceflow.errors import FencedError, OnceflowError
from onceflow.protocol.heartbeats import ACTIVE, STANDBY
from onceflow.testing.broker import create_topic
from onceflow.testing.waiting import wait_until
from onceflow_workshop.bench.standby import PARTITIONS, Feeder, Watcher, check, roles

pytestmark = [
    pytest.mark.integration,
    pytest.mark.faults,
    pytest.mark.long,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2"
    ),
]

WAIT_S = 120
SPLIT_S = 5.0  # more than three times as long as a driver may be silent
# Somebody is there who refuses.
CALL = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), 0.7)
except ConnectionRefusedError:
    sys.exit(0)
except OSError:
    sys.exit(1)
"""
NOWHERE = "02:00:00:00:00:01"  # the hardware address of nobody


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
    return done.stdout


class Network:
    """Hosts ``a`` and ``b``, and this process as the third one, with the broker.

    Attributes:
        servers: address of the third host, as the others see it.
    """

    HOSTS = ("a", "b")

    def __init__(self) -> None:
        self._id = f"of{os.getpid() % 100_000}"
        subnet = f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
        self.servers = f"{subnet}.254"
        self.addresses = {host: f"{subnet}.{number}" for number, host in enumerate(self.HOSTS, 1)}

    def __enter__(self) -> Network:
        try:
            ip("link", "add", self._id, "type", "bridge")
            ip("addr", "add", f"{self.servers}/24", "dev", self._id)
            ip("link", "set", self._id, "up")
            for host, address in self.addresses.items():
                space = self.space(host)
                ip("netns", "add", space)
                ip("link", "add", self._port(host), "type", "veth", "peer", "name", "eth0", "netns", space)
                ip("link", "set", self._port(host), "master", self._id, "up")
                ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    ip("-n", space, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.HOSTS:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", self.space(host))
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", self._id)

    def space(self, host: str) -> str:
        """The namespace of a host."""
        return f"{self._id}{host}"

    def _port(self, host: str) -> str:
        return f"{self._id}{host}"

    @contextlib.contextmanager
    def drivers_apart(self) -> Iterator[None]:
        """The two drivers do not reach each other; both reach the broker."""
        try:
            for host in self.HOSTS:
                ip("link", "set", self._port(host), "type", "bridge_slave", "isolated", "on")
            yield
        finally:
            for host in self.HOSTS:
                ip("link", "set", self._port(host), "type", "bridge_slave", "isolated", "off")

    @contextlib.contextmanager
    def cut_off_from_the_broker(self, host: str) -> Iterator[None]:
        """What a host sends to the broker goes to nobody. It reaches the other driver."""
        entry = (self.servers, "dev", "eth0")
        ip("-n", self.space(host), "neigh", "replace", *entry, "lladdr", NOWHERE, "nud", "permanent")
        try:
            yield
        finally:
            ip("-n", self.space(host), "neigh", "del", *entry)

    @contextlib.contextmanager
    def cut_off(self, *hosts: str) -> Iterator[None]:
        """Hosts reach nobody."""
        for host in hosts:
            ip("link", "set", self._port(host), "down")
        try:
            yield
        finally:
            for host in hosts:
                ip("link", "set", self._port(host), "up")


class Drivers:
    """A driver on each of the hosts.

    Args:
        servers: bootstrap servers, as the drivers see them; ``local``: as this process does.
    """

    def __init__(self, network: Network, servers: str, local: str, folder: Path) -> None:
        self.network = network
        self.flow = f"split-{os.getpid()}"
        self.source, self.target = f"{self.flow}-in", f"{self.flow}-out"
        self._servers = servers
        self._folder = folder
        self._cluster = Cluster(ClientSettings(local, {}))
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._number = 0

    def start(self, host: str) -> None:
        self._number += 1
        own = self._folder / host
        (own / "tmp").mkdir(parents=True, exist_ok=True)
        given = {
            "servers": self._servers,
            "flow": self.flow,
            "folder": str(own),
            "source": self.source,
            "target": self.target,
            "host": self.network.addresses[host],
        }
        command = ["ip", "netns", "exec", self.network.space(host), sys.executable]
        command += ["-m", "onceflow_workshop.bench.standby_service", json.dumps(given)]
        environment = os.environ | {"TMPDIR": str(own / "tmp"), "SPARK_LOCAL_IP": "127.0.0.1"}
        with (own / f"driver-{self._number}.log").open("wb") as log:
            self.running[host] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )

    def roles(self) -> dict[str, str]:
        """What the drivers that live say they are; "": one that is not warm yet."""
        with contextlib.suppress(OnceflowError):  # the topic is not there yet, say
            last = roles(self._cluster, self.flow)
            return {host: last.get(process.pid, "") for host, process in self.running.items() if process.poll() is None}
        return {}

    def await_roles(self, active: str, standby: str) -> None:
        wanted = {active: ACTIVE, standby: STANDBY}
        wait_until(lambda: self.roles() == wanted, WAIT_S, lambda: f"{wanted}: {self.roles()} {self._logs()}")

    def await_fenced(self, host: str) -> None:
        """It ends with the exit code for that."""
        process = self.running[host]
        wait_until(lambda: process.poll() is not None, WAIT_S, lambda: f"{host} ends {self._logs()}")
        assert process.returncode == FencedError.exit_code, self._logs()
        self._end(host)

    def _logs(self) -> str:
        return "\n".join(each.read_text(errors="replace")[-2000:] for each in self._folder.glob("*/driver-*.log"))

    def _end(self, host: str) -> None:
        process = self.running.pop(host)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its JVM, too
        process.wait(30)

    def close(self) -> None:
        for host in list(self.running):
            self._end(host)
        self._cluster.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[tuple[Drivers, Feeder, Watcher]]:
    local, seen = free_ports(2)
    with Network() as network:
        properties = {
            "listeners": f"PLAINTEXT://127.0.0.1:{local},HOSTS://{network.servers}:{seen}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,HOSTS:PLAINTEXT,CONTROLLER:PLAINTEXT",
        }
        with LocalBroker(tmp_path / "broker", port=local, properties=properties) as broker:
            drivers = Drivers(network, f"{network.servers}:{seen}", broker.bootstrap_servers, tmp_path)
            for topic in (drivers.source, drivers.target):
                create_topic(broker.bootstrap_servers, topic, PARTITIONS)
            feeder = Feeder(broker.bootstrap_servers, drivers.source)
            watcher = Watcher(broker.bootstrap_servers, drivers.target)
            try:
                yield drivers, feeder, watcher
            finally:
                feeder.close()
                drivers.close()
                watcher.close()
                broker.kill()


def test_the_network_splits(world: tuple[Drivers, Feeder, Watcher]) -> None:
    drivers, feeder, watcher = world
    network = drivers.network
    drivers.start("a")
    wait_until(lambda: drivers.roles() == {"a": ACTIVE}, WAIT_S, "a is active")
    drivers.start("b")
    drivers.await_roles("a", "b")

    def goes_on(host: str) -> Callable[[], bool]:
        """Whether results of a driver arrive from now on."""
        since, pid = time.monotonic(), drivers.running[host].pid
        return lambda: any(at > since and value[2] == pid for at, _, value in reversed(watcher.seen[-500:]))

    # No standby takes over from a driver that writes, whether it reaches that one or not.
    for cut in (network.drivers_apart(), network.cut_off_from_the_broker("b"), network.cut_off("b")):
        with cut:
            time.sleep(SPLIT_S)
            wait_until(goes_on("a"), 10, "a goes on")
            assert drivers.roles()["a"] == ACTIVE
        drivers.await_roles("a", "b")

    # One that cannot write is replaced, although its process lives and is seen by the other one.
    for cut, active, standby in (
        (network.cut_off_from_the_broker("a"), "a", "b"),
        (network.cut_off("b"), "b", "a"),
    ):
        with cut:
            wait_until(goes_on(standby), 30, lambda s=standby: f"{s} takes over: {drivers.roles()} {drivers._logs()}")
        drivers.await_fenced(active)
        drivers.start(active)  # as its supervisor does
        drivers.await_roles(standby, active)

    # If nobody reaches the broker, nobody can take over. Afterwards one of them goes on.
    with network.cut_off("a", "b"):
        time.sleep(SPLIT_S)
    wait_until(lambda: list(drivers.roles().values()).count(ACTIVE) == 1, WAIT_S, "one is active")
    feeder.close()
    wait_until(lambda: len(watcher.seen) >= feeder.count, WAIT_S, lambda: f"{len(watcher.seen)} of {feeder.count}")
    time.sleep(1.0)  # so that doubled records have time to come
    check(watcher, feeder.count)


def test_what_is_cut_off_gets_no_answer() -> None:
    """Otherwise the test above would show nothing."""
    with Network() as network:

        def reached(host: str, address: str) -> bool:
            command = ["ip", "netns", "exec", network.space(host), sys.executable, "-S", "-c", CALL, address]
            return subprocess.run(command, check=False).returncode == 0

        def seen() -> list[bool]:
            other = network.addresses["b"]
            return [reached("a", network.servers), reached("b", network.servers), reached("a", other)]

        wait_until(lambda: seen() == [True, True, True], 30, "all reach each other")
        cuts: list[tuple[Any, list[bool]]] = [
            (network.drivers_apart(), [True, True, False]),
            (network.cut_off_from_the_broker("a"), [False, True, True]),
            (network.cut_off("b"), [True, False, False]),
            (network.cut_off("a", "b"), [False, False, False]),
        ]
        for cut, wanted in cuts:
            with cut:
                assert seen() == wanted
            wait_until(lambda: seen() == [True, True, True], 30, "all reach each other again")
