"""server.properties of the local Kafka: defaults, what the caller gives, and where clients connect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import javaproperties
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.broker import LocalBroker
from onceflow.broker.config import (
    Cluster,
    Node,
    new_cluster_id,
    parse_listeners,
    render_properties,
    server_properties,
)
from onceflow.broker.folder import Folder, free_ports
from onceflow.broker.metadata import Partition
from onceflow.errors import OptionError


def cluster(*, nodes: int = 1, client_listener: str | None = None, **properties: str) -> Cluster:
    return Cluster(
        cluster_id="AAAAAAAAAAAAAAAAAAAAAA",
        version="4.3.1",
        nodes=tuple(Node(i, Path(f"/data/node-{i}"), 9090 + i, 19090 + i) for i in range(1, nodes + 1)),
        properties={key.replace("__", "."): value for key, value in properties.items()},
        client_listener=client_listener,
    )


def properties_of(given: Cluster) -> dict[str, str]:
    return server_properties(given, given.nodes[0])


def test_one_node_listens_on_localhost_only() -> None:
    given = cluster()
    properties = properties_of(given)
    assert properties["listeners"] == "PLAINTEXT://127.0.0.1:9091,CONTROLLER://127.0.0.1:19091"
    assert properties["controller.quorum.voters"] == "1@127.0.0.1:19091"
    assert properties["transaction.state.log.replication.factor"] == "1"
    assert properties["auto.create.topics.enable"] == "false"
    assert "transaction.abort.timed.out.transaction.cleanup.interval.ms" not in properties
    assert given.bootstrap_servers == "127.0.0.1:9091"


def test_three_nodes_replicate_and_survive_the_loss_of_one() -> None:
    given = cluster(nodes=3)
    properties = server_properties(given, given.nodes[2])
    assert properties["node.id"] == "3"
    assert properties["controller.quorum.voters"] == "1@127.0.0.1:19091,2@127.0.0.1:19092,3@127.0.0.1:19093"
    assert properties["default.replication.factor"] == "3"
    assert properties["min.insync.replicas"] == "2"
    assert given.bootstrap_servers == "127.0.0.1:9091,127.0.0.1:9092,127.0.0.1:9093"


def test_given_properties_win() -> None:
    properties = properties_of(cluster(auto__create__topics__enable="true", num__io__threads="9"))
    assert properties["auto.create.topics.enable"] == "true"
    assert properties["num.io.threads"] == "9"


def test_properties_of_one_node_win_over_those_of_all() -> None:
    given = replace(
        cluster(nodes=3, num__io__threads="9", background__threads="7"),
        node_properties={2: {"num.io.threads": "5", "advertised.listeners": "PLAINTEXT://127.0.0.1:1{port}"}},
    )
    first, second = (server_properties(given, node) for node in given.nodes[:2])
    assert (first["num.io.threads"], second["num.io.threads"]) == ("9", "5")
    assert (first["background.threads"], second["background.threads"]) == ("7", "7")
    assert "advertised.listeners" not in first
    assert second["advertised.listeners"] == "PLAINTEXT://127.0.0.1:19092"


def test_properties_of_a_node_that_does_not_exist_are_refused() -> None:
    with pytest.raises(OptionError, match="no node 4"):
        replace(cluster(nodes=3), node_properties={4: {}})


@pytest.mark.parametrize("nodes, majority", [(1, 1), (2, 2), (3, 2), (5, 3)])
def test_a_majority_of_the_nodes_decides(nodes: int, majority: int) -> None:
    assert cluster(nodes=nodes).majority == majority


@pytest.mark.parametrize(
    "leader, in_sync, order",
    [
        (1, {1, 2, 3}, (2, 3, 1)),
        (3, {1, 2, 3}, (1, 2, 3)),
        (1, {1, 3}, (3, 1, 2)),
        (2, {1, 2}, (1, 2, 3)),
        (1, {1}, None),
        (-1, {1, 2, 3}, None),
    ],
)
def test_the_next_leader_is_in_sync(leader: int, in_sync: set[int], order: tuple[int, ...] | None) -> None:
    assert Partition("orders", 0, leader, (1, 2, 3), frozenset(in_sync)).next_order() == order


def remembered(folder: Path, nodes: int = 1, **features: int) -> Cluster:
    """A cluster in this folder that was started once and does not run."""
    folder.mkdir()
    given = cluster(nodes=nodes)
    laid_out = replace(
        given,
        nodes=tuple(replace(node, data_dir=folder / node.data_dir.name) for node in given.nodes),
        features={key.replace("_", "."): level for key, level in features.items()},
    )
    Folder(folder).write(laid_out)
    return laid_out


def test_a_folder_remembers_the_cluster(tmp_path: Path) -> None:
    before = remembered(tmp_path / "broker", nodes=3, transaction_version=1)
    assert Folder(tmp_path / "broker").read() == before
    assert LocalBroker(tmp_path / "broker").bootstrap_servers == "127.0.0.1:9091,127.0.0.1:9092,127.0.0.1:9093"


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"nodes": 1}, r"has 3 node\(s\), not 1"),
        ({"version": "3.9.2"}, r"is Kafka 4\.3\.1, not 3\.9\.2"),
        ({"features": {"transaction.version": 2}}, r"transaction\.version 1, not 2"),
        ({"features": {"group.version": 0}}, r"group\.version .* not 0"),
    ],
)
def test_a_folder_keeps_what_it_was_laid_out_with(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    remembered(tmp_path / "broker", nodes=3, transaction_version=1)
    with pytest.raises(OptionError, match=problem):
        LocalBroker(tmp_path / "broker", **options).start()


def test_a_cluster_has_at_least_one_node() -> None:
    with pytest.raises(OptionError, match="at least one node"):
        LocalBroker("unused", nodes=0)


def test_one_of_three_nodes_cannot_start_alone(tmp_path: Path) -> None:
    remembered(tmp_path / "broker", nodes=3)
    with pytest.raises(OptionError, match="2 of 3 have to run"):
        LocalBroker(tmp_path / "broker").start_node(2)


def test_ports_are_given_out_once() -> None:
    ports = [port for _ in range(20) for port in free_ports(100)]
    assert len(set(ports)) == 2000


def test_given_listeners_keep_the_controller_and_carry_broker_traffic() -> None:
    given = cluster(listeners="SASL_PLAINTEXT://127.0.0.1:{port},PLAINTEXT://127.0.0.1:5")
    properties = properties_of(given)
    assert properties["listeners"].endswith("PLAINTEXT://127.0.0.1:5,CONTROLLER://127.0.0.1:19091")
    assert properties["inter.broker.listener.name"] == "SASL_PLAINTEXT"
    assert properties["listener.security.protocol.map"] == (
        "SASL_PLAINTEXT:SASL_PLAINTEXT,PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT"
    )
    assert given.bootstrap_servers == "127.0.0.1:9091"


def test_bootstrap_servers_may_point_to_a_named_listener() -> None:
    given = cluster(
        listeners="INSIDE://127.0.0.1:{port},OUTSIDE://127.0.0.1:5",
        listener__security__protocol__map="INSIDE:PLAINTEXT,OUTSIDE:SSL,CONTROLLER:PLAINTEXT",
        client_listener="OUTSIDE",
    )
    assert given.bootstrap_servers == "127.0.0.1:5"


def test_the_protocol_of_an_unknown_listener_is_not_guessed() -> None:
    properties = properties_of(cluster(listeners="SECURE://127.0.0.1:{port}"))
    assert properties["listener.security.protocol.map"] == "CONTROLLER:PLAINTEXT"


def test_an_unknown_client_listener_is_refused() -> None:
    with pytest.raises(OptionError, match="no listener OUTSIDE"):
        _ = cluster(client_listener="OUTSIDE").bootstrap_servers


def test_only_a_controller_listener_is_refused() -> None:
    with pytest.raises(OptionError, match="only a controller listener"):
        properties_of(cluster(listeners="CONTROLLER://127.0.0.1:1"))


@pytest.mark.parametrize("text", ["PLAINTEXT", "://x:1", "PLAINTEXT://host"])
def test_malformed_listeners_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="not of the form"):
        parse_listeners(text)


def test_inter_broker_security_is_left_to_the_caller() -> None:
    properties = properties_of(cluster(security__inter__broker__protocol="SASL_PLAINTEXT"))
    assert "inter.broker.listener.name" not in properties


def test_braces_of_a_jaas_configuration_stay() -> None:
    properties = properties_of(cluster(x__jaas__config='Module required password="{a}{node_id}";'))
    assert properties["x.jaas.config"] == 'Module required password="{a}1";'


def test_values_are_escaped_as_java_reads_them() -> None:
    assert render_properties({"a": "x\\y\nz", "b": " led"}) == "a=x\\\\y\\nz\nb=\\ led\n"
    assert render_properties({"log.dirs": "/für/\U0001f600"}) == "log.dirs=/f\\u00fcr/\\ud83d\\ude00\n"


@given(st.dictionaries(st.text(min_size=1), st.text()))
def test_any_properties_are_read_back(properties: dict[str, str]) -> None:
    """Java reads these files as Latin-1."""
    text = render_properties(properties)
    assert javaproperties.loads(text.encode("ascii").decode("latin-1")) == properties


def test_cluster_ids_are_what_kafka_takes() -> None:
    ids = {new_cluster_id() for _ in range(300)}
    assert len(ids) == 300
    assert all(len(each) == 22 and not each.startswith("-") for each in ids)
