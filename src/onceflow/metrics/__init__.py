"""Metrics of running flows for Prometheus, and probes of their health."""
