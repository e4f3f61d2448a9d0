"""The checks, one file per family."""
