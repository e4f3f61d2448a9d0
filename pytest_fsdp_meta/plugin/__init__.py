"""The pytest side: hooks, options, markers, fixtures, items and their outcomes. Nothing else imports pytest."""

pytest_plugins = ["pytest_fsdp_meta.plugin.hooks"]
"""For ``-p pytest_fsdp_meta.plugin``, by which the plugin is loaded where entry points are not."""
