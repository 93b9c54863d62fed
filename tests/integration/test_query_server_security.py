"""The query server with TLS and tokens, and on a broker with TLS, SASL and ACLs."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from confluent_kafka.admin import AclOperation, ResourceType
from kafka import KafkaConsumer
from kafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment, ConsumerProtocolSubscription

from onceflow.client.settings import ClientSettings
from onceflow.errors import PermissionDeniedError
from onceflow.server.members import _Assignor
from onceflow.server.peer_auth import PeerSecrets
from onceflow.testing.broker import create_topic
from onceflow.testing.waiting import WaitedInVainError, wait_until
from onceflow_workshop.testing.secure import SECRET, Secure, grant
from onceflow_workshop.testing.served import ServerProcess, numbers, write_rows

sys.path.insert(0, str(Path(__file__).parent))
try:
    from permission_table import table
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.integration

Serve = Callable[..., httpx.Client]
_numbers = itertools.count(1)
TOKEN = "a-token-of-the-tests"


def test_instances_ask_each_other_with_tls_and_tokens(
    onceflow_broker: str, make_topic: Callable[..., str], serve: Serve, tmp_path: Path
) -> None:
    topic = make_topic("secret", 4, cleanup_policy="compact")
    write_rows(onceflow_broker, topic, numbers(200), "consistent_random")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    given = {
        "certificate": tmp_path / "server.pem",
        "certificate_key": tmp_path / "server.pem",
        "authority": tmp_path / "ca.pem",
        "tokens": [TOKEN],
        "instances": f"group-{topic}",
    }
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    both = [serve(topic, **given, ready=False) for _ in range(2)]
    allowed = {"Authorization": f"Bearer {TOKEN}"}
    with contextlib.ExitStack() as stack:
        urls = [str(each.base_url) for each in both]
        clients = [stack.enter_context(httpx.Client(base_url=url, verify=context, headers=allowed)) for url in urls]

        def shared() -> bool:
            listed = [client.get(f"/tables/{topic}").json()["partitions"] for client in clients]
            ready = all(client.get("/ready").status_code == 200 for client in clients)
            return ready and all(
                len({each["instances"][0] for each in partitions if each["instances"]}) == 2 for partitions in listed
            )

        wait_until(shared, 30, lambda: clients[0].get("/tables").text)
        assert urls[0].startswith("https://")
        for client in clients:
            for key, value in list(numbers(200).items())[::10]:
                assert client.get(f"/tables/{topic}/keys/{key}").json()["value"] == json.loads(value)
            many = client.post(f"/tables/{topic}/multi-get", json={"keys": [*numbers(200), "no"]}).json()
            assert {row["key"]: json.dumps(row["value"]) for row in many["rows"]} == numbers(200)
            assert client.get(f"/tables/{topic}/range", params={"limit": 7}).json()["rows"][6]["key"] == "key-0006"
            assert client.get(f"/tables/{topic}/count").json()["count"] == 200
            assert client.get(f"/tables/{topic}").json()["placement"] == "other"
            for body in (
                "",
                "1",
                '{"keys": 1}',
                '{"freshness": {"least": [], "staleness_ms": null, "wait_s": 1}, "places": [[[], 1]]}',
            ):
                assert client.post(f"/peer/{topic}/get", content=body).status_code == 401  # a token is no proof


@pytest.fixture
def guarded(secure: Secure) -> Iterator[str]:
    """A topic with rows on a broker with TLS, SASL and ACLs."""
    topic = f"guarded-{next(_numbers)}"
    create_topic(secure.internal, topic, 4, {"cleanup.policy": "compact"})
    write_rows(secure.internal, topic, numbers(40))
    yield topic
    grant(secure, [])


def privileges(topic: str) -> dict[str, tuple[Any, str, Any]]:
    """What docs/connect.md says that an instance needs."""
    names = {"TABLE": topic, "GROUP": f"group-{topic}"}
    return {right.kind: right.of(names).acl for right in table()["table serve --instances"]}


@pytest.mark.long
@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", pytest.param("PLAIN", marks=pytest.mark.long)])
def test_least_privileges(secure: Secure, guarded: str, serve: Serve, mechanism: str) -> None:
    """Alone it needs READ on the topic, in a group also READ on the group; nothing else."""
    settings = ClientSettings(secure.servers, secure.options(mechanism))
    needed = privileges(guarded)
    grant(secure, [needed["topic"]])
    client = serve(guarded, settings=settings)
    assert client.get(f"/tables/{guarded}/keys/key-0007").json()["value"] == {"n": 7}
    assert client.get(f"/tables/{guarded}/count").json()["count"] == 40
    grant(secure, list(needed.values()))
    both = [serve(guarded, settings=settings, instances=f"group-{guarded}", ready=False) for _ in range(2)]
    wait_until(lambda: all(shared(each, guarded) for each in both), 30, lambda: both[0].get("/tables").text)
    for each in both:
        assert each.get(f"/tables/{guarded}/count").json()["count"] == 40
        assert each.get(f"/tables/{guarded}/keys/key-0007").json()["value"] == {"n": 7}
    position = each.get(f"/tables/{guarded}/count").json()["position"]
    write_rows(secure.internal, guarded, {"key-0007": "8"})
    with each.stream("GET", f"/tables/{guarded}/changes", params={"since": position}) as response:
        events = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))
        assert next(event["value"] for event in events if event.get("key") == "key-0007") == 8


def shared(client: httpx.Client, topic: str) -> bool:
    """Whether two instances share the partitions, and this one is ready."""
    partitions = client.get(f"/tables/{topic}").json()["partitions"]
    owners = {each["instances"][0] for each in partitions if each["instances"]}
    return len(owners) == 2 and client.get("/ready").status_code == 200


@pytest.mark.long
def test_instances_with_different_secrets(
    onceflow_broker: str, topic: str, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that leads the group has all partitions; the other one is not ready, and says why. A second secret of
    both lets them share."""
    write_rows(onceflow_broker, topic, numbers(10))
    one, two = (f"a-secret-of-instance-{number}" for number in range(2))
    first = serve(topic, peer_secrets=[one], instances=f"group-{topic}")
    second = serve(topic, peer_secrets=[two], instances=f"group-{topic}", ready=False)
    wanted = "its leader is no instance with a secret of this one; give all instances the same --peer-secret-file"
    wait_until(lambda: wanted in second.get("/ready").text, 30, lambda: second.get("/ready").text)
    assert second.get(f"/tables/{topic}/count").status_code == 503
    assert first.get(f"/tables/{topic}/count").json()["count"] == 10
    assert "1 member has no secret of this instance" in caplog.text
    third = serve(topic, peer_secrets=[two, one], instances=f"group-{topic}", ready=False)
    assert third.get(f"/tables/{topic}/count").status_code == 503  # it proves itself with its first secret
    fourth = serve(topic, peer_secrets=[one, two], instances=f"group-{topic}", ready=False)
    wait_until(lambda: all(shared(each, topic) for each in (first, fourth)), 30, lambda: first.get("/tables").text)
    for client in (first, fourth):
        assert client.get(f"/tables/{topic}/count").json()["count"] == 10


