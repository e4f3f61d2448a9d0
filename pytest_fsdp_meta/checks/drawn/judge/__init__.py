"""Judges of the topic drawn."""
