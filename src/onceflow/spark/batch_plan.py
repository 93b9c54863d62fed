"""What differs from batch to batch in a plan: the time, and the seeds of random numbers.

Spark does the same with the plan of a micro-batch (``IncrementalExecution``: ``CurrentBatchTimestamp``, and new seeds
for ``ExpressionWithRandomSeed``).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from pyspark.sql import SparkSession

from onceflow.spark import jvm, plans
from onceflow.spark.java_functions import JavaFunctions

_CATALYST = "org.apache.spark.sql.catalyst"
_EXPRESSIONS = f"{_CATALYST}.expressions"
#: Expressions of the time, and the types that they have; empty: a point in time.
_CLOCKS = {"CurrentTimestamp": "", "Now": "", "CurrentDate": "DateType", "LocalTimestamp": "TimestampNTZType"}
#: Types for which Spark takes such texts as times (SpecialDatetimeValues).
_TIMES = ("date", "timestamp", "timestamp_ntz")
_SPECIAL = {"now", "today", "tomorrow", "yesterday"}
_RANDOM = "EXPRESSION_WITH_RANDOM_SEED"


def inlined(spark: SparkSession, plan: Any) -> Any:
    """The plan without ``WITH``: what it names is where it is used (Spark: ``InlineCTE``)."""
    make = JavaFunctions(spark)
    if not plan.containsPattern(make.tree_pattern("CTE")):
        return plan
    (constructor,) = make.java_class(f"{_CATALYST}.optimizer.InlineCTE").getConstructors()
    # Always; from Spark 4 on, whether to keep what is not used.
    flags = [True, False][: constructor.getParameterCount()]
    return make.static(f"{_CATALYST}.optimizer.InlineCTE")(*flags).apply(plan)


def with_variable_time(spark: SparkSession, plan: Any, variable: Any) -> tuple[Any, bool]:
    """The plan with the time taken from a variable, and whether it has a time.

    Args:
        variable: an AtomicReference, which has microseconds of the epoch.
    """
    make = JavaFunctions(spark)
    types = make.static("org.apache.spark.sql.types.DataTypes")

    def time() -> Any:
        holder = make.static("org.apache.spark.sql.types.ObjectType")(make.java_class(variable.getClass().getName()))
        literal = make.static(f"{_EXPRESSIONS}.Literal")(variable, holder)
        none = plans.sequence(spark, ())
        # Not deterministic: else the optimizer would call it once and for all.
        return make.static(f"{_EXPRESSIONS}.objects.Invoke")(
            literal, "get", types.TimestampType, none, none, True, False, False
        )

    return _timed(spark, plan, time)


def of_batch(spark: SparkSession, plan: Any, now_us: int, *, other_times: bool = False) -> Any:
    """The plan for one attempt of a batch.

    Args:
        now_us: the time of the batch, in microseconds of the epoch.
        other_times: whether it may have some, see `has_other_times`. ``current_time()`` is left to the optimizer.
    """
    make = JavaFunctions(spark)

    def time() -> Any:
        kind = make.static("org.apache.spark.sql.types.DataTypes").TimestampType
        return make.static(f"{_EXPRESSIONS}.Literal")(now_us, kind)

    plan, _ = _timed(spark, plan, time)
    if other_times:
        plan = _with_texts(spark, plan, now_us)
    if not is_random(spark, plan):
        return plan
    seeded = make.java_class(f"{_EXPRESSIONS}.ExpressionWithRandomSeed")

    def reseeded(expression: Any) -> Any:
        if not seeded.isInstance(expression):
            return None
        return expression.withNewSeed(secrets.randbits(63))

    return plans.mapped(spark, plan, make.tree_pattern(_RANDOM), reseeded)


def is_random(spark: SparkSession, plan: Any) -> bool:
    """Whether a plan has random numbers."""
    return bool(plan.containsPattern(JavaFunctions(spark).tree_pattern(_RANDOM)))


def has_other_times(spark: SparkSession, plan: Any) -> bool:
    """Whether a plan has times that only the optimizer knows: ``current_time()`` of Spark 4.1, and texts such as
    ``now`` that are cast to a date or a time (Spark: ``SpecialDatetimeValues``)."""
    make = JavaFunctions(spark)
    known = (("CURRENT_LIKE", _is_current_time), ("CAST", _is_special))
    return any(found(each) for name, found in known for each in plans.expressions(make, plan, make.tree_pattern(name)))


def _with_texts(spark: SparkSession, plan: Any, now_us: int) -> Any:
    """The plan with a time in place of each text such as ``now``."""
    make = JavaFunctions(spark)
    util = make.static(f"{_CATALYST}.util.DateTimeUtils")
    zone = util.getZoneId(str(spark.conf.get("spark.sql.session.timeZone")))
    seconds, micros = divmod(now_us, 1_000_000)
    now = make.static("java.time.Instant").ofEpochSecond(seconds, micros * 1000).atZone(zone)
    today = now.toLocalDate()
    days = {"today": today, "tomorrow": today.plusDays(1), "yesterday": today.minusDays(1)}

    def changed(expression: Any) -> Any:
        if not _is_special(expression):
            return None
        name = str(expression.child().value()).strip().lower()
        text = now.toOffsetDateTime() if name == "now" else days[name]
        return expression.withNewChildren(
            plans.sequence(spark, [make.object(f"{_EXPRESSIONS}.Literal").apply(str(text))])
        )

    return plans.mapped(spark, plan, make.tree_pattern("CAST"), changed)


def _is_current_time(expression: Any) -> bool:
    return jvm.kind(expression) == "CurrentTime"


def _is_special(expression: Any) -> bool:
    if jvm.kind(expression) != "Cast" or jvm.kind(expression.child()) != "Literal":
        return False
    if str(expression.child().value()).strip().lower() not in _SPECIAL:
        return False
    return str(expression.dataType().typeName()) in _TIMES


def _timed(spark: SparkSession, plan: Any, time: Callable[[], Any]) -> tuple[Any, bool]:
    make = JavaFunctions(spark)
    pattern = make.tree_pattern("CURRENT_LIKE")
    if not plan.containsPattern(pattern):
        return plan, False
    now, found = time(), []

    def changed(expression: Any) -> Any:
        name = jvm.kind(expression)
        if name not in _CLOCKS:
            return None
        found.append(name)
        if not _CLOCKS[name]:
            return now
        kind = getattr(make.static("org.apache.spark.sql.types.DataTypes"), _CLOCKS[name])
        mode = make.object(f"{_EXPRESSIONS}.EvalMode").LEGACY()
        return make.static(f"{_EXPRESSIONS}.Cast")(now, kind, expression.timeZoneId(), mode)

    return plans.mapped(spark, plan, pattern, changed), bool(found)
