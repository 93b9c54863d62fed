"""The local stores that can be chosen by name. Each is imported when it is chosen."""

from __future__ import annotations

from onceflow.errors import OptionError
from onceflow.state.stores.base import Store

STORES = ("lmdb", "memory", "rocksdb")


def check_store(store: object, flow: str | None = None) -> None:
    """Refuse a name that no store has.

    Raises:
        OptionError: there is none.
    """
    if isinstance(store, str) and store not in STORES:
        raise OptionError(f"store={store!r} is unknown", flow=flow, next_step=f"use one of {', '.join(STORES)}")


def check_installed(store: str | type[Store]) -> None:
    """Refuse a store whose package is missing in this process.

    Raises:
        EnvironmentUnusableError: it is.
    """
    if store == "rocksdb":
        from onceflow.state.stores.rocksdb_store import library

        library()


def store_class(store: str | type[Store]) -> type[Store]:
    """The class of a local store by its name; a class is returned unchanged."""
    if not isinstance(store, str):
        return store
    if store == "memory":
        from onceflow.state.stores.memory_store import MemoryStore

        return MemoryStore
    if store == "rocksdb":
        from onceflow.state.stores.rocksdb_store import RocksdbStore

        return RocksdbStore
    from onceflow.state.stores.lmdb_store import LmdbStore

    return LmdbStore
