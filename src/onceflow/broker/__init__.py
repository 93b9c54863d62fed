"""A real Apache Kafka on this machine: for the demo, for tests, for trying things out."""

from onceflow.broker.local import LocalBroker, default_data_dir

__all__ = ["LocalBroker", "default_data_dir"]
