"""Windows over event time for processors: which windows there are, what they hold, and when they close."""
