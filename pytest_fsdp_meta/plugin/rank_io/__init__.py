"""Output, warnings, progress and debugger of ranks, as pytest shows them."""
