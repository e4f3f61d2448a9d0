"""On the ranks: from a subject to evidence. Every module here runs inside a world and may import torch."""
