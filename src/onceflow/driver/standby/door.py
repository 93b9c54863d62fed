"""A port that tells drivers of other machines that a process lives: the system closes its connections when it dies.

An active driver and its standbys listen, and each standby keeps a connection to the active driver. If it is closed, and
a new one is refused, the process has ended. A connection that breaks otherwise, or takes long, says nothing: then
heartbeats decide, as they do for a process that is stopped (SIGSTOP).

Nothing is asked or told here but the id of the driver, so that another process behind the same address is not taken for
it. This is the only socket in onceflow that leads neither to a broker nor to a user's service.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import threading

from onceflow.errors import OptionError
from onceflow.host.identity import boot_id

_GREETING = b"onceflow driver "
_GREETING_BYTES = 200
_CONNECTIONS_MAX = 64
_BACKLOG = 16
_PORTS, _PORT_DIGITS = 1 << 16, 5
_TURN_S = 0.5
#: A connection that takes longer says nothing, and is tried again.
_CONNECT_S = 1.0
#: How long it takes until a connection is tried again that has told nothing, in seconds.
_AGAIN_S = 0.2
_IN_PROGRESS = (0, errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EALREADY)
_NETWORK = "/proc/self/ns/net"
_STEP = (
    "give an address of this machine that its standby reaches, in Kubernetes the pod's IP; 127.0.0.1 if both drivers "
    "are on one machine"
)


def network() -> str:
    """The identity of this process's network: the loopback address of another one leads elsewhere."""
    try:
        inside = str(os.stat(_NETWORK).st_ino)
    except OSError:
        inside = socket.gethostname()
    return f"{boot_id()}/{inside}"


class Door:
    """Listens in a thread until it is closed. Whoever connects gets the id of this driver, and keeps the connection.

    Args:
        host: address of this machine that others connect to; a free port is chosen.
        driver: id of this driver.

    Raises:
        OptionError: this machine has no such address.
    """

    def __init__(self, host: str, driver: str, *, flow: str) -> None:
        try:
            self._socket = _listening(host)
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that is too long
            raise OptionError(
                f"This driver cannot listen on standby_host={host!r}", flow=flow, detail=str(error), next_step=_STEP
            ) from error
        self._socket.setblocking(False)
        self._greeting = _GREETING + driver.encode() + b"\n"
        self._callers: list[socket.socket] = []
        self._over = threading.Event()
        number, port = self._socket.getsockname()[:2]
        self.address = f"[{number}]:{port}" if ":" in number else f"{number}:{port}"
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"onceflow-door-{flow}")
        self._thread.start()

    def close(self) -> None:
        """Close all connections, and do not listen any more."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(2 * _TURN_S)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while not self._over.is_set():
                for key, _ in selector.select(_TURN_S):
                    if key.fileobj is self._socket:
                        self._accept(selector)
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._callers:
                        self._read(selector, key.fileobj)  # else it was dropped just now
        for each in (*self._callers, self._socket):
            each.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            caller, _ = self._socket.accept()
            caller.setblocking(False)
            caller.send(self._greeting)
        except OSError:
            return
        self._callers.append(caller)
        selector.register(caller, selectors.EVENT_READ)
        if len(self._callers) > _CONNECTIONS_MAX:  # whoever was not a driver goes first
            self._drop(selector, self._callers[0])

    def _read(self, selector: selectors.BaseSelector, caller: socket.socket) -> None:
        """Nothing is expected from a caller but its end."""
        with contextlib.suppress(OSError):
            if caller.recv(1024):
                return
        self._drop(selector, caller)

    def _drop(self, selector: selectors.BaseSelector, caller: socket.socket) -> None:
        selector.unregister(caller)
        self._callers.remove(caller)
        caller.close()


class Caller:
    """Keeps a connection to the door of another driver. It never waits: `is_gone` takes what has come.

    Args:
        door: ``host:port``.
        driver: the id that is to answer there.
        same_network: whether this process is in the network of that driver, so that a refusal is certain at once.
            Else it is believed only if that driver has answered there before: the address may be one that nothing
            reaches from here.
    """

    def __init__(self, door: str, driver: str, *, same_network: bool) -> None:
        host, _, port = door.rpartition(":")
        is_port = port.isdecimal() and len(port) <= _PORT_DIGITS and 0 < int(port) < _PORTS
        self._address = (host.strip("[]"), port if is_port else "")
        self._expected = _GREETING + driver.encode() + b"\n"
        self._believes = same_network
        self._socket: socket.socket | None = None
        self._has_connected = False
        self._since = 0.0
        self._heard = b""

    def is_gone(self, now: float) -> bool:
        """Whether that process has ended for certain.

        Args:
            now: monotonic seconds.
        """
        if self._socket is None and now - self._since >= _AGAIN_S:
            self._since, self._heard, self._has_connected = now, b"", False
            if self._refused(self._connect()):
                return self._believes
        if self._socket is None:
            return False
        return self._look(now)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> int:
        """Begin to connect. Returns the error number."""
        if not all(self._address):
            return 0
        try:
            # Numeric addresses only: a name service that does not answer must not stop the standby.
            numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            info = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM, flags=numeric)
        except (OSError, ValueError):  # ValueError: it is no text that may be an address
            return 0
        family, kind, _, _, address = info[0]
        self._socket = socket.socket(family, kind)
        self._socket.setblocking(False)
        return self._socket.connect_ex(address)

    def _look(self, now: float) -> bool:
        found = self._socket
        if found is None:
            return False
        if not self._has_connected:
            problem = found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if problem:
                return self._refused(problem) and self._believes
            try:
                found.getpeername()
            except OSError:  # not yet
                if now - self._since > _CONNECT_S:
                    self.close()
                return False
            self._has_connected = True
        try:
            came = found.recv(_GREETING_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            came = b""
        if not came:  # it was closed: a new connection tells why, at once
            self.close()
            self._since = now - _AGAIN_S
            return False
        self._heard = (self._heard + came)[:_GREETING_BYTES]
        if self._expected.startswith(self._heard):
            self._believes = self._believes or self._heard == self._expected
            return False
        self.close()
        return self._believes  # another process is behind the address of this one

    def _refused(self, problem: int) -> bool:
        if problem in _IN_PROGRESS:
            return False
        self.close()
        return problem == errno.ECONNREFUSED


def _listening(host: str) -> socket.socket:
    """A socket that listens on a free port.

    Raises:
        OSError: this machine has no such address, or it is none to connect to.
    """
    if not host:
        raise OSError("it is empty")
    family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified:
        raise OSError("it means all addresses, and others have to connect to one")
    listening = socket.socket(family, kind)
    try:
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def reaches(door: str, network_of_door: str) -> bool:
    """Whether the loopback address of a door is the one of this process; any other address may be reached."""
    host = door.rpartition(":")[0].strip("[]")
    loopback = host == "localhost" or host == "::1" or host.startswith("127.")
    return not loopback or network_of_door == network()
