"""`onceflow doctor`: what each check says of facts that a test makes up. No brokers."""

from __future__ import annotations

import json
import os
import pwd
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from onceflow.admin.doctor import checks as doctor
from onceflow.admin.doctor import cluster as doctor_cluster
from onceflow.admin.doctor import disk as doctor_disk
from onceflow.admin.doctor import local as doctor_local
from onceflow.admin.doctor import machine as doctor_machine
from onceflow.admin.doctor import permissions as doctor_permissions
from onceflow.admin.doctor import topics as doctor_topics
from onceflow.admin.doctor.facts import (
    CLUSTER,
    INTERNAL,
    JOINED,
    NAMED,
    OUTPUT,
    PROGRESS,
    SOURCE,
    TABLE,
    Facts,
    FlowFacts,
    Topic,
)
from onceflow.admin.doctor.finding import Check, Finding, Level, error, examine, failed, ok, skipped, warning
from onceflow.admin.doctor.local import Host
from onceflow.admin.doctor.reading import old_unread
from onceflow.admin.status.flow_status import FlowStatus, PartitionStatus, SourceStatus
from onceflow.broker.config import Cluster as LocalCluster
from onceflow.broker.config import Node as LocalNode
from onceflow.broker.folder import Folder
from onceflow.cli.main import cli
from onceflow.client.allowed import operations
from onceflow.client.brokers import Held, held_back_warning
from onceflow.client.nodes import Node
from onceflow.client.producers import OpenTransaction
from onceflow.client.topics import Copies
from onceflow.errors import EnvironmentUnusableError, OptionError, PermissionDeniedError, UnknownTopicError
from onceflow.host import jars
from onceflow.host.user import check_user
from onceflow.planning.source_starts import SourceTopic
from onceflow.protocol.names import Names
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress

ROOT = Path(__file__).parents[2]
NOW_MS = 1_800_000_000_000
HOST = Host(())
GOOD_SETTINGS = {
    "cleanup.policy": "delete",
    "max.message.bytes": "1048588",
    "message.timestamp.type": "CreateTime",
    "min.insync.replicas": "2",
    "retention.ms": "604800000",
    "unclean.leader.election.enable": "false",
}
EVERYTHING = frozenset({"READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS", "CREATE"})


def topic(name: str, role: str, *, in_sync: int = 3, leader: int = 1, partitions: int = 8, **settings: Any) -> Topic:
    given = {**GOOD_SETTINGS, **({"cleanup.policy": "compact"} if role in (TABLE, INTERNAL, JOINED, PROGRESS) else {})}
    given |= {key.replace("_", "."): value for key, value in settings.items()}
    copies = {number: Copies(leader, [1, 2, 3], [1, 2, 3][:in_sync]) for number in range(partitions)}
    return Topic(name, role, copies=copies, settings=given, operations=EVERYTHING)


def broker(node: int, **fields: Any) -> Node:
    known = {"version": "4.3", "finalized": {"transaction.version": 2}, "supported": {"transaction.version": 2}}
    return Node(node, f"kafka-{node}:9092", **{**known, **fields})


BROKERS = tuple(broker(node) for node in (1, 2, 3))
SETTINGS = {
    "transaction.max.timeout.ms": frozenset({"900000"}),
    "transactional.id.expiration.ms": frozenset({"604800000"}),
    "message.max.bytes": frozenset({"1048588"}),
    "replica.fetch.max.bytes": frozenset({"1048576000"}),
}


def facts(*topics: Topic, **fields: Any) -> Facts:
    own = [topic(PROGRESS_TOPIC, PROGRESS), topic("__transaction_state", CLUSTER), topic("__consumer_offsets", CLUSTER)]
    known = {each.name: each for each in [*topics, *own]}
    given = {"brokers": BROKERS, "broker_settings": SETTINGS, "operations": EVERYTHING, "topics": known}
    return Facts(**{**given, "flows": frozenset({"f"}), "now_ms": NOW_MS, **fields})


