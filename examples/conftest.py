"""Keeps the run of this repository out of ``downstream/``, which is a repository of its own.

Collected here it would have this one's settings, import the kit from this checkout, and bring its own check into every
run: ``make downstream`` runs a copy elsewhere, with the kit from the wheel. Within ``downstream/`` pytest takes the ini
table of its ``pyproject.toml``, and does not come by here.
"""

from __future__ import annotations

collect_ignore = ["downstream"]
