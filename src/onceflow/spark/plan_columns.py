"""Reads from Spark's plans what the columns of a projection are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onceflow.spark import jvm, plans

_TEXTS = ("string", "binary")


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
    """A column that is anything else."""

    name: str


PlanColumn = TakenColumn | ConstantColumn | ComputedColumn


def output_ids(node: Any) -> list[int]:
    """The ids of a node's columns."""
    return [int(attribute.exprId().id()) for attribute in plans.items(node.output())]


def projected(project: Any) -> list[PlanColumn]:
    """The columns of a projection."""
    return [_column(each) for each in plans.items(project.projectList())]


def _column(named: Any) -> PlanColumn:
    name = str(named.name())
    expression = named.child() if jvm.kind(named) == "Alias" else named
    inner, cast = expression, None
    while jvm.kind(inner) == "Cast":
        kind, before = _kind(inner), _kind(inner.child())
        if kind != before and jvm.kind(inner.child()) != "Literal":
            if kind not in _TEXTS or before not in _TEXTS:
                return ComputedColumn(name)
            cast = cast or kind  # only the last cast counts, since none changes the bytes
        inner = inner.child()
    if jvm.kind(inner) == "AttributeReference":
        return TakenColumn(name, int(inner.exprId().id()), cast)
    if jvm.kind(inner) == "Literal":
        return _constant(name, inner, expression)
    return ComputedColumn(name)


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
    return ComputedColumn(name)


def _kind(expression: Any) -> str:
    return str(expression.dataType().catalogString())