def flow(**fields: Any) -> FlowFacts:
    progress = Progress("f", 7, {"in": {0: 5}}, {"in": "id"}, NOW_MS - 1000, outputs=("out",))
    sources = {"in": SourceTopic("in", "id", {0: 0}, {0: 9})}
    known = {"names": Names("f"), "progress": progress, "sources": sources, "group": EVERYTHING, "may_write_id": True}
    return FlowFacts(**{**known, **fields})


def run(check: Any, about: Any) -> list[Finding]:
    return list(examine([Check("name", check)], about))


def bad(found: list[Finding]) -> list[Finding]:
    return [each for each in found if each.level in (Level.WARNING, Level.ERROR)]


def the_bad_one(found: list[Finding], level: Level, words: str) -> Finding:
    (one,) = bad(found)
    assert one.level is level, one
    assert re.search(words, f"{one.subject}: {one.found}"), one
    assert one.fix, "it says what to do"
    return one


# ---- findings --------------------------------------------------------------------------------------------


def test_a_check_that_fails_is_a_finding_and_others_run() -> None:
    def breaks(_: None) -> Iterator[Finding]:
        yield ok("first", "fine")
        raise OptionError("it broke", detail="here", next_step="mend it")

    def denied(_: None) -> Iterator[Finding]:
        raise PermissionDeniedError("not allowed", next_step="grant it")

    found = list(examine([Check("a", breaks), Check("b", denied), Check("c", lambda _: [ok("last", "fine")])], None))
    assert [(each.check, each.level) for each in found] == [
        ("a", Level.OK),
        ("a", Level.ERROR),
        ("b", Level.SKIPPED),
        ("c", Level.OK),
    ]
    assert (found[1].found, found[1].fix) == ("it broke: here", "mend it")


@pytest.mark.parametrize(
    "found, lenient, strict",
    [([ok("", ""), skipped("", "")], False, False), ([warning("", "", "")], False, True), ([error("", "", "")], 1, 1)],
)
def test_what_fails(found: list[Finding], lenient: bool, strict: bool) -> None:
    assert (failed(found, strict=False), failed(found, strict=True)) == (lenient, strict)


# ---- this machine ----------------------------------------------------------------------------------------


def test_this_machine_is_good_enough_for_the_tests() -> None:
    for check in (doctor_local.check_python, doctor_local.check_java, doctor_local.check_spark):
        assert [each.level for each in run(check, HOST)] == [Level.OK]
    assert {each.level for each in run(doctor_local.check_packages, HOST)} == {Level.OK}


def test_no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    the_bad_one(run(doctor_local.check_java, HOST), Level.ERROR, "which has no bin/java")


def java(folder: Path, version: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "java").touch(0o755)
    (folder / "release").write_text(f'JAVA_VERSION="{version}"\n')
    return folder


@pytest.mark.parametrize("version, level", [("11.0.1", Level.ERROR), ("25.0.1", Level.WARNING)])
def test_another_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, level: Level) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "jdk", version)))
    the_bad_one(run(doctor_local.check_java, HOST), level, f"Java {version}")


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_local, "PYTHON_MIN", (9, 0))
    the_bad_one(run(doctor_local.check_python, HOST), Level.ERROR, "9.0 or later is needed")


def test_another_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jars, "installed_spark_version", lambda: "4.0.1")
    monkeypatch.setattr(jars, "jars_version", lambda: "4.1.0")
    the_bad_one(run(doctor_local.check_spark, HOST), Level.ERROR, "pyspark 4.0.1 with jars of Spark 4.1.0")


def test_a_spark_that_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_local.versions, "installed_spark_version", lambda: "3.3.0")
    the_bad_one(run(doctor_local.check_spark, HOST), Level.ERROR, "Spark 3.3.0 is not supported")


