"""Fixtures for the tests of commands, of the query server (`onceflow table serve`), and of the PostgreSQL sink."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from onceflow.cli.main import cli
from onceflow.client.settings import ClientSettings
from onceflow.server.formats import Format
from onceflow.server.options import ServeOptions
from onceflow.server.process import QueryServer
from onceflow.testing.postgres import LocalPostgres
from onceflow.testing.waiting import wait_until
from onceflow_workshop.testing.secure import Secure, secure_broker

Serve = Callable[..., httpx.Client]


@pytest.fixture(scope="session")
def postgres() -> Iterator[LocalPostgres]:
    """A server of this session."""
    with LocalPostgres() as server:
        yield server


@pytest.fixture
def dsn(postgres: LocalPostgres) -> str:
    """How to connect to an empty schema of it."""
    return postgres.schema()


@pytest.fixture
def serve(onceflow_broker: str, tmp_path: Path) -> Iterator[Serve]:
    """Starts servers in this process; each call returns a client of a new one, when it is ready."""
    running: list[tuple[QueryServer, threading.Thread, httpx.Client]] = []

    def start(tables: dict[str, Format] | str, *, ready: bool = True, **given: Any) -> httpx.Client:
        named = {tables: Format()} if isinstance(tables, str) else tables
        options = {"settings": ClientSettings(onceflow_broker), "state_dir": tmp_path, "port": 0, **given}
        if "instances" in given:
            options.setdefault("peer_secrets", ["a-secret-of-the-tests"])
        server = QueryServer(ServeOptions(named, **options))
        server.open()
        thread = threading.Thread(target=server.run)
        thread.start()
        client = httpx.Client(base_url=server.url, timeout=30, verify=False)
        running.append((server, thread, client))
        if ready:
            wait_until(lambda: client.get("/ready").status_code == 200, 30, lambda: client.get("/ready").text)
        return client

    yield start
    for server, thread, client in running:
        client.close()
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    """A broker with TLS, SASL and ACLs."""
    with secure_broker(tmp_path_factory.mktemp("secure")) as found:
        yield found


@pytest.fixture
def topic(make_topic: Callable[..., str]) -> str:
    return make_topic("served", 4, cleanup_policy="compact")


@pytest.fixture
def call(onceflow_broker: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``call("fork", "a", "b", input="y")``: runs a command on the broker, in this process. Its error is in the
    result."""
    monkeypatch.setenv("ONCEFLOW_BOOTSTRAP_SERVERS", onceflow_broker)
    return lambda *arguments, **more: CliRunner().invoke(cli, arguments, standalone_mode=False, **more)


@pytest.fixture
def verify(onceflow_broker: str, tmp_path: Path) -> Callable[..., tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Runs `onceflow verify`; returns its findings and its last line. Code None: 2 if it says that something was not
    judged, else 0."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def run(flow: str, *arguments: str, code: int | None = 0) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        common = ["--bootstrap-servers", onceflow_broker, "--scratch", str(scratch), "--json"]
        answer = CliRunner().invoke(cli, ["verify", flow, *arguments, *common], standalone_mode=False)
        assert list(scratch.iterdir()) == [], "scratch files are gone, whatever the end"
        if answer.exception is not None:
            raise answer.exception
        *found, last = [json.loads(line) for line in answer.stdout.splitlines()]
        expected = (2 if last["unjudged"] else 0) if code is None else code
        assert answer.return_value == expected, (found, last)
        return found, last

    return run


@pytest.fixture
def quick_cleaner(onceflow_broker: str) -> Iterator[None]:
    """The cleaner of the broker looks for work ten times a second."""
    admin = AdminClient({"bootstrap.servers": onceflow_broker})
    (node,) = admin.list_topics(timeout=30).brokers

    def change(operation: AlterConfigOpType) -> None:
        entry = ConfigEntry("log.cleaner.backoff.ms", "100", incremental_operation=operation)
        resource = ConfigResource(ResourceType.BROKER, str(node), incremental_configs=[entry])
        admin.incremental_alter_configs([resource])[resource].result(30)

    change(AlterConfigOpType.SET)
    yield
    change(AlterConfigOpType.DELETE)
