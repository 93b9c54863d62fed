"""What is in memory when a flow has started is left out of garbage collections while it runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from onceflow.host import garbage
from onceflow.host.garbage import SetAside


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(garbage, "_users", 0)  # loops of other tests may still hold it
    gc.unfreeze()  # tests/conftest.py has set aside what is there for all tests
    yield
    gc.freeze()


def is_kept(count: int) -> bool:
    """Whether so many objects are still set aside, but for a few whose last reference is gone since then."""
    return count - 1000 < gc.get_freeze_count() <= count


def test_several_flows_share_it() -> None:
    one, other = SetAside(), SetAside()
    one.hold()
    kept = gc.get_freeze_count()
    assert kept > 10_000
    other.hold()
    assert is_kept(kept)
    one.release()
    assert is_kept(kept)
    other.release()
    assert not gc.get_freeze_count()


def test_each_counts_once() -> None:
    one, other = SetAside(), SetAside()
    one.hold()
    one.hold()
    other.release()  # it has never held anything
    assert gc.get_freeze_count()
    one.release()
    one.release()
    assert not gc.get_freeze_count()


def test_garbage_is_not_kept() -> None:
    class Cycle:
        alive = 0

        def __init__(self) -> None:
            self.me = self
            Cycle.alive += 1

        def __del__(self) -> None:
            Cycle.alive -= 1

    gc.disable()
    Cycle()
    gc.enable()
    one = SetAside()
    one.hold()
    assert Cycle.alive == 0
    one.release()


def test_a_program_without_collections_keeps_its_choice() -> None:
    gc.disable()
    try:
        SetAside().hold()
        assert not gc.get_freeze_count()
    finally:
        gc.enable()


def test_what_a_program_has_set_aside_stays_so() -> None:
    gc.freeze()
    one, kept = SetAside(), gc.get_freeze_count()
    one.hold()
    assert is_kept(kept)
    one.release()
    assert is_kept(kept)
