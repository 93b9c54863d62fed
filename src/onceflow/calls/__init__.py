"""Calls of other services, several at a time: limits, retries, circuit breakers."""
