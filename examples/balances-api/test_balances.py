"""The processor alone, in milliseconds; what the page asks for; at the end the whole service, with kills."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import balances_web
import pytest
from balances_api import Balances, balances_flow
from balances_web import BalancesWeb
from confluent_kafka import Producer

from onceflow.client.settings import ClientSettings
from onceflow.server.formats import Format
from onceflow.server.options import ServeOptions
from onceflow.server.process import QueryServer
from onceflow.testing import independent
from onceflow.testing.flow_driver import FlowDriver
from onceflow.testing.processor_driver import ProcessorDriver
from onceflow.testing.waiting import wait_until

TOKEN = "a-token-of-the-tests"

# ---- the flow ----------------------------------------------------------------------------------------


def test_movements_add_up() -> None:
    driver = ProcessorDriver(Balances())
    driver.send_many([("ada", {"amount": 40}), ("bob", {"amount": 3}), ("ada", {"amount": 12})])
    driver.send("ada", {"amount": -2})
    found = {key: (row["balance"], row["count"]) for key, row in driver.states.items()}
    assert found == {"ada": (50, 3), "bob": (3, 1)}
    assert [record.value["balance"] for record in driver.outputs if record.key == "ada"] == [40, 52, 50]


@pytest.mark.integration
def test_the_table_has_what_the_statements_say(onceflow_spark: Any) -> None:
    flow = FlowDriver(balances_flow, partitions=2)
    flow.send_many("movements", [("ada", {"amount": 40}), ("bob", {"amount": 3}), ("ada", "no JSON")])
    flow.send("movements", "bob", {"amount": -3})
    flow.send("movements", "bob", {"close": True})
    assert flow.table("balances") == {"ada": {"balance": 40, "count": 1, "through": 0}}
    assert [each.value for each in flow.read("statements") if each.key == "bob"][-1] == {"closed": True}
    assert [each.value for each in flow.read("rejected")] == [b"no JSON"]


def test_a_row_says_up_to_which_movement_it_goes() -> None:
    driver = ProcessorDriver(Balances())
    driver.send("ada", {"amount": 40})
    first = driver.state("ada")["through"]
    driver.send("ada", {"amount": 2})
    assert driver.state("ada")["through"] > first


def test_an_account_without_money_can_be_closed() -> None:
    driver = ProcessorDriver(Balances(), on_error="dead-letter")
    driver.send("ada", {"amount": 40})
    driver.send("ada", {"close": True})
    assert len(driver.dead_letters) == 1
    driver.send_many([("ada", {"amount": -40}), ("ada", {"close": True})])
    assert driver.states == {}
    driver.send("ada", {"amount": 1})
    assert driver.state("ada")["count"] == 1


@pytest.mark.parametrize(
    "key, value, error",
    [
        ("ada", {"amount": 0}, "ValueError"),
        ("ada", {"amount": 1_000_000_001}, "ValueError"),
        ("ada", {"amount": "5"}, "TypeError"),
        ("ada", {"amount": True}, "TypeError"),
        ("ada", {}, "KeyError"),
        ("ada", 5, "TypeError"),
        ("ada", None, "TypeError"),
        ("ada", b'{"amount"', "JSONDecodeError"),
        ("a/b", {"amount": 5}, "ValueError"),
    ],
)
def test_what_is_no_movement_is_rejected(key: str, value: Any, error: str) -> None:
    driver = ProcessorDriver(Balances(), on_error="dead-letter")
    driver.send(key, value)
    driver.send("ada", {"amount": 5})
    assert driver.state("ada")["balance"] == 5
    (dead_letter,) = driver.dead_letters
    assert dict(dead_letter.headers)["onceflow.error.class"] == error.encode()


# ---- the page ----------------------------------------------------------------------------------------


class Stack:
    """A table that is served, and the server of the page. Rows are written as the flow writes them."""

    def __init__(self, bootstrap: str, table: str, movements: str, folder: Path) -> None:
        self.bootstrap, self.table, self.movements = bootstrap, table, movements
        options = {"settings": ClientSettings(bootstrap), "state_dir": folder, "port": 0, "tokens": [TOKEN]}
        self.instance = QueryServer(ServeOptions({table: Format()}, **options))
        self.instance.open()
        self.producer = Producer({"bootstrap.servers": bootstrap, "partitioner": "murmur2_random"})
        # Nobody listens at the first address: every question may have to go to the other instance.
        urls = ["http://127.0.0.1:1", self.instance.url]
        self.web = BalancesWeb(0, urls, self.producer, movements, TOKEN)
        self.port = self.web.server_address[1]
        self._threads = [threading.Thread(target=each) for each in (self.instance.run, self.web.serve_forever)]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.ask(f"/tables/{table}/count")[0] == 200, 30, "the instance answers")

    def write(self, account: str, balance: int, through: int) -> None:
        self.producer.produce(self.table, json.dumps({"balance": balance, "through": through}), account)
        assert not self.producer.flush(30)

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any, http.client.HTTPMessage]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers

    def events(self, count: int, last: str = "") -> list[tuple[str, str, Any]]:
        """The next events of a stream of changes: kind, id and document."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request("GET", f"/tables/{self.table}/changes", headers={"Last-Event-ID": last} if last else {})
            answer = connection.getresponse()
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            found = []
            for _ in range(count):
                fields = dict(answer.readline().decode().strip().split(": ", 1) for _ in range(3))
                assert answer.readline() == b"\n"
                found.append((fields["event"], fields["id"], json.loads(fields["data"])))
            return found

    def close(self) -> None:
        self.web.shutdown()
        self.web.server_close()
        self.instance.stop()
        for thread in self._threads:
            thread.join(30)


