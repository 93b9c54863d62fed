"""Decisions that are made before anything is written."""
