"""The signals that stop a service, and the time that a stop may take."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from onceflow.interactive import is_interactive

_REPEATED_S = 1.0  # signals that come together are one

#: Windows has no SIGHUP.
STOPS = tuple(signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGHUP") if name in signal.Signals.__members__)


def in_main_thread() -> bool:
    """Whether this is the only thread that Python lets handle signals."""
    return threading.current_thread() is threading.main_thread()


class StopSignals:
    """While it is entered in the main thread, SIGTERM, SIGINT (Ctrl-C) and SIGHUP ask for a stop.

    A stop takes at most ``stop_s``: then the process ends at once, as with a second signal, whatever its main thread
    is doing. In a notebook it takes as long as it takes. SIGHUP is left alone where it is ignored (``nohup``). In
    another thread, which gets no signals, nothing asks for a stop.

    Args:
        stop_s: in seconds, from the first signal until the exit of this context.
        on_ask: called by the handler of the first signal. It must not wait for anything.
    """

    def __init__(self, stop_s: float, on_ask: Callable[[], object] = lambda: None) -> None:
        self.stop_s = stop_s
        self._on_ask = on_ask
        self._asked_at: float | None = None
        self._before: dict[int, Any] = {}
        # Their put() may interrupt a get() of the same thread. An Event would wait for its own lock then.
        self._wakes: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._over = threading.Event()

    @property
    def asked(self) -> bool:
        """Whether a stop was asked for."""
        return self._asked_at is not None

    @property
    def left_s(self) -> float:
        """How many seconds are left for the stop."""
        return self.stop_s if self._asked_at is None else max(0.0, self._asked_at + self.stop_s - time.monotonic())

    def wait(self, seconds: float) -> bool:
        """Wait until a stop is asked for. Returns whether it was."""
        try:
            if not self.asked:
                self._wakes.get(timeout=seconds)
        except queue.Empty:
            pass
        return self.asked

    def __enter__(self) -> StopSignals:
        if not in_main_thread():
            return self
        if not is_interactive():  # a notebook must survive
            threading.Thread(target=self._limit, daemon=True, name="onceflow-stop-limit").start()
        self._before = {
            number: signal.signal(number, self._ask)
            for number in STOPS
            if number == signal.SIGTERM or number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._begun.put(None)
        for number, handler in self._before.items():
            # The second signal of a pair may arrive when everything is stopped already.
            signal.signal(number, self._late if self.asked and not is_interactive() else handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._on_ask()
            self._wakes.put(number)
            self._begun.put(number)
        elif not self._is_repeated():
            _end_at_once(number, b"ended before everything was stopped")

    def _late(self, number: int, frame: FrameType | None) -> None:
        if self._is_repeated():
            return
        for each, handler in self._before.items():
            if signal.getsignal(each) == self._late:  # not one that was set since then
                signal.signal(each, handler)
        signal.raise_signal(number)

    def _is_repeated(self) -> bool:
        return self._asked_at is not None and time.monotonic() - self._asked_at < _REPEATED_S

    def _limit(self) -> None:
        """End the process when a stop takes too long."""
        number = self._begun.get()
        if number is not None and not self._over.wait(self.stop_s):
            _end_at_once(number, b"not everything was stopped in %g s (stop_timeout), so it ends now" % self.stop_s)


def _end_at_once(number: int, why: bytes) -> None:
    """End the process without waiting for anything. Its batch is aborted by the next start, as after a crash."""
    if is_interactive():  # the notebook must survive
        raise KeyboardInterrupt
    # The process may be in the middle of a print, so this does not use the buffers of sys.stderr.
    try:
        os.write(2, b"onceflow: " + why + b"; the next start continues as after a crash\n")
    except OSError:  # its terminal is gone
        pass
    os._exit(128 + number)