@pytest.fixture
def spark_4_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Spark 4.1.1 with Scala 2.13, without a connector, and an empty cache."""
    monkeypatch.setattr(jars, "installed_spark_version", lambda: "4.1.1")
    monkeypatch.setattr(jars, "scala_version", lambda: "2.13")
    monkeypatch.setattr(jars, "spark_jars", lambda: ["spark-core_2.13-4.1.1.jar"])
    monkeypatch.setenv("ONCEFLOW_CACHE", str(tmp_path))
    return tmp_path


def test_no_connector_yet(spark_4_1: Path) -> None:
    found = the_bad_one(run(doctor_local.check_connector, HOST), Level.WARNING, "the first session downloads them")
    assert "onceflow setup" in found.fix


def test_a_connector_in_the_cache(spark_4_1: Path) -> None:
    coordinates = jars.spark_connector_coordinates("4.1.1", "2.13")
    folder = spark_4_1 / "jars" / jars.cache_key(coordinates, transitive=False)
    folder.mkdir(parents=True)
    (folder / "spark-sql-kafka-0-10_2.13-4.1.3.jar").touch()
    (folder / "classpath").write_text("spark-sql-kafka-0-10_2.13-4.1.3.jar\n")
    (found,) = run(doctor_local.check_connector, HOST)
    assert (found.level, found.found.startswith("4.1.3 for Scala 2.13")) == (Level.OK, True)


@pytest.mark.parametrize(
    "name, value",
    [
        ("spark.jars.packages", "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.1"),
        ("spark.jars.packages", "a:b:1,org.apache.spark:spark-sql-kafka-0-10_2.12:4.1.1"),
        ("spark.jars", "/opt/spark-sql-kafka-0-10_2.13-3.5.7.jar,/opt/other.jar"),
    ],
)
def test_a_connector_of_another_spark(spark_4_1: Path, name: str, value: str) -> None:
    host = Host((), {name: value})
    the_bad_one(run(doctor_local.check_connector, host), Level.ERROR, "does not fit Spark 4.1.1 with Scala 2.13")


def test_a_connector_of_another_spark_in_its_folder(monkeypatch: pytest.MonkeyPatch, spark_4_1: Path) -> None:
    monkeypatch.setattr(jars, "spark_jars", lambda: ["spark-sql-kafka-0-10_2.13-4.2.0.jar"])
    the_bad_one(run(doctor_local.check_connector, HOST), Level.ERROR, "Spark's folder of jars, does not fit")


@pytest.mark.parametrize("version", ["2.9.0", "3.1", "3.0.11"])
def test_a_package_of_another_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    there = doctor_local.importlib.metadata.version
    monkeypatch.setattr(
        doctor_local.importlib.metadata, "version", lambda name: version if name == "kafka-python" else there(name)
    )
    found = the_bad_one(run(doctor_local.check_packages, HOST), Level.ERROR, f"kafka-python: {version}; ")
    assert found.fix == "pip install 'kafka-python>=3.0.12,<3.1'"


def test_ranges_of_packages_are_those_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2].partition("\n]")[0]
    wanted = [Requirement(line) for line in re.findall(r'^    "(.*)",$', text, re.MULTILINE)]
    declared = {each.name: {(one.operator, one.version) for one in each.specifier} for each in wanted}
    for name, (first, below) in doctor_local.PACKAGES.items():
        ranges = {(">=", ".".join(map(str, first)))} | ({("<", ".".join(map(str, below)))} if below else set())
        assert declared[name] == ranges


@pytest.mark.parametrize("limit, level", [(100, Level.ERROR), (1024, Level.WARNING), (65536, None), (-1, None)])
def test_open_files(monkeypatch: pytest.MonkeyPatch, limit: int, level: Level | None) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, resource.RLIM_INFINITY))
    found = run(doctor_local.check_open_files, HOST)
    assert [each.level for each in bad(found)] == ([level] if level else [])


# ---- disks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("free, level", [(10**6, Level.ERROR), (10**9, Level.WARNING), (10**12, Level.OK)])
def test_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, level: Level) -> None:
    monkeypatch.setattr(doctor_disk.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    found = run(doctor_disk.check_disk, Host((tmp_path / "not" / "yet",)))
    assert [each.level for each in found] == [level] * 3
    assert found[0].subject == f"state {tmp_path}/not/yet"
    assert not (tmp_path / "not").exists()


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_disk.os, "access", lambda path, _: Path(path) != tmp_path)
    found = bad(run(doctor_disk.check_disk, Host((tmp_path,))))
    assert [(each.level, each.subject) for each in found] == [(Level.ERROR, f"state {tmp_path}")]


def test_state_that_is_not_used_any_more(tmp_path: Path) -> None:
    for name in ("new", "old", "@tables"):
        (tmp_path / name / "table" / "0").mkdir(parents=True)
        (tmp_path / name / "table" / "0" / "data.mdb").write_bytes(b"x" * 9000)
    long_ago = time.time() - 40 * 86_400
    for path in (tmp_path / "old", *(tmp_path / "old").rglob("*")):
        os.utime(path, (long_ago, long_ago))
    found = run(doctor_disk.check_local_state, Host((tmp_path, tmp_path / "none")))
    one = the_bad_one(found, Level.WARNING, r"flow old: .* KB, last changed 40 days ago")
    assert one.subject == str(tmp_path / "old")
    assert next(each.found for each in found if each.level is Level.OK).startswith("flows in the last 30 days: new (")


# ---- the cluster -----------------------------------------------------------------------------------------


def test_a_healthy_cluster_has_no_bad_findings() -> None:
    topics = topic("in", SOURCE), topic("out", OUTPUT), topic("t", TABLE), topic("n", NAMED)
    everything = facts(*topics, flow=flow(status=status()))
    found = list(examine([*doctor.CLUSTER, *doctor.FLOW], everything))
    assert bad(found) == []
    assert {each.check for each in found} == {check.name for check in (*doctor.CLUSTER, *doctor.FLOW)} - {
        "unknown-flows"
    }


def test_a_broker_that_does_not_answer() -> None:
    found = run(doctor_cluster.check_brokers, facts(brokers=(BROKERS[0], broker(2, problem="refused"))))
    the_bad_one(found, Level.ERROR, "broker 2 at kafka-2:9092: does not answer: refused")


@pytest.mark.parametrize(
    "brokers, words",
    [
        ((BROKERS[0], broker(2, version="4.2")), r"different versions \(1: 4.3, 2: 4.2\)"),
        ((broker(1, finalized={"transaction.version": 1}),), "not finalized"),
        ((broker(1, finalized={}),), "not finalized"),
    ],
)
def test_versions(brokers: tuple[Node, ...], words: str) -> None:
    the_bad_one(run(doctor_cluster.check_versions, facts(brokers=brokers)), Level.WARNING, words)


def test_a_broker_without_the_feature_is_fine() -> None:
    old = broker(1, version="3.9", finalized={}, supported={})
    assert not bad(run(doctor_cluster.check_versions, facts(brokers=(old,))))


def test_clocks() -> None:
    stamped = replace(topic("in", SOURCE), newest_ms=NOW_MS + 60_000)
    the_bad_one(run(doctor_cluster.check_clock, facts(stamped)), Level.WARNING, "topic in is 60.0 s later")
    late = flow(progress=Progress("f", 7, {}, {}, NOW_MS + 9_000))
    the_bad_one(run(doctor_cluster.check_clock, facts(flow=late)), Level.WARNING, "progress is 9.0 s later")
    (found,) = run(doctor_cluster.check_clock, facts(replace(stamped, newest_ms=NOW_MS), flow=flow()))
    assert (found.level, "2 times of others compared" in found.found) == (Level.SKIPPED, True)


@pytest.mark.parametrize(
    "name, value, level",
    [
        ("transaction.max.timeout.ms", "59999", Level.ERROR),
        ("transactional.id.expiration.ms", "60000", Level.WARNING),
    ],
)
def test_settings_of_brokers(name: str, value: str, level: Level) -> None:
    seen = facts(broker_settings={**SETTINGS, name: frozenset({value, "999999999"})})
    the_bad_one(run(doctor_cluster.check_broker_settings, seen), level, f"{name}: {value} ms")


def test_settings_of_brokers_that_may_not_be_read() -> None:
    (found,) = run(doctor_cluster.check_broker_settings, facts(broker_settings=None))
    assert (found.level, "DESCRIBE_CONFIGS on the cluster" in found.fix) == (Level.SKIPPED, True)


def test_topics_of_kafka_itself() -> None:
    risky = topic("__transaction_state", CLUSTER, unclean_leader_election_enable="true")
    found = run(doctor_cluster.check_cluster_topics, facts(risky, topics={risky.name: risky}))
    the_bad_one(found, Level.WARNING, "__transaction_state: unclean.leader.election.enable=true")
    absent = Topic("__consumer_offsets", CLUSTER, problem=UnknownTopicError("no"))
    assert not bad(run(doctor_cluster.check_cluster_topics, facts(topics={absent.name: absent})))


@pytest.mark.parametrize(
    "progress, level, words",
    [
        (topic(PROGRESS_TOPIC, PROGRESS, partitions=4), Level.ERROR, "has 4 partitions, but needs 8"),
        (topic(PROGRESS_TOPIC, PROGRESS, cleanup_policy="delete"), Level.ERROR, "cleanup.policy=delete"),
        (topic(PROGRESS_TOPIC, PROGRESS, min_insync_replicas="1"), Level.WARNING, "min.insync.replicas=1"),
    ],
)
def test_the_progress_topic(progress: Topic, level: Level, words: str) -> None:
    the_bad_one(run(doctor_cluster.check_progress_topic, facts(topics={PROGRESS_TOPIC: progress})), level, words)


def test_hidden_topics_are_left_to_the_permissions() -> None:
    hidden = Topic(PROGRESS_TOPIC, PROGRESS, problem=PermissionDeniedError("hidden"))
    source = Topic("in", SOURCE, problem=PermissionDeniedError("hidden"))
    seen = facts(topics={PROGRESS_TOPIC: hidden, "in": source})
    for check in (doctor_cluster.check_progress_topic, doctor_topics.check_topics):
        assert [each.level for each in run(check, seen)] == [Level.SKIPPED]


def test_no_progress_topic_yet() -> None:
    absent = {PROGRESS_TOPIC: Topic(PROGRESS_TOPIC, PROGRESS, problem=UnknownTopicError("no"))}
    assert not bad(run(doctor_cluster.check_progress_topic, facts(topics=absent)))
    denied = facts(topics=absent, operations=frozenset({"DESCRIBE"}))
    assert "grant CREATE" in the_bad_one(run(doctor_cluster.check_progress_topic, denied), Level.WARNING, "first").fix


def test_state_of_flows_that_the_cluster_does_not_know() -> None:
    local = {"f": Path("/state/f"), "gone": Path("/state/gone")}
    found = run(doctor_cluster.check_unknown_flows, facts(local_flows=local))
    assert "gone" in the_bad_one(found, Level.WARNING, "no progress in this cluster: gone").found
    assert run(doctor_cluster.check_unknown_flows, facts(local_flows=local, flows=None)) == []


# ---- topics ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "progress, flows, level, words",
    [
        (None, frozenset({"ff"}), Level.WARNING, "has no progress here"),
        (None, None, Level.SKIPPED, "cannot be read"),
    ],
)
def test_no_progress(progress: Any, flows: Any, level: Level, words: str) -> None:
    (found,) = run(doctor_topics.check_progress, facts(flow=flow(progress=progress, similar=("ff",)), flows=flows))
    assert (found.level, words in found.found) == (level, True)
    assert ("did you mean ff?" in found.fix) == (level is Level.WARNING)


@pytest.mark.parametrize(
    "seen, level, words",
    [
        (topic("out", OUTPUT, in_sync=2), Level.WARNING, "under-replicated"),
        (topic("out", OUTPUT, in_sync=1), Level.ERROR, "nothing can be written"),
        (topic("out", OUTPUT, leader=-1), Level.ERROR, "have no leader"),
        (Topic("out", OUTPUT, problem=UnknownTopicError("gone", next_step="make it")), Level.ERROR, "gone"),
    ],
)
def test_topics(seen: Topic, level: Level, words: str) -> None:
    the_bad_one(run(doctor_topics.check_topics, facts(seen)), level, words)


def test_many_partitions_are_not_all_named() -> None:
    (found,) = run(doctor_topics.check_topics, facts(topic("out", OUTPUT, in_sync=2, partitions=100)))
    assert "8, 9 and 90 more are" in found.found


@pytest.mark.parametrize(
    "setting, words",
    [({"min_insync_replicas": "1"}, "min.insync"), ({"unclean_leader_election_enable": "true"}, "unclean.leader")],
)
def test_safety(setting: dict[str, str], words: str) -> None:
    found = run(doctor_topics.check_safety, facts(topic("out", OUTPUT, **setting), topic("in", SOURCE)))
    assert the_bad_one(found, Level.WARNING, words).subject == "out"


@pytest.mark.parametrize(
    "role, policy, level",
    [
        (TABLE, "delete", Level.ERROR),
        (INTERNAL, "delete", Level.ERROR),
        (JOINED, "compact,delete", Level.WARNING),
        (SOURCE, "compact", Level.WARNING),
        (OUTPUT, "compact", Level.OK),
        (NAMED, "delete", Level.OK),
        (SOURCE, None, Level.SKIPPED),
    ],
)
def test_cleanup_policy(role: str, policy: str | None, level: Level) -> None:
    (found,) = run(doctor_topics.check_cleanup, facts(topic("t", role, cleanup_policy=policy)))
    assert found.level is level


def test_cleanup_policy_of_letters() -> None:
    progress = Progress("f", 7, {}, {}, NOW_MS, side_topics={"failed": "dead letter", "parked": "parked"})
    topics = [topic(name, OUTPUT, cleanup_policy="compact") for name in ("failed", "parked")]
    found = run(doctor_topics.check_cleanup, facts(*topics, flow=flow(progress=progress)))
    assert the_bad_one(found, Level.ERROR, "of dead letter records with the same key").subject == f"{OUTPUT} failed"


def status(*, lag: int = 0, waited_s: float = 0.0, age_s: float = 1.0, held: int = 0, why: str = "") -> FlowStatus:
    part = PartitionStatus(0, 5, 0, 5 + lag, 5 + lag + held, lag, waited_s, held)
    return FlowStatus("f", 7, age_s=age_s, sources=[SourceStatus("in", {0: 5}, [part], held=[why] if why else [])])


def test_held_back() -> None:
    def found(**more: Any) -> list[Finding]:
        return run(doctor_topics.check_held_back, facts(topic("in", SOURCE), flow=flow(status=status(**more))))

    assert [each.found for each in found()] == ["no open transaction holds records back"]
    (short,) = found(held=1300)
    assert (short.level, short.found[:21]) == (Level.OK, "1,300 offsets behind ")
    held = Held("in", 0, 5, 305, 120.0)
    for seen in (
        OpenTransaction(17, 3, 5, NOW_MS, transactional_id="billing.v2", state="Ongoing", timeout_ms=900_000),
        OpenTransaction(17, 3, 5, NOW_MS),
    ):
        text = held_back_warning(held, seen)
        one = the_bad_one(found(held=300, why=text), Level.WARNING, r"of in-0 .*300 offsets behind it.* producer id 17")
        assert (seen.transactional_id or "it hangs") in one.found
        assert ("transactions abort billing.v2" if seen.transactional_id else "transactions describe") in one.fix
    assert run(doctor_topics.check_held_back, facts(flow=flow())) == []


def test_lag() -> None:
    (found,) = run(doctor_topics.check_lag, facts(topic("in", SOURCE), flow=flow()))
    assert (found.level, found.found) == (Level.OK, "lag 4 offsets; retention.ms=604800000")
    old = facts(topic("in", SOURCE), flow=flow(old_unread={"in": (0,)}))
    the_bad_one(run(doctor_topics.check_lag, old), Level.WARNING, "partitions 0 are older than half")
    dead = facts(topic("in", SOURCE), flow=flow(status=status(lag=4, waited_s=299.0, age_s=301.0)))
    one = the_bad_one(
        run(doctor_topics.check_lag, dead), Level.WARNING, "lag 4 offsets.* nothing was committed for 299"
    )
    assert "onceflow status f --endpoint" in one.fix
    fresh = facts(topic("in", SOURCE), flow=flow(status=status(lag=4, waited_s=2.0, age_s=301.0)))
    assert bad(run(doctor_topics.check_lag, fresh)) == [], "there was nothing to read before"
    lost = facts(topic("in", SOURCE), flow=flow(sources={"in": SourceTopic("in", "id", {0: 6}, {0: 9})}))
    the_bad_one(run(doctor_topics.check_lag, lost), Level.ERROR, "offsets 5 to 5 have expired")
    other = facts(topic("in", SOURCE), flow=flow(sources={"in": SourceTopic("in", "new", {0: 0}, {0: 9})}))
    the_bad_one(run(doctor_topics.check_lag, other), Level.ERROR, "deleted and created again")


@pytest.mark.parametrize(
    "latest, young, old",
    [
        (9, 3, ()),  # the next record to read is young
        (9, 7, (0,)),  # the first young record is after it
        (9, -1, (0,)),  # no record is young
        (5, -1, ()),  # everything is read
    ],
)
def test_old_unread_records(latest: int, young: int, old: tuple[int, ...]) -> None:
    assert old_unread({0: 5}, {0: latest}, {0: young}) == old


def test_message_sizes() -> None:
    large = topic("in", SOURCE, max_message_bytes="5000000")
    found = run(doctor_topics.check_message_size, facts(large, topic("out", OUTPUT)))
    the_bad_one(found, Level.WARNING, "output out: .*a source takes messages of up to 5000000")
    fetched = {**SETTINGS, "replica.fetch.max.bytes": frozenset({"1048576"})}
    found = run(doctor_topics.check_message_size, facts(large, broker_settings=fetched))
    the_bad_one(found, Level.WARNING, "source in: .*replica.fetch.max.bytes=1048576")
    defaults = facts(topic("in", SOURCE), broker_settings=fetched)
    assert not bad(run(doctor_topics.check_message_size, defaults))


# ---- permissions -----------------------------------------------------------------------------------------


def test_operations_of_an_answer() -> None:
    assert operations({3, 8, 99}) == {"READ", "DESCRIBE"}
    assert operations(set()) == frozenset()
    assert operations(None) is None


@pytest.mark.parametrize(
    "role, lacks",
    [(SOURCE, "READ"), (OUTPUT, "WRITE"), (TABLE, "READ"), (TABLE, "WRITE"), (INTERNAL, "WRITE"), (JOINED, "READ")],
)
def test_a_missing_permission_names_the_acl(role: str, lacks: str) -> None:
    seen = replace(topic("t", role), operations=EVERYTHING - {lacks})
    found = the_bad_one(run(doctor_permissions.check_permissions, facts(seen)), Level.ERROR, f"{lacks} is not allowed")
    assert found.fix.endswith(f"--operation {lacks.capitalize()} --topic t")


def test_a_topic_that_may_not_be_seen() -> None:
    seen = Topic("in", SOURCE, problem=PermissionDeniedError("hidden"))
    found = the_bad_one(run(doctor_permissions.check_permissions, facts(seen)), Level.ERROR, "source in: READ")
    assert "--operation Read --topic in" in found.fix


def test_settings_that_may_not_be_read() -> None:
    seen = replace(topic("out", OUTPUT), operations=frozenset({"WRITE"}))
    found = the_bad_one(run(doctor_permissions.check_permissions, facts(seen)), Level.WARNING, "DESCRIBE_CONFIGS")
    assert found.fix.endswith("--operation DescribeConfigs --topic out")


@pytest.mark.parametrize("may, level", [({"READ"}, Level.OK), ({"WRITE"}, Level.OK), (set(), Level.ERROR)])
def test_a_named_topic(may: set[str], level: Level) -> None:
    seen = replace(topic("t", NAMED), operations=frozenset(may | {"DESCRIBE_CONFIGS"}))
    assert run(doctor_permissions.check_permissions, facts(seen))[0].level is level


def test_group_and_transactional_id() -> None:
    denied = facts(flow=flow(group=frozenset({"DESCRIBE"}), may_write_id=False))
    group, transactional_id = bad(run(doctor_permissions.check_permissions, denied))
    assert group.fix.endswith("--operation Read --group f")
    assert transactional_id.fix.endswith("--operation Write --transactional-id onceflow.f")
    unknown = facts(flow=flow(group=None, may_write_id=None))
    found = run(doctor_permissions.check_permissions, unknown)
    assert [each.level for each in found][-2:] == [Level.SKIPPED, Level.SKIPPED]


# ---- the command -----------------------------------------------------------------------------------------


def test_the_local_part_is_shown_when_no_broker_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "LOOK_REFUSED_S", 0.1)
    arguments = ["doctor", "f", "--bootstrap-servers", "127.0.0.1:1", "--state-dir", str(tmp_path), "--no-session"]
    answer = CliRunner().invoke(cli, [*arguments, "--json"], standalone_mode=False)
    found = [json.loads(line) for line in answer.stdout.splitlines()]
    assert {each["check"] for each in found} == {check.name for check in doctor_machine.LOCAL} | {"connection"}
    assert [each["level"] for each in found if each["check"] == "connection"] == ["error"]
    assert answer.return_value == 1
    plain = CliRunner().invoke(cli, arguments, standalone_mode=False).stdout
    assert re.search(r"^error   connection: 127.0.0.1:1: No broker answered", plain, re.MULTILINE)
    assert re.search(r"^ok      python: ", plain, re.MULTILINE)


@pytest.mark.parametrize("package", ["kafka", "pyarrow"])
def test_a_package_that_cannot_be_imported_is_a_finding(package: str) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from onceflow.cli.main import main\n"
        "main(['doctor', '--json', '--no-session', '--bootstrap-servers', '127.0.0.1:1'])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.stderr == ""
    assert {each["check"] for each in found} == {check.name for check in doctor_machine.LOCAL} | {"connection"}
    (connection,) = [each for each in found if each["check"] == "connection"]
    assert "nothing of Kafka was checked: " in connection["found"]
    assert package in connection["found"]
    assert run.returncode == 1


def test_the_page_lists_the_checks() -> None:
    page = (ROOT / "docs" / "diagnose.md").read_text().partition("\n## Check the setup\n")[2]
    section = page.partition("\n## ")[0]
    listed = re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE)
    assert listed == [
        *(check.name for check in doctor_machine.LOCAL),
        doctor_machine.SESSION.name,
        doctor_machine.CONNECTION,
        *(check.name for check in (*doctor.CLUSTER, *doctor.FLOW)),
    ]


def test_spark_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ended with 0 where `session()` failed."""
    program = (
        "import sys; print('WARN a', file=sys.stderr); from onceflow.errors import OptionError\n"
        "raise OptionError('It is so', next_step='do that')"
    )
    monkeypatch.setattr(doctor_local, "_SESSION", program)
    (found,) = doctor_local.check_session(Host(()))
    assert (found.level, found.fix) == (Level.ERROR, "do that")
    assert found.found == "Spark does not start: OptionError: It is so"
    monkeypatch.setattr(doctor_local, "_SESSION", "import os; os._exit(7)")
    (found,) = doctor_local.check_session(Host(()))
    assert (found.level, found.found) == (Level.ERROR, "Spark does not start: its process has ended with code 7")
    monkeypatch.setattr(doctor_local, "_SESSION", "pass")
    assert [each.level for each in doctor_local.check_session(Host(()))] == [Level.OK]


