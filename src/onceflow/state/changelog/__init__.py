"""The topics that hold the rows of a table. This room of ``state`` asks Kafka; the others use no sockets.

It may import ``client``, ``protocol`` and ``errors``. Start reading at ``topics.py``.
"""
