"""``concurrently``: makes a function callable side by side, with limits, timeouts, retries and a circuit breaker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any, TypeVar

from onceflow.calls import journal
from onceflow.calls.breaker import Breaker
from onceflow.calls.options import TRANSIENT, Transient, check_options, check_transient
from onceflow.calls.runner import CallRunner
from onceflow.calls.target import Call, CallTarget, Outcome
from onceflow.errors import OptionError
from onceflow.options.arguments import checked_arguments

T = TypeVar("T")
ORDERS = ("key", None)


@checked_arguments
def concurrently(
    function: Callable[..., Any],
    *,
    limit: int = 16,
    timeout: str | float = "10 seconds",
    deadline: str | float | None = None,
    retries: int = 2,
    backoff: str | float = "200 ms",
    transient: Transient | Iterable[type[Exception]] | type[Exception] | None = None,
    breaker: Breaker | None = None,
    resource: Callable[[], Any] | None = None,
    order: str | None = "key",
) -> Calls:
    """Call a function of another service for many records at a time.

    ::

        class Charge(onceflow.Processor):
            value = state = output = serdes.JSON
            charge = onceflow.concurrently(charge, limit=32, timeout="5 seconds")

            def process(self, key, records, state):
                for record in records:
                    receipt = self.charge(key, record.value["amount"])  # looks like an ordinary call
                    state.put(receipt)
                    yield Record(key, receipt)

    Results are used in the order of the records. A batch may run again, and then its calls are made again: calls are
    made **at least once**. Give the other side an idempotency key, such as an identifier in the record, or
    ``onceflow.idempotency_key(record)``.

    Args:
        function: a plain function, which runs in threads, or a coroutine function. Give a client in a plain function
            its own timeout: threads cannot be stopped.
        limit: how many calls are under way at a time in one task.
        timeout: for one attempt, which then fails with CallTimeoutError.
        deadline: for all attempts of a call together; None: as long as they take.
        retries: how often a call is made again after a transient error.
        backoff: the pause before the second attempt. It doubles with every further one, up to 30 seconds, and half of
            it is random.
        transient: errors worth another attempt: classes, or a function; None: ConnectionError, TimeoutError,
            CallTimeoutError.
        breaker: a `Breaker`: when calls fail at once; None: never.
        resource: makes a context manager that is entered once per task; the function gets its value as the first
            argument.
        order: ``key``: the calls of a key are made one after the other; None: they may be made earlier.

    Returns:
        What is called in place of the function. It can be an attribute of a processor's class or object, or be given to
        `Flow.enrich`.

    Raises:
        OptionError: an argument is invalid.
    """
    if not callable(function):
        raise OptionError(f"concurrently takes a function, not {function!r:.100}", next_step="give a function")
    if order not in ORDERS:
        raise OptionError(f"concurrently: order={order!r} is unknown", next_step='use "key" or None')
    if breaker is not None and not isinstance(breaker, Breaker):
        raise OptionError(f"concurrently: breaker={breaker!r:.100}", next_step="for example onceflow.Breaker()")
    options = check_options(limit, timeout, deadline, retries, backoff)
    again = check_transient(TRANSIENT if transient is None else transient)
    return Calls(CallTarget(function, options, again, breaker, resource), order)


class Calls:
    """A function that is called side by side: see `concurrently`."""

    def __init__(self, target: CallTarget, order: str | None) -> None:
        self.target = target
        self.order = order

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. In `Processor.process`, calls for other keys are under way at the same time.

        What stands before the call in ``process`` may run several times, until the call has returned. In ``on_timer``,
        and outside of a flow, calls are made one after the other.

        Returns:
            What the function returns.

        Raises:
            Exception: what the last attempt has raised.
            CallTimeoutError, CircuitOpenError: it took too long; it was not made.
        """
        now = journal.current()
        if now is not None:
            return now.result(self.target, args, kwargs)
        with closing(CallRunner()) as runner:
            call = runner.start(Call(self.target, args, kwargs))
            runner.settle()
        assert call.outcome is not None
        return call.outcome.get()

    def all(self, items: Iterable[Any]) -> list[Outcome]:
        """Call the function with each item, and wait for all: for column processors, and functions of ``mapInArrow``.

        Returns:
            The outcomes in the order of the items. A call that has failed does not raise, see `Outcome`.
        """
        with closing(CallRunner()) as runner:
            calls = [runner.start(Call(self.target, (item,))) for item in items]
            runner.settle()
        return [call.outcome for call in calls if call.outcome is not None]

    def each(self, items: Iterable[T], *, discard: Callable[[Any], None] | None = None) -> Iterator[tuple[T, Outcome]]:
        """Call the function with each item; every item with its outcome, in the order in which they are done.

        Items are taken when there is room for them: at most ``limit`` are under way or wait to be taken. So results may
        be large, such as open files. If the caller takes no more, calls under way are given up.

        Args:
            discard: called with the value of each call that nobody takes, for example to close a file. It may run in
                any thread, and after the end of this call.
        """
        source = iter(items)
        item_of: dict[Call, T] = {}
        with closing(CallRunner()) as runner:
            while True:
                for item in islice(source, self.target.options.limit - len(item_of)):
                    item_of[runner.start(Call(self.target, (item,), discard=discard))] = item
                if not item_of:
                    return
                done = runner.take()
                assert done.outcome is not None
                yield item_of.pop(done), done.outcome


def calls_of(processor: object) -> list[Calls]:
    """The `Calls` that a processor has, as attributes of its class or of itself."""
    found: dict[str, object] = {}
    for kind in reversed(type(processor).__mro__):
        found.update(vars(kind))
    found.update(getattr(processor, "__dict__", {}))
    return [each for each in found.values() if isinstance(each, Calls)]
