"""Runs a real Apache Kafka on this machine, for the demo, for tests and for experiments."""

from onceflow.broker.local import LocalBroker, default_data_dir

__all__ = ["LocalBroker", "default_data_dir"]
