"""The start of a query: it takes the flow over in Kafka, and puts the run of the query together.

It may import all other rooms of the driver. Start reading at ``run.py``, then ``startup.py``.
"""
