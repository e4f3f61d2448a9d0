"""The author's own loader of batches."""
