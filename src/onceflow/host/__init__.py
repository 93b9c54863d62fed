"""Things of this machine: Java, jars, file locks, the identity of the host, files of ended processes.

It may import ``errors`` alone. Start reading at ``identity.py``.
"""
