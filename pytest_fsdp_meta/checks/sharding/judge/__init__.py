"""Judges of the topic sharding."""
