"""``CallRunner``: makes the calls of one task, side by side, until it is closed.

An event loop in a thread of its own does all that has to do with time: limits, timeouts, pauses. Coroutine functions
run in it; plain functions run in threads, and the loop waits for them. The thread of the task waits for results, so it
can be interrupted at any time, whatever the functions do.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from queue import SimpleQueue
from typing import Any

from onceflow.calls.copies import copied
from onceflow.calls.target import Call, CallTarget, Outcome
from onceflow.errors import BatchAbortedError, CallTimeoutError, CircuitOpenError, DeadlineExceededError
from onceflow.user_code import RESOURCE, TRANSIENT, of_hook

# How long a coroutine may take to notice that it is cancelled, and the loop to end.
_CANCEL_S, _CLOSE_S = 1.0, 5.0
_LOOK_S = 0.5

_THREADS_CLOSE_S = 0.2  # a call that never returns must not keep a process alive
NAME = "onceflow-call"


class CallRunner:
    """Makes calls, at most ``limit`` of each target at a time.

    Args:
        limit_s: how long all calls together may take, from the first one on; None: as long as they like.
        flow: whose calls they are, for `give_up`.
    """

    def __init__(self, limit_s: float | None = None, flow: str | None = None) -> None:
        self._limit_s = limit_s
        self._flow = flow
        self._given_up = False
        self._began_at: float | None = None
        self._results: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._leave: asyncio.Event | None = None
        self._tasks: set[asyncio.Future[Any]] = set()
        self._lanes: dict[CallTarget, _Lane] = {}
        self._returned: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._under_way = 0
        self._done = 0

    # ---- for the thread of the task ------------------------------------------------------------------

    @property
    def under_way(self) -> int:
        """How many calls are not done, or are done and were not taken."""
        return self._under_way

    def start(self, call: Call) -> Call:
        """Make a call as soon as there is room for it."""
        loop = self._loop or self._open()
        if self._began_at is None:
            self._began_at = time.monotonic()
        self._under_way += 1
        loop.call_soon_threadsafe(self._begin, call)
        return call

    def settle(self) -> None:
        """Wait until all calls are done, also those that are started meanwhile.

        Raises:
            DeadlineExceededError: they take longer than ``limit_s``.
            BatchAbortedError: the flow is being stopped.
        """
        while self._under_way:
            self.take()

    def take(self) -> Call:
        """Wait for a call that is done, and tell its owner.

        Raises:
            DeadlineExceededError, BatchAbortedError: see `settle`.
        """
        while True:
            if self._given_up:
                raise BatchAbortedError("Calls were given up, because the flow is being stopped", flow=self._flow)
            left_s = _LOOK_S if self._limit_s is None else self._limit_s - self._used_s()
            call: Call | None
            try:
                call = self._results.get(timeout=min(_LOOK_S, max(0.001, left_s)))
            except queue.Empty:
                if self._thread is None or not self._thread.is_alive():
                    raise RuntimeError("the event loop of the calls has ended") from None
                call = None
            if self._limit_s is not None and self._under_way and self._used_s() > self._limit_s:
                raise self._too_slow()
            if call is not None:
                break
        self._under_way -= 1
        self._done += 1
        if call.done is not None:
            call.done(call)
        return call

    def close(self) -> None:
        """End the threads. Calls under way are cancelled; plain functions that cannot be, are left alone."""
        thread, loop, self._thread, self._loop = self._thread, self._loop, None, None
        with _lock:
            _open.discard(self)
        if thread is None or loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._end)
        except RuntimeError:  # the loop has ended by itself
            pass
        thread.join(_CLOSE_S)
        while not self._results.empty():
            call = self._results.get()
            if call.outcome is not None:
                call.dropped(call.outcome.value)

    def give_up(self, flow: str) -> None:
        """From another thread: do not wait for calls any more, if they are of this flow."""
        if self._flow == flow:
            self._given_up = True

    def alone(self) -> CallRunner:
        """For a call that is waited for by itself, within the same limits."""
        with _lock:
            _open.add(self)  # until it is closed
        self._began_at = self._began_at or time.monotonic()
        runner = CallRunner(self._limit_s and max(0.001, self._limit_s - self._used_s()), self._flow)
        runner._given_up = self._given_up
        return runner

    def _used_s(self) -> float:
        return 0.0 if self._began_at is None else time.monotonic() - self._began_at

    def _too_slow(self) -> DeadlineExceededError:
        limits = ", ".join(f"{target.name}: limit={target.options.limit}" for target in list(self._lanes))
        return DeadlineExceededError(
            f"The calls of a batch take longer than {round(self._limit_s or 0, 1):g} s, "
            "for which its transaction may still be open",
            detail=f"one task: {self._done} calls are done, {self._under_way} are not; {limits}",
            next_step="lower max_records_per_batch of Flow.read, raise limit= of onceflow.concurrently, or raise "
            "transaction_timeout of Flow.write",
        )

    # ---- the loop ------------------------------------------------------------------------------------
    def _open(self) -> asyncio.AbstractEventLoop:
        loop = self._loop = asyncio.new_event_loop()
        with _lock:
            _open.add(self)
        self._leave, self._lanes = asyncio.Event(), {}  # locks and resources of an earlier loop are of no use
        self._thread = threading.Thread(target=self._run_loop, args=(loop,), name=f"{NAME}-loop", daemon=True)
        self._thread.start()
        return loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        threads = DaemonThreads()
        try:
            loop.run_until_complete(self._serve(threads))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
            self._drop_returned()
            threads.close()

    async def _serve(self, threads: DaemonThreads) -> None:
        assert self._leave is not None
        self._threads = threads
        async with AsyncExitStack() as self._resources:
            await self._leave.wait()
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            if tasks:  # the functions of the user may still need the resources
                await asyncio.wait(tasks, timeout=_CANCEL_S)

    def _end(self) -> None:
        assert self._leave is not None
        self._leave.set()

    def _begin(self, call: Call) -> None:
        self._keep(asyncio.get_running_loop().create_task(self._run(call)))

    def _keep(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        """`_serve` cancels it, and waits for it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, call: Call) -> None:
        lane = self._lanes.get(call.target)
        if lane is None:
            lane = self._lanes[call.target] = _Lane(call.target)
        async with lane.turns:
            try:
                call.outcome = await self._attempts(call, lane)
            except BaseException as problem:  # of `transient` or `resource`, which are of the user's
                assert self._leave is not None
                if self._leave.is_set() and not isinstance(problem, Exception):
                    raise
                call.outcome = Outcome(None, _as_exception(problem), 0)  # else the call would be waited for
        self._results.put(call)

    async def _attempts(self, call: Call, lane: _Lane) -> Outcome:
        options, circuit = call.target.options, lane.circuit
        end = None if options.deadline_s is None else time.monotonic() + options.deadline_s
        last: Exception | None = None
        for attempt in range(1, options.retries + 2):
            try:
                if circuit is not None:
                    circuit.check()
            except CircuitOpenError as refused:
                refused.__cause__ = last
                return Outcome(None, refused, attempt - 1)
            try:
                left_s = options.timeout_s if end is None else min(options.timeout_s, end - time.monotonic())
                value = await self._attempt(call, lane, max(0.0, left_s))
            except Exception as error:
                last = error
            else:
                if circuit is not None:
                    circuit.succeeded()
                return Outcome(value, None, attempt)
            try:
                again = call.target.transient(last)
            except Exception as error:
                of_hook(error, TRANSIENT)
                raise
            if circuit is not None:
                (circuit.failed if again else circuit.succeeded)()
            pause_s = options.pause_s(attempt)
            if not again or attempt > options.retries or (end is not None and time.monotonic() + pause_s >= end):
                return Outcome(None, last, attempt)
            await asyncio.sleep(pause_s)
            if end is not None and time.monotonic() >= end:  # a busy machine wakes up late
                break
        return Outcome(None, last, attempt)

    async def _attempt(self, call: Call, lane: _Lane, timeout_s: float) -> Any:
        """Call the function once. Raises what it raises, or CallTimeoutError."""
        args, kwargs = call.args, call.kwargs
        if call.is_compared or call.target.options.retries:  # the function may change what it gets
            args, kwargs = tuple(map(copied, args)), {name: copied(each) for name, each in kwargs.items()}
        if call.target.resource is not None:
            try:
                args = (await self._resource(call.target, lane), *args)
            except Exception as error:
                of_hook(error, RESOURCE)
                raise
        if lane.is_async:
            work: asyncio.Future[Any] = self._keep(
                asyncio.get_running_loop().create_task(_converted(call.target.function(*args, **kwargs)))
            )
            left_s = timeout_s
        else:
            began_at = time.monotonic()
            work = await self._in_thread(call, args, kwargs, lane, timeout_s)
            left_s = max(0.0, timeout_s - (time.monotonic() - began_at))
        try:
            await asyncio.wait({work}, timeout=left_s)
        except asyncio.CancelledError:
            if not lane.is_async:  # a coroutine was cancelled by `_serve`; a second time would disturb its clean-up
                work.cancel()
            work.add_done_callback(partial(_discard, call))
            raise
        if work.done():
            if work.cancelled():  # not by us
                raise _as_exception(asyncio.CancelledError("what it waited for was cancelled"))
            return work.result()
        work.add_done_callback(partial(_discard, call))
        work.cancel()
        if lane.is_async:
            await asyncio.wait({work}, timeout=_CANCEL_S)
        raise _timed_out(call.target, timeout_s, "did not return")

    async def _in_thread(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], lane: _Lane, timeout_s: float
    ) -> asyncio.Future[Any]:
        """Call a plain function in a thread. It has a place among ``limit`` until it really ends: a call that was given
        up goes on, and the other side must not get more calls at a time than it may."""
        try:
            await asyncio.wait_for(lane.places.acquire(), timeout_s)
        except asyncio.TimeoutError:
            what = "was not made, because earlier calls that were given up still run: no place was free"
            raise _timed_out(call.target, timeout_s, what) from None
        assert self._leave is not None
        if self._leave.is_set():  # before Python 3.12, wait_for does not notice if it is cancelled as it gets the place
            lane.places.release()
            raise asyncio.CancelledError
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def finish(value: Any, error: BaseException | None) -> None:
            lane.places.release()
            if future.done():  # given up
                call.dropped(value)
            else:
                future.set_result(value) if error is None else future.set_exception(error)

        def job() -> None:
            value, error = None, None
            try:
                value = _returned(call.target.function(*args, **kwargs))
            except BaseException as problem:
                error = _as_exception(problem)
            self._returned.append((partial(finish, value, error), partial(call.dropped, value)))
            try:
                loop.call_soon_threadsafe(self._finish_returned)
            except RuntimeError:  # the loop has ended
                self._drop_returned()

        self._threads.submit(job)
        return future

    def _finish_returned(self) -> None:
        """In the loop: hand on what plain functions have returned."""
        while self._returned:
            self._returned.popleft()[0]()

    def _drop_returned(self) -> None:
        """After the end of the loop: nobody waits any more. It has also forgotten what it was still asked to call, so
        this is called by its own thread, and by each function that returns later."""
        while True:
            try:
                _, drop = self._returned.popleft()
            except IndexError:
                return
            drop()

    async def _resource(self, target: CallTarget, lane: _Lane) -> Any:
        assert target.resource is not None
        async with lane.opening:
            if not lane.is_open:
                made = target.resource()
                if hasattr(made, "__aenter__"):
                    lane.resource = await self._resources.enter_async_context(made)
                else:
                    lane.resource = self._resources.enter_context(made)
                lane.is_open = True
        return lane.resource


