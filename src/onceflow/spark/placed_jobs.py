"""Jobs whose tasks run in executors that are named for them.

Spark asks an RDD where each of its partitions is wanted (``RDD.preferredLocations``), and what follows without a
shuffle inherits the answer. An RDD of numbers can name executors itself (``SparkContext.makeRDD``). Behind a shuffle
an RDD is put that has the same partitions, each with a preference: `coalesce` with a ``PartitionCoalescer`` of ours.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from pyspark import RDD
from pyspark.serializers import CPickleSerializer
from pyspark.sql import DataFrame, SparkSession

from onceflow.spark import jvm
from onceflow.spark.java_functions import JavaFunctions

_T = TypeVar("_T")
_COALESCER, _GROUP = "org.apache.spark.rdd.PartitionCoalescer", "org.apache.spark.rdd.PartitionGroup"
_HANDLER, _OBJECT, _METHOD = "java.lang.reflect.InvocationHandler", "java.lang.Object", "java.lang.reflect.Method"
_CLASS_TAG = "scala.reflect.ClassTag"
_KEPT = 64  # RDDs of numbers: one for each set of executors that batches have lately used


class PlacedJobs:
    """Makes jobs whose tasks prefer executors.

    Args:
        spark: the session in which they run.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._make = JavaFunctions(spark)
        self._numbered: OrderedDict[tuple[str, ...], RDD[int]] = OrderedDict()

    def run(self, executors: Sequence[str], task: Callable[[Iterable[int]], Iterable[_T]]) -> list[_T]:
        """Run a function once for each of these executors, and return what the calls have yielded.

        Args:
            executors: their preferences, see `Executor.preference`.
            task: gets the numbers of its task. It has to read them, or Spark ends the Python worker with the task.
        """
        if not executors:
            return []
        return self.numbered(executors).mapPartitions(task).collect()

    def numbered(self, executors: Sequence[str]) -> RDD[int]:
        """An RDD with a partition for each executor, which holds its number."""
        wanted = tuple(executors)
        if wanted in self._numbered:
            self._numbered.move_to_end(wanted)
            return self._numbered[wanted]
        make, context = self._make, self._spark.sparkContext
        to_seq = make.function("org.apache.spark.api.python.PythonUtils", "toSeq")
        pair = make.static("scala.Tuple2")
        items = [pair(pickle.dumps(number), to_seq([name])) for number, name in enumerate(wanted)]
        tag = make.object(_CLASS_TAG).apply(make.java_class("[B"))
        made = context._jsc.sc().makeRDD(to_seq(items), tag)
        self._numbered[wanted] = RDD(made.toJavaRDD(), context, CPickleSerializer())
        if len(self._numbered) > _KEPT:
            self._numbered.popitem(last=False)
        return self._numbered[wanted]

    def moved(self, df: DataFrame, executors: Sequence[str]) -> DataFrame:
        """The same rows in the same partitions, each of which prefers an executor.

        Args:
            df: it has a partition for each executor, behind a shuffle.
        """
        make = self._make
        rdd = df._jdf.queryExecution().toRdd()
        partitions = list(rdd.partitions())
        if len(partitions) != len(executors):
            raise ValueError(f"{len(partitions)} partitions for {len(executors)} executors")
        option, group = make.function("scala.Option", "apply"), make.static(_GROUP)
        groups = []
        for partition, name in zip(partitions, executors, strict=True):
            groups.append(group(option(name)))
            getattr(groups[-1].partitions(), "$plus$eq")(partition)
        placed = rdd.coalesce(len(groups), False, option(self._coalescer(make.array(groups, _GROUP))), None)
        placed.partitions()  # makes them, and keeps them
        self._forget_coalescer(placed)
        session: Any = self._spark._jsparkSession
        return DataFrame(session.internalCreateDataFrame(placed, df._jdf.schema(), False), self._spark)

    def _coalescer(self, groups: Any) -> Any:
        """A ``PartitionCoalescer`` that returns these groups. Spark wants one that can be serialized."""
        make = self._make
        always = make.ignoring(make.bound(make.identity(_OBJECT), 0, groups), 0, _OBJECT, _METHOD, f"[L{_OBJECT};")
        # Scala 2.12 has an interface of its own for it.
        own = "scala.Serializable"
        serializable = own if jvm.has_class(self._spark._jvm, own) else "java.io.Serializable"
        interfaces = make.array([make.java_class(each) for each in (_COALESCER, serializable)], "java.lang.Class")
        loader = make.java_class(_COALESCER).getClassLoader()
        proxy = make.function("java.lang.reflect.Proxy", "newProxyInstance")
        return proxy(loader, interfaces, make.as_interface(always, _HANDLER))

    def _forget_coalescer(self, rdd: Any) -> None:
        """Take the coalescer out of an RDD that has its partitions: tasks get the RDD, and method handles cannot be
        serialized."""
        make = self._make
        for field in rdd.getClass().getDeclaredFields():
            if str(field.getName()).endswith("partitionCoalescer"):
                field.setAccessible(True)
                field.set(rdd, make.function("scala.Option", "empty")())
