"""Runs queries as a service until a signal stops it: signals, the time that a stop may take, exit codes.

It may import the query and ``metrics``. Start reading at ``serving.py``.
"""
