"""What ranks hold while loading and in a training step."""
