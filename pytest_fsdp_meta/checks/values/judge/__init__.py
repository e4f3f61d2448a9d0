"""Judges of the topic values."""
