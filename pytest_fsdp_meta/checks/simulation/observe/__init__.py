"""Observers of the topic simulation."""
