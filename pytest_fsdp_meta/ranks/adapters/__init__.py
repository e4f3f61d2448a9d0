"""Adapters describe which part of a tensor a rank holds: one module per way of sharding, and the lookup among them."""
