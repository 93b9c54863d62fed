"""Runs a processor over one partition's part of a batch. Knows neither Spark nor Kafka."""
