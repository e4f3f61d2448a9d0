"""The one place that reads what pytest keeps private.

pytest offers no public way to ask which fixtures a test requests by itself, which fixtures request which, or with which
parameters an item was made: ``item.fixturenames`` is a flat closure. ``tests/test_plugin_private.py`` holds what is
read here, and breaks when it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest


def requested_fixtures(item: pytest.Function) -> tuple[str, ...]:
    """Names of the arguments of the test function itself, ``self`` and those with defaults left out."""
    return tuple(item._fixtureinfo.argnames)


def resolved_fixture(item: pytest.Function, name: str) -> Callable[..., Any] | None:
    """The function that the fixture ``name`` resolves to for this item."""
    definitions = item._fixtureinfo.name2fixturedefs.get(name)
    return definitions[-1].func if definitions else None


def fixtures_asking_for(item: pytest.Function, name: str) -> list[str]:
    """Names of the fixtures in the item's closure that request ``name`` themselves."""
    closure = item._fixtureinfo.name2fixturedefs
    return [fixture for fixture, definitions in closure.items() if name in definitions[-1].argnames]


def parameters(item: pytest.Item) -> Mapping[str, Any]:
    """The values that the item is parametrized with, by argument."""
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params
