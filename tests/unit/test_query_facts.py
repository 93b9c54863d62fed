"""What is decided from the facts of a query, without a JVM: facts are put together here as a plan would have them."""

from __future__ import annotations

from typing import Any

import pytest

from onceflow.driver.batch.driver_program import DriverProgram, Functions, StepProgram, described, driver_program
from onceflow.planning.direct_plan import DirectPlan, Function, SparkOperators
from onceflow.planning.direct_query import direct_plan
from onceflow.planning.step_tree import stripped, tree_of
from onceflow.spark import function_names
from onceflow.spark.operators import OPERATORS, operator
from onceflow.spark.plan_columns import ComputedColumn, ConstantColumn, TakenColumn
from onceflow.spark.query_facts import MARK, Node, QueryFacts, SourceNode, topics_read
from onceflow.task.row_operators import SOURCE_TYPES, Attribute, Constant, Select
from onceflow.task.task_program import TopicRead

FLOW = "f"
COLUMNS = tuple((name, number) for number, name in enumerate(SOURCE_TYPES, start=1))[:-1]


def source(topic: str = "a", flow: str | None = FLOW, *, kind: str = "StreamingRelationV2", **options: str) -> Node:
    given = {"subscribe": topic, **options, **({} if flow is None else {MARK: flow})}
    return Node(kind, (), COLUMNS, source=SourceNode("kafka", flow, topic, given))


def above(child: Node, kind: str, columns: Any = None, **more: Any) -> Node:
    return Node(kind, (), child.columns if columns is None else columns, (child,), child.streaming, **more)


def both(kind: str, *children: Node) -> Node:
    return Node(kind, (), children[0].columns, children, any(child.streaming for child in children))


def rooted(node: Node) -> Node:
    """The node as the root of a plan: each below it has its path."""
    return node.moved(())


def facts(node: Node) -> QueryFacts:
    return QueryFacts(rooted(node))


def step(child: Node, table: str = "t") -> Node:
    return above(child, "MapInArrow", function=function_names.step_name(table))


STATIC = Node("LocalRelation", (), COLUMNS, streaming=False)


@pytest.mark.parametrize(
    "node, state",
    [
        (source(), ""),
        (above(source(), "Aggregate"), "an aggregation"),
        (above(STATIC, "Aggregate"), ""),
        (both("Join", source(), STATIC), ""),
        (both("Join", source(), above(source("b"), "Project")), "a join of two streams"),
        (both("Join", source(), above(STATIC, "Aggregate")), ""),
        (above(above(source(), "Deduplicate"), "Project"), "dropDuplicates"),
    ],
)
def test_what_spark_keeps_state_for(node: Node, state: str) -> None:
    assert facts(node).state == state
    assert facts(node).reads_little == (not state and node.kind != "Join" and node.streaming)


def test_sources() -> None:
    mixed = facts(both("Union", source("a"), above(source("b", minpartitions="9"), "Filter")))
    assert (mixed.topics, mixed.others) == (True, False)
    assert mixed.splitting == ("minPartitions", "b")
    assert topics_read(mixed.root) == {"a", "b"}
    rate = Node("StreamingRelationV2", (), (("value", 1),), source=SourceNode("rate", None, None, {}))
    other = facts(both("Union", source(), rate))
    assert (other.topics, other.others, other.splitting) == (True, True, None)
    assert facts(source(flow=None, minpartitions="9")).splitting is None, "it is not read by a flow"


def test_where_reads_end() -> None:
    ending = above(source("a"), "Filter", ends=(5, 7))
    query = facts(both("Union", ending, above(ending, "Project"), source("b"), above(source("c"), "Filter")))
    assert query.ends_of_reads(FLOW) == {("a", (5, 7)), ("b", None), ("c", None)}
    again = facts(both("Union", ending, source("a")))
    assert again.ends_of_reads(FLOW) == {("a", (5, 7)), ("a", None)}, "read twice, with and without an end"
    assert query.ends_of_reads("another") == set()


