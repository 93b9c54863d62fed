"""``tables=`` of ``Flow.process``, and ``Flow.join_table``: what is checked before a table can be joined."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from onceflow.errors import OptionError, counted, located
from onceflow.state.api.serdes import is_serde, prepare
from onceflow.state.changelog.compacted_topic import CompactedTopic
from onceflow.state.joins.spec import JoinSpec, JoinTable
from onceflow.state.local.format import default_state_dir
from onceflow.state.stores.choice import check_store, store_class


def checked_tables(tables: Any, *, own: Container[str], flow: str) -> dict[str, JoinTable]:
    """The tables by name, as given to ``Flow.process``.

    Args:
        tables: topics or `JoinTable`s by name; None: there are none.
        own: topics of the flow's own tables.

    Raises:
        OptionError: see its text.
    """
    if tables is None:
        return {}
    if not isinstance(tables, Mapping) or not all(isinstance(name, str) and name for name in tables):
        raise OptionError(
            f"tables={tables!r:.100} is not a dict of names and topics",
            flow=flow,
            next_step='for example tables={"rates": "fx-rates"}; state.table("rates") is that table then',
        )
    return {name: checked_table(table, own=own, flow=flow) for name, table in tables.items()}


def checked_table(table: Any, *, own: Container[str], flow: str) -> JoinTable:
    """One table, given as a topic or as a `JoinTable`.

    Raises:
        OptionError: see its text.
    """
    found = JoinTable(table) if isinstance(table, str) else table
    topic: Any = getattr(found, "topic", None)
    if not isinstance(found, JoinTable) or not (topic and isinstance(topic, str)):
        raise OptionError(
            f"{table!r:.100} is not a table to join with",
            flow=flow,
            next_step="give a topic, or a JoinTable(topic, ...)",
        )
    if found.topic in own:
        raise OptionError(
            f"{found.topic} is a table of this flow, so the flow cannot join with it",
            flow=flow,
            topic=found.topic,
            next_step="use the state of the processor, or join in another flow",
        )
    for name, serde in (("key", found.key), ("value", found.value)):
        if not (serde is None and name == "key") and not is_serde(serde):
            raise OptionError(
                f"{name}={serde!r} of the table {found.topic} is not a serde",
                flow=flow,
                next_step="give serdes.STRING, serdes.JSON, ...",
            )
        with located(flow=flow, topic=found.topic):
            prepare(serde)
    check_store(found.store, flow)
    return found


def check_not_joined(table: str, joined: Iterable[JoinSpec], flow: str) -> None:
    """Refuse a table for a process step that the flow joins with already.

    Raises:
        OptionError: the flow joins with it.
    """
    if table in {spec.topic for spec in joined}:
        raise OptionError(
            f"The flow joins with {table}, so it cannot be the table of a step of this flow",
            flow=flow,
            topic=table,
            next_step="give the step a table of its own",
        )


def join_spec(
    name: str,
    table: JoinTable,
    found: CompactedTopic,
    *,
    flow_key: str,
    run: str,
    local: bool,
    state_dir: str | Path | None = None,
) -> JoinSpec:
    """A table for the tasks.

    Args:
        run: identifies the run of the driver.
        state_dir: folder of the copies, if the table itself names none.
        local: whether tasks run on this machine; then the driver decides where the copies are.
    """
    given = state_dir if table.state_dir is None else table.state_dir
    default = default_state_dir() if local else None
    return JoinSpec(
        name=name,
        topic=table.topic,
        topic_id=found.info.topic_id,
        partitions=found.info.partitions,
        key=table.key,
        value=table.value,
        co_partitioned=table.co_partitioned,
        store=store_class(table.store),
        flow_key=flow_key,
        run=run,
        state_dir=default if given is None else Path(given),
        tombstone_ms=found.tombstone_ms,
    )


def check_co_partitioned(specs: Iterable[JoinSpec], table: str, partitions: int, flow: str) -> None:
    """Refuse co-partitioned tables whose number of partitions is not that of the flow's table.

    Raises:
        OptionError: there is one.
    """
    for spec in specs:
        if spec.co_partitioned and spec.partitions != partitions:
            raise OptionError(
                f"{spec.topic} has {counted(spec.partitions, 'partition')} and table {table} has {partitions}, so "
                "they are not co-partitioned",
                flow=flow,
                topic=spec.topic,
                next_step="leave co_partitioned out, or give both the same number of partitions",
            )
