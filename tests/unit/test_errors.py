"""Errors cross processes with all they know, and say what to do next."""

from __future__ import annotations

import inspect
import pickle
import traceback

import pytest

from onceflow import errors
from onceflow.errors import OnceflowError, located

CLASSES = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, OnceflowError)]


def make(kind: type[OnceflowError]) -> OnceflowError:
    return kind("it broke", next_step="mend it.", flow="orders", topic="out-3", batch=7, detail="offset 5, not 4")


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_with_every_field(kind: type[OnceflowError], protocol: int) -> None:
    error = make(kind)
    copy = pickle.loads(pickle.dumps(error, protocol))
    assert type(copy) is kind
    assert (copy.what, copy.fields()) == (error.what, error.fields())
    assert str(copy) == str(error)


@pytest.mark.parametrize("kind", CLASSES)
def test_text_holds_all(kind: type[OnceflowError]) -> None:
    assert str(make(kind)) == (
        "it broke [flow=orders, topic=out-3, batch=7]\n  detail: offset 5, not 4\n  next step: mend it."
    )


def test_text_leaves_out_what_is_not_known() -> None:
    assert str(OnceflowError("it broke")) == "it broke"
    assert str(OnceflowError("it broke", batch=0)) == "it broke [batch=0]"


@pytest.mark.parametrize("kind", CLASSES)
def test_locate_fills_only_what_is_missing(kind: type[OnceflowError]) -> None:
    error = kind("it broke", next_step="mend it.", topic="out-3", detail="d")
    assert error.locate(flow="orders", topic="other", batch=0) is error
    assert (error.flow, error.topic, error.batch) == ("orders", "out-3", 0)
    assert (error.what, error.next_step, error.detail) == ("it broke", "mend it.", "d")
    assert str(error) == "it broke [flow=orders, topic=out-3, batch=0]\n  detail: d\n  next step: mend it."
    error.locate(flow="payments", batch=9)
    assert (error.flow, error.batch) == ("orders", 0)


@pytest.mark.parametrize("kind", CLASSES)
def test_located_completes_the_error_itself_and_adds_no_frame(kind: type[OnceflowError]) -> None:
    error = kind("it broke", topic="out-3")
    with pytest.raises(kind) as caught, located(flow="orders", topic="other", batch=0):
        raise error
    assert caught.value is error
    assert (error.flow, error.topic, error.batch) == ("orders", "out-3", 0)
    assert [entry.name for entry in traceback.extract_tb(error.__traceback__)] == [
        "test_located_completes_the_error_itself_and_adds_no_frame"
    ]


def test_located_leaves_other_errors_alone() -> None:
    with pytest.raises(ValueError, match="no error of ours") as caught, located(flow="orders"):
        raise ValueError("no error of ours")
    assert caught.value.args == ("no error of ours",)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_says_what_it_is_for(kind: type[OnceflowError]) -> None:
    assert kind.__doc__
    assert kind.__doc__.splitlines()[0].endswith((".", ":", ","))