@pytest.fixture
def stack(onceflow_broker: str, make_topic: Callable[..., str], tmp_path: Path) -> Iterator[Stack]:
    table, movements = make_topic("balances", 2, cleanup_policy="compact"), make_topic("movements", 2)
    with closing(Stack(onceflow_broker, table, movements, tmp_path / "copies")) as found:
        yield found


@pytest.mark.integration
def test_what_the_page_asks_for(stack: Stack) -> None:
    status, page, headers = stack.ask("/")
    assert (status, headers["Content-Type"]) == (200, "text/html")
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert b"http" not in page.replace(b"<html", b"")  # nothing of another host

    ((kind, begin, _),) = stack.events(1)
    assert kind == "position"
    status, placed, _ = stack.ask("/movements", {"account": "ada", "amount": 5}, **{"Content-Type": "application/json"})
    assert status == 202
    (written,) = independent.read_topic(stack.bootstrap, stack.movements)
    assert json.loads(placed) == {"partition": written.partition, "offset": written.offset}
    assert (written.key, json.loads(written.value or b"")) == (b"ada", {"amount": 5})
    stack.write("ada", 5, written.offset)
    # The stream continues where the first one ended, and its ids are positions that questions may demand.
    _, (kind, position, change) = stack.events(2, begin)
    assert (kind, change["key"], change["value"]) == ("change", "ada", {"balance": 5, "through": written.offset})
    status, found, headers = stack.ask(f"/tables/{stack.table}/keys/ada?min_position={position}")
    assert (status, json.loads(found)["value"]["balance"]) == (200, 5)
    assert headers["Onceflow-Position"] == json.loads(found)["position"]
    assert headers["Answered-By"] == stack.instance.url
    status, missing, _ = stack.ask(f"/tables/{stack.table}/keys/nobody")
    assert (status, sorted(json.loads(missing)["lag"])) == (404, ["ms", "records"])


