"""Schemas that are kept in a registry, and serdes of Avro, Protobuf and JSON Schema.

It may import ``options``, ``arrow_types``, ``protocol`` for varints, and JSON of ``state/format``.
Start reading at ``registry.py``.
"""
