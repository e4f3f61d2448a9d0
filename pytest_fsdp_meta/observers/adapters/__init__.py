"""One file per way of sharding, and the lookup that asks them."""
