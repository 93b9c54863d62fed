"""Functions of the JVM that are put together from its methods, without code of ours in it.

py4j can call methods, and pass objects on. But it cannot give Scala a function. ``java.lang.invoke`` can: a method
handle with some of its arguments bound becomes an object with any interface that has one abstract method. Handles can
also be called one after the other, so that many calls of Python become one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from py4j.java_gateway import JavaClass
from pyspark.sql import SparkSession

_OBJECT, _CLASS = "java.lang.Object", "java.lang.Class"
_PRIMITIVE = {"boolean": "java.lang.Boolean", "long": "java.lang.Long", "void": "java.lang.Void"}
_T = TypeVar("_T")
# By gateway, so by JVM: methods, classes and types, which stay what they are.
_looked_up: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


class JavaFunctions:
    """Makes functions. What was looked up is kept for as long as the JVM lives, because every call of it counts.

    Args:
        spark: any session of the JVM.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._gateway: Any = spark.sparkContext._gateway
        self._looked_up = _looked_up.setdefault(self._gateway, {})
        self._known: dict[Any, Any] = {}
        self._lookup = self._found("lookup", self.function("java.lang.invoke.MethodHandles", "publicLookup"))
        self._loader = self.static("java.lang.Thread").currentThread().getContextClassLoader()

    def once(self, key: Any, make: Callable[[], _T]) -> _T:
        """What this object has made for this key before, or makes now."""
        return _once(self._known, key, make)

    def _found(self, key: Any, find: Callable[[], _T]) -> _T:
        """What was found for this key before, or is found now."""
        return _once(self._looked_up, key, find)

    # ---- classes and objects -----------------------------------------------------------------------------------------

    def static(self, name: str) -> Any:
        """A class, for its static methods and constructors. (``jvm.a.b.c`` costs a call for each part of the name.)"""
        return JavaClass(name, self._gateway._gateway_client)

    def function(self, owner: str, name: str) -> Any:
        """A static method, to be called."""
        return self._found((owner, name), lambda: getattr(self.static(owner), name))

    def java_class(self, name: str) -> Any:
        """A class as an object. Arrays are named as in Java: ``[B``."""
        if name in _PRIMITIVE:
            return self._found(name, lambda: self.static(_PRIMITIVE[name]).TYPE)
        for_name = self.function(_CLASS, "forName")
        return self._found(name, lambda: for_name(name, True, self._loader))

    def array(self, items: Sequence[Any], of: str = _OBJECT) -> Any:
        """An array of objects; ``of``: their class."""
        made = self._gateway.new_array(self.static(of), len(items))
        for at, item in enumerate(items):
            made[at] = item
        return made

    def object(self, name: str) -> Any:
        """A Scala object, such as ``scala.collection.Iterator``."""
        return self.function(f"{name}$", "MODULE$")

    def tree_pattern(self, name: str) -> Any:
        """One of Catalyst's tree patterns, which say what is in a plan."""
        return getattr(self.static("org.apache.spark.sql.catalyst.trees.TreePattern"), name)()

    # ---- handles -----------------------------------------------------------------------------------------------------

    def method(self, owner: str, signature: str, *, of: Any = None) -> Any:
        """The handle of a public method. Its first parameter is the object, if the method is not static.

        Args:
            owner: its class.
            signature: ``name(types of the parameters) -> type of the result``, with ``static`` in front of it for a
                static method. The name alone: the method is searched for, which takes some 25 ms.
            of: the object that it is bound to; None: it is not bound.

        Raises:
            LookupError: there is no method of this name alone, or there are several.
            Py4JJavaError: there is no such method.
        """
        find = self._method if "(" in signature else self._method_of_name
        handle = self._found(("method", owner, signature), lambda: find(owner, signature))
        return handle if of is None else handle.bindTo(of)

    def _method(self, owner: str, signature: str) -> Any:
        named, _, returned = signature.partition(" -> ")
        name, _, types = named.removeprefix("static ").rstrip(")").partition("(")
        kind = self._type(returned, tuple(filter(None, types.split(", "))))
        find = self._lookup.findStatic if signature.startswith("static ") else self._lookup.findVirtual
        return find(self.java_class(owner), name, kind)

    def _method_of_name(self, owner: str, name: str) -> Any:
        declared = self.java_class(owner).getMethods()
        # One call in place of two for each method.
        texts = str(self.function("scala.runtime.ScalaRunTime", "stringOf")(declared)).split(", ")
        matches = [at for at, text in enumerate(texts) if f".{name}(" in text]
        if len(matches) != 1:
            raise LookupError(f"{owner} has {len(matches) or 'no'} methods {name}")
        return self._lookup.unreflect(declared[matches[0]]).asFixedArity()

    def constructor(self, owner: str) -> Any:
        """The handle of the one public constructor of a class."""

        def find() -> Any:
            (found,) = self.java_class(owner).getConstructors()
            return self._lookup.unreflectConstructor(found)

        return self._found((owner, "<init>"), find)

    def parameters(self, handle: Any) -> int:
        """How many parameters a handle has."""
        return int(handle.type().parameterCount())

    def typed(self, handle: Any, result: str, *parameters: str) -> Any:
        """The same handle with other types, to which its own ones are cast. ``void`` drops the result."""
        return handle.asType(self._found(("type", result, parameters), lambda: self._type(result, parameters)))

    def _type(self, result: str, parameters: tuple[str, ...]) -> Any:
        types = self.array([self.java_class(name) for name in parameters], _CLASS)
        return self.function("java.lang.invoke.MethodType", "methodType")(self.java_class(result), types)

    def bound(self, handle: Any, at: int, *arguments: Any) -> Any:
        """The handle with these arguments from a place on."""
        return self._of_handles("insertArguments")(handle, at, self.array(arguments))

    def then(self, first: Any, *others: Any) -> Any:
        """What calls ``first``, and each of the others with the result of the one before, which is cast for it."""
        for other in others:
            wanted = other.type().changeParameterType(0, first.type().returnType())
            first = self._of_handles("filterReturnValue")(first, other.asType(wanted))
        return first

    def fed(self, handle: Any, at: int, supplier: Any) -> Any:
        """The handle that gets the argument at a place from a handle without parameters, cast for it."""
        wanted = supplier.type().changeReturnType(handle.type().parameterType(at))
        return self._of_handles("collectArguments")(handle, at, supplier.asType(wanted))

    def after(self, first: Any, handle: Any) -> Any:
        """What calls ``first``, which returns nothing, with the first parameters of a handle, and then the handle."""
        return self._of_handles("foldArguments")(handle, first)

    def lastly(self, handle: Any, cleanup: Any) -> Any:
        """The handle, which returns nothing, and after it ``cleanup`` with the same parameters, also if it fails."""
        thrown = self.ignoring(cleanup, 0, "java.lang.Throwable")
        return self._of_handles("tryFinally")(handle, thrown)

    def rescued(self, handle: Any, cleanup: Any) -> Any:
        """The handle, and if it fails ``cleanup`` with the same parameters; then it fails."""
        returned = handle.type().returnType()
        throwable = self.java_class("java.lang.Throwable")
        fail = self._of_handles("throwException")(returned, throwable)
        for at in range(self.parameters(handle)):
            fail = self._of_handles("dropArguments")(
                fail, at + 1, self.array([handle.type().parameterType(at)], _CLASS)
            )
        fail = self.after(self.ignoring(cleanup, 0, "java.lang.Throwable"), fail)
        return self._of_handles("catchException")(handle, throwable, fail)

    def either(self, test: Any, handle: Any, otherwise: Any) -> Any:
        """One of two handles of the same type. ``test`` takes the same parameters, or the first of them."""
        return self._of_handles("guardWithTest")(test, handle, otherwise)

    def constant(self, value: bool) -> Any:
        """A handle without parameters that returns a boolean."""
        return self._of_handles("constant")(self.java_class("boolean"), value)

    def identity(self, kind: str) -> Any:
        """A handle that returns its parameter."""
        return self._of_handles("identity")(self.java_class(kind))

    def nothing(self, *parameters: str) -> Any:
        """A handle that does nothing with its parameters."""
        return self._of_handles("empty")(
            self._found(("type", "void", parameters), lambda: self._type("void", parameters))
        )

    def ignoring(self, handle: Any, at: int, *types: str) -> Any:
        """The handle with further parameters, which it does not use."""
        classes = self.array([self.java_class(name) for name in types], _CLASS)
        return self._of_handles("dropArguments")(handle, at, classes)

    def as_interface(self, handle: Any, interface: str) -> Any:
        """An object with the interface, whose one abstract method calls the handle."""
        make = self.function("java.lang.invoke.MethodHandleProxies", "asInterfaceInstance")
        return make(self.java_class(interface), handle)

    def _of_handles(self, name: str) -> Any:
        return self.function("java.lang.invoke.MethodHandles", name)


def _once(known: dict[Any, Any], key: Any, make: Callable[[], _T]) -> _T:
    if key not in known:
        known[key] = make()
    found: _T = known[key]
    return found
