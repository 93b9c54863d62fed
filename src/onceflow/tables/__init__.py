"""Views of compacted topics, for lookups from any process.

It may import ``state`` below its engine, ``client`` and ``protocol``; no Spark. Start reading at ``table.py``.
"""
