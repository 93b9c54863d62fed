"""Chaos: flows that run while everything around them breaks, and a verdict on what they wrote."""
