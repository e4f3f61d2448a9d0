"""Judge what simulated worlds have shown."""
