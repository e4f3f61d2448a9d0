"""Names, shapes, dtypes, trainability and attributes of parameters and buffers."""