def test_a_user_id_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    check_user()
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(EnvironmentUnusableError, match="has no entry in /etc/passwd") as caught:
        check_user()
    assert ">> /etc/passwd" in caught.value.next_step


def test_a_check_that_fails_in_any_way_is_an_error() -> None:
    def fails(_: None) -> Any:
        raise RuntimeError("Could not determine home directory.")

    (found,) = examine([Check("it", fails)], None)
    assert (found.level, found.found) == (Level.ERROR, "Could not determine home directory.")


def test_a_local_broker_that_is_stopped_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONCEFLOW_HOME", str(tmp_path))
    monkeypatch.delenv("ONCEFLOW_BOOTSTRAP_SERVERS", raising=False)
    node = LocalNode(1, tmp_path / "broker" / "node-1", 20_123, 20_124)
    node.data_dir.mkdir(parents=True)
    Folder(tmp_path / "broker").write(LocalCluster("cluster", "4.3.1", (node,)))
    arguments = ["doctor", "--no-session", "--json", "--state-dir", str(tmp_path)]
    answer = CliRunner().invoke(cli, arguments, standalone_mode=False)
    (found,) = [each for each in map(json.loads, answer.stdout.splitlines()) if each["check"] == "connection"]
    assert (found["level"], found["found"]) == ("error", "The local broker (127.0.0.1:20123) is stopped")
    assert answer.return_value == 1
