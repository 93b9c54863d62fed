"""Help for testing pipelines: a real broker and Spark as pytest fixtures.

The fixtures come with the package (pytest finds them without an import): ``onceflow_broker``, ``make_topic`` and
``onceflow_spark``. This module imports neither pytest nor Spark.
"""
