"""What observers share; it runs inside a world and may import torch."""
