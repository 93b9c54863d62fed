"""Log lines: as JSON, and with the flow, batch and step that they are about.

It may import ``errors``. Start reading at ``json_logs.py``.
"""
