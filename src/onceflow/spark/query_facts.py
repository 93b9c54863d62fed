"""What is known of a query from its analyzed plan. The plan is in Spark's JVM; ``Flow.write`` reads it once.

Whatever decides how a query runs takes these facts and not the plan. So it needs no JVM, and can be tested without one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from onceflow.errors import UnsupportedQueryError
from onceflow.spark import function_names, jvm, plan_columns, plans
from onceflow.spark.java_functions import JavaFunctions
from onceflow.spark.operators import Operator, operator
from onceflow.spark.plan_columns import PlanColumn, TakenColumn

#: An option on the source that says which flow read it; Spark's Kafka source ignores what it does not know.
MARK = "onceflow.flow"
# Sources as a plan has them before and after a query has begun.
_SOURCES = ("StreamingRelationV2", "StreamingRelation", "StreamingExecutionRelation")
# With these options several tasks may read one partition.
_SPLITTING = ("minPartitions", "maxRecordsPerPartition")
_END_OF_READ = re.compile(r"\(`?offset`? < get\(array\(([-\dL, ]*)\), `?partition`?\)\)")


@dataclass(frozen=True)
class SourceNode:
    """How a plan reads a source.

    Args:
        name: of its format, such as ``kafka``; empty: it has none.
        flow: the flow whose ``Flow.read`` has made it; None: none has.
        topic: None: the source is no topic.
        options: further options of it, by their names in small letters.
    """

    name: str
    flow: str | None
    topic: str | None
    options: dict[str, str]


@dataclass(frozen=True)
class Node:
    """An operator of a plan, and those below it.

    Args:
        kind: its class, see ``operators.OPERATORS``.
        path: the numbers of the children that lead to it from the root of the plan.
        columns: name and expression id of each column that it yields, if its rows are from a stream. Spark keeps the id
            of a column that is passed on unchanged. Several columns may have one name.
        children: those that its rows come from.
        streaming: whether its rows are from a stream.
        function: the name of the Python function of ``mapInArrow`` and ``mapInPandas``.
        projected: what each column of a projection is.
        source: of a source.
        ends: of the filter of a read that ends (``until=``, see ``kafka_source.load_source``): where, by partition.
        keeps_all: whether the condition of a filter is true for every row and in every batch.
        deals_out: whether rows go to tasks in turn (``repartition(n)`` without columns).
    """

    kind: str
    path: plans.Path
    columns: tuple[tuple[str, int], ...]
    children: tuple[Node, ...] = ()
    streaming: bool = True
    function: str = ""
    projected: tuple[PlanColumn, ...] = ()
    source: SourceNode | None = None
    ends: tuple[int, ...] | None = None
    keeps_all: bool = False
    deals_out: bool = False

    @property
    def operator(self) -> Operator:
        """The properties of its kind."""
        return operator(self.kind)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its columns."""
        return tuple(name for name, _ in self.columns)

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of its columns."""
        return tuple(number for _, number in self.columns)

    @property
    def table(self) -> str | None:
        """The table of a process step; None: it is no process step."""
        return function_names.table_of_step(self.function) if self.kind == "MapInArrow" else None

    def nodes(self) -> Iterator[Node]:
        """The node and all below it."""
        yield self
        for child in self.children:
            yield from child.nodes()

    def down_to(self, below: Node) -> Iterator[Node]:
        """The operators from the node to one below it, which comes last."""
        found = self
        yield found
        for number in below.path[len(self.path) :]:
            found = found.children[number]
            yield found

    def path_to(self, below: Node) -> plans.Path:
        """The path from the node to one below it."""
        return below.path[len(self.path) :]

    def id_of(self, name: str) -> int | None:
        """The id of the first column of this name; None: there is none."""
        return next((number for each, number in self.columns if each == name), None)

    def moved(self, path: plans.Path) -> Node:
        """The same node at another path."""
        children = tuple(child.moved((*path, number)) for number, child in enumerate(self.children))
        return replace(self, path=path, children=children)

    def selected(self, names: tuple[str, ...]) -> Node:
        """A projection of the node to some of its columns, whose names are unique, as ``DataFrame.select`` makes it."""
        ids = dict(self.columns)
        columns = tuple((name, ids[name]) for name in names)
        taken = tuple(TakenColumn(name, number, None) for name, number in columns)
        return Node("Project", self.path, columns, (self.moved((*self.path, 0)),), self.streaming, projected=taken)


@dataclass(frozen=True)
class QueryFacts:
    """Facts about a query.

    Args:
        root: its plan.
    """

    root: Node

    @cached_property
    def streams(self) -> tuple[Node, ...]:
        """The operators whose rows are from a stream."""
        return tuple(node for node in self.root.nodes() if node.streaming)

    @cached_property
    def sources(self) -> tuple[SourceNode, ...]:
        """The streams that it reads."""
        return tuple(node.source for node in self.streams if node.source is not None)

    @property
    def topics(self) -> bool:
        """Whether it reads topics with ``Flow.read``."""
        return any(source.flow is not None for source in self.sources)

    @property
    def others(self) -> bool:
        """Whether it has other sources, whose position is in the checkpoint only."""
        return any(source.flow is None for source in self.sources)

    @cached_property
    def state(self) -> str:
        """What Spark keeps state for, such as ``an aggregation``; empty: it keeps none."""
        return next(filter(None, map(_state_of, self.streams)), "")

    @property
    def has_with(self) -> bool:
        """Whether it has a ``WITH`` clause."""
        return any(node.kind == "WithCTE" for node in self.root.nodes())

    @property
    def watermark(self) -> bool:
        """Whether it has one of Spark's watermarks, by which operators with state drop late rows."""
        return any(node.kind == "EventTimeWatermark" for node in self.streams)

    @cached_property
    def has_step(self) -> bool:
        """Whether rows come out of a process step."""
        return any(node.table is not None for node in self.streams)

    @property
    def dealt_out(self) -> bool:
        """Whether rows go to tasks in turn: the order of a key is lost."""
        return any(node.deals_out for node in self.streams)

    @property
    def splitting(self) -> tuple[str, str] | None:
        """An option by which several tasks may read one partition, and its topic; None: there is none."""
        for source in self.sources:
            for name in _SPLITTING:
                if source.flow is not None and name.lower() in source.options:
                    return name, str(source.topic)
        return None

    @property
    def dead_letters(self) -> str:
        """Whether dead letters are among the rows (``Flow.enrich``), and if they go through operators: ``none``,
        ``written`` or ``processed``."""
        count = sum(function_names.has_dead_letters(node.function) for node in self.streams)
        if not count:
            return "none"
        return "written" if count == 1 and function_names.has_dead_letters(self.root.function) else "processed"

    @property
    def reads_little(self) -> bool:
        """Whether few source records mean little work for Spark: the query joins nothing and keeps no state."""
        joins = ("Join", "LateralJoin")
        return all(n.streaming and n.kind not in joins and not n.operator.stateful for n in self.root.nodes())

    @property
    def may_merge_tasks(self) -> bool:
        """Whether one task may read several source partitions, one after the other: the query has nothing but
        operators that look at one row at a time, and unions. Functions over batches may count on one partition for
        each task."""
        return all(node.operator.row_by_row for node in self.root.nodes())

    @property
    def may_make_many(self) -> bool:
        """Whether user code may make many rows from one, for example the rows of a file from a link to it."""
        return any(node.operator.python and not function_names.is_ours(node.function) for node in self.root.nodes())

    def ends_of_reads(self, flow: str) -> set[tuple[str, tuple[int, ...] | None]]:
        """The topics that it reads with ``Flow.read`` of this flow, and where the reads end; None: they do not end."""
        ends: set[tuple[str, tuple[int, ...] | None]] = set()
        reads: Counter[str] = Counter()  # those that are not below the filter of a read that ends
        for node in self.root.nodes():
            ended = node.ends is not None
            source = node.children[0].source if ended else node.source
            if source is None or source.flow != flow or source.topic is None:
                continue
            if ended:
                ends.add((source.topic, node.ends))
            reads[source.topic] += -1 if ended else 1
        return ends | {(topic, None) for topic, count in reads.items() if count > 0}


