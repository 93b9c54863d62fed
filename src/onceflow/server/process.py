"""Starts, runs and stops a query server."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn

from onceflow.errors import EnvironmentUnusableError
from onceflow.server.access import AccessControl
from onceflow.server.app import make_app
from onceflow.server.connection import Connection
from onceflow.server.fast_path import FastPath
from onceflow.server.local import LocalTable
from onceflow.server.members import Members
from onceflow.server.options import ServeOptions
from onceflow.server.partitions import Alone
from onceflow.server.peers import HttpPeers
from onceflow.server.routed import RoutedTable
from onceflow.server.routes import Routes
from onceflow.server.service import Served, Service
from onceflow.tables.share import Share

log = logging.getLogger("onceflow.server")

_BACKLOG = 4_096


class QueryServer:
    """A query server of this process.

    Attributes:
        url: where it answers; known after `open`.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._shares: dict[str, Share] = {}
        self._socket: socket.socket | None = None
        self._members: Alone | Members | None = None
        self._server: _Server | None = None
        self.url = ""

    def open(self) -> None:
        """Find the topics, and listen. Nothing is answered before `run`.

        Raises:
            UnknownTopicError, PermissionDeniedError, BrokerUnreachableError: a topic cannot be read.
            OptionError: a topic is not compacted.
            EnvironmentUnusableError: the address is in use, or the folder of the copies cannot be used.
        """
        options = self._options
        self._socket = _listening(options.host, options.port)
        port = self._socket.getsockname()[1]
        self.url = options.url(port)
        try:
            for topic in options.tables:
                share = Share(
                    topic,
                    bootstrap_servers=options.settings.bootstrap_servers,
                    options=options.settings.options,
                    store=options.store,
                    state_dir=options.state_dir,
                    connect_timeout="15 seconds",
                )
                self._shares[topic] = share
                share.open()
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        """Answer until SIGTERM, SIGINT or `stop`. Running requests are answered before it returns.

        Raises:
            OptionError: the broker refuses the session timeout of the group.
        """
        options = self._options
        routes = Routes(self.url)
        members = self._members = self._membership(routes)
        secrets = options.secrets
        peers = None if secrets is None else HttpPeers(secrets, options.authority)
        tables = {}
        for topic, share in self._shares.items():
            local = LocalTable(share)
            routed = RoutedTable(topic, local, routes, peers, options.limits)
            tables[topic] = Served(topic, share, local, routed, options.tables[topic])
        service = Service(tables, routes, options.limits, options.settings, lambda: members.problems, secrets)
        app = AccessControl(
            FastPath(make_app(service, _nothing if peers is None else peers.close), service),
            options.limits,
            options.tokens,
            access_log=options.access_log,
        )
        self._server = _Server(_config(options, app), lambda: self._stopping(service))
        assert self._socket is not None
        try:
            with _handlers_kept():
                members.start()
                self._server.run([self._socket])
        finally:
            members.close()
        if isinstance(members, Members) and members.refused is not None:
            raise members.refused

    def stop(self) -> None:
        """End `run` soon. May be called by any thread."""
        if self._server is not None:
            self._server.end()

    def close(self) -> None:
        """Release what `open` took, if `run` was not called."""
        if self._socket is not None:
            self._socket.close()
        for share in self._shares.values():
            share.close()

    def _membership(self, routes: Routes) -> Alone | Members:
        options = self._options
        if options.instances is None or options.secrets is None:
            return Alone(self._shares, routes)
        return Members(
            self._shares,
            routes,
            options.settings,
            group=options.instances,
            secrets=options.secrets,
            copies=options.copies,
            session_s=options.session_s,
            give_up=self.stop,
        )

    def _stopping(self, service: Service) -> None:
        if not service.stopping:
            service.stopping = True
            if self._members is not None:
                self._members.leave()


async def _nothing() -> None:
    """There is nothing to close."""


class _Server(uvicorn.Server):
    """Tells when it begins to end."""

    def __init__(self, config: uvicorn.Config, ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._ending = ending

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._ending()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # of requests that took longer than they may
        await asyncio.sleep(0.01)

    def end(self) -> None:
        """End soon, as after a signal."""
        self._ending()
        self.should_exit = True


def _config(options: ServeOptions, app: AccessControl) -> uvicorn.Config:
    limits = options.limits
    return uvicorn.Config(
        app,
        http=Connection.limited(limits.stall_s),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=limits.connections,
        backlog=_BACKLOG,
        timeout_keep_alive=max(5, int(limits.stall_s)),
        timeout_graceful_shutdown=max(1, int(limits.stop_s)),
        ssl_certfile=options.certificate,
        ssl_keyfile=options.certificate_key,
    )


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(address)
            found.listen(_BACKLOG)  # who connects before the server answers waits
        except OSError:
            found.close()
            raise
    except (OSError, UnicodeError) as refused:  # the latter: no host name
        raise EnvironmentUnusableError(
            f"The query server cannot listen on {host}:{port}",
            detail=str(refused),
            next_step="choose another --port (0: any free one) or --host",
        ) from refused
    return found


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """uvicorn raises the signals that have ended it again when it has ended; here they have done their work."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def more_files(wanted: int) -> None:
    """Let this process have more open files, if the system allows it: each connection is one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
