"""Observers of the topic checkpoint."""
