"""Observers of the topic tracing."""
