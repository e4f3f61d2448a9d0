"""Judges of the topic training."""
