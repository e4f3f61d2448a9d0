"""Judges of the topic memory."""
