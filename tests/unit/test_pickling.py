"""What of a processor cannot be sent to tasks is named; what can, tells the modules that tasks need."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

import onceflow
from onceflow.errors import OptionError
from onceflow.spark.pickling import load_failure, pickled
from onceflow.testing import processor_driver

LOCK = threading.Lock()


def locked() -> Any:
    return LOCK


class Holder(onceflow.Processor):
    """Of this module, which tasks could import: only its instances are pickled."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def in_a_class_attribute() -> Any:
    class Balance(onceflow.Processor):
        client = LOCK

    return Balance()


def in_a_base_class() -> Any:
    class Base(onceflow.Processor):
        client = LOCK

    class Balance(Base):
        pass

    return Balance()


def in_a_global() -> Any:
    class Balance(onceflow.Processor):
        def open(self, partition: int) -> None:
            self.all = [LOCK for _ in range(partition)]

    return Balance()


def in_a_closure() -> Any:
    client = threading.Lock()

    class Balance(onceflow.Processor):
        @staticmethod
        def helper() -> Any:
            return client

    return Balance()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Holder(count=1, client=LOCK), r"Holder\.client \(lock\) cannot be sent to tasks"),
        (lambda: Holder(clients={"a": [1, LOCK]}), r"Holder\.clients\['a'\]\[1\] \(lock\) cannot"),
        (lambda: Holder(inner=Holder(client=LOCK)), r"Holder\.inner\.client \(lock\) cannot"),
        (lambda: Holder(make=lambda: LOCK), r"LOCK \(lock\), which Holder\.make uses, cannot"),
        (in_a_class_attribute, r"Balance\.client \(lock\) cannot"),
        (in_a_base_class, r"Base\.client \(lock\) cannot"),
        (in_a_global, r"LOCK \(lock\), which \S*Balance\.open uses, cannot"),
        (in_a_closure, r"client \(lock\), which \S*Balance\.helper uses, cannot"),
    ],
)
def test_what_cannot_be_sent_is_named(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        pickled(make(), flow="balances")
    error = caught.value
    assert error.flow == "balances"
    assert error.detail == "TypeError: cannot pickle '_thread.lock' object"
    assert "open()" in error.next_step


def test_a_reduce_that_raises_names_the_class() -> None:
    class Balance(onceflow.Processor):
        def __reduce__(self) -> Any:
            raise ValueError("not today\nnor tomorrow")

    with pytest.raises(OptionError, match=r"Balance\)? cannot be sent to tasks") as caught:
        pickled(Balance(), flow="balances")
    assert caught.value.detail == "ValueError: not today"


def test_it_tells_the_modules_that_tasks_need() -> None:
    class ByValue(onceflow.Processor):
        """Goes along as a whole; what its functions use is imported."""

        value = onceflow.serdes.JSON

        def open(self, partition: int) -> None:
            self.client = socket.create_connection(("localhost", 1))
            processor_driver.ProcessorDriver(self)

    assert {"socket", "onceflow.testing.processor_driver"} <= pickled(ByValue(), flow="f").names
    assert __name__ not in pickled(ByValue(), flow="f").names
    assert __name__ in pickled(Holder(), flow="f").names


def test_it_is_loaded_as_tasks_do() -> None:
    assert load_failure(pickled(Holder(count=1), flow="f").data) is None
    failure = load_failure(pickle.dumps(Holder()).replace(b"Holder", b"Nobody"))
    assert failure is not None
    assert (failure.kind, "Nobody" in failure.text) == ("AttributeError", True)