def _state_of(node: Node) -> str:
    if node.operator.stateful:
        return node.operator.word
    both = node.kind == "Join" and all(child.streaming for child in node.children)
    return "a join of two streams" if both else ""


def topics_read(node: Node) -> set[str]:
    """The topics that the streams of a part of a plan read."""
    return {each.source.topic for each in node.nodes() if each.source is not None and each.source.topic}


def facts_of(df: DataFrame, *, columns: bool = True) -> QueryFacts:
    """Read the analyzed plan of a DataFrame.

    Args:
        columns: whether columns and conditions are read, too. They are most of the calls of the JVM.
    """
    with _deep():
        plan = plans.analyzed(df)
        facts = QueryFacts(_read(df.sparkSession, plan, (), columns=columns))
        _check_subqueries(JavaFunctions(df.sparkSession), plan)
        return facts


def node_of(spark: SparkSession, plan: Any) -> Node:
    """Read an analyzed plan."""
    with _deep():
        return _read(spark, plan, (), columns=True)


def _check_subqueries(make: JavaFunctions, plan: Any) -> None:
    """Spark does not look at them when it checks a query on streams, and fails at the first batch."""
    for each in plans.expressions(make, plan, make.tree_pattern("PLAN_EXPRESSION")):
        query = plans.subquery(make, each)
        if query is not None and query.isStreaming():
            raise UnsupportedQueryError(
                "A stream is read in a subquery, or in LATERAL",
                next_step="join the two streams; or read what the subquery needs as a batch, with spark.read",
            )


