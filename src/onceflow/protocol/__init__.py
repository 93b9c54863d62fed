"""Kafka formats as pure functions: no sockets, no Spark. Imports nothing of onceflow except errors."""
