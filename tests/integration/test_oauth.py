"""OAUTHBEARER on a real broker whose tokens live for seconds: nothing lost or doubled, and no token is shown."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import onceflow
from onceflow.broker.local import LocalBroker, free_ports
from onceflow.testing.broker import create_topic
from onceflow.testing.identity import IdentityProvider

pytestmark = pytest.mark.integration

CLIENT, SECRET = "flow", "a-secret-that-must-not-be-printed"


@dataclass(frozen=True)
class Guarded:
    """A broker that takes tokens; ``internal`` is a listener that takes everybody."""

    servers: str
    internal: str
    provider: IdentityProvider

    @property
    def base(self) -> dict[str, str]:
        return {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER"}

    def credentials(self, **changed: str) -> dict[str, str]:
        return {
            **self.base,
            "sasl.oauthbearer.token.endpoint.url": self.provider.url,
            "sasl.oauthbearer.client.id": CLIENT,
            "sasl.oauthbearer.client.secret": SECRET,
            **{f"sasl.oauthbearer.{name.replace('_', '.')}": value for name, value in changed.items()},
        }


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("oauth")
    port, internal = free_ports(2)
    with IdentityProvider(folder, lifetime_s=6, clients={CLIENT: SECRET}) as provider:
        properties = {
            "listeners": f"SASL_PLAINTEXT://127.0.0.1:{port},INTERNAL://127.0.0.1:{internal}",
            "listener.security.protocol.map": "SASL_PLAINTEXT:SASL_PLAINTEXT,INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "INTERNAL",
            **provider.broker_properties(),
        }
        with LocalBroker(
            folder / "broker",
            properties=properties,
            client_listener="INTERNAL",
            environment=provider.broker_environment,
        ) as broker:
            yield Guarded(f"127.0.0.1:{port}", broker.bootstrap_servers, provider)


@pytest.fixture
def six_seconds(guarded: Guarded) -> Iterator[Guarded]:
    yield guarded
    guarded.provider.lifetime_s = 6
    guarded.provider.is_down = False


@pytest.fixture
def pipe(guarded: Guarded, make_pipe: Callable[..., Any]) -> Any:
    pipe = replace(make_pipe(), bootstrap=guarded.internal)
    for topic in (pipe.source, pipe.target):
        create_topic(guarded.internal, topic, 4)
    return pipe


def provider_module(spark: Any, folder: Path, url: str) -> str:
    """The import path of a user's function that gets tokens, sent to tasks as a user would do it."""
    name = f"tokens_{folder.name.replace('-', '_')}"
    script = folder / f"{name}.py"
    script.write_text(
        f'''
import base64, json, urllib.request

def token():
    basic = base64.b64encode(b"{CLIENT}:{SECRET}").decode()
    request = urllib.request.Request(
        "{url}", data=b"grant_type=client_credentials", headers={{"Authorization": "Basic " + basic}}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({{}}))
    with opener.open(request, timeout=5) as response:
        return json.load(response)["access_token"]
'''
    )
    spark.sparkContext.addPyFile(str(script))
    return f"{name}:token"


def keep_filling(pipe: Any, seconds: float) -> None:
    """Records all the time: 20 every fifth of a second."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        pipe.fill(20)
        time.sleep(max(0.0, 0.2 - (time.monotonic() - began)))


def assert_no_secrets(provider: IdentityProvider, texts: Mapping[str, str]) -> None:
    assert provider.issued
    for where, text in texts.items():
        assert SECRET not in text, f"the client's secret is in {where}"
        for token in provider.issued:
            assert token not in text, f"a token is in {where}"
            assert token.rpartition(".")[2] not in text, f"a token's signature is in {where}"


def shown(flow: Any, df: Any, query: Any) -> dict[str, str]:
    """What a user, the UI or an event log is shown of a running flow."""
    context = df.sparkSession.sparkContext
    return {
        "the plan": df._jdf.queryExecution().toString(),
        "the configuration": str(context.getConf().getAll()),
        "the local properties": str(context._jsc.sc().getLocalProperties()),
        "the progress": json.dumps([json.loads(p.json) for p in query.recentProgress]),
        "the batches": str(list(query.batches)),
        "the settings": repr(flow._settings),
        "the status": str(query.status),
    }


def test_tokens_end_while_two_flows_run(
    six_seconds: Guarded, pipe: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """By tasks with client credentials, and by the driver with a function; each re-authenticates several times."""
    guarded = six_seconds
    function = provider_module(pipe.spark, tmp_path, guarded.provider.url)
    by_driver = replace(pipe, flow=f"{pipe.flow}-2", target=f"{pipe.target}-2", sent=pipe.sent)
    create_topic(guarded.internal, by_driver.target, 4)
    ways = [
        (pipe, guarded.credentials(), 0),
        (by_driver, {**guarded.base, "onceflow.token.provider": function}, 4000),
    ]
    texts: dict[str, str] = {}
    filler = threading.Thread(target=keep_filling, args=(pipe, 20.0))
    with caplog.at_level(logging.INFO):
        flows = [
            onceflow.Flow(p.flow, p.spark, bootstrap_servers=guarded.servers, options=options) for p, options, _ in ways
        ]
        try:
            frames = [flow.read(pipe.source).select("key", "value") for flow in flows]
            started = [
                flow.write(df, topic=p.target, small_batch_rows=rows, trigger="500 milliseconds").start()
                for flow, df, (p, _, rows) in zip(flows, frames, ways, strict=True)
            ]
            filler.start()
            filler.join()
            for flow, df, query in zip(flows, frames, started, strict=True):
                query.processAllAvailable()
                texts |= {f"{where} of {flow.name}": text for where, text in shown(flow, df, query).items()}
        finally:
            for flow in flows:
                flow.close()
    assert len(pipe.sent) >= 1000
    pipe.check()
    by_driver.check()
    tasks, driver = (query.batches for query in started)
    assert {batch.path for batch in tasks if batch.records} == {"tasks"}
    assert {batch.path for batch in driver if batch.records} == {"driver"}
    assert [batch.attempts for batch in (*tasks, *driver)] == [1] * (len(tasks) + len(driver)), "no batch was aborted"
    assert len(guarded.provider.issued) >= 2 * 20 / 6
    assert_no_secrets(guarded.provider, {**texts, "the log": caplog.text})
