"""Commands on stopped flows and on topics: reset, repartition, parked records."""
