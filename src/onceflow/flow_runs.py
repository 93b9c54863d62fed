"""The runs of a flow: one after the other, never two at a time."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable

from onceflow import hooks, interactive
from onceflow.client.settings import ClientSettings
from onceflow.direct.run import DirectRun
from onceflow.driver.batch.source_times import SourceTimes
from onceflow.driver.standby.standby import Standby, StandbyOptions
from onceflow.driver.start.run import MicroBatchRun
from onceflow.driver.start.startup import Startup
from onceflow.engine_query import EngineQuery
from onceflow.errors import OptionError
from onceflow.logs import log_context
from onceflow.protocol.names import Names
from onceflow.query import FlowQuery
from onceflow.uncaught import fenced_ends_program


class FlowRuns:
    """The start that is being prepared, and the query that runs.

    Args:
        refused_s: how long the first connection waits while all bootstrap servers refuse, in seconds.
        standby: None: it fences other drivers at once.

    Attributes:
        lock: to be held while a start is prepared.
        function_numbers: of the functions in queries. Those of an earlier start are not taken for those of this one.
        begin: begins with the batches of a query. A test runs them itself.
    """

    def __init__(
        self, names: Names, settings: ClientSettings, refused_s: float, standby: StandbyOptions | None = None
    ) -> None:
        self._names = names
        self._settings = settings
        self._refused_s = refused_s
        self._standby = standby
        self.lock = threading.RLock()
        self.function_numbers = itertools.count(1)
        self._startup = self._new_startup()
        self._running: FlowQuery | None = None
        self.begin: Callable[[EngineQuery], None] = _begin

    @property
    def startup(self) -> Startup:
        """Of the next run."""
        return self._startup

    def check_readable(self, topic: str) -> None:
        """Check that sources may be added. In a notebook, the query of an earlier cell is stopped.

        Raises:
            OptionError: the flow is running.
        """
        if self._is_running() and interactive.is_interactive():
            self.startup.takeover.check_source(topic)  # before that query is stopped
            interactive.stop_earlier(self._settings.bootstrap_servers, self._names.transactional_id)
        if self._is_running():
            raise OptionError(
                "The flow is running; its sources cannot be changed",
                flow=self._names.flow,
                next_step="call read before write(...).start(), or stop the query first",
            )

    def start(self, prepare: Callable[[Startup], MicroBatchRun | DirectRun]) -> FlowQuery:
        """Start a query.

        Args:
            prepare: puts the run together.
        """
        with fenced_ends_program(), self.lock, log_context.within(flow=self._names.flow):
            if self._is_running():
                raise OptionError(
                    "The flow already has a running query",
                    flow=self._names.flow,
                    next_step="one flow runs one query (it may write to many topics through a topic column); "
                    "use another Flow for another query",
                )
            startup = self.startup
            run = prepare(startup)

            def ended() -> None:
                run.close()
                self._release(startup)

            try:
                times = functools.partial(SourceTimes, self._settings)
                startup.takeover.commit()
                startup.takeover.when_taken_over(run.sink.taken_over_by)
                engine = run.start()
                reason = run.report.engine_reason
                standbys = startup.takeover.standbys
                self._running = query = FlowQuery(
                    engine, run.sink, ended, run.until, times, run.report, reason, standbys
                )
                query.log_start()
                engine.when_ended(lambda: self._ended(query, startup))
                interactive.started(self._settings.bootstrap_servers, self._names.transactional_id, query)
                hooks.at(hooks.STARTED, where="driver", flow=self._names.flow, query=query)
                self.begin(engine)
            except BaseException:
                ended()
                raise
            return query

    @staticmethod
    def _ended(query: FlowQuery, startup: Startup) -> None:
        """The engine has ended a query, for whatever reason."""
        try:
            query.terminated()
        finally:
            startup.takeover.stand_down()

    def close(self) -> None:
        """Stop the running query, if there is one, and close the connections."""
        with self.lock:
            if self._running is not None and self._running.isActive:
                self._running.stop()
            self._release(self._startup)

    def _new_startup(self) -> Startup:
        standby = None
        if self._standby is not None:
            standby = Standby(self._names, self._settings, self._standby, refused_s=self._refused_s)
        return Startup(self._names, self._settings, refused_s=self._refused_s, standby=standby)

    def _is_running(self) -> bool:
        """Whether the last query is active. If it has ended by itself, its resources are released here."""
        if self._running is not None and not self._running.isActive:
            self._running.release()
            # Another thread may be about to do the same. It must not close the connections of the next start.
            self._release(self._startup)
            self._running = None
        return self._running is not None

    def _release(self, startup: Startup) -> None:
        """Close the connections of one run. Connections of a newer start of this flow stay open."""
        with self.lock:
            startup.takeover.close()
            if self._startup is startup:
                self._startup = self._new_startup()


def _begin(engine: EngineQuery) -> None:
    engine.begin()
