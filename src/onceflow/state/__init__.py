"""State of a flow: kept in a compacted topic, cached in local stores, read and changed by processors (user code)."""
