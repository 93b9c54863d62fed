"""What the tests of `onceflow reset --to`, `progress import`, `fork` and `promote` share."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

from click.testing import Result

from onceflow.protocol.progress import PROGRESS_TOPIC
from onceflow.testing import independent

Call = Callable[..., Result]


def told(answer: Result) -> dict[str, Any]:
    """What a command has printed as JSON."""
    assert answer.exception is None, (answer.exception, answer.output)
    (line,) = answer.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def refused(answer: Result, kind: type[Exception] | tuple[type[Exception], ...], *texts: str) -> None:
    """It was refused with this error, or one of these, which has all these texts."""
    assert isinstance(answer.exception, kind), (answer.exception, answer.output)
    for text in texts:
        assert text in str(answer.exception)


def progress_of(pipe: Any) -> dict[str, Any] | None:
    """The committed progress record of a flow, as an independent consumer sees it."""
    records = independent.read_topic(pipe.bootstrap, PROGRESS_TOPIC, decided=True)
    last = [record.value for record in records if record.key == pipe.flow.encode()]
    return json.loads(last[-1]) if last and last[-1] is not None else None


@contextlib.contextmanager
def feeding(pipe: Any) -> Iterator[None]:
    """The source gets more records all the time."""
    over = threading.Event()
    failures: list[BaseException] = []

    def feed() -> None:
        try:
            while not over.wait(0.02):
                pipe.fill(20)
        except BaseException as problem:
            failures.append(problem)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        yield
    finally:
        over.set()
        feeder.join(60)
    assert not failures
