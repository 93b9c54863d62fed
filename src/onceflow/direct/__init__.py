"""The direct engine: the driver fetches the records of small batches, and runs them without a Spark job."""
