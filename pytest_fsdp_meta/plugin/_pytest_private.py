"""The one place that reads what pytest keeps private.

pytest offers no public way to ask which fixtures a test requests by itself, which fixtures request which, or with which
parameters an item was made: ``item.fixturenames`` is a flat closure. Nor does it offer its rewriting of asserts to
processes that run no session. ``tests/plugin/test_pytest_private.py`` holds what is
read here, and breaks when it moves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
from _pytest.assertion import util
from _pytest.assertion.rewrite import AssertionRewritingHook


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


def rewritten_modules() -> tuple[str, ...]:
    """Names that were given to ``pytest.register_assert_rewrite`` in this process."""
    return tuple(name for finder in _rewriters() for name in sorted(finder._must_rewrite))


def rewrite_asserts(root: str, verbosity: str, *modules: str) -> None:
    """In a process of ranks: asserts in these modules, not imported yet, tell what they compare."""
    if _rewriters():
        return  # forked from a process that has done this
    given = {name: os.environ.pop(name, None) for name in ("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTEST_PLUGINS")}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        # It installs the import hook. Of the user's configuration nothing is read again: its names are here.
        config = pytest.Config.fromdictargs(
            {}, ["-c", os.devnull, "--rootdir", root, "--noconftest", "-p", "no:cacheprovider"]
        )
    finally:
        del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
        os.environ.update({name: value for name, value in given.items() if value is not None})
    config.option.verbose = int(verbosity)
    pytest.register_assert_rewrite(*modules)
    util._reprcompare = partial(_compared, config)


def _compared(config: pytest.Config, operator: str, left: object, right: object) -> str | None:
    """As pytest's own protocol of a test explains a comparison."""
    for told in config.hook.pytest_assertrepr_compare(config=config, op=operator, left=left, right=right):
        lines = [line.replace("\n", "\\n") for line in told or ()]
        if lines:
            return "\n~".join(lines).replace("%", "%%")
    return None


def _rewriters() -> list[AssertionRewritingHook]:
    return [finder for finder in sys.meta_path if isinstance(finder, AssertionRewritingHook)]


def uncaptured(config: pytest.Config) -> AbstractContextManager[None]:
    """Within it, what is written goes where pytest's own output goes."""
    manager = config.pluginmanager.getplugin("capturemanager")
    return nullcontext() if manager is None else manager.global_and_fixture_disabled()
