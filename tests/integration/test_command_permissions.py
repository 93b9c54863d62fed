"""What docs/connect.md says that each command needs is enough, and a missing right is named, with the command that adds
it: on a broker with TLS, SCRAM and ACLs, for principals that have exactly a row of the table, or all of it but one."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from confluent_kafka import KafkaException

from onceflow.cli.main import cli
from onceflow.errors import PermissionDeniedError
from onceflow.protocol.progress import PROGRESS_TOPIC
from onceflow.testing.waiting import wait_until
from onceflow_workshop.testing.secure import SECRET, Secure, admin, grant

sys.path.insert(0, str(Path(__file__).parent))
try:
    from command_world import ORIGIN, RIGHTS, CommandWorld
    from permission_table import Right
finally:
    sys.path.pop(0)

pytestmark = [pytest.mark.integration, pytest.mark.long]


@dataclass(frozen=True)
class Case:
    """A command that is run with the rights of a row.

    Args:
        says: what is in its output when it works.
        denied: what is said without a right; None: a PermissionDeniedError with the command that adds it.
        not_asked_for: rights without which it works here, too.
    """

    says: str
    denied: Callable[[Right], str] | None = None
    not_asked_for: tuple[Right, ...] = ()


def not_permitted(right: Right) -> str:
    return f"not permitted: {right.operation} on {right.kind} {right.name}"


def without_tables(right: Right) -> str:
    """Without READ, this principal does not have DESCRIBE either, which is asked for first."""
    said = not_permitted(right)
    is_asked_before = right.name.startswith(("table-", "letters-")) and not right.name.endswith("-replayed")
    return said.replace("READ", "DESCRIBE") if is_asked_before else said


def no_flow(right: Right) -> str:
    return right.added_by if right.operation == "DESCRIBE" else "permission to read"


def not_listed(right: Right) -> str:
    return "There are no" if right.operation == "DESCRIBE" else no_flow(right)


def not_known(right: Right) -> str:
    return right.added_by if right.kind == "topic" else "lacks DESCRIBE on all transactional ids"


def looks_first(right: Right) -> str:
    return right.added_by.replace("Write --transactional", "Describe --transactional")


CASES = {
    "claim-check collect": Case("References: TOPIC 0"),
    "compare": Case("nothing differs", not_asked_for=(Right("READ", "topic", "SOURCE"),)),
    "consume": Case("row-0"),
    "fork": Case("is a copy of", not_asked_for=(Right("READ", "topic", "SOURCE"),)),  # as below
    "peek": Case("row-0"),
    "parked list": Case(ORIGIN),
    "parked show": Case("KeyError"),
    "parked retry": Case("1 record went"),
    "parked drop": Case("1 record dropped"),
    "parked replay": Case("1 record went"),
    "produce": Case("1 record written"),
    "progress export": Case('"batch_id": 3'),
    "progress import": Case("is moved"),
    "progress import --state delete": Case("4 rows of its tables deleted"),
    "promote": Case(
        "has taken the place of",
        not_asked_for=(
            Right("READ", "topic", "SOURCE"),  # as below
            *(
                Right("READ", "topic", table + part) for table in ("TABLE", "NEW-TABLE") for part in ("", "-internal")
            ),  # it has no timers
        ),
    ),
    "reset": Case("was at batch 3"),
    "reset --to": Case("is moved"),
    "reset --to --state delete": Case("4 rows of its tables deleted"),
    "status": Case(
        "a lag of 0 records", not_permitted, not_asked_for=(Right("DESCRIBE", "group", "FLOW"),)
    ),  # it has one source
    "status --tables": Case("IN KAFKA", without_tables, not_asked_for=(Right("DESCRIBE", "group", "FLOW"),)),
    "table count": Case("2"),
    "table describe": Case("committed by batch 3", no_flow),
    "table get": Case("row-1"),
    "table list": Case("FLOW", not_listed),
    "table prefix": Case("row-1"),
    "table range": Case("row-1"),
    "table repartition": Case(
        "Table TABLE went from",
        not_asked_for=(Right("READ", "topic", "SOURCE"),),  # the group keeps its offsets then
    ),
    "table tail": Case("row-"),
    "topic create": Case("Topic TOPIC created"),
    "topic delete": Case("deleted"),
    "topic describe": Case("PARTITION"),
    "topic list": Case("TOPIC", not_listed),
    "transactions describe": Case("Ongoing"),
    "transactions list": Case("Ongoing", not_known, not_asked_for=(Right("DESCRIBE", "topic", "__transaction_state"),)),
    "transactions abort": Case("Aborted", looks_first),
    "verify": Case("nothing wrong"),
}


#: Rows that other tests grant.
ELSEWHERE = {
    "taking over a flow": ("test_security.py", "test_least_privileges_over_tls"),
    "a flow": ("test_security.py", "test_least_privileges_over_tls"),
    "a flow with state, in addition": ("test_security.py", "test_privileges_of_a_flow_with_state"),
    "a flow with dead letters or late records, in addition": ("test_security.py", "test_privileges_of_dead_letters"),
    "a flow with `standby=True`, in addition": ("test_security.py", "test_privileges_of_a_standby"),
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
    """Users for each row: with all of its rights, and without one of them."""

    secure: Secure
    commands: CommandWorld

    def user(self, label: str, without: int = -1) -> str:
        return f"u-{list(CASES).index(label)}-{without}"

    def rights(self, label: str) -> list[Right]:
        return [right.of(self.commands.names[label]) for right in RIGHTS[label]]

    def run(self, label: str, user: str) -> Result:
        options = [f"--option={name}={value}" for name, value in self.secure.options(user=user).items()]
        words = [*self.commands.words(label), "--bootstrap-servers", self.secure.servers, *options]
        stdin = '{"value": "x"}' if label == "produce" else None
        return CliRunner().invoke(cli, words, standalone_mode=False, input=stdin)


@pytest.fixture(scope="module")
def world(secure: Secure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    found = World(secure, CommandWorld(secure.internal, tmp_path_factory.mktemp("world")))
    grant(secure, [])
    _make_users(found)
    yield found
    for producer in found.commands.left_open:
        with contextlib.suppress(KafkaException):  # a command has aborted it
            producer.abort_transaction(30)
    client = admin.AdminClient({"bootstrap.servers": secure.internal})  # other tests look at how it is made
    client.delete_topics([PROGRESS_TOPIC])[PROGRESS_TOPIC].result(30)
    wait_until(lambda: PROGRESS_TOPIC not in client.list_topics(timeout=10).topics, 30, "the progress topic is gone")


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

    def unknown() -> list[str]:
        """Users that the broker has not learnt of yet: the controller has answered."""
        known = client.describe_user_scram_credentials().result(30)
        return [user for user in users if user not in known]

    wait_until(lambda: not unknown(), 30, "the broker knows the users")


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
            assert isinstance(answer.exception, PermissionDeniedError), f"{right}: {said}"
            assert right.added_by in answer.exception.next_step, said
        else:
            assert case.denied(right) in said, said
    answer = world.run(label, world.user(label))
    assert answer.exception is None, answer.exception
    assert (answer.return_value or 0) == 0
    says = re.sub("[A-Z]{2,}", lambda found: world.commands.names[label].get(found[0], found[0]), case.says)
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
