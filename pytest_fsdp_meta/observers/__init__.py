"""Observers run on the ranks and turn a subject into evidence. Modules here run inside a world and may import torch."""
