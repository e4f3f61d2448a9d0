"""Every tensor is materialised, initialised and on its device; the load itself."""
