"""Saving, loading, exporting and resuming."""
