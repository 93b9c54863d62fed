"""The first connection to a cluster: a wrong address is an error after some seconds, a slow server is not.

A refused connection, or a name that does not resolve, means that no broker is there. If that is so for all addresses
for some seconds, an error is raised. A server that accepts connections, or does not respond, may only be slow: it has
until the deadline of the start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import kafka.errors as kafka_errors

from onceflow.client.addresses import Address, Contact, contact
from onceflow.client.auth.logins import authentication_failed, may_log_in_again
from onceflow.client.auth.sources import TokenUnavailableError
from onceflow.client.deadline import Deadline
from onceflow.client.library_log import muted
from onceflow.client.settings import ClientSettings
from onceflow.client.transport import ConnectionManager
from onceflow.errors import BrokerUnreachableError, BrokerUnsupportedError, DeadlineExceededError

log = logging.getLogger("onceflow")

#: For how long a start waits while all servers refuse connections, in seconds, by default.
REFUSED_S = 15.0
#: The same for commands that only look: nothing waits there for the brokers.
LOOK_REFUSED_S = 5.0
_TELL_AFTER_S, _TELL_EVERY_S = 5.0, 30.0
# One connection that hangs in its handshake must not use up the whole deadline.
_MIN_ATTEMPT_S, _MAX_ATTEMPT_S = 2.0, 15.0


class Wait:
    """The wait for the first connection: what has happened at each address so far, and for how long.

    Args:
        refused_s: for how long all addresses may refuse connections. None: until the deadline, without log messages.
        named: the addresses are those that the brokers advertise, not the bootstrap servers.
    """

    def __init__(
        self, settings: ClientSettings, deadline: Deadline, *, refused_s: float | None, named: bool = False
    ) -> None:
        self._servers = settings.bootstrap_servers
        self._protocol = settings.options.get("security.protocol", "PLAINTEXT")
        self._deadline = deadline
        self._refused_s = refused_s
        self._named = named
        self._met: dict[Address, Contact] = {}
        self._began = self._takes_since = deadline.remaining
        self._tell_at_s = _TELL_AFTER_S
        self._addresses: Sequence[Address] = ()
        self._refusing = set[Address]()  # at the last attempt

    @property
    def tells(self) -> bool:
        return self._refused_s is not None

    def over(self, addresses: Sequence[Address]) -> None:
        """Set the addresses that are tried from now on."""
        self._addresses = addresses

    def failed(self, address: Address, problem: str | None) -> bool:
        """Report that a Kafka connection to this address has failed.

        Args:
            problem: why, in the words of kafka-python; None: it was not tried again.

        Returns:
            Whether the address accepts TCP connections now and refused them before.

        Raises:
            BrokerUnreachableError: all addresses have refused connections for ``refused_s``.
        """
        if problem is not None:
            (self._refusing.add if "ECONNREFUSED" in problem else self._refusing.discard)(address)
        if self._refused_s is None:
            return False
        before, now = self._met.get(address), contact(address)
        self._met[address] = now
        if not now.refused:
            self._takes_since = self._deadline.remaining
        elif self._refused() and self._takes_since - self._deadline.remaining >= self._refused_s:
            raise self.error(f"within {self._refused_s:g} s")
        self.tell()
        return before is not None and before.refused and not now.refused

    def tell(self) -> None:
        """Log the state of each address, if the wait has lasted for some seconds."""
        waited_s = self._began - self._deadline.remaining
        if not self.tells or waited_s < self._tell_at_s:
            return
        self._tell_at_s = waited_s + _TELL_EVERY_S
        refused_s = self._takes_since - self._deadline.remaining
        left_s = (self._refused_s or 0.0) - refused_s if self._refused() else self._deadline.remaining
        log.warning(
            "%s: no broker has answered for %.0f s: %s; trying for another %.0f s",
            self._deadline.what,
            waited_s,
            "; ".join(self._in_words(address, self._met.get(address)) for address in self._addresses),
            max(0.0, min(left_s, self._deadline.remaining)),
        )

    def error(self, how_long: str, problem: str = "") -> BrokerUnreachableError:
        """The error that ends the wait. ``problem``: why the last Kafka connection failed."""
        lines = [self._at_last(address, contact(address)) for address in self._addresses]
        detail = "; ".join(lines) + (f"; last problem: {problem}" if problem else "")
        if self._named:
            return BrokerUnreachableError(
                f"{self._servers} answers, but none of the brokers that it names answered {how_long}",
                detail=detail,
                next_step="set advertised.listeners of the brokers to addresses that this machine resolves and reaches",
            )
        return BrokerUnreachableError(
            f"No broker answered at {self._servers} {how_long}",
            detail=detail,
            next_step="check bootstrap_servers and security.protocol, and that the broker is up "
            "(`onceflow broker status` for the local one); a Flow that starts before its brokers waits longer with "
            "connect_timeout=",
        )

    def _refused(self) -> bool:
        return all(address in self._met and self._met[address].refused for address in self._addresses)

    def _at_last(self, address: Address, met: Contact) -> str:
        if not met.text and address in self._refusing:
            return f"{address} has refused connections, and accepts them now: start again"
        return self._in_words(address, met)

    def _in_words(self, address: Address, met: Contact | None) -> str:
        if met is None:
            return f"{address}: no answer yet"
        if met.text:
            return f"{address}: {met.text}"
        return (
            f"{address} accepts connections but did not complete the Kafka handshake as {self._protocol} "
            "(TLS or SASL expected by one side only, an untrusted certificate, or not a broker)"
        )


def connect_to_any(
    nodes: Callable[[], Sequence[Any]],
    manager: ConnectionManager,
    net: Any,
    settings: ClientSettings,
    deadline: Deadline,
    wait: Wait,
) -> None:
    """Connect to any of these nodes. kafka-python's own loop is not used: it would silently retry a wrong password.

    Args:
        nodes: returns the brokers, as objects of kafka-python's metadata. Called before each attempt.
        net: the event loop of `manager`.

    Raises:
        BrokerUnreachableError, AuthenticationFailedError, BrokerUnsupportedError: no connection could be made.
    """
    attempt, problem = 0, ""
    while True:
        choice = nodes()
        node = choice[attempt % len(choice)]
        wait.over([Address(each.host, each.port) for each in choice])
        try:
            _connect(manager, net, node.node_id, deadline, wait)
            return
        except (kafka_errors.SaslAuthenticationFailedError, kafka_errors.AuthorizationError) as error:
            if not may_log_in_again(settings, error):
                raise authentication_failed(settings, error) from error
            why = problem = str(error)
        except (kafka_errors.UnsupportedSaslMechanismError, TokenUnavailableError) as error:
            raise authentication_failed(settings, error) from error
        except kafka_errors.IncompatibleBrokerVersion as error:
            raise BrokerUnsupportedError(
                "What answers at bootstrap_servers is not a Kafka broker of a known version",
                detail=str(error),
                next_step="give the address of a broker, not of a controller; onceflow needs Kafka 2.8 or later",
            ) from error
        except kafka_errors.NodeNotReadyError as error:  # kafka-python still waits for its backoff
            why = None
            problem = problem or str(error)
        except (kafka_errors.KafkaError, OSError) as error:
            why = problem = str(error)
        if wait.failed(Address(node.host, node.port), why):
            # Without this, kafka-python would not try this broker again for up to half a minute.
            manager.reset_backoff(node.node_id)
        try:
            deadline.pause(attempt + 3, problem)
        except DeadlineExceededError as error:
            raise wait.error(f"within {deadline.seconds:g} s", problem) from error
        attempt += 1


def _connect(manager: ConnectionManager, net: Any, node_id: Any, deadline: Deadline, wait: Wait) -> None:
    patience_s = min(max(_MIN_ATTEMPT_S, deadline.seconds / 4), _MAX_ATTEMPT_S)
    timeout_ms = max(1, int(deadline.capped(patience_s) * 1000))

    async def run() -> None:
        await manager.get_connection(node_id, timeout_ms=timeout_ms, refresh_metadata_on_err=False)

    # A server may accept the connection and then send nothing: the message must be logged during the wait.
    telling = net.call_later(_TELL_AFTER_S, wait.tell) if wait.tells else None
    try:
        with muted():
            net.run(run)
    finally:
        if telling is not None:
            net.cancel(telling)