@pytest.mark.parametrize(
    "build, found",
    [
        (lambda calls: calls, "written"),
        (lambda calls: above(calls, "Project"), "processed"),
        (lambda calls: above(calls, "MapInArrow", function=calls.function), "processed"),
        (lambda calls: both("Union", calls, calls), "processed"),
        (lambda calls: source(), "none"),
    ],
)
def test_dead_letters_of_calls(build: Any, found: str) -> None:
    calls = above(source(), "MapInArrow", function=function_names.calls_name("ask", dead_letters=True))
    assert facts(build(calls)).dead_letters == found


def test_functions_of_users_may_make_many_rows() -> None:
    for name, many in [
        (function_names.step_name("t"), False),
        (function_names.join_name("t"), False),
        (function_names.map_name(1, "clean"), True),
        (function_names.calls_name("ask", dead_letters=False), True),
        ("split", True),
    ]:
        query = facts(above(above(source(), "MapInArrow", function=name), "Project"))
        assert query.may_make_many == many, name
        assert not query.may_merge_tasks
    assert facts(both("Union", above(source(), "Filter"), source())).may_merge_tasks
    assert facts(above(source(), "Repartition", deals_out=True)).dealt_out


def test_every_operator_has_a_word_and_the_unknown_one_has_no_property() -> None:
    assert all(each.word for each in OPERATORS.values())
    unknown = operator("SomethingNew")
    assert not any(vars(unknown).values())
    # What Spark can evaluate for the rows of a batch keeps no state; what is narrow is no shuffle.
    assert not [kind for kind, each in OPERATORS.items() if each.stateful and (each.per_batch or each.narrow)]
    assert not [kind for kind, each in OPERATORS.items() if each.names_only and not each.same_rows]


# ---- the plan of the direct engine -------------------------------------------------------------------


def plan_of(node: Node, *functions: str) -> DirectPlan | str:
    return direct_plan(rooted(node), FLOW, functions)


def bound(plan: DirectPlan, functions: Functions | None = None) -> DriverProgram:
    found = driver_program(plan, None, functions or Functions({}, {}, None), None)
    assert isinstance(found, DriverProgram), found
    return found


def select(child: Node, *columns: Any) -> Node:
    ids = [column.expression if isinstance(column, TakenColumn) else 90 + n for n, column in enumerate(columns)]
    named = tuple((column.name, number) for column, number in zip(columns, ids, strict=True))
    return above(child, "Project", named, projected=tuple(columns))


VALUE, KEY = TakenColumn("value", 2, None), TakenColumn("key", 1, None)


def test_columns_and_constants_need_no_spark() -> None:
    plan = plan_of(select(above(source(), "SubqueryAlias"), VALUE, ConstantColumn("topic", "out", "string")))
    assert isinstance(plan, DirectPlan)
    (one,) = plan.sources
    assert one.read == TopicRead("a", False, True, None)
    (operator_,) = one.operators
    assert isinstance(operator_, Select)
    assert operator_.columns == (Attribute("value", 1), Constant("topic", "out", SOURCE_TYPES["topic"]))
    assert (plan.by_spark, plan.needs_frame) == (False, False)
    assert described(plan, bound(plan)).splitlines() == ["== Direct plan ==", "topic a -> select value, topic"]


def test_operators_of_spark_that_follow_each_other_are_one_range_of_the_plan() -> None:
    filtered = above(select(source(), KEY, ComputedColumn("value")), "Filter")
    plan = plan_of(above(select(filtered, KEY), "Repartition"))
    assert isinstance(plan, DirectPlan)
    (one,) = plan.sources
    # The repartition has no effect. The projection, the filter and the projection below it are one program.
    assert one.operators == (SparkOperators(("key",), (0,), (0, 0, 0)),)
    joined = plan_of(both("Join", STATIC, source()))
    assert isinstance(joined, DirectPlan)
    assert joined.sources[0].operators == (SparkOperators(tuple(n for n, _ in COLUMNS), (), (1,)),)


def test_operators_of_spark_above_a_union_are_one_program() -> None:
    sides = [select(source(topic), KEY, VALUE) for topic in "abc"]
    plan = plan_of(above(both("Union", *sides), "Filter"))
    assert isinstance(plan, DirectPlan)
    made: list[Any] = []

    class Program:
        needed, job = frozenset({1}), "a join"

    def evaluate(node: Any, path: Any, base: Any) -> Any:
        made.append((path, base))
        return Program()

    program = bound(plan, Functions({}, {}, evaluate))
    assert made == [((), (0,))], "planning takes a second each time"
    assert program.job == "a join"
    assert len({id(topic.operators[-1]) for topic in program.query.program.topics}) == 1
    refused = driver_program(plan, None, Functions({}, {}, lambda *_: "a type that Arrow lacks"), None)
    assert refused == "a type that Arrow lacks"


