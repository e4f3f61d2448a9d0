"""Weights that a loader draws instead of loading."""
