"""What docs/connect.md says that each command needs is enough, and a missing right is named, with the command that adds
it: on a broker with TLS, SCRAM and ACLs, for principals that have exactly a row of the table, or all of it but one."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from confluent_kafka import KafkaException, Producer

from onceflow.admin import progress_file
from onceflow.admin.writer import Row, Writer
from onceflow.claim_check.objects import ObjectStore
from onceflow.cli.main import cli
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.client.transactions import Transactions
from onceflow.clock import clock_ms
from onceflow.driver import progress_log
from onceflow.errors import PermissionDeniedError
from onceflow.protocol.names import Names
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress
from onceflow.state import rows
from onceflow.testing.secure import SECRET, Secure, admin, connected, grant
from onceflow.testing.waiting import wait_until

sys.path.insert(0, str(Path(__file__).parent))
try:
    from permission_table import Right, table
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.integration

RIGHTS = table()
ORIGIN = "orders/0/17"
PARKED_HEADERS = [("onceflow.error.class", b"KeyError"), ("onceflow.attempt", b"3"), ("onceflow.key", b"k")]


@dataclass(frozen=True)
class Case:
    """A command that is run with the rights of a row.

    Args:
        arguments: with placeholders as the table has them.
        says: what is in its output when it works.
        denied: what is said without a right; None: a PermissionDeniedError with the command that adds it.
        not_asked_for: rights without which it works here, too.
    """

    arguments: str
    says: str
    denied: Callable[[Right], str] | None = None
    not_asked_for: tuple[Right, ...] = ()


def not_permitted(right: Right) -> str:
    return f"not permitted: {right.operation} on {right.kind} {right.name}"


def no_flow(right: Right) -> str:
    return right.added_by if right.operation == "DESCRIBE" else "permission to read"


def not_listed(right: Right) -> str:
    return "There are no" if right.operation == "DESCRIBE" else no_flow(right)


def not_known(right: Right) -> str:
    return right.added_by if right.kind == "topic" else "lacks DESCRIBE on all transactional ids"


def looks_first(right: Right) -> str:
    return right.added_by.replace("Write --transactional", "Describe --transactional")


CASES = {
    "claim-check collect": Case("--store STORE --topic TOPIC --dry-run", "References: TOPIC 0"),
    "consume": Case("TOPIC", "row-0"),
    "peek": Case("TOPIC", "row-0"),
    "parked list": Case("PARKED", ORIGIN),
    "parked show": Case(f"PARKED {ORIGIN}", "KeyError"),
    "parked retry": Case("PARKED --all --to RETRY", "1 record went"),
    "parked drop": Case("PARKED --all --yes", "1 record dropped"),
    "produce": Case("TOPIC --json", "1 record written"),
    "progress export": Case("FLOW", '"batch_id": 3'),
    "progress import": Case("FLOW FILE --yes", "is moved"),
    "progress import --state delete": Case("FLOW FILE --state delete --yes", "4 rows of its tables deleted"),
    "reset": Case("FLOW --yes", "was at batch 3"),
    "reset --to": Case("FLOW --to earliest --yes", "is moved"),
    "reset --to --state delete": Case("FLOW --to earliest --state delete --yes", "4 rows of its tables deleted"),
    "status": Case(
        "FLOW", "a lag of 0 records", not_permitted, not_asked_for=(Right("DESCRIBE", "group", "FLOW"),)
    ),  # it has one source
    "table count": Case("TABLE --state-dir FOLDER", "2"),
    "table describe": Case("TABLE", "committed by batch 3", no_flow),
    "table get": Case("TABLE row-1 --state-dir FOLDER", "row-1"),
    "table list": Case("", "FLOW", not_listed),
    "table prefix": Case("TABLE row --state-dir FOLDER", "row-1"),
    "table range": Case("TABLE --state-dir FOLDER", "row-1"),
    "table repartition": Case(
        "FLOW TABLE --partitions COUNT",
        "Table TABLE went from",
        not_asked_for=(Right("READ", "topic", "SOURCE"),),  # the group keeps its offsets then
    ),
    "table tail": Case("TABLE --from-start --limit 1 --state-dir FOLDER", "row-"),
    "topic create": Case("TOPIC --partitions 1", "Topic TOPIC created"),
    "topic delete": Case("TOPIC --yes", "deleted"),
    "topic describe": Case("TOPIC", "PARTITION"),
    "topic list": Case("", "TOPIC", not_listed),
    "transactions describe": Case("ID --topic TOPIC", "Ongoing"),
    "transactions list": Case(
        "--topic TOPIC", "Ongoing", not_known, not_asked_for=(Right("DESCRIBE", "topic", "__transaction_state"),)
    ),
    "transactions abort": Case("ID --topic TOPIC --yes", "Aborted", looks_first),
    "verify": Case("FLOW --id record --partitioner any", "nothing wrong"),
}


#: Rows that other tests grant.
ELSEWHERE = {
    "taking over a flow": ("test_security.py", "test_least_privileges_over_tls"),
    "a flow": ("test_security.py", "test_least_privileges_over_tls"),
    "a flow with state, in addition": ("test_security.py", "test_privileges_of_a_flow_with_state"),
    "a flow with dead letters or late records, in addition": ("test_security.py", "test_privileges_of_dead_letters"),
    "a flow that joins with a table, in addition": ("test_security.py", "test_privileges_of_a_flow_that_joins"),
    "a flow that writes to another system": ("test_security.py", "test_privileges_without_an_output_in_kafka"),
    "onceflow.peek": ("test_security.py", "test_privileges_of_a_look"),
    "onceflow.Table": ("test_security.py", "test_privileges_of_a_look"),
    "doctor": ("test_security.py", "test_the_doctor_names_each_missing_privilege"),
    "table serve": ("test_query_server_security.py", "test_least_privileges"),
    "table serve --instances": ("test_query_server_security.py", "test_least_privileges"),
    "`transactions abort` of one that hangs": ("test_open_transactions.py", "test_missing_permissions"),
}


@dataclass
class World:
    """What the commands find on the broker, for each row things of its own, and users: with all rights of a row, and
    without one of them."""

    secure: Secure
    tmp_path: Path
    names: dict[str, dict[str, str]]

    def user(self, label: str, without: int = -1) -> str:
        return f"u-{list(CASES).index(label)}-{without}"

    def rights(self, label: str) -> list[Right]:
        return [right.of(self.names[label]) for right in RIGHTS[label]]

    def run(self, label: str, user: str) -> Result:
        path = label.split(" --")[0]
        words = [*path.split(), *CASES[label].arguments.split()]
        words = [self.names[label].get(word, word) for word in words]
        # A call that is denied later has added partitions.
        self.names[label]["COUNT"] = str(int(self.names[label]["COUNT"]) + 1)
        options = [f"--option={name}={value}" for name, value in self.secure.options(user=user).items()]
        stdin = '{"value": "x"}' if path == "produce" else None
        return CliRunner().invoke(
            cli, [*words, "--bootstrap-servers", self.secure.servers, *options], standalone_mode=False, input=stdin
        )


@pytest.fixture(scope="module")
def world(secure: Secure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    found = World(secure, folder, {})
    for number, label in enumerate(CASES):
        placeholders = ("TOPIC", "SOURCE", "OUTPUT", "TABLE", "FLOW", "PARKED", "RETRY", "ID")
        found.names[label] = {each: f"{each.lower()}-{number}" for each in placeholders}
        found.names[label]["ID"] = f"onceflow.id-{number}"  # as if it were one of a flow
        found.names[label] |= {
            "FOLDER": str(folder / f"{number}"),
            "STORE": str(folder / "store"),
            "FILE": str(folder / f"{number}.json"),
            "COUNT": "3",
        }
    ObjectStore(str(folder / "store")).put(b"a value")
    _make_topics(found)
    grant(secure, [])
    _make_users(found)
    left_open = list(_fill(found))
    yield found
    for producer in left_open:
        with contextlib.suppress(KafkaException):  # a command has aborted it
            producer.abort_transaction(30)
    client = admin.AdminClient({"bootstrap.servers": secure.internal})  # other tests look at how it is made
    client.delete_topics([PROGRESS_TOPIC])[PROGRESS_TOPIC].result(30)
    wait_until(lambda: PROGRESS_TOPIC not in client.list_topics(timeout=10).topics, 30, "the progress topic is gone")


def _topics(world: World, label: str) -> set[str]:
    rights = [right for right in world.rights(label) if right.kind == "topic" and right.name[:2] != "__"]
    return {right.name for right in rights} - ({world.names[label]["TOPIC"]} if label == "topic create" else set())


def _make_topics(world: World) -> None:
    client = admin.AdminClient({"bootstrap.servers": world.secure.internal})
    new = [
        admin.NewTopic(name, 2, config={"cleanup.policy": "compact"} if name.startswith("table") else {})
        for label in CASES
        for name in _topics(world, label)
    ]
    for future in client.create_topics(new, operation_timeout=30).values():
        future.result(30)


def _make_users(world: World) -> None:
    client = admin.AdminClient({"bootstrap.servers": world.secure.internal})
    all_acls, users = [], []
    for label in CASES:
        rights = world.rights(label)
        for without in range(-1, len(rights)):
            user = world.user(label, without)
            users.append(user)
            for n, right in enumerate(rights):
                if n != without:
                    kind, name, operation = right.acl
                    all_acls.append(
                        admin.AclBinding(
                            kind, name, admin.ResourcePatternType.LITERAL, f"User:{user}", "*", operation,
                            admin.AclPermissionType.ALLOW,
                        )
                    )  # fmt: skip
    info = admin.ScramCredentialInfo(admin.ScramMechanism.SCRAM_SHA_512, 4096)
    upserts = [admin.UserScramCredentialUpsertion(user, info, SECRET.encode()) for user in users]
    for future in client.alter_user_scram_credentials(upserts).values():
        future.result(30)
    for future in client.create_acls(all_acls).values():
        future.result(30)
    connected(world.secure, world.secure.options(user=users[-1])).close()


def _fill(world: World) -> Iterator[Any]:
    """Records, progress and open transactions of every row."""
    servers = world.secure.internal
    plain = Producer({"bootstrap.servers": servers, "partitioner": "murmur2_random"})
    with closing(Cluster(ClientSettings(servers))) as cluster:
        progress_log.ensure_topic(cluster, Deadline(30, "a test"))
        for label in CASES:
            topics, names = _topics(world, label), world.names[label]
            if names["PARKED"] in topics:
                plain.produce(names["PARKED"], b"{}", ORIGIN.encode(), headers=PARKED_HEADERS)
            if names["FLOW"] in str(world.rights(label)) or label.startswith(
                ("progress", "table describe", "table list")
            ):
                _commit(cluster, world, label)
            else:
                for topic, n in itertools.product(topics & {names["TOPIC"], names["TABLE"]}, range(2)):
                    plain.produce(topic, b"{}", b"row-%d" % n, n)
            assert plain.flush(30) == 0
            if label.startswith("transactions"):
                producer = Producer({"bootstrap.servers": servers, "transactional.id": names["ID"]})
                producer.init_transactions(30)
                producer.begin_transaction()
                producer.produce(names["TOPIC"], b"open", partition=0)
                assert producer.flush(30) == 0
                yield producer


def _commit(cluster: Cluster, world: World, label: str) -> None:
    """A batch of a flow that has copied its source, with a row in each partition of its table."""
    deadline = Deadline(30, "a test")
    topics, names = _topics(world, label), world.names[label]
    written = [name for name in (names["SOURCE"], names["OUTPUT"]) if name in topics]
    state = [name for name in (names["TABLE"], f"{names['TABLE']}-internal") if name in topics]
    transactions = Transactions(cluster, f"onceflow.{names['FLOW']}")
    transactions.init(deadline)
    identity = transactions.begin(deadline)
    writer = Writer(cluster, transactions, dict.fromkeys([*written, *state], 1_000_000), deadline)
    for topic, partition in itertools.product([*written, *state], range(2)):
        key, row = b"row-%d" % partition, Row(b"{}", clock_ms())
        if topic.endswith("-internal"):
            key, row = rows.map_key(key, b"map", b"1"), row._replace(value=rows.pack(b"entry"))
        writer.write(topic, partition, [(key, row)])
    ends = {topic: {0: 0, 1: 0} for topic in state}
    for (topic, partition), done in writer.finish().items():
        if topic in ends:
            ends[topic][partition] = done.end_offset
    offsets = {topic: {0: 2, 1: 2} for topic in written[:1]}  # behind the marker of this transaction
    progress = Progress(
        names["FLOW"],
        3,
        offsets,
        {each: cluster.topic(each, deadline).topic_id for each in [*offsets, *state]},
        clock_ms(),
        outputs=tuple(written[1:]),
        changelogs=ends,
        producer_id=identity.producer_id,
        producer_epoch=identity.producer_epoch,
    )
    progress_log.write_progress(cluster, transactions, Names(names["FLOW"]), progress, offsets, deadline)
    transactions.commit(deadline, flow=names["FLOW"], doing="tested")
    Path(names["FILE"]).write_text(json.dumps(progress_file.export(progress, names["FLOW"], clock_ms())))


@pytest.mark.parametrize("label", CASES)
def test_the_rights_of_its_row_are_enough(world: World, label: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without one of them, nothing is done, and it is said which one. With all of them, the command works."""
    case = CASES[label]
    for n, right in enumerate(world.rights(label)):
        if RIGHTS[label][n] in case.not_asked_for:
            continue
        caplog.clear()
        answer = world.run(label, world.user(label, n))
        said = f"{answer.output}\n{answer.exception or ''}\n{caplog.text}"
        assert SECRET not in said
        if case.denied is None:
            assert isinstance(answer.exception, PermissionDeniedError), said
            assert right.added_by in answer.exception.next_step, said
        else:
            assert case.denied(right) in said, said
    answer = world.run(label, world.user(label))
    assert answer.exception is None, answer.exception
    assert (answer.return_value or 0) == 0
    says = re.sub("[A-Z]{2,}", lambda found: world.names[label].get(found[0], found[0]), case.says)
    assert says in answer.output, answer.output


def test_each_command_is_in_the_table() -> None:
    """Commands that take a connection; what each row says is tried here, or there."""

    def connecting(group: click.Group, *path: str) -> Iterator[str]:
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if isinstance(command, click.Group):
                yield from connecting(command, *path, name)
            elif any("--option" in parameter.opts for parameter in command.params):
                yield " ".join((*path, name))

    of_commands = {label.split(" --")[0] for label in RIGHTS}
    assert set(connecting(cli)) <= of_commands
    assert set(RIGHTS) == {*CASES, *ELSEWHERE}
    for file, test in ELSEWHERE.values():
        assert f"def {test}(" in (Path(__file__).parent / file).read_text(), test
