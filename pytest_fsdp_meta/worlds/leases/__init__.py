"""Sharing the devices of one machine among processes, such as workers of pytest-xdist."""
