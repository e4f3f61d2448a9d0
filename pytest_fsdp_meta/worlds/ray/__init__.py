"""Ranks on several machines: one Ray actor per rank."""
