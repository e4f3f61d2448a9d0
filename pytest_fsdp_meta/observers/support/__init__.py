"""Tools that observers share: poison, bit digests, precision, memory maps, private torch names."""
