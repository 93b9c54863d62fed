"""What belongs to this machine: its Java, its jars, its identity, files of ended processes."""
