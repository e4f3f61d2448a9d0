"""Load a transformers checkpoint onto a mesh, each rank reading only the rows that it holds."""

from shardload.batches import rows_of
from shardload.loading import load

__all__ = ["load", "rows_of"]
