"""The demo `balances`: what it expects, that its auditors see what is wrong, and how local state is lost."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from confluent_kafka import KafkaError, KafkaException

import onceflow
from onceflow.cli.demo import demo
from onceflow.demos import balances_data as data
from onceflow.demos.audit import Message
from onceflow.demos.balances import READ_BACK, Balances, run
from onceflow.demos.balances_data import Balance
from onceflow.demos.chain import Audit, Choices
from onceflow.demos.deposits_data import Deposit, generate, identify
from onceflow.demos.display import balances_table, print_result
from onceflow.demos.harness import Death, Service, _delete, plan_kills, plan_losses
from onceflow.demos.reading import GroupLag
from onceflow.demos.services import balances as service
from onceflow.errors import OptionError
from onceflow.wire.partitioners import key_partitions

SEED = 42
PARTITIONS = 4
Records = list[Message]


def deposits(count: int = 3000) -> list[Deposit]:
    return list(generate(SEED, count))


# ---- expected results --------------------------------------------------------------------------------


def test_balances_are_the_sums_of_valid_deposits() -> None:
    expected = data.expected_balances(deposits())
    valid = [deposit for deposit in deposits() if deposit.cause is None]
    assert sum(balance.balance for balance in expected.values()) == sum(deposit.amount for deposit in valid)
    assert {key: balance.count for key, balance in expected.items()} == Counter(deposit.key for deposit in valid)


def test_the_last_statement_of_an_account_is_its_balance() -> None:
    last = {record.key: json.loads(record.value) for record in data.expected_statements(deposits())}
    expected = data.expected_balances(deposits())
    assert {key: Balance(value["balance"], value["count"]) for key, value in last.items()} == expected


def test_a_statement_tells_the_id_of_its_deposit() -> None:
    records = list(data.expected_statements(deposits()))
    assert [identify(record.value) for record in records] == [record.identity for record in records]


def test_the_service_makes_these_statements_and_balances() -> None:
    """The processor, without Kafka and Spark, over batches of 500."""
    rows: dict[bytes, bytes] = {}
    statements: dict[str, bytes] = {}
    processor = service.Balance()
    valid = [deposit for deposit in deposits() if deposit.cause is None]
    for first in range(0, len(valid), 500):
        by_key: dict[bytes, list[onceflow.Record]] = {}
        for deposit in valid[first : first + 500]:
            value = processor.value.decode(deposit.value)
            by_key.setdefault(deposit.key, []).append(onceflow.Record(deposit.key, value))
        for key, records in by_key.items():
            for record in processor.process(key, records, _State(rows, key)):
                statements[record.value["id"]] = processor.output.encode(record.value)
    assert statements == {record.identity: record.value for record in data.expected_statements(deposits())}
    assert data.audit_rows("rows", data.expected_balances(deposits()), rows.items()).holds


class _State:
    def __init__(self, rows: dict[bytes, bytes], key: bytes) -> None:
        self._rows = rows
        self._key = key

    def get(self, default: object) -> object:
        return json.loads(self._rows[self._key]) if self._key in self._rows else default

    def put(self, value: object) -> None:
        self._rows[self._key] = json.dumps(value).encode()


# ---- auditor of rows ---------------------------------------------------------------------------------


def _rows() -> list[tuple[bytes, bytes]]:
    return [(key, _value(balance)) for key, balance in data.expected_balances(deposits()).items()]


def _value(balance: Balance) -> bytes:
    return f'{{"balance":{balance.balance},"count":{balance.count}}}'.encode()


def _audit_rows(rows: list[tuple[bytes, bytes]]) -> data.BalanceFindings:
    return data.audit_rows("local store", data.expected_balances(deposits()), rows)


def test_right_rows_pass() -> None:
    findings = _audit_rows(_rows())
    assert findings.holds
    assert findings.found == findings.expected == len(_rows())
    assert findings.total == findings.expected_total > 0


@pytest.mark.parametrize(
    "value",
    [
        b'{"balance":1,"count":1}',
        b'{"balance":1.0,"count":1}',
        b'{"balance":1}',
        b'{"balance":1,"count":1,"more":1}',
        b"[1, 2]",
        b"7",
        b"\xff",
        b"",
    ],
)
def test_a_wrong_row_is_seen(value: bytes) -> None:
    rows = _rows()
    rows[3] = (rows[3][0], value)
    findings = _audit_rows(rows)
    assert findings.wrong == 1
    assert rows[3][0].decode() in findings.examples[0]


def test_a_balance_that_is_off_by_a_cent_is_seen() -> None:
    rows = _rows()
    balance = data.decoded(rows[3][1])
    assert balance is not None
    rows[3] = (rows[3][0], _value(Balance(balance.balance + 1, balance.count)))
    findings = _audit_rows(rows)
    assert findings.wrong == 1
    assert findings.total == findings.expected_total + 1


def test_missing_doubled_and_foreign_accounts_are_seen() -> None:
    rows = _rows()
    assert _audit_rows(rows[1:]).wrong == 1
    assert _audit_rows([*rows, rows[0]]).wrong == 1
    assert _audit_rows([*rows, (b"acc-99999", rows[0][1])]).wrong == 1
    assert _audit_rows([]).wrong == len(rows)


# ---- auditor of the table topic ----------------------------------------------------------------------


def _table() -> Records:
    """The table topic of a flow whose batches had 300 records."""
    valid = [deposit for deposit in deposits() if deposit.cause is None]
    keys = sorted({deposit.key for deposit in valid})
    places = dict(zip(keys, key_partitions(pa.array(keys, pa.binary()), PARTITIONS).tolist(), strict=True))
    balances: dict[bytes, Balance] = {}
    messages: Records = []
    offsets: Counter[int] = Counter()
    for first in range(0, len(valid), 300):
        changed = {}
        for deposit in valid[first : first + 300]:
            before = balances.get(deposit.key, Balance(0, 0))
            after = Balance(before.balance + deposit.amount, before.count + 1)
            balances[deposit.key] = changed[deposit.key] = after
        for key, balance in changed.items():
            messages.append(Message(places[key], offsets[places[key]], key, _value(balance)))
            offsets[places[key]] += 1
    return messages


def _audit_table(messages: Records) -> data.BalanceFindings:
    return data.audit_table("balances", deposits(), messages, partitions=PARTITIONS)


def _twice(messages: Records) -> tuple[int, int]:
    """Indexes of the last two records of a key."""
    key = messages[-1].key
    first = max(n for n, message in enumerate(messages[:-1]) if message.key == key)
    return first, len(messages) - 1


def test_a_right_table_passes_also_when_compacted() -> None:
    messages = _table()
    findings = _audit_table(messages)
    assert findings.holds
    assert findings.examples == []
    assert findings.found == findings.expected == len(data.expected_balances(deposits()))
    last = {message.key: message for message in messages}
    assert _audit_table(list(last.values())).holds


def _wrong_last(messages: Records) -> None:
    messages[-1] = messages[-1]._replace(value=b'{"balance":5,"count":1}')


def _wrong_between(messages: Records) -> None:
    first, _ = _twice(messages)
    balance = data.decoded(messages[first].value or b"")
    assert balance is not None
    messages[first] = messages[first]._replace(value=_value(Balance(balance.balance + 1, balance.count)))


def _ahead(messages: Records) -> None:
    messages[-1] = messages[-1]._replace(value=b'{"balance":5,"count":100000}')


def _back(messages: Records) -> None:
    first, second = _twice(messages)
    messages.append(messages[first]._replace(offset=messages[second].offset + 1))


def _again(messages: Records) -> None:
    messages.append(messages[-1]._replace(offset=messages[-1].offset + 1))


def _elsewhere(messages: Records) -> None:
    messages.append(messages[-1]._replace(partition=(messages[-1].partition + 1) % PARTITIONS, offset=10_000))


def _deleted(messages: Records) -> None:
    messages.append(messages[-1]._replace(offset=messages[-1].offset + 1, value=None))


def _deleted_for_a_while(messages: Records) -> None:
    _, second = _twice(messages)
    messages.insert(second, messages[second]._replace(value=None))


def _foreign(messages: Records) -> None:
    messages.append(Message(0, 10_000, b"acc-99999", b'{"balance":5,"count":1}'))


def _without_key(messages: Records) -> None:
    messages.append(Message(0, 10_000, None, b'{"balance":5,"count":1}'))


@pytest.mark.parametrize(
    "damage",
    [
        _wrong_last,
        _wrong_between,
        _ahead,
        _back,
        _again,
        _elsewhere,
        _deleted,
        _deleted_for_a_while,
        _foreign,
        _without_key,
    ],
)
def test_the_auditor_sees_every_kind_of_damage(damage: Callable[[Records], None]) -> None:
    messages = _table()
    damage(messages)
    findings = _audit_table(messages)
    assert not findings.holds
    assert findings.examples[0].startswith("balances: ")


def test_findings_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    findings = _audit_rows(_rows()[1:])
    print_result([balances_table([findings])], findings.examples)
    shown = capsys.readouterr().out
    assert f"{findings.expected_total:,}" in shown
    assert "is missing, must be" in shown


# ---- kills and lost state ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_every_plan_loses_state_that_is_there_and_is_read_back(seed: int, count: int) -> None:
    batches = 5 * (count + 1)
    kills = plan_losses(plan_kills(count, batches=batches, rng=random.Random(seed)), rng=random.Random(seed))
    assert len(kills) == count
    assert any(kill.loses_state for kill in kills)
    # The first kill, and so every one, comes after a committed batch.
    assert kills[0].step != "init"
    assert kills[0].batches >= 2
    # After the last loss, no kill before a batch that has read the state back was committed.
    last = max(n for n, kill in enumerate(kills) if kill.loses_state)
    assert all(kill.batches >= 3 for kill in kills[last + 1 :])
    assert sum(kill.batches + 1 for kill in kills) < batches
    again = plan_losses(plan_kills(count, batches=batches, rng=random.Random(seed)), rng=random.Random(seed))
    assert again == kills


def test_no_kills_lose_nothing() -> None:
    assert plan_losses([], rng=random.Random(1)) == []


def test_deleting_tells_whether_there_was_anything(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert not _delete(state)
    state.mkdir()
    assert not _delete(state)
    (state / "flow" / "0").mkdir(parents=True)
    (state / "flow" / "0" / "data.mdb").write_bytes(b"x")
    assert _delete(state)
    assert not state.exists()


def test_only_the_flow_with_state_loses_some(tmp_path: Path) -> None:
    class Deadline:
        seconds = remaining = 1.0

    chain = Balances(Choices(10_000, SEED, 3), "localhost:1", tmp_path, Deadline())  # type: ignore[arg-type]
    losses = {service.flow.split("-")[0]: service.planned_losses > 0 for service in chain.services}
    assert losses == {"validate": False, "settle": False, "balance": True}
    assert [service.planned for service in chain.services] == [3, 3, 3]


@pytest.mark.parametrize(
    "lost, restores, problem",
    [
        ([True, True, False], 8, None),
        ([True, False, False], 1, None),
        ([False, False, False], 8, "never deleted"),
        ([True, True, True], 0, "nothing was read back"),
    ],
)
def test_state_must_have_been_deleted_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: list[bool], restores: int, problem: str | None
) -> None:
    """A driver that dies before it has opened its state again has none to lose: that deletion does not count."""

    class Silent:
        def say(self, text: str) -> None:
            pass

    class Deadline:
        seconds = remaining = 1.0

    chain = Balances(Choices(10_000, SEED, 3), "localhost:1", tmp_path, Deadline())  # type: ignore[arg-type]
    monkeypatch.setattr(chain, "audit_balances", lambda: [_audit_rows(_rows())])
    monkeypatch.setattr(chain, "restores", lambda: restores)
    chain.services[-1].deaths = [Death("plan", 4, 0.0, lost_state=one) for one in lost]
    audit = Audit()
    chain.look_further(audit, Silent())  # type: ignore[arg-type]
    assert audit.facts["state_deleted"] == sum(lost)
    assert audit.facts["restores"] == restores
    assert [problem in text for text in audit.problems] == ([True] if problem else [])


def test_what_was_read_back_is_told_from_the_log(tmp_path: Path) -> None:
    """By the driver, of committed batches; what a task says of the same is not counted again."""
    lines = [
        "12:00 INFO onceflow.state: table balances-1a2b3c-0: restored, 0 records read in 0.01 s",
        "12:00 INFO onceflow.state: table balances-1a2b3c-1: restored, 500 records read in 0.01 s",
        "12:00 INFO onceflow.state: table balances-1a2b3c-2: caught up, 20 records read in 0.01 s",
        "12:00 INFO onceflow.state: table balances-1a2b3c-2: caught up; 20 records read in 0.01 s, 2000 a second",
        "something else",
    ]
    one = Service("balance", [], [], tmp_path)
    assert one.log_lines(READ_BACK) == []
    one.log_file.write_text("\n".join(lines))
    assert [int(found[1]) for found in one.log_lines(READ_BACK)] == [0, 500, 20]


# ---- progress of the flows ---------------------------------------------------------------------------


class _Consumer:
    def __init__(self, problem: int) -> None:
        self._problem = problem

    def committed(self, span: object, timeout: float) -> object:
        raise KafkaException(KafkaError(self._problem))

    def close(self) -> None:
        pass


def _lag(problem: int) -> GroupLag:
    lag = GroupLag("localhost:1", "group", "topic", 1)
    lag.close()
    lag._consumer = _Consumer(problem)
    return lag


@pytest.mark.parametrize("problem", [14, 15, 16])
def test_a_coordinator_that_moves_is_waited_for(problem: int) -> None:
    assert _lag(problem).read() is None


@pytest.mark.parametrize("problem", [KafkaError._ALL_BROKERS_DOWN, KafkaError.GROUP_AUTHORIZATION_FAILED])
def test_other_problems_are_not_passed_over(problem: int) -> None:
    with pytest.raises(KafkaException):
        _lag(problem).read()


# ---- command -----------------------------------------------------------------------------------------


def test_too_few_records_for_the_kills_are_refused_before_anything_starts() -> None:
    with pytest.raises(OptionError, match="too few"):
        run(Choices(records=1000, kills=3))


def test_the_command_is_listed_and_wants_a_kill() -> None:
    assert "\nbalances " in CliRunner().invoke(demo, []).output
    refused = CliRunner().invoke(demo, ["balances", "--kills", "0"])
    assert refused.exit_code == 2
    assert "--kills" in refused.output


def test_the_example_is_the_service_of_the_demo() -> None:
    example = Path(__file__).parents[2] / "examples" / "balances" / "service.py"
    assert example.resolve() == Path(service.__file__).resolve()
