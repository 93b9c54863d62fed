"""The direct engine: the driver fetches records and runs their batches; with a backlog, tasks of Spark do."""
