"""Collectives of the loader and of a training step."""
