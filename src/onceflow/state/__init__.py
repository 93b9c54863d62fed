"""State of a flow: kept in a compacted topic, cached in local stores, read and changed by processors (user code).

It may import ``protocol`` and ``host``; only ``state/changelog`` uses ``client``. Start reading at ``spec.py``.
"""
