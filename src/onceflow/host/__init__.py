"""Things of this machine: Java, jars, file locks, the identity of the host, files of ended processes."""
