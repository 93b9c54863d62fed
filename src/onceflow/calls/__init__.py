"""Calls of other services, several at a time: limits, retries, circuit breakers.

It may import ``options`` and what everybody may import. Start reading at ``concurrently.py``.
"""
