"""Observers of the topic random_numbers."""
