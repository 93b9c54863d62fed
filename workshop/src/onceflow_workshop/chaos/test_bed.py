"""The test bed of a run: a Kafka cluster behind a fault proxy, a Spark cluster if the setup has one, and topics.

A ``Setup`` is one of the combinations that are tested.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from onceflow.broker.local import LocalBroker
from onceflow.driver.record.progress_log import PROGRESS_PARTITIONS
from onceflow.planning.engine import ENGINES, TASKS
from onceflow.protocol.progress import PROGRESS_TOPIC
from onceflow.testing.broker import create_topic
from onceflow.testing.postgres import LocalPostgres
from onceflow_workshop.chaos import daemon, external
from onceflow_workshop.chaos.commands import Commands
from onceflow_workshop.chaos.driver_process import Driver
from onceflow_workshop.chaos.feeder import Feeder
from onceflow_workshop.chaos.flows import COPY, JOINER, LEDGER, PAIRS, PLAIN, SORTER, TOTALS, UNLOGGED, Choices, Names
from onceflow_workshop.chaos.hosts import GIVEN_UP, Hosts
from onceflow_workshop.chaos.replacement import Replacement
from onceflow_workshop.chaos.servers import Servers
from onceflow_workshop.chaos.spark_cluster import SparkCluster
from onceflow_workshop.testing.proxy import Proxies, proxied_node_properties

OLDER_KAFKA = "3.9.2"
# How far a driver's clock may be ahead: brokers reject records that are more than an hour ahead (KIP-937). There is no
# limit for a clock that is behind.
AHEAD_MS = 3_000_000
_BROKER = {
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    # A killed node can only come back when its old session has timed out.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "controller.quorum.election.timeout.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1500",
}


@dataclass(frozen=True)
class Setup:
    """A combination.

    Args:
        nodes: how many nodes of Kafka. copies: replicas of each partition, except in Kafka's own topics; None: three,
            if there are as many nodes. version: of Kafka; None: the newest.
        features: of the cluster, to set another transaction version.
        workers: of a Spark standalone cluster; 0: Spark runs in the driver.
        own_hosts: whether each worker is a host with a disk of its own. If not, they share one state folder.
        flows: kinds, see ``flows.py``.
        servers: instances of the query server that share the ledger's table.
        rate: records per second.
        properties: of the brokers.
    """

    name: str
    nodes: int = 1
    copies: int | None = None
    version: str | None = None
    features: Mapping[str, int] = field(default_factory=dict)
    workers: int = 0
    own_hosts: bool = False
    flows: Sequence[str] = (COPY, LEDGER)
    servers: int = 0
    rate: int = 1_500
    partitions: int = 4
    properties: Mapping[str, str] = field(default_factory=dict)


# Kafka forgets a flow that is idle for some seconds. Its defaults are a week, and a check every hour.
_FORGETS = {
    "transactional.id.expiration.ms": "8000",
    "transaction.remove.expired.transaction.cleanup.interval.ms": "1000",
    "producer.id.expiration.ms": "8000",
}


SETUPS = {
    setup.name: replace(setup, flows=tuple(filter(external.is_installed, setup.flows)))
    for setup in (
        Setup("one-node", flows=(COPY, PLAIN, LEDGER, SORTER, JOINER, PAIRS, external.SQLITE), servers=2),
        Setup("three-nodes", nodes=3, flows=(COPY, PLAIN, LEDGER, external.DELTA)),
        Setup("one-copy", nodes=3, copies=1),
        Setup("executors", workers=2, flows=(LEDGER, SORTER, JOINER, PAIRS, external.DELTA), rate=1_000),
        Setup("hosts", workers=3, own_hosts=True, flows=(LEDGER, SORTER, JOINER), rate=300, partitions=6),
        Setup("forgetful", flows=(COPY, LEDGER, external.POSTGRES), properties=_FORGETS),
        Setup("checkpoint", flows=(COPY, TOTALS)),
        Setup("no-changelog", flows=(COPY, UNLOGGED)),
        Setup("version-1", flows=(COPY, LEDGER, external.SQLITE), features={"transaction.version": 1}),
        Setup("kafka-3.9", flows=(COPY, LEDGER, external.POSTGRES), version=OLDER_KAFKA),
    )
}


@dataclass
class TestBed:
    """Everything that a fault may touch.

    Args:
        broker: the feeder and the checks connect to it directly, the drivers through ``proxies``.
        frames: how many frames the proxies have disturbed, by action.
        replacement: the copy of a flow that runs beside it; None: there is none.
        copies: kind and names of all copies that have run.
        engines: each start of a flow has one of these.
    """

    setup: Setup
    names: Names
    broker: LocalBroker
    proxies: Proxies
    feeder: Feeder
    driver: Driver
    servers: Servers
    spark_cluster: SparkCluster | None
    postgres: LocalPostgres | None = None
    frames: Counter[str] = field(default_factory=Counter)
    replacement: Replacement | None = None
    copies: list[tuple[str, Names]] = field(default_factory=list)
    engines: Sequence[str] = ENGINES

    @cached_property
    def commands(self) -> Commands:
        """Commands of an operator, which reach the brokers as drivers do."""
        return Commands(self.names.folder, self.proxies.bootstrap_servers)

    def end_copy(self) -> None:
        """End the driver of a copy. What has ended drivers of it before is counted with the others."""
        found, self.replacement = self.replacement, None
        if found is not None:
            found.close()
            self.driver.stops += found.driver.stops
            self.driver.strange += found.driver.strange
            self.driver.commits.count += found.driver.commits.count
            self.driver.commits.engines.add(found.driver.commits.engines)

    @property
    def bootstrap_servers(self) -> str:
        """The direct address, without the proxies."""
        return self.broker.bootstrap_servers

    @property
    def states(self) -> list[Path]:
        """The state folders of hosts that have one of their own."""
        return self.spark_cluster.states if isinstance(self.spark_cluster, Hosts) else []

    @property
    def node_ids(self) -> list[int]:
        return [node.node_id for node in self.broker.cluster.nodes]


def rebooting_hosts(names: Names) -> dict[str, str]:
    """Settings of Spark with which executors take the boot id of their host from a file."""
    return {
        "spark.python.daemon.module": daemon.__name__,
        f"spark.executorEnv.{daemon.VARIABLE}": str(names.boot),
    }


def _settings(cluster: SparkCluster | None, names: Names) -> dict[str, str]:
    """Settings of Spark."""
    if cluster is None:
        return {}
    return {**cluster.settings, **rebooting_hosts(names), **(GIVEN_UP if isinstance(cluster, Hosts) else {})}


def _engines(setup: Setup, engines: Sequence[str]) -> Sequence[str]:
    """What flows of a setup start with. Where the driver runs them, hosts have nothing to do."""
    return [*engines, *[each for each in engines if each == TASKS] * 3] if setup.own_hosts else engines


@contextlib.contextmanager
def open_test_bed(setup: Setup, folder: Path, *, engines: Sequence[str] = ENGINES, seed: str) -> Iterator[TestBed]:
    """Start the test bed of a setup. Everything is ended afterwards.

    Args:
        engines: each start of a flow has one of these.
        seed: decides which, and when records come in bursts.
    """
    with contextlib.ExitStack() as stack:
        properties, ports = proxied_node_properties(range(1, setup.nodes + 1))
        copies = {"default.replication.factor": str(setup.copies), "min.insync.replicas": "1"} if setup.copies else {}
        broker = stack.enter_context(
            LocalBroker(
                folder / "kafka",
                nodes=setup.nodes,
                version=setup.version,
                features=setup.features,
                properties={**_BROKER, **copies, **setup.properties},
                node_properties=properties,
                heap="400m" if setup.nodes > 1 else "700m",
            )
        )
        proxies = stack.enter_context(Proxies(ports))
        postgres = None
        if external.POSTGRES in setup.flows:
            postgres = stack.enter_context(LocalPostgres(folder / "postgres"))
        names = Names("chaos", folder, postgres.dsn if postgres else "")
        for kind in external.KINDS:
            if kind in setup.flows:
                names.target(kind).create()
        replayed = [names.replayed] if SORTER in setup.flows else []
        for topic in [names.source, *names.outputs(setup.flows), *replayed]:
            create_topic(broker.bootstrap_servers, topic, setup.partitions)
        if setup.copies is not None:  # otherwise a flow would create it with more copies
            create_topic(broker.bootstrap_servers, PROGRESS_TOPIC, PROGRESS_PARTITIONS, {"cleanup.policy": "compact"})
        names.boot.write_text("first")
        spark_cluster = None
        if setup.workers:
            cluster = Hosts if setup.own_hosts else SparkCluster
            spark_cluster = stack.enter_context(cluster(folder / "spark", setup.workers))
        driver = Driver(
            names,
            setup.flows,
            proxies.bootstrap_servers,
            "local[2]" if spark_cluster is None else spark_cluster.master,
            _settings(spark_cluster, names),
            engines=_engines(setup, engines),
            rng=random.Random(f"{seed} engines"),
        )
        driver.choices = Choices(own_hosts=setup.own_hosts)
        stack.callback(driver.close)
        servers = stack.enter_context(Servers(names, proxies.bootstrap_servers, setup.servers))
        traffic = random.Random(f"{seed} traffic")
        feeder = stack.enter_context(Feeder(broker.bootstrap_servers, names.source, setup.rate, traffic))
        bed = TestBed(setup, names, broker, proxies, feeder, driver, servers, spark_cluster, postgres, engines=engines)
        stack.callback(bed.end_copy)
        yield bed