class Stranger(AbstractPartitionAssignor):  # type: ignore[misc]
    """A member of the group that is no instance: it claims to have all partitions at its own address."""

    name, version = _Assignor.name, _Assignor.version

    def __init__(self, topic: str, address: str) -> None:
        self.topic, self.address = topic, address
        self.seen: list[bytes] = []
        self.coordinator: Any = None

    def metadata(self, topics: Any) -> ConsumerProtocolSubscription:
        said = {"address": self.address, "restored": {self.topic: [0, 1, 2, 3]}, "begun": {self.topic: []}}
        known = {"partitions": {self.topic: 4}, "misplaced": [], "member": self.coordinator._generation.member_id}
        document = json.dumps({**said, **known}).encode()
        return ConsumerProtocolSubscription(0, sorted(topics), b"0" * 64 + document)

    def assign(self, cluster: Any, members: Any) -> dict[str, ConsumerProtocolAssignment]:
        decided = {"holders": {self.topic: [[self.address]] * 4}, "misplaced": [], "usual": 1}
        decided["generation"] = self.coordinator._generation.generation_id
        decided["members"] = [member.member_id for member in members]
        sent = b"0" * 64 + json.dumps(decided).encode()
        return {member.member_id: ConsumerProtocolAssignment(0, [], sent) for member in members}

    def on_assignment(self, assignment: Any, generation: int) -> None:
        self.seen.append(assignment.user_data)


@contextlib.contextmanager
def listening() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server that answers each request with a lie, and the headers of the requests that it got."""
    asked: list[dict[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(dict(self.headers))
            self.rfile.read(int(self.headers["content-length"]))
            body = b'{"places": [[["bGll"], [[[0, 9]], 0, 0, "", 4]]], "count": 7, "layout": [0, 0]}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.long
def test_without_proofs_a_stranger_is_believed(
    onceflow_broker: str, topic: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the next test looks for is there: instances that check no proof are broken on purpose."""
    monkeypatch.setattr(PeerSecrets, "_is_one_of", lambda *_, **__: True)
    with pytest.raises((AssertionError, KeyError)):
        test_a_stranger_in_the_group(onceflow_broker, topic, serve, "instance")


