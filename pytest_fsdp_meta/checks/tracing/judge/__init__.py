"""Judges of the topic tracing."""
