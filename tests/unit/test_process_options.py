"""What Flow.process checks before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from onceflow import ColumnProcessor, Processor, Record, Retry, serdes
from onceflow.errors import OptionError
from onceflow.planning.process import StepOptions, check_options

OPTIONS = StepOptions("t", None, "dead-letter", "dead", None, None, "lmdb", None, False, "30 seconds")
RETRIES = replace(OPTIONS, on_error="fail", dead_letter_topic=None)


def policy() -> Retry:
    return Retry(retry_topic="retry", parked_topic="parked")


class Misspelled(Processor):
    def proces(self, key: Any, records: Any, state: Any) -> Iterator[Record]:
        yield Record(key)


class Empty(ColumnProcessor):
    pass


class Right(Processor):
    def process(self, key: Any, records: Any, state: Any) -> Iterator[Record]:
        yield Record(key)


class Inherits(Right):
    pass


@pytest.mark.parametrize(
    "processor, hint", [(Misspelled(), "did you mean 'proces'?"), (Empty(), "Define it"), (Processor(), "Define it")]
)
def test_a_processor_without_process_is_refused(processor: Any, hint: str) -> None:
    """With on_error="dead-letter", all records became dead letters."""
    with pytest.raises(OptionError, match=r"does not define process\(\)") as caught:
        check_options(OPTIONS, processor, flow="f", sources=["s"], tables=[])
    assert hint in str(caught.value)


@pytest.mark.parametrize("name", ["copies", "partitions", "max_timers_per_batch"])
@pytest.mark.parametrize("value", [0, -1, "2", "", 1.5, 2.0, float("nan"), True, b"2", [2]])
def test_numbers_that_are_none_are_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match="is not a whole number of at least 1"):
        check_options(replace(OPTIONS, **{name: value}), Right(), flow="f", sources=["s"], tables=[])


def test_there_is_always_a_copy() -> None:
    given: Any = {"copies": None}
    with pytest.raises(OptionError, match="copies=None is not a whole number"):
        check_options(replace(OPTIONS, **given), Right(), flow="f", sources=["s"], tables=[])


def test_a_processor_may_inherit_process() -> None:
    assert check_options(OPTIONS, Inherits(), flow="f", sources=["s"], tables=[])


class Typos(Right):
    alowed_lateness = "1 minute"
    TTL = "1 day"

    def evnt_time(self, record: Record) -> int:
        return 0

    def on_timers(self, key: Any, timer: Any, state: Any) -> None:
        """Never called."""


class Helped(Right):
    allowed = ()
    amounts = 1

    def processed(self) -> None:
        """A helper of process()."""


def test_names_of_a_class_that_are_almost_known(caplog: pytest.LogCaptureFixture) -> None:
    """They had no effect, and nothing said so: state was kept for ever, and no record was late."""
    check_options(OPTIONS, Typos(), flow="f", sources=["s"], tables=[])
    said = caplog.messages
    assert len(said) == 4
    for name, meant in {
        "alowed_lateness": "allowed_lateness",
        "evnt_time": "event_time",
        "on_timers": "on_timer",
        "TTL": "ttl",
    }.items():
        assert any(f"flow f: Typos has {name!r}" in line and f"did you mean {meant!r}?" in line for line in said)


@pytest.mark.parametrize("processor", [Right(), Inherits(), Helped()])
def test_other_names_of_a_class_are_its_own(processor: Any, caplog: pytest.LogCaptureFixture) -> None:
    check_options(OPTIONS, processor, flow="f", sources=["s"], tables=[])
    assert caplog.messages == []


@pytest.mark.parametrize("name, given", [("retention", "1 minute"), ("changelog", False)])
def test_an_option_that_would_lose_waiting_records_is_refused(name: str, given: Any) -> None:
    """Records that waited for their retry vanished when the time was over, or with the disk of a host."""
    with pytest.raises(OptionError, match=f"{name}.* cannot be combined with Retry"):
        check_options(replace(RETRIES, **{name: given}), policy(), flow="f", sources=["s"], tables=[])


def test_a_retry_with_a_time_to_live_is_refused() -> None:
    class Brief(Retry):
        ttl = "1 minute"

    for brief in (Brief(retry_topic="retry", parked_topic="parked"), policy()):
        brief.ttl = "1 minute"
        with pytest.raises(OptionError, match="ttl cannot be combined with Retry"):
            check_options(RETRIES, brief, flow="f", sources=["s"], tables=[])
    assert check_options(RETRIES, policy(), flow="f", sources=["s"], tables=[])


def _with(name: str, function: Any, base: type = Right) -> Any:
    return type("Given", (base,), {name: function})()


@pytest.mark.parametrize(
    "name, function",
    [
        ("process", lambda self, key, records: []),
        ("process", lambda self, records, *, state: []),
        ("on_timer", lambda self, key, timer: []),
        ("event_time", lambda self: 0),
        ("open", lambda self: None),
        ("close", lambda self, partition: None),
        ("late_before_ms", lambda self: 0),
        ("migrate", lambda self, payload: payload),
        ("migrate", lambda self, payload, from_version, name, more: payload),
    ],
)
def test_methods_that_cannot_be_called_are_refused(name: str, function: Any) -> None:
    """Every record became a dead letter, or every batch failed."""
    with pytest.raises(OptionError, match=rf"Given\.{name}\(.*cannot be called") as caught:
        check_options(OPTIONS, _with(name, function), flow="f", sources=["s"], tables=[])
    assert f"define it as {name}(self" in caught.value.next_step


@pytest.mark.parametrize(
    "name, function",
    [
        ("process", lambda self, *arguments: []),
        ("process", lambda self, key, records, state, more=1: []),
        ("migrate", lambda self, payload, from_version: payload),
        ("migrate", lambda self, payload, from_version, name: payload),
        ("migrate", lambda self, payload, from_version, name=None: payload),
        ("event_time", lambda self, record: 0),
    ],
)
def test_methods_that_can_be_called(name: str, function: Any) -> None:
    assert check_options(OPTIONS, _with(name, function), flow="f", sources=["s"], tables=[])


@pytest.mark.parametrize("name", ["key", "value", "state", "output"])
@pytest.mark.parametrize("given", ["json", serdes.struct, serdes.Struct, 7, json])
def test_serdes_that_are_none_are_refused(name: str, given: Any) -> None:
    """The first record ended the flow without a name, or all became dead letters."""
    processor = _with(name, given)
    with pytest.raises(OptionError, match=f"{name} of Given is no serde") as caught:
        check_options(OPTIONS, processor, flow="f", sources=["s"], tables=[])
    assert "serdes.JSON" in caught.value.next_step


@pytest.mark.parametrize("given", [serdes.JSON, serdes.struct(a="int64"), serdes.Serde(str.encode, bytes.decode)])
def test_serdes_of_all_kinds(given: Any) -> None:
    for name in ("key", "value", "state", "output"):
        assert check_options(OPTIONS, _with(name, given), flow="f", sources=["s"], tables=[])
