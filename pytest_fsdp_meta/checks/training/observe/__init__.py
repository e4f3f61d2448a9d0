"""Observers of the topic training."""
