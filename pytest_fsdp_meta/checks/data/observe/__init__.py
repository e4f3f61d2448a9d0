"""Observers of the topic data."""
