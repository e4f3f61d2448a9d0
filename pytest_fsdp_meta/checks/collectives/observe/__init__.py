"""Observers of the topic collectives."""
