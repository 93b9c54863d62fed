"""The Kafka client: all code that communicates with brokers. Message formats are in ``onceflow.protocol``."""
