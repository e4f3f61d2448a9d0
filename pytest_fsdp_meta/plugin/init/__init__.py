"""``--fsdp-init``: write a first test file for a loader, from what its signature and its source say."""