@pytest.mark.integration
def test_others_are_refused(stack: Stack) -> None:
    """Pages of other origins, and hosts that only lead here; and what is no movement."""
    of_json = {"Content-Type": "application/json"}
    movement = {"account": "ada", "amount": 5}
    assert stack.ask("/movements", movement, **{"Content-Type": "text/plain"})[0] == 404
    assert stack.ask("/movements", movement, Host="evil.example", **of_json)[0] == 404
    assert stack.ask("/", Host=f"evil.example:{stack.port}")[0] == 403
    assert stack.ask("/metrics")[0] == stack.ask("/peer/x/get", movement, **of_json)[0] == 404
    for wrong in ([], {"account": "ada"}, {"account": "ada", "amount": "much"}, {"account": "x" * 2_000, "amount": 1}):
        assert stack.ask("/movements", wrong, **of_json)[0] == 400
    assert independent.read_topic(stack.bootstrap, stack.movements) == []
    stack.web.instances = ["http://127.0.0.1:1"]
    assert stack.ask(f"/tables/{stack.table}/count")[0] == 503


# A visitor: writes a movement when the page has shown a balance, and tells again and again what it sees.
VISITOR = """<script>
let wrote = false;
setInterval(() => {
  if (!wrote && at("balance").textContent.includes(": 40 cents")) { wrote = true; at("move").requestSubmit(); }
  fetch("/seen", { method: "POST", body: document.body.innerText });
}, 100);
</script></body>"""


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_the_page_in_a_browser(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.html"
    text = balances_web.PAGE.read_text().replace("/tables/balances", f"/tables/{stack.table}")
    page.write_text(text.replace('"balances:"', f'"{stack.table}:"').replace("</body>", VISITOR))
    monkeypatch.setattr(balances_web, "PAGE", page)
    seen = [""]
    post = balances_web.Handler.do_POST

    def watched(handler: Any) -> None:
        if handler.path == "/seen":
            seen.append(handler.rfile.read(int(handler.headers["Content-Length"])).decode())
            handler._say(200, {})
        else:
            post(handler)

    monkeypatch.setattr(balances_web.Handler, "do_POST", watched)
    stack.write("ada", 40, 0)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    browser = subprocess.Popen([*command, f"http://127.0.0.1:{stack.port}/"], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: "not yet in the balance" in seen[-1], 30, lambda: seen[-1])
        assert "ada: 40 cents" in seen[-1]
        (written,) = independent.read_topic(stack.bootstrap, stack.movements)
        stack.write("bob", 7, 0)
        stack.write("ada", 45, written.offset)
        wait_until(lambda: "is in the balance" in seen[-1] and "ada: 45 cents" in seen[-1], 30, lambda: seen[-1])
        assert "bob\t7\t" in seen[-1]
        assert "Stream: connected" in seen[-1]
        assert f"answered by {stack.instance.url}" in seen[-1]
    finally:
        browser.kill()
        browser.wait()


# ---- the whole service -------------------------------------------------------------------------------


def run_demo(bootstrap: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "onceflow.cli.main", "demo", "tables", "--bootstrap-servers", bootstrap, *options]
    environment = {**os.environ, "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1"}
    answer = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, env=environment)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    result: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    assert (result["demo"], result["wrong"], result["stale"], result["missing_cents"]) == ("tables", 0, 0, 0)
    assert answer.stderr.count("SIGKILL") == result["kills"]
    return result


@pytest.mark.integration
@pytest.mark.faults
@pytest.mark.long
def test_killed(onceflow_broker: str) -> None:
    result = run_demo(onceflow_broker, "--seconds", "3", "--kills", "1")
    assert result["kills"] == 2
    assert result["answers"] > 1_000
    assert result["longest_silence_s"] < 10


@pytest.mark.integration
@pytest.mark.faults
@pytest.mark.long
def test_killed_more_often(onceflow_broker: str) -> None:
    result = run_demo(onceflow_broker, "--seconds", "60", "--kills", "3")
    assert result["kills"] == 6
    assert result["answers"] > 10_000
