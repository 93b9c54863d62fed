"""Local copies of table partitions: their format, restoring them from Kafka, reading them."""
