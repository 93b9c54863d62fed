"""Reads from Spark's plans what the columns of a projection are, and how a source topic is read."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame

from onceflow import user_code
from onceflow.spark import jvm, plans
from onceflow.spark.queries import MARK

_MAX_SHOWN = 120
_TEXTS = ("string", "binary")
# Spark numbers columns in the texts of some expressions.
_NUMBER = re.compile(r"#\d+L?")


@dataclass(frozen=True)
class TakenColumn:
    """A column of the input.

    Args:
        expression: its id.
        cast: the type that its bytes are taken as, ``string`` or ``binary``; None: it keeps its type.
    """

    name: str
    expression: int
    cast: str | None


@dataclass(frozen=True)
class ConstantColumn:
    """A column with the same value in all rows.

    Args:
        kind: its type, as in SQL.
    """

    name: str
    value: str | bytes | int | None
    kind: str


@dataclass(frozen=True)
class ComputedColumn:
    """A column that is anything else.

    Args:
        text: how it is computed.
    """

    name: str
    text: str


@dataclass(frozen=True)
class SourceNode:
    """How a plan reads a topic.

    Args:
        flow: the flow whose ``Flow.read`` has made the source; None: none has.
        topic: None: the source is no topic.
        options: further options of it, by their names in small letters.
    """

    flow: str | None
    topic: str | None
    options: dict[str, str]


def output_ids(node: Any) -> list[int]:
    """The ids of a node's columns."""
    return [int(attribute.exprId().id()) for attribute in plans.items(node.output())]


def output_names(node: Any) -> tuple[str, ...]:
    """The names of a node's columns."""
    return tuple(str(attribute.name()) for attribute in plans.items(node.output()))


def projected(project: Any) -> list[TakenColumn | ConstantColumn | ComputedColumn]:
    """The columns of a projection."""
    return [_column(each) for each in plans.items(project.projectList())]


def source_node(relation: Any) -> SourceNode:
    """How a ``StreamingRelationV2`` reads."""
    options = relation.extraOptions()
    given = {str(name).lower(): str(options.get(name)) for name in options.keySet()}
    return SourceNode(given.get(MARK), given.get("subscribe"), given)


def end_of_read(node: Any) -> tuple[int, ...] | None:
    """Where a read ends (``until=``) whose filter this is, by partition, see ``kafka_source.load_source``.

    None: it is another filter.
    """
    if jvm.kind(node.child()) != "StreamingRelationV2":
        return None
    found = re.fullmatch(r"\(`?offset`? < get\(array\(([-\dL, ]*)\), `?partition`?\)\)", str(node.condition().sql()))
    return None if found is None else tuple(map(int, re.findall(r"-?\d+", found[1])))


def ends_of_reads(df: DataFrame, flow: str) -> set[tuple[str, tuple[int, ...] | None]]:
    """The topics that a query reads with ``Flow.read`` of this flow, and where the reads end; None: they do not end."""
    ends: set[tuple[str, tuple[int, ...] | None]] = set()
    reads: Counter[str] = Counter()  # those that are not below such a filter
    for node in jvm.nodes(plans.analyzed(df)):
        kind = jvm.kind(node)
        if kind == "StreamingRelationV2" and (topic := _topic(node, flow)) is not None:
            reads[topic] += 1
        elif kind == "Filter" and (end := end_of_read(node)) is not None:
            topic = _topic(node.child(), flow)
            if topic is not None:
                ends.add((topic, end))
                reads[topic] -= 1
    return ends | {(topic, None) for topic, count in reads.items() if count > 0}


def _topic(relation: Any, flow: str) -> str | None:
    source = source_node(relation)
    return source.topic if source.flow == flow else None


def _column(named: Any) -> TakenColumn | ConstantColumn | ComputedColumn:
    name = str(named.name())
    expression = named.child() if jvm.kind(named) == "Alias" else named
    inner, cast = expression, None
    while jvm.kind(inner) == "Cast":
        kind, before = _kind(inner), _kind(inner.child())
        if kind != before and jvm.kind(inner.child()) != "Literal":
            if kind not in _TEXTS or before not in _TEXTS:
                return ComputedColumn(name, _text(expression))
            cast = cast or kind  # only the last cast counts, since none changes the bytes
        inner = inner.child()
    if jvm.kind(inner) == "AttributeReference":
        return TakenColumn(name, int(inner.exprId().id()), cast)
    if jvm.kind(inner) == "Literal":
        return _constant(name, inner, expression)
    return ComputedColumn(name, _text(expression))


def _constant(name: str, literal: Any, expression: Any) -> ConstantColumn | ComputedColumn:
    value, kind, own = literal.value(), _kind(expression), _kind(literal)
    if value is None:
        return ConstantColumn(name, None, kind)
    if own == "string":
        value = bytes(value.getBytes())
        if kind == "string":
            value = value.decode()
    known = isinstance(value, str | bytes | int) and not isinstance(value, bool)
    if known and (kind == own or (own in _TEXTS and kind == "binary")):
        return ConstantColumn(name, value, kind)
    return ComputedColumn(name, _text(expression))


def _kind(expression: Any) -> str:
    return str(expression.dataType().catalogString())


def _text(expression: Any) -> str:
    """How a column is computed, as SQL."""
    return user_code.cut(_NUMBER.sub("", str(expression.sql())), _MAX_SHOWN)
