"""Pure Kafka formats: no sockets, no Spark. Imports nothing of onceflow but errors."""
