"""Measurements: each module is run with ``python -m`` and prints a table."""
