"""The only module that uses pytest's private names.

pytest has no public way to ask which fixtures a test requests itself, which fixtures request which, or which parameters
an item has: ``item.fixturenames`` is a flat closure. Nor can one ask which fixtures there are or which keys an ini file
has, replace an item by one of another class, ask whether its marks will skip it, skip it at the line of the test, or
rewrite asserts in a process without a session.
``tests/plugin/test_pytest_private.py`` fails when one of these names changes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from io import StringIO
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from _pytest.assertion import util
from _pytest.assertion.rewrite import AssertionRewritingHook
from _pytest.config import create_terminal_writer
from _pytest.outcomes import Skipped
from _pytest.skipping import evaluate_skip_marks, evaluate_xfail_marks

F = TypeVar("F", bound=pytest.Function)


def recreate(kind: type[F], item: pytest.Function) -> F:
    """Return an item of this class in place of one that pytest has made, as pytest-asyncio does."""
    made: F = kind.from_parent(
        item.parent,
        name=item.name,
        callspec=getattr(item, "callspec", None),
        callobj=item.obj,
        fixtureinfo=item._fixtureinfo,
        keywords=item.keywords,
        originalname=item.originalname,
    )
    made.own_markers = item.own_markers
    return made


def skipped(reason: str) -> BaseException:
    """Return the exception that skips an item and is reported at the line of the test, not where it is raised."""
    return Skipped(reason, _use_item_location=True)


def expectation(item: pytest.Item) -> str:
    """Return "skip" or "xfail" if the item's own marks will have that effect, else ""; "skip" if they are invalid."""
    try:
        if evaluate_skip_marks(item):
            return "skip"
        marked = evaluate_xfail_marks(item)
        expects = pytest.fail.Exception if marked is None or marked.raises is None else marked.raises
        return "xfail" if marked and issubclass(pytest.fail.Exception, expects) else ""  # type: ignore[arg-type]
    except (Exception, pytest.fail.Exception):  # pytest shows the error when the item runs
        return "skip"


def requested_fixtures(item: pytest.Function) -> tuple[str, ...]:
    """Return the argument names of the test function, without ``self`` and arguments with defaults."""
    return tuple(item._fixtureinfo.argnames)


def resolved_fixture(item: pytest.Function, name: str) -> Callable[..., Any] | None:
    """Return the function of the fixture that ``name`` resolves to for this item."""
    definitions = item._fixtureinfo.name2fixturedefs.get(name)
    return definitions[-1].func if definitions else None


def fixtures_asking_for(item: pytest.Function, name: str) -> list[str]:
    """Return the names of the item's fixtures that request ``name`` directly."""
    closure = item._fixtureinfo.name2fixturedefs
    return [fixture for fixture, definitions in closure.items() if name in definitions[-1].argnames]


def parameters(item: pytest.Item) -> Mapping[str, Any]:
    """Return the values that the item is parametrized with, by argument name."""
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def fixtures_instead(error: pytest.FixtureLookupError) -> list[str]:
    """Return the fixtures that there are, if the error is that one does not exist, else []."""
    text = error.formatrepr().errorstring  # the only place that has the names
    _, found, names = text.partition(" not found\n available fixtures: ")
    return names.partition("\n")[0].split(", ") if found else []


def ini_keys(config: pytest.Config) -> list[str]:
    """Return the keys that the ini file and the option ``-o`` set, also those that no plugin has registered."""
    written = config._inicfg if hasattr(config, "_inicfg") else config.inicfg  # the latter before pytest 9
    overridden = (text.partition("=")[0] for text in config.getoption("override_ini") or ())
    return list(dict.fromkeys([*written, *overridden]))


def rewritten_modules() -> tuple[str, ...]:
    """Return the module names passed to ``pytest.register_assert_rewrite`` in this process."""
    return tuple(name for finder in _rewriters() for name in sorted(finder._must_rewrite))


def rewrite_asserts(root: str, verbosity: str, *modules: str) -> None:
    """In a process of ranks: make asserts in these modules, not imported yet, explain what they compare."""
    if _rewriters():
        return  # forked from a process that has done so
    given = {name: os.environ.pop(name, None) for name in ("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTEST_PLUGINS")}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        # Creating a Config installs the import hook. The user's configuration is not read: ``modules`` is all of it.
        config = pytest.Config.fromdictargs(
            {}, ["-c", os.devnull, "--rootdir", root, "--noconftest", "-p", "no:cacheprovider"]
        )
    finally:
        del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
        os.environ.update({name: value for name, value in given.items() if value is not None})
    config.option.verbose = int(verbosity)
    # pytest 8.0 asks the terminal, which only a session has, how to highlight what an assert compares.
    terminal = SimpleNamespace(_tw=create_terminal_writer(config, StringIO()))
    config.pluginmanager.register(terminal, "terminalreporter")
    pytest.register_assert_rewrite(*modules)
    util._reprcompare = partial(_explain_comparison, config)


def _explain_comparison(config: pytest.Config, operator: str, left: object, right: object) -> str | None:
    """Explain a failed comparison as pytest's own ``pytest_runtest_protocol`` does."""
    for explanation in config.hook.pytest_assertrepr_compare(config=config, op=operator, left=left, right=right):
        lines = [line.replace("\n", "\\n") for line in explanation or ()]
        if lines:
            return "\n~".join(lines).replace("%", "%%")
    return None


def _rewriters() -> list[AssertionRewritingHook]:
    return [finder for finder in sys.meta_path if isinstance(finder, AssertionRewritingHook)]


def uncaptured(config: pytest.Config) -> AbstractContextManager[None]:
    """Suspend capturing, so that output goes where pytest's own goes."""
    manager = config.pluginmanager.getplugin("capturemanager")
    return nullcontext() if manager is None else manager.global_and_fixture_disabled()
