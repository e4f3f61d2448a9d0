"""The one place that reads what pytest keeps private.

pytest offers no public way to ask, at collection, which fixtures request which: ``item.fixturenames`` is a flat
closure. ``tests/test_plugin.py`` holds what is read here, and breaks when it moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def resolved_fixture(item: pytest.Function, name: str) -> Callable[..., Any] | None:
    """The function that the fixture ``name`` resolves to for this item."""
    definitions = item._fixtureinfo.name2fixturedefs.get(name)
    return definitions[-1].func if definitions else None


def fixtures_asking_for(item: pytest.Function, name: str) -> list[str]:
    """Names of the fixtures in the item's closure that request ``name`` themselves."""
    closure = item._fixtureinfo.name2fixturedefs
    return [fixture for fixture, definitions in closure.items() if name in definitions[-1].argnames]
