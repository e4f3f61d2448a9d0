"""Leases that keep the worker processes of one run from using the same device twice."""
