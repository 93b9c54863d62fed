"""OAUTHBEARER on a real broker whose tokens live for seconds: nothing lost or doubled, and no token is shown."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import onceflow
from onceflow.broker.local import LocalBroker, free_ports
from onceflow.client.auth.jaas import jaas_fields
from onceflow.client.auth.sources import ClientCredentials, TokenUnavailableError
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.spark import token_endpoint
from onceflow.testing.broker import create_topic
from onceflow.testing.waiting import wait_until
from onceflow_workshop.testing.identity import IdentityProvider

pytestmark = [pytest.mark.integration, pytest.mark.long]

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


def provider_script(folder: Path, url: str) -> str:
    """The import path of a user's function that gets tokens, in a module of this folder."""
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
    return f"{name}:token"


def keep_filling(pipe: Any, seconds: float) -> None:
    """Records all the time: 40 at least every half second."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pipe.fill(40)
        time.sleep(0.1)


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
        "the progress": json.dumps([json.loads(p.json) if hasattr(p, "json") else p for p in query.recentProgress]),
        "the batches": str(list(query.batches)),
        "the settings": repr(flow._settings),
        "the status": str(query.status),
    }


@pytest.mark.long
def test_tokens_end_while_two_flows_run(
    six_seconds: Guarded, pipe: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """By tasks with client credentials, and by the driver with a function; each re-authenticates several times."""
    guarded = six_seconds
    function = provider_script(tmp_path, guarded.provider.url)
    pipe.spark.sparkContext.addPyFile(str(tmp_path / f"{function.partition(':')[0]}.py"))  # to tasks, as users do it
    by_driver = replace(pipe, flow=f"{pipe.flow}-2", target=f"{pipe.target}-2", sent=pipe.sent)
    create_topic(guarded.internal, by_driver.target, 4)
    ways = [
        (pipe, guarded.credentials(), "tasks"),
        (by_driver, {**guarded.base, "onceflow.token.provider": function}, "driver"),
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
                flow.write(df, topic=p.target, engine=engine, trigger="500 milliseconds").start()
                for flow, df, (p, _, engine) in zip(flows, frames, ways, strict=True)
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
    assert all(batch.path.endswith("tasks") for batch in tasks)
    assert {batch.path for batch in driver} == {"driver"}
    assert [batch.attempts for batch in (*tasks, *driver)] == [1] * (len(tasks) + len(driver)), "no batch was aborted"
    assert len(guarded.provider.issued) >= 2 * 20 / 6
    assert_no_secrets(guarded.provider, {**texts, "the log": caplog.text})


# ---- our own connections, without Spark ----------------------------------------------------------------------


def cluster_of(guarded: Guarded, options: Mapping[str, str]) -> Cluster:
    return Cluster(ClientSettings(guarded.servers, options))


def refusal(guarded: Guarded, options: Mapping[str, str]) -> onceflow.AuthenticationFailedError:
    cluster = cluster_of(guarded, options)
    assert cluster.tokens is not None
    cluster.tokens._patience_s = 1.0
    began = time.monotonic()
    try:
        with pytest.raises(onceflow.AuthenticationFailedError) as caught:
            cluster.connect(Deadline(4, "a test connects"))
    finally:
        cluster.close()
    assert time.monotonic() - began < 8
    assert SECRET not in str(caught.value)
    assert not any(token in str(caught.value) for token in guarded.provider.issued)
    return caught.value


@pytest.mark.parametrize(
    "changed, problem, step",
    [
        ({"client_secret": "guessed"}, "answered HTTP 401 (invalid_client: Invalid client", "check client id"),
        ({"client_id": "nobody"}, "answered HTTP 401 (invalid_client", "check client id"),
        pytest.param(
            *(
                {"token_endpoint_url": "http://127.0.0.1:1/token"},
                "cannot be reached: Connection",
                "token.endpoint.url",
            ),
            marks=pytest.mark.long,
        ),
    ],
    ids=range(3),
)
def test_no_token_from_the_endpoint(guarded: Guarded, changed: dict[str, str], problem: str, step: str) -> None:
    error = refusal(guarded, guarded.credentials(**changed))
    assert problem in error.what
    assert step in error.next_step


@pytest.fixture
def giving(guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], dict[str, str]]:
    """``giving(f)``: options with which ``f`` gives the tokens, in this process."""

    def make(function: Callable[[], Any]) -> dict[str, str]:
        name = f"given_{tmp_path.name.replace('-', '_')}"
        module = type(sys)(name)
        module.token = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        return {**guarded.base, "onceflow.token.provider": f"{name}:token"}

    return make


@pytest.mark.parametrize(
    "claims",
    [{"aud": "other"}, {"iss": "https://other"}, {"exp": 1}, {"sub": None}],
    ids=["audience", "issuer", "expired", "subject"],
)
def test_tokens_that_the_broker_refuses(guarded: Guarded, giving: Any, claims: dict[str, Any]) -> None:
    given: list[str] = []

    def token() -> tuple[str, float]:
        given.append(guarded.provider.token(CLIENT, **claims))
        return given[-1], 60.0  # what the function says, whatever the token says

    error = refusal(guarded, giving(token))
    assert error.what == f"The broker at {guarded.servers} refused the credentials"
    assert "invalid_token" in error.detail
    assert "issuer, audience" in error.next_step
    assert len(given) == 2, "a refused token is replaced once"


def test_a_token_with_a_wrong_signature(guarded: Guarded, giving: Any) -> None:
    token = guarded.provider.token(CLIENT)
    head, _, signature = token.rpartition(".")
    error = refusal(guarded, giving(lambda: f"{head}.{signature[::-1]}"))
    assert "refused the credentials" in error.what


def test_a_token_revoked_before_its_time(guarded: Guarded, giving: Any) -> None:
    """The broker knows better than we how long a token is good for; the next one is."""
    given: list[str] = []

    def token() -> tuple[str, float]:
        given.append(guarded.provider.token(CLIENT, **({"exp": 1} if not given else {})))
        return given[-1], 60.0

    cluster = cluster_of(guarded, giving(token))
    try:
        cluster.connect(Deadline(30, "a test connects"))
    finally:
        cluster.close()
    assert len(given) == 2


@pytest.mark.long
def test_a_connection_that_was_idle_logs_in_first(six_seconds: Guarded) -> None:
    """Nothing runs the event loop between batches. The broker would close the connection at the first request."""
    guarded = six_seconds
    guarded.provider.lifetime_s = 3
    cluster = cluster_of(guarded, guarded.credentials(scope="idle"))
    try:
        deadline = Deadline(60, "a test")
        cluster.connect(deadline)
        topics = cluster.topics(None, deadline)
        (node,) = (broker.node_id for broker in cluster.manager.cluster.brokers())
        before = cluster.manager.get_connection(node)
        expired = time.monotonic() + 4
        while time.monotonic() < expired:
            time.sleep(0.1)
        assert set(cluster.topics(None, deadline)) == set(topics)
        assert cluster.manager.get_connection(node) is before, "the same connection"
    finally:
        cluster.close()


@pytest.mark.long
def test_the_provider_is_down_for_a_while(six_seconds: Guarded) -> None:
    guarded = six_seconds
    cluster = cluster_of(guarded, guarded.credentials(scope="outage"))
    try:
        cluster.connect(Deadline(30, "a test connects"))
        guarded.provider.is_down = True
        back = threading.Timer(8.0, lambda: setattr(guarded.provider, "is_down", False))
        back.start()
        deadline = Deadline(30, "a test asks while there are no tokens")
        began = time.monotonic()
        while time.monotonic() - began < 9:
            cluster.topics(None, deadline)
            time.sleep(0.2)
        back.join()
    finally:
        cluster.close()


# ---- Spark's reader ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_tokens_of_a_file_that_is_renewed(six_seconds: Guarded, pipe: Any, tmp_path: Path) -> None:
    """As with a projected token of Kubernetes. The Java client alone would read the file once."""
    guarded = six_seconds
    file = tmp_path / "token"
    stop = threading.Event()

    def write() -> None:
        fresh = file.with_suffix(".new")
        fresh.write_text(guarded.provider.token(CLIENT))
        fresh.replace(file)

    def renew() -> None:
        while not stop.wait(1.0):
            write()

    write()
    renewer = threading.Thread(target=renew)
    renewer.start()
    options = {**guarded.base, "sasl.oauthbearer.token.endpoint.url": file.as_uri()}
    try:
        with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=guarded.servers, options=options) as flow:
            df = flow.read(pipe.source).select("key", "value")
            query = flow.write(df, topic=pipe.target).start()
            keep_filling(pipe, 9.0)
            query.processAllAvailable()
    finally:
        stop.set()
        renewer.join()
    pipe.check()


@pytest.mark.long
def test_the_endpoint_with_tls(guarded: Guarded, onceflow_spark: Any, tmp_path: Path) -> None:
    """What executors on other machines ask. The certificate is for the driver's name, and only the key it names."""
    tokens = ClientSettings(guarded.servers, guarded.credentials()).tokens
    assert tokens is not None
    tls = token_endpoint.certificate_for("localhost", onceflow_spark.sparkContext._gateway)
    endpoint = token_endpoint.TokenEndpoint(tokens, host="localhost", tls=tls)
    try:
        fields = jaas_fields(endpoint.jaas)
        pinned = tmp_path / "endpoint.pem"
        pinned.write_text(fields["ssl.truststore.certificates"])
        assert "PRIVATE" not in pinned.read_text()
        client = ClientCredentials(endpoint.url, fields["clientId"], fields["clientSecret"], ca_file=str(pinned))
        assert client.fetch(5).text == tokens.token()
        with pytest.raises(TokenUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            replace(client, ca_file=None).fetch(5)
        with pytest.raises(TokenUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            replace(client, endpoint=endpoint.url.replace("localhost", "127.0.0.1")).fetch(5)
    finally:
        endpoint.close()


# ---- whole programs ------------------------------------------------------------------------------------------


def run_program(guarded: Guarded, pipes: list[Any], arguments: dict[str, Any], *, seconds: float, folder: Path) -> str:
    """``oauth_driver.py`` with these flows while records come in; all it has printed."""
    stop = folder / "stop"
    given = {"bootstrap": guarded.servers, "stop": str(stop), "folder": str(folder), **arguments}
    log = folder / "output.txt"
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("oauth_driver.py")), json.dumps(given)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until(
                lambda: "started" in log.read_text(),
                90,
                lambda: f"the driver says that its queries have started\n{log.read_text()[-5000:]}",
                useless=lambda: process.poll() is not None and "it has ended",
                poll_s=0.05,
            )
            keep_filling(pipes[0], seconds)
            stop.touch()
            assert process.wait(90) == 0, log.read_text()[-5000:]
        finally:
            process.kill()
            process.wait()
    printed = log.read_text()
    assert "INFO ExpiringCredentialRefreshingLogin" in printed, "Java's clients log at INFO, too"
    return printed


def flow_arguments(pipe: Any, options: Mapping[str, str], engine: str, **more: str) -> dict[str, Any]:
    """Spark's Kafka source, and with it Java's clients, reads what has a checkpoint."""
    return {
        "flow": pipe.flow,
        "source": pipe.source,
        "target": pipe.target,
        "options": dict(options),
        "write": {"engine": engine, "trigger": "500 milliseconds", **more},
    }


@pytest.mark.long
@pytest.mark.timeout(600)
def test_five_minutes_with_tokens_of_thirty_seconds(six_seconds: Guarded, pipe: Any, tmp_path: Path) -> None:
    """By micro-batches and by the driver, at log level INFO and with an event log: nothing lost, no token anywhere."""
    guarded = six_seconds
    guarded.provider.lifetime_s = 30
    function = provider_script(tmp_path, guarded.provider.url)
    by_driver = replace(pipe, flow=f"{pipe.flow}-2", target=f"{pipe.target}-2", sent=pipe.sent)
    create_topic(guarded.internal, by_driver.target, 4)
    events = tmp_path / "events"
    events.mkdir()
    arguments = {
        "master": "local[2]",
        "spark": {
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": events.as_uri(),
            "spark.eventLog.compress": "false",
        },
        "flows": [
            flow_arguments(pipe, guarded.credentials(), "tasks", checkpoint=str(tmp_path / "checkpoint")),
            flow_arguments(by_driver, {**guarded.base, "onceflow.token.provider": function}, "driver"),
        ],
    }
    output = run_program(guarded, [pipe], arguments, seconds=300, folder=tmp_path)
    assert len(pipe.sent) >= 10_000
    pipe.check()
    by_driver.check()
    assert "(attempt 1 of" not in output, "a batch was aborted"
    assert len(guarded.provider.issued) >= 20
    logged = "".join(file.read_text() for file in events.rglob("*") if file.is_file())
    assert pipe.source in logged
    assert_no_secrets(guarded.provider, {"the output": output, "the event log": logged})
    assert "clientSecret" not in output + logged, "not even that of the driver's own endpoint"


@pytest.mark.long
def test_executors_ask_the_driver_for_tokens(six_seconds: Guarded, pipe: Any, tmp_path: Path) -> None:
    """Executors are processes of their own: their readers get tokens of the user's function from the driver, by TLS.
    Those of Spark's Kafka source, and tasks that read by themselves."""
    guarded = six_seconds
    by_themselves = replace(pipe, flow=f"{pipe.flow}-2", target=f"{pipe.target}-2", sent=pipe.sent)
    create_topic(guarded.internal, by_themselves.target, 4)
    options = {**guarded.base, "onceflow.token.provider": provider_script(tmp_path, guarded.provider.url)}
    arguments = {
        "master": "local-cluster[2,1,600]",
        "spark": {
            "spark.executor.memory": "600m",
            "spark.executorEnv.PYTHONPATH": str(tmp_path),
            "spark.driver.host": "localhost",
            "spark.driver.bindAddress": "127.0.0.1",
        },
        "flows": [
            flow_arguments(pipe, options, "tasks", checkpoint=str(tmp_path / "checkpoint")),
            flow_arguments(by_themselves, options, "tasks"),
        ],
    }
    output = run_program(guarded, [pipe], arguments, seconds=20, folder=tmp_path)
    pipe.check()
    by_themselves.check()
    assert "endpoints [TokenEndpoint(https://localhost:" in output
    assert_no_secrets(guarded.provider, {"the output": output})
