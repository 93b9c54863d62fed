"""What belongs to this machine: its Java, its jars, its boot, files of ended processes."""
