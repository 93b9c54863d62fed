"""State of a flow: truth in a compacted topic, a local store as its cache, user code in between."""
