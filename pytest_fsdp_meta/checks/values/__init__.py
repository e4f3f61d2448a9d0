"""Shards equal their slices of the reference, and replicas equal each other."""
