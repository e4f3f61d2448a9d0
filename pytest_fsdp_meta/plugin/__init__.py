"""The pytest plugin: hooks, options, markers, fixtures, items and reports. Only this package imports pytest."""

pytest_plugins = ["pytest_fsdp_meta.plugin.hooks"]
"""Makes ``-p pytest_fsdp_meta.plugin`` work where entry points are disabled."""
