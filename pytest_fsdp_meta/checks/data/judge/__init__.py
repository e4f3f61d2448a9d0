"""Judges of the topic data."""
