"""Metrics of running flows for Prometheus, and probes of their health.

It may import ``planning``, ``state`` and what is below them. Start reading at ``endpoint.py``.
"""
