"""A loopback proxy that understands Kafka's framing. It delays, duplicates, reorders, drops and cuts frames.

A broker must advertise the proxy's port on a listener of its own, or clients would go around it::

    with proxied_broker(folder) as (direct, through, proxy):
        proxy.faults(Network(seed, rules))

``network.py`` decides what happens to which frame. Listeners must be plaintext: frames inside TLS cannot
be read, and with SASL a request that is sent again on another connection would not be authenticated there. Traffic
between brokers does not pass the proxy.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

from onceflow.broker.config import HOST
from onceflow.broker.local import LocalBroker, free_ports
from onceflow_workshop.testing.links import JOIN_S, Copies, Link
from onceflow_workshop.testing.network import API_KEYS, Fault, Network

END_TXN = API_KEYS["EndTxn"]


class Proxy:
    """Forwards frames between clients and one broker, on 127.0.0.1.

    ``cut`` arms one fault: the next ``times`` requests of an API are lost, either before the broker sees them
    (``before``) or after it has answered (``after``, the answer is lost). The client's connection is closed.
    ``faults`` leaves all decisions to a ``Network``.
    """

    def __init__(self, port: int, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._lock = threading.Lock()
        self._armed: tuple[int, str, int] | None = None
        self.cuts = 0
        self._network: Network | None = None
        self._closed = False
        self._links: set[Link] = set()
        self.gate = threading.Event()  # frames pass while it is set
        self.gate.set()
        #: Requests that ``duplicate`` has sent again, and the broker's answers.
        self.copies = Copies(upstream_port, self.gate)
        self._server = socket.create_server((HOST, port))
        self.port = int(self._server.getsockname()[1])  # with port 0, a free one is chosen
        self._accepting = threading.Thread(target=self._accept, daemon=True, name=f"proxy-{self.port}")
        self._accepting.start()

    # ---- faults --------------------------------------------------------------------------------------

    def cut(self, api_key: int, when: str, times: int = 1) -> None:
        if when not in ("before", "after"):
            raise ValueError(f"when={when!r}: use 'before' or 'after'")
        with self._lock:
            self._armed = (api_key, when, times)
            self.cuts = 0

    def faults(self, network: Network | None) -> None:
        """Ask ``network`` about every frame from now on. None ends that. Frames that are already held back stay so."""
        self._network = network

    def pause(self) -> None:
        """Hold back everything in both directions. Connections stay open, and new ones can be made."""
        self.gate.clear()

    def resume(self) -> None:
        """Forward everything that was held back, also requests of clients that have given up."""
        self.gate.set()

    def cut_all(self) -> None:
        """Close every connection that exists now."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.shut()

    def close(self) -> None:
        """Close everything, and return when the threads have ended."""
        self._closed = True
        with contextlib.suppress(OSError):  # not every system wakes a thread that accepts by closing its socket
            socket.create_connection((HOST, self.port), timeout=JOIN_S).close()
        self._accepting.join(JOIN_S)
        self._server.close()
        self.copies.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.shut()
        self.gate.set()
        for thread in [thread for link in links for thread in link.threads]:
            thread.join(JOIN_S)
        self.copies.join()

    # ---- for the links -------------------------------------------------------------------------------

    def armed(self, api_key: int) -> str | None:
        with self._lock:
            if self._armed is None or self._armed[0] != api_key:
                return None
            _, when, times = self._armed
            self._armed = (api_key, when, times - 1) if times > 1 else None
            self.cuts += 1
            return when

    def decide(self, api_key: int, direction: str) -> Fault | None:
        network = self._network
        return None if network is None else network.decide(api_key, direction)

    def ended(self, link: Link) -> None:
        with self._lock:
            self._links.discard(link)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                if self._closed:
                    raise ConnectionAbortedError
                broker = socket.create_connection((HOST, self._upstream_port), timeout=10)
            except OSError:
                client.close()
                if self._closed:
                    return
                continue
            broker.settimeout(None)
            link = Link(self, client, broker)
            with self._lock:
                self._links.add(link)
            link.start()


# ---- brokers behind proxies ------------------------------------------------------------------------------


class Proxies:
    """A proxy for each broker of a cluster, with one network.

    Args:
        ports: (proxy port, upstream port) of each broker, see ``proxied_node_properties``.
    """

    def __init__(self, ports: Iterable[tuple[int, int]]) -> None:
        self._proxies: list[Proxy] = []
        try:
            for port, upstream_port in ports:
                self._proxies.append(Proxy(port, upstream_port))
        except BaseException:
            self.close()
            raise

    @property
    def bootstrap_servers(self) -> str:
        """Addresses of all proxies."""
        return ",".join(f"{HOST}:{proxy.port}" for proxy in self._proxies)

    def __len__(self) -> int:
        return len(self._proxies)

    def __getitem__(self, index: int) -> Proxy:
        """The proxy of the broker that was given at this place."""
        return self._proxies[index]

    def __iter__(self) -> Iterator[Proxy]:
        return iter(self._proxies)

    def faults(self, network: Network | None) -> None:
        for proxy in self._proxies:
            proxy.faults(network)

    def pause(self) -> None:
        for proxy in self._proxies:
            proxy.pause()

    def resume(self) -> None:
        for proxy in self._proxies:
            proxy.resume()

    def cut_all(self) -> None:
        for proxy in self._proxies:
            proxy.cut_all()

    def close(self) -> None:
        for proxy in self._proxies:
            proxy.close()

    def __enter__(self) -> Proxies:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def proxied_properties(port: int, upstream_port: int) -> dict[str, str]:
    """Properties of a broker that has a second listener, at ``upstream_port``, and advertises ``port`` to clients."""
    return {
        "listeners": f"PLAINTEXT://{HOST}:{{port}},PROXIED://{HOST}:{upstream_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{{port}},PROXIED://{HOST}:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT",
    }


def proxied_node_properties(node_ids: Iterable[int]) -> tuple[dict[int, dict[str, str]], list[tuple[int, int]]]:
    """Properties of every node of a cluster behind proxies, and (proxy port, upstream port) of each, in order::

    properties, ports = proxied_node_properties([1, 2, 3])
    with Proxies(ports) as proxies, LocalBroker(folder, nodes=3, node_properties=properties): ...
    """
    ids = list(node_ids)
    free = free_ports(2 * len(ids))
    ports = list(zip(free[::2], free[1::2], strict=True))
    return {node_id: proxied_properties(*pair) for node_id, pair in zip(ids, ports, strict=True)}, ports


@contextlib.contextmanager
def proxied_broker(data_dir: Path) -> Iterator[tuple[str, str, Proxy]]:
    """A broker of its own behind a proxy.

    Yields:
        bootstrap servers of the direct listener, bootstrap servers through the proxy, the proxy.
    """
    through, behind = free_ports(2)
    with LocalBroker(data_dir, properties=proxied_properties(through, behind)) as broker:
        proxy = Proxy(through, behind)
        try:
            yield broker.bootstrap_servers, f"{HOST}:{through}", proxy
        finally:
            proxy.close()
