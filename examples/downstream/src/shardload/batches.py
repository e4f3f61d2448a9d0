"""Which rows of a global batch belong to whom."""

from __future__ import annotations


def rows_of(rank: int, ranks: int, rows: int) -> range:
    """The rows of ``rank``: in order, without a gap, and sizes that differ by one at most."""
    return range(rank * rows // ranks, (rank + 1) * rows // ranks)
