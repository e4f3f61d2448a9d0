"""Plain data of the topic sharding."""
