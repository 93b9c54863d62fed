"""Stores of one table partition's rows (LMDB, RocksDB, memory), and a batch's changes over them."""
