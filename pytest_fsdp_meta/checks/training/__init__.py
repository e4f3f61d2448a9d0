"""Losses, gradients, clipping, updates and what else N training steps do, compared with one device."""
