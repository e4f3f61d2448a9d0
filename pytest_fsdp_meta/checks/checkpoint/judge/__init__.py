"""Judges of the topic checkpoint."""
