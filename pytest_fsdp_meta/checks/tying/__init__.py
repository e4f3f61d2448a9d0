"""Tied weights stay tied."""
