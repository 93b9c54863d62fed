"""What does not go together with ``changelog=False`` of ``Flow.process``."""

from __future__ import annotations

from typing import Any

from onceflow.errors import OptionError
from onceflow.state.stores.base import Store
from onceflow.state.stores.choice import store_class


def check_local(changelog: bool, store: str | type[Store], processor: Any, flow: str, **of_topics: bool) -> None:
    """Check the options of a step without table topics.

    Args:
        of_topics: options that say how table topics are used, by name.

    Raises:
        OptionError: see its text.
    """
    if changelog is not False:
        raise OptionError(f"changelog={changelog!r} is no bool", flow=flow, next_step="give True or False")
    if not store_class(store).on_disk:
        raise OptionError(
            f"changelog=False needs a store on disk, store={store!r} is in the memory of one process",
            flow=flow,
            detail="driver and Python workers process partitions in turn, and each process would have other state",
            next_step='leave store= out, or give "lmdb" or "rocksdb"',
        )
    for name, given in of_topics.items():
        if given:
            raise OptionError(
                f"{name}=True cannot be combined with changelog=False: there is no table topic",
                flow=flow,
                next_step="leave one of them out",
            )
    if hasattr(getattr(processor, "state", None), "encode_bytes"):
        raise OptionError(
            "a ClaimCheck as state serde cannot be combined with changelog=False",
            flow=flow,
            detail="the references would be in local copies alone, so their objects would be deleted as orphans",
            next_step="leave changelog=False out, or keep the values themselves in the state",
        )