_open: set[CallRunner] = set()
_lock = threading.Lock()


def give_up(flow: str) -> None:
    """Let a batch of a flow that runs in this process wait no longer for its calls: the flow is being stopped."""
    with _lock:
        runners = list(_open)
    for runner in runners:
        runner.give_up(flow)


class _Lane:
    """What the calls of one target share. Made in the loop."""

    def __init__(self, target: CallTarget) -> None:
        self.is_async = target.is_async
        self.circuit = target.circuit()
        self.turns = asyncio.Semaphore(target.options.limit)
        self.places = asyncio.Semaphore(target.options.limit)
        self.opening = asyncio.Lock()
        self.is_open = False
        self.resource: Any = None


async def _converted(awaitable: Any) -> Any:
    """Wait for it. SystemExit and the like would end the loop, and nobody would hear of it."""
    try:
        return await awaitable
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as problem:
        raise _as_exception(problem) from problem


def _returned(value: Any) -> Any:
    """What a plain function has returned. Nobody would wait for a coroutine, so the call would never be made."""
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError(
            f"the function is a plain one, and has returned a coroutine of {value.__qualname__}: give concurrently a "
            "function that is defined with async def"
        )
    return value


def _discard(call: Call, work: asyncio.Future[Any]) -> None:
    """A function was given up. What it has returned all the same is discarded."""
    if not work.cancelled() and work.exception() is None:
        call.dropped(work.result())


