"""A running flow tells of what keeps it waiting, and at its start of settings that can lose records."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from confluent_kafka import Producer

from onceflow.broker.local import free_ports
from onceflow.client.settings import ClientSettings
from onceflow.driver.batch import watching
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until
from onceflow_workshop.testing.proxy import Proxy

pytestmark = pytest.mark.integration


@pytest.mark.long
def test_a_transaction_that_stays_open_on_a_source(
    make_pipe: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watching, "INTERVAL_S", 0.2)
    monkeypatch.setattr(watching, "WARN_AFTER_S", 1.0)
    caplog.set_level(logging.WARNING, "onceflow")
    pipe = make_pipe()
    pipe.fill(400)
    name = f"slow-{pipe.flow}"
    other = Producer({"bootstrap.servers": pipe.bootstrap, "transactional.id": name, "log_level": 0})
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(pipe.source, b"not yet", b"k", partition=1)
    other.flush(30)
    flow = pipe.open()
    query = flow.write(flow.read(pipe.source).select("key", "value"), topic=pipe.target).start()
    try:
        wait_until(lambda: "a transaction is open" in caplog.text, 30, "the transaction is told of")
        assert f"of {pipe.source}-1 on could be read" in caplog.text
        assert repr(name) in caplog.text
        other.abort_transaction(30)
        query.processAllAvailable()
    finally:
        query.stop()
    assert not [t for t in threading.enumerate() if t.name == f"onceflow-watch-{pipe.flow}"]
    assert len(independent.read_topic(pipe.bootstrap, pipe.target, decided=True)) == 400


def test_brokers_that_are_away(
    onceflow_broker: str,
    make_topic: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Told once, not at each look, and again when they are back."""
    monkeypatch.setattr(watching, "INTERVAL_S", 0.05)
    monkeypatch.setattr(watching, "_LOOK_S", 0.5)
    caplog.set_level(logging.DEBUG, "onceflow")
    (port,) = free_ports(1)
    settings = ClientSettings(f"127.0.0.1:{port}")
    watch = watching.Watch(settings, {make_topic("orders", partitions=1): [0]}, flow="orders", over=lambda: False)
    proxies: list[Proxy] = []
    try:
        wait_until(
            lambda: f"flow orders: no broker of 127.0.0.1:{port} has answered for" in caplog.text,
            30,
            "that they are away is told",
        )
        assert f"127.0.0.1:{port}" in caplog.text
        proxies.append(Proxy(port, int(onceflow_broker.partition(",")[0].rpartition(":")[2])))
        wait_until(lambda: "flow orders: brokers answer again" in caplog.text, 30, "that they are back is told")
    finally:
        watch.stop()
        for proxy in proxies:
            proxy.close()
    assert [record.levelname for record in caplog.records if "orders:" in record.message] == ["WARNING"] * 2


def test_settings_that_can_lose_records_are_told_at_the_start(make_pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

    pipe = make_pipe()
    pipe.fill(10)
    unclean = ConfigEntry("unclean.leader.election.enable", "true", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, pipe.target, incremental_configs=[unclean])
    admin = AdminClient({"bootstrap.servers": pipe.bootstrap})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(30)
    caplog.set_level(logging.WARNING, "onceflow")
    pipe.run()
    told = [record.message for record in caplog.records if "unclean.leader.election.enable=true" in record.message]
    assert told == [message for message in told if pipe.target in message and pipe.flow in message]
    assert len(told) == 1
