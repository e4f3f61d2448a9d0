"""Observers of the topic memory."""
