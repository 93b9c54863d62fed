"""The only package that touches py4j, the JVM or private names of PySpark.

It may import ``client``, ``host`` and ``state/api``. Start reading at ``queries.py``.
"""
