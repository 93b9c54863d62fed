"""What commands find on a broker when tests run them: for each of them topics, records, a flow's progress, and an open
transaction of their own."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import confluent_kafka.admin
from confluent_kafka import Producer

from onceflow.admin.change import progress_file
from onceflow.admin.records.writer import Row, Writer
from onceflow.claim_check.objects import ObjectStore
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import TopicLimits
from onceflow.client.transactions import Transactions
from onceflow.clock import clock_ms
from onceflow.driver.record import progress_log
from onceflow.protocol.names import Names
from onceflow.protocol.progress import ForkOrigin, Progress, TableProgress
from onceflow.state.format import rows

sys.path.insert(0, str(Path(__file__).parent))
try:
    from permission_table import table
finally:
    sys.path.pop(0)

_admin: Any = confluent_kafka.admin
RIGHTS = table()
ORIGIN = "orders/0/17"
_OF_FLOWS = ("compare", "fork", "progress export", "table describe", "table list")
_PARKED_HEADERS = [("onceflow.error.class", b"KeyError"), ("onceflow.attempt", b"3"), ("onceflow.key", b"k")]

#: For each row of the table of permissions that is a command: arguments with which it works. Names in capitals stand
#: for those of `CommandWorld.names`.
ARGUMENTS = {
    "claim-check collect": "--store STORE --topic TOPIC --dry-run",
    "compare": "FLOW NEW",
    "consume": "TOPIC",
    "fork": "FLOW NEW --yes",
    "peek": "TOPIC",
    "parked list": "PARKED",
    "parked show": f"PARKED {ORIGIN}",
    "parked retry": "PARKED --all --to RETRY",
    "parked drop": "PARKED --all --yes",
    "parked replay": "LETTERS --all",
    "produce": "TOPIC --json",
    "progress export": "FLOW",
    "progress import": "FLOW FILE --yes",
    "progress import --state delete": "FLOW FILE --state delete --yes",
    "promote": "NEW --replaces FLOW --yes",
    "reset": "FLOW --yes",
    "reset --to": "FLOW --to earliest --yes",
    "reset --to --state delete": "FLOW --to earliest --state delete --yes",
    "status": "FLOW",
    "status --tables": "FLOW --tables",
    "table count": "TABLE --state-dir FOLDER",
    "table describe": "TABLE",
    "table get": "TABLE row-1 --state-dir FOLDER",
    "table list": "",
    "table prefix": "TABLE row --state-dir FOLDER",
    "table range": "TABLE --state-dir FOLDER",
    "table repartition": "FLOW TABLE --partitions COUNT --yes",
    "table tail": "TABLE --from-start --limit 1 --state-dir FOLDER",
    "topic create": "TOPIC --partitions 1",
    "topic delete": "TOPIC --yes",
    "topic describe": "TOPIC",
    "topic list": "",
    "transactions describe": "ID --topic TOPIC",
    "transactions list": "--topic TOPIC",
    "transactions abort": "ID --topic TOPIC --yes",
    "verify": "FLOW --id record --partitioner any",
}


class CommandWorld:
    """Topics and records on a broker, for the commands of `ARGUMENTS`.

    Args:
        servers: a listener where everything is allowed.
    """

    def __init__(self, servers: str, folder: Path) -> None:
        self._servers = servers
        self.names: dict[str, dict[str, str]] = {}
        store = str(folder / "store")
        ObjectStore(store).put(b"a value")
        for n, label in enumerate(ARGUMENTS):
            placeholders = ("TOPIC", "SOURCE", "OUTPUT", "TABLE", "FLOW", "NEW", "PARKED", "RETRY", "LETTERS")
            self.names[label] = {
                **{each: f"{each.lower()}-{n}" for each in placeholders},
                "ID": f"onceflow.id-{n}",  # as if it were one of a flow
                "FOLDER": str(folder / f"{n}"),
                "FILE": str(folder / f"{n}.json"),
                "STORE": store,
                "COUNT": "2",
            }
        self._make_topics()
        self.left_open = list(self._fill())

    def words(self, label: str) -> list[str]:
        """The words of a command. They are others at each call if the command works only once."""
        names = self.names[label]
        names["COUNT"] = str(int(names["COUNT"]) + 1)
        path = label.split(" --")[0]
        return [*path.split(), *(names.get(word, word) for word in ARGUMENTS[label].split())]

    def topics(self, label: str) -> set[str]:
        """The topics that were made for a row."""
        rights = [right.of(self.names[label]) for right in RIGHTS[label] if right.kind == "topic"]
        created = {right.name for right in rights if right.operation == "CREATE"}
        return {right.name for right in rights if not right.name.startswith("__")} - created

    def _make_topics(self) -> None:
        client = _admin.AdminClient({"bootstrap.servers": self._servers})
        new = [
            _admin.NewTopic(name, 2, config={"cleanup.policy": "compact"} if "table" in name else {})
            for label in ARGUMENTS
            for name in self.topics(label)
        ]
        for future in client.create_topics(new, operation_timeout=30).values():
            future.result(30)

    def _fill(self) -> Iterator[Any]:
        """Yields the producers of open transactions."""
        plain = Producer({"bootstrap.servers": self._servers, "partitioner": "murmur2_random"})
        with closing(Cluster(ClientSettings(self._servers))) as cluster:
            progress_log.ensure_topic(cluster, Deadline(30, "a test"))
            for label in ARGUMENTS:
                topics, names = self.topics(label), self.names[label]
                if names["PARKED"] in topics:
                    plain.produce(names["PARKED"], b"{}", ORIGIN.encode(), headers=_PARKED_HEADERS)
                if label == "parked replay":
                    origin = {"topic": names["SOURCE"], "partition": "0", "offset": "1"}
                    headers = [
                        (f"onceflow.{of}.{name}", each.encode())
                        for of in ("origin", "error")
                        for name, each in origin.items()
                    ]
                    plain.produce(names["LETTERS"], b"{}", b"k", headers=[_PARKED_HEADERS[0], *headers])
                if "FLOW" in str(RIGHTS[label]) or label in _OF_FLOWS:
                    self._commit(cluster, label)
                    if label in ("compare", "promote"):
                        self._commit(cluster, label, copy=True)
                else:
                    for topic, n in itertools.product(topics & {names["TOPIC"], names["TABLE"]}, range(2)):
                        plain.produce(topic, b"{}", b"row-%d" % n, n)
                assert plain.flush(30) == 0
                if label.startswith("transactions"):
                    producer = Producer(
                        {
                            "bootstrap.servers": self._servers,
                            "transactional.id": names["ID"],
                            "transaction.timeout.ms": 600_000,  # it stays open until its command is tried
                            "log_level": 0,
                        }
                    )
                    producer.init_transactions(30)
                    producer.begin_transaction()
                    producer.produce(names["TOPIC"], b"open", partition=0)
                    assert producer.flush(30) == 0
                    yield producer

    def _commit(self, cluster: Cluster, label: str, *, copy: bool = False) -> None:
        """A batch of a flow that has copied its source, with a row in each partition of its table; or a batch of the
        copy of such a flow."""
        deadline = Deadline(30, "a test")
        topics, names = self.topics(label), self.names[label]
        forked = None
        if copy:
            new = names["NEW"]
            forked = ForkOrigin(
                names["FLOW"],
                3,
                clock_ms(),
                tables={names["TABLE"]: f"{new}-{names['TABLE']}"} if label == "compare" else {},
                outputs={names["OUTPUT"]: {0: 0, 1: 0}},
            )
            names = {**names, **{each: f"{new}-{names[each]}" for each in ("OUTPUT", "TABLE")}, "FLOW": new}
        source = names["SOURCE"]
        written = [name for name in (source, names["OUTPUT"]) if name in topics and not (copy and name == source)]
        state = [name for name in (names["TABLE"], f"{names['TABLE']}-internal") if name in topics]
        transactions = Transactions(cluster, f"onceflow.{names['FLOW']}")
        transactions.init(deadline)
        identity = transactions.begin(deadline)
        writer = Writer(cluster, transactions, dict.fromkeys([*written, *state], TopicLimits(1_000_000)), deadline)
        for topic, partition in itertools.product([*written, *state], range(2)):
            key, row = b"row-%d" % partition, Row(b"{}", clock_ms())
            if topic.endswith("-internal"):
                key, row = rows.map_key(key, b"map", b"1"), row._replace(value=rows.pack(b"entry"))
            writer.write(topic, partition, [(key, row)])
        ends = {topic: {0: 0, 1: 0} for topic in state}
        for (topic, partition), done in writer.finish().items():
            if topic in ends:
                ends[topic][partition] = done.end_offset
        sources = [source] if source in topics else written[:1]
        offsets = {topic: {0: 2, 1: 2} for topic in sources}  # behind the marker of this transaction
        progress = Progress(
            names["FLOW"],
            3,
            offsets,
            {each: cluster.topic(each, deadline).topic_id for each in [*offsets, *state]},
            clock_ms(),
            outputs=tuple(name for name in written if name != source),
            side_topics={names["LETTERS"]: "dead letter"} if names["LETTERS"] in topics else {},
            changelogs=ends,
            tables={names["TABLE"]: TableProgress()} if label in ("compare", "fork") else {},
            forked=forked,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
        )
        progress_log.write_progress(cluster, transactions, Names(names["FLOW"]), progress, offsets, deadline)
        transactions.commit(deadline, flow=names["FLOW"], doing="tested")
        Path(names["FILE"]).write_text(json.dumps(progress_file.export(progress, names["FLOW"], clock_ms())))
