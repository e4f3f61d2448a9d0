"""Random numbers in training mode, and generators at a checkpoint."""