def test_the_columns_that_are_used_are_told_for_each_topic_also_below_a_step() -> None:
    given = select(source("b"), KEY, VALUE)
    plan = plan_of(both("Union", select(source("a"), VALUE), select(step(given), VALUE)))
    assert isinstance(plan, DirectPlan)
    program = bound(plan)
    assert isinstance(program.steps[0], StepProgram)
    assert described(plan, program, extended=True).splitlines() == [
        "== Direct plan ==",
        "topic a -> select value",
        "  columns of the topic that are used: value",
        "process step of table t -> select value",
        "  topic b -> select key, value",
        "    columns of the topic that are used: key, value",
    ]


def test_functions_of_the_flow_are_named_and_steps_are_sources() -> None:
    name, join = function_names.map_name(1, "clean"), function_names.join_name("t")
    plan = plan_of(select(step(above(source(), "MapInArrow", function=name)), VALUE), name)
    assert isinstance(plan, DirectPlan)
    assert not plan.sources
    (one,) = plan.steps
    names = tuple(n for n, _ in COLUMNS)
    assert one.input.sources[0].operators == (Function(name, names, names),)
    assert not one.input.needs_frame, "a function of Flow.map depends on each row alone"
    assert plan.needs_frame
    assert list(plan.reads) == ["a"]
    moved = plan_of(above(source(), "MapInArrow", function=join), join)
    assert isinstance(moved, DirectPlan)
    assert moved.needs_frame, "rows are moved to the function of a join"
    assert "which was made before an earlier run" in str(plan_of(above(source(), "MapInArrow", function=join)))


@pytest.mark.parametrize(
    "node, why",
    [
        (above(source(), "Aggregate"), "the query has an aggregation"),
        (above(source(), "Sort"), "the query has a sort"),
        (above(source(), "SomethingNew"), "the query has the operator SomethingNew"),
        (both("Union", source(), STATIC), "the query has rows that are not from a stream"),
        (both("Join", source(), source("b")), "the query has a join of two streams"),
        (both("Join", STATIC, STATIC), "the query has rows without a stream"),
        (source(flow="another"), "the query reads a source that is not a topic of this flow"),
        (source(minpartitions="2"), "topic a is read with minPartitions"),
        (above(source(), "Filter").children[0].selected(("key",)), ""),
    ],
)
def test_why_there_is_no_plan(node: Node, why: str) -> None:
    found = plan_of(node)
    assert found == why if why else isinstance(found, DirectPlan)


# ---- steps -------------------------------------------------------------------------------------------


def test_where_steps_stand() -> None:
    query = facts(above(both("Union", step(above(source(), "Filter")), above(source("b"), "Project")), "Filter"))
    tree, branches = tree_of(query, ["t"], FLOW) or pytest.fail("it has a step")
    (one,) = tree.steps
    assert (one.node.path, one.narrow) == ((0, 0), False)
    assert tree.step is None
    assert [branch.path for branch in branches] == [(0, 0, 0), (0, 1)]
    assert one.input.branch == 0
    assert [(node.path, number) for node, number in tree.branches] == [((0, 1), 1)]
    assert tree_of(facts(source()), [], FLOW) is None


def test_operators_that_change_nothing_are_left_out() -> None:
    columns = (("key", 1), ("value", 2), ("topic", 3), ("headers", 4), ("timestamp", 5))
    made = Node("MapInArrow", (), columns, (source(),), function=function_names.step_name("t"))
    for kind, more in (("SubqueryAlias", {}), ("Filter", {"keeps_all": True})):
        tree, _ = tree_of(facts(above(made, kind, **more)), ["t"], FLOW) or pytest.fail("it has a step")
        assert tree.step is None
        left = stripped(tree).step
        assert left is not None
        assert (left.table, left.narrow, left.node.path) == ("t", True, (0,))
    tree, _ = tree_of(facts(above(made, "Filter")), ["t"], FLOW) or pytest.fail("it has a step")
    assert stripped(tree) is tree
