"""Worlds that do not run: what a rank would hold and send."""