@contextmanager
def _deep() -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise UnsupportedQueryError(
            "The query has too many operators, one after the other",
            next_step="make several columns by one select or withColumns, in place of one withColumn after the other",
        ) from error


def _read(spark: SparkSession, node: Any, path: plans.Path, *, columns: bool) -> Node:
    kind = jvm.kind(node)
    children = enumerate(plans.children(node))
    below = tuple(_read(spark, child, (*path, number), columns=columns) for number, child in children)
    streaming = any(child.streaming for child in below) if below else bool(node.isStreaming())
    columns = columns and streaming  # of the static side of a join, only what it consists of is asked
    is_filter = columns and kind == "Filter"
    return Node(
        kind,
        path,
        tuple((str(each.name()), int(each.exprId().id())) for each in plans.items(node.output())) if columns else (),
        below,
        streaming=streaming,
        function=str(node.functionExpr().name()) if operator(kind).python else "",
        projected=tuple(plan_columns.projected(node)) if columns and kind == "Project" else (),
        source=_source(node, kind) if kind in _SOURCES else None,
        ends=_end_of_read(node) if is_filter and below[0].kind == "StreamingRelationV2" else None,
        keeps_all=is_filter and plans.is_always_true(spark, node.condition()),
        deals_out=kind == "Repartition" and bool(node.shuffle()),
    )


def _source(relation: Any, kind: str) -> SourceNode:
    name = "" if kind == "StreamingExecutionRelation" else str(relation.sourceName())
    if kind != "StreamingRelationV2":
        return SourceNode(name, None, None, {})
    options = relation.extraOptions()
    # An array: the end of a Java iterator is an exception, which takes py4j 40 ms.
    given = {str(each).lower(): str(options.get(each)) for each in options.keySet().toArray()}
    return SourceNode(name, given.get(MARK), given.get("subscribe"), given)


def _end_of_read(node: Any) -> tuple[int, ...] | None:
    found = _END_OF_READ.fullmatch(str(node.condition().sql()))
    return None if found is None else tuple(map(int, re.findall(r"-?\d+", found[1])))
