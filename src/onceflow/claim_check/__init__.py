"""Claim check: large values are kept in storage, and references to them travel through Kafka."""
