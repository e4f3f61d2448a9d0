"""Placements, mesh dimensions, and shards that cover each tensor once."""
