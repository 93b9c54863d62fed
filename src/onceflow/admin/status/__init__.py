"""Where flows are: what Kafka knows of them, and what their running drivers say.

It may import ``admin/records`` and ``admin/transactions``. Start reading at ``flow_status_reader.py``.
"""