@pytest.mark.parametrize("first", ["instance", pytest.param("stranger", marks=pytest.mark.long)])
def test_a_stranger_in_the_group(onceflow_broker: str, topic: str, serve: Serve, first: str) -> None:
    """Whoever may read the group can join it. It is asked nothing, gets no token, and no answer of it is believed."""
    write_rows(onceflow_broker, topic, numbers(40))
    ended = threading.Event()
    with listening() as (address, asked):
        stranger = Stranger(topic, address)

        def belong() -> None:
            consumer = KafkaConsumer(
                bootstrap_servers=onceflow_broker,
                group_id=f"group-{topic}",
                partition_assignment_strategy=[stranger],
                enable_auto_commit=False,
                session_timeout_ms=10_000,
            )
            stranger.coordinator = consumer._coordinator
            consumer.subscribe([topic])
            while not ended.is_set():
                consumer.poll(100)
            consumer.close(autocommit=False)

        thread = threading.Thread(target=belong)

        def joined() -> None:
            thread.start()
            wait_until(lambda: stranger.seen, 30, "the stranger is in the group")

        try:
            if first == "stranger":
                joined()
            client = serve(topic, tokens=[TOKEN], instances=f"group-{topic}", ready=False)
            client.headers["Authorization"] = f"Bearer {TOKEN}"
            if first == "instance":
                wait_until(lambda: client.get("/ready").status_code == 200, 30, lambda: client.get("/ready").text)
                joined()
            else:
                wanted = "its leader is no instance with a secret"
                wait_until(lambda: wanted in client.get("/ready").text, 30, lambda: client.get("/ready").text)
                ended.set()  # it can keep instances from an assignment for as long as it is there
                thread.join(60)
                wait_until(lambda: client.get("/ready").status_code == 200, 30, lambda: client.get("/ready").text)
            for key, value in numbers(40).items():
                assert client.get(f"/tables/{topic}/keys/{key}").json()["value"] == json.loads(value)
            assert client.get(f"/tables/{topic}/count").json()["count"] == 40
            assert asked == []
        finally:
            ended.set()
            thread.join(60)


def test_without_read_on_the_topic(secure: Secure, guarded: str, serve: Serve) -> None:
    settings = ClientSettings(secure.servers, secure.options())
    grant(secure, [privileges(guarded)["group"]])
    with pytest.raises(PermissionDeniedError, match=guarded) as caught:
        serve(guarded, settings=settings)
    assert caught.value.next_step.startswith("grant READ on the topic: kafka-acls.sh")
    # What DESCRIBE shows is enough to begin; the first record cannot be read.
    grant(secure, [(ResourceType.TOPIC, guarded, AclOperation.DESCRIBE)])
    client = serve(guarded, settings=settings, ready=False)
    wanted = f"table {guarded}: this principal may not use the topic; grant READ on the topic: kafka-acls.sh"
    wait_until(lambda: wanted in str(client.get("/ready").json()["waiting_for"]), 30, lambda: client.get("/ready").text)
    refused = client.get(f"/tables/{guarded}/keys/key-0007")
    assert refused.status_code == 503
    assert "grant READ" in refused.json()["next_step"]
    assert SECRET not in refused.text


@pytest.mark.long
def test_without_read_on_the_group(
    secure: Secure, guarded: str, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    needed = privileges(guarded)
    grant(secure, [needed["topic"]])
    settings = ClientSettings(secure.servers, secure.options())
    client = serve(guarded, settings=settings, instances=f"group-{guarded}", ready=False)
    wanted = f"consumer group group-{guarded}: the broker refuses this user; grant READ on the group"
    wait_until(lambda: wanted in client.get("/ready").json()["waiting_for"], 30, lambda: client.get("/ready").text)
    assert client.get("/ready").status_code == client.get(f"/tables/{guarded}/keys/key-0007").status_code == 503
    assert client.get("/health").status_code == 200
    grant(secure, list(needed.values()))  # it need not be started again
    wait_until(lambda: client.get("/ready").status_code == 200, 30, lambda: client.get("/ready").text)
    assert client.get(f"/tables/{guarded}/keys/key-0007").json()["value"] == {"n": 7}
    assert caplog.text.count("grant READ on the group") == 1


@pytest.mark.long
def test_a_session_that_the_broker_refuses(onceflow_broker: str, topic: str, tmp_path: Path) -> None:
    """It could never be a member of the group, so it ends."""
    arguments = [topic, "--bootstrap-servers", onceflow_broker, "--instances", f"group-{topic}", "--session-timeout"]
    server = ServerProcess([*arguments, "3600", "--state-dir", str(tmp_path)], tmp_path / "log")
    server.launch()
    with contextlib.suppress(WaitedInVainError):
        wait_until(lambda: server.exit_code is not None, 60, "it ends")
    server.end()
    assert server.exit_code == 1
    said = (tmp_path / "log").read_text()
    assert "onceflow: The broker refuses --session-timeout 3600s" in said
    assert "group.min.session.timeout.ms" in said
    assert "Traceback" not in said


@pytest.mark.long
@pytest.mark.parametrize(
    "missing",
    ["fastapi", *(pytest.param(name, marks=pytest.mark.long) for name in ("uvicorn", "httptools", "aiohttp"))],
)
def test_without_the_packages_of_the_query_server(missing: str) -> None:
    """As after `pip install onceflow`: one line says what to install, and other commands work."""
    program = f"import sys; sys.modules[{missing!r}] = None; from onceflow.cli.main import main; main(sys.argv[1:])"
    done = [
        subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
        for arguments in (["table", "serve", "t", "--bootstrap-servers", "127.0.0.1:1"], ["table", "get", "--help"])
    ]
    wanted = f"onceflow: The query server needs the package {missing}\n  next step: pip install 'onceflow[serve]'\n"
    assert (done[0].returncode, done[0].stdout, done[0].stderr) == (1, "", wanted)
    assert done[1].returncode == 0, done[1].stderr
