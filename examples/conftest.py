"""Exclude two folders from this repository's test runs.

``downstream/`` is a separate repository. Collected here, it would use this repository's settings, import the plugin
from this checkout and add its own check to every run. ``make downstream`` runs a copy elsewhere, with the plugin from
the wheel. Inside ``downstream/``, pytest uses its ``pyproject.toml`` and does not read this file.

``frameworks/`` needs packages that are not installed here. ``make wild`` runs each file in its own environment.
"""

from __future__ import annotations

collect_ignore = ["downstream", "frameworks"]