def _as_exception(problem: BaseException) -> Exception:
    if isinstance(problem, Exception) and not isinstance(problem, StopIteration):  # no future takes a StopIteration
        return problem
    wrapped = RuntimeError(f"the function raised {type(problem).__name__}: {problem}")
    wrapped.__cause__ = problem
    return wrapped


def _timed_out(target: CallTarget, timeout_s: float, what: str) -> CallTimeoutError:
    return CallTimeoutError(
        f"{target.name} {what} within {timeout_s:g} s",
        next_step="raise timeout= of onceflow.concurrently, or find out why the other side is slow",
    )


class DaemonThreads:
    """As many threads as there are jobs at a time. They are reused, and end with `close`.

    Not a ThreadPoolExecutor: a process waits at its end for the threads of that, also for one that hangs.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job, which must not raise. It sees the context variables of the caller."""
        context = contextvars.copy_context()
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._work, name=NAME, daemon=True)
                thread.start()
                self._threads.append(thread)
        self._jobs.put(partial(context.run, job))

    def close(self) -> None:
        """End the threads that are idle, and those that work when they have done so; wait for them, but not long."""
        for _ in self._threads:
            self._jobs.put(None)
        end = time.monotonic() + _THREADS_CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._threads = []

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds the arguments of the call
            with self._lock:
                self._idle += 1
