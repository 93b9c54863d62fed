"""Runs a processor over one partition's part of a batch. It depends neither on Spark nor on Kafka."""
