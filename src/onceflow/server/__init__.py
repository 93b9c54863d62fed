"""The query server: tables over HTTP, shared by several instances.

It may import ``tables`` and what is below it, and ``schema_registry``; no Spark. Start reading at ``app.py``.
"""
