"""What drivers say of flows, compared with what Kafka has of them."""

from __future__ import annotations

from collections.abc import Sequence

from onceflow.admin.status.driver_status import DriverStatus
from onceflow.admin.status.flow_status import ANSWERS, NOT_SERVED, SILENT, FlowStatus
from onceflow.errors import OnceflowError


def attach(statuses: Sequence[FlowStatus], drivers: Sequence[DriverStatus], prefix: str) -> list[str]:
    """Give each flow what its driver says, and a warning if that does not agree with Kafka.

    Args:
        prefix: the prefix of transactional ids of the flows that were asked for.

    Returns:
        Warnings about flows of drivers that are none of these flows.
    """
    by_name = {status.flow: status for status in statuses}
    strangers = []
    for driver in drivers:
        status = by_name.get(driver.flow) or by_name.get(prefix + driver.flow)
        if status is None:
            strangers.append(f"{driver.endpoint} serves flow {driver.flow}, which is not shown here")
            continue
        status.warnings += _disagreements(status, driver)
        if status.driver is None or driver.condition in ("starting", "running"):
            status.driver = driver
    return strangers


def without_kafka(flows: Sequence[str], drivers: Sequence[DriverStatus], silent: OnceflowError) -> list[FlowStatus]:
    """The named flows, or all flows of these drivers, when no broker answers: nothing of them is known from Kafka.

    Args:
        silent: why Kafka could not be asked.
    """
    reason = f"Kafka: {silent.what}" + (f" ({silent.detail})" if silent.detail else "")
    return [FlowStatus(name, unseen=[reason]) for name in flows or sorted({each.flow for each in drivers})]


def tell_answers(statuses: Sequence[FlowStatus], *, served: bool) -> None:
    """Set whether the driver of each flow has answered, after endpoints were asked.

    Args:
        served: whether at least one of the endpoints has answered.
    """
    for status in statuses:
        status.driver_answer = ANSWERS if status.driver is not None else NOT_SERVED if served else SILENT


def _disagreements(status: FlowStatus, driver: DriverStatus) -> list[str]:
    """Kafka is asked after the driver, so it may know of later batches, never of fewer."""
    other = status.driver
    runs = ("starting", "running")
    found = []
    both = other is not None and other.condition in runs and driver.condition in runs
    if other is not None and both and (other.host, other.pid) != (driver.host, driver.pid):
        found.append(f"two drivers say that they run it: {other.endpoint} and {driver.endpoint}; one will be fenced")
    ours, theirs = (status.producer_id, status.producer_epoch), (driver.producer_id, driver.producer_epoch)
    if status.batch is not None and driver.batch > status.batch:
        found.append(
            f"{driver.endpoint} says that batch {driver.batch} is committed, and Kafka has {status.batch}: it is of "
            "another cluster, or the flow was moved back meanwhile"
        )
    elif status.batch == driver.batch and -1 not in (ours[0], theirs[0]) and ours != theirs:
        found.append(
            f"{driver.endpoint} says that producer {theirs[0]}, epoch {theirs[1]} has committed batch {driver.batch}, "
            f"and Kafka has producer {ours[0]}, epoch {ours[1]}: it is of another cluster, or an older driver"
        )
    if driver.condition == "failed":
        found.append(f"its driver at {driver.endpoint} has failed: {driver.failure or 'see its log'}")
    return found
