"""Commands for flows and topics: reset, repartition, parked records, reading and writing records."""
