"""Commands that change a flow: move it in time, reset it, import progress, give a table more partitions.

It may import ``admin/status`` and what that imports. Start reading at ``flow_transaction.py``, then ``move.py``.
"""
