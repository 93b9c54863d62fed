"""The only package that touches py4j, the JVM or private names of PySpark."""
