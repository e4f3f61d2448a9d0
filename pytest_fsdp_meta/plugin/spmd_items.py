"""Tests that run on ranks: ``@fsdp_spmd``, whose body every rank runs, and those that request ``fsdp_world``.

Every function here does nothing for other items.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest

from pytest_fsdp_meta.loader.call import UNANIMOUS_OUTCOMES, Call
from pytest_fsdp_meta.plugin import hypothesis_given
from pytest_fsdp_meta.plugin.collection import WORLD_ITEM, runs_nothing
from pytest_fsdp_meta.plugin.failure_lines import LINE, FailureLine
from pytest_fsdp_meta.plugin.fixture_worlds import Disagreement, FixtureWorlds
from pytest_fsdp_meta.plugin.pickling import Unsendable, pack_call, pack_drawn
from pytest_fsdp_meta.plugin.rerun_command import rerun_command
from pytest_fsdp_meta.plugin.spmd_rank import BODY, TracebackStyle
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.worlds import LeaseError, WorldError

PACKED_CALL = pytest.StashKey[Call]()


def before_fixtures(item: pytest.Item, worlds: FixtureWorlds) -> None:
    """Make ``fsdp_world`` usable in the test's fixtures."""
    world_item = item.stash.get(WORLD_ITEM, None)
    if world_item is None:
        return
    assert isinstance(item, pytest.Function)
    test = hypothesis_given.given_test(item.obj)
    if test is not None:
        hypothesis_given.disable_deadline(test)
    worlds.begin(item, world_item)


def after_fixtures(item: pytest.Item, worlds: FixtureWorlds) -> None:
    """Start the ranks, so that a world that cannot start is an error of the setup, not a failure of the test."""
    world_item = item.stash.get(WORLD_ITEM, None)
    if world_item is None or runs_nothing(item.config):
        return
    assert isinstance(item, pytest.Function)
    try:
        if world_item.spmd:
            item.stash[PACKED_CALL] = pack_call(item)
        worlds.world()
    except (Unsendable, WorldError, LeaseError) as error:
        message = str(error)
        item.stash[LINE] = _line(item, error)
    else:
        return
    pytest.fail(message, pytrace=False)


def call(item: pytest.Function, worlds: FixtureWorlds, given: Sequence[str]) -> bool | None:
    """Run the body of ``@fsdp_spmd`` on every rank; None for other tests.

    ``given`` are the options that a rerun command repeats.
    """
    world_item = item.stash.get(WORLD_ITEM, None)
    if world_item is None or not world_item.spmd:
        return None
    values = {name: item.funcargs[name] for name in item.stash[PACKED_CALL].names}
    test = hypothesis_given.given_test(item.obj)
    try:
        if test is None:
            _run_body(item, worlds, {})
        else:
            hypothesis_given.run_examples(test, values, lambda drawn: _run_body(item, worlds, drawn))
    except (WorldError, Disagreement, Unsendable) as error:
        notes, rerun = hypothesis_given.join_notes(error), f"rerun: {rerun_command(item, given)}"
        message = "\n\n".join(filter(None, [str(error), notes, rerun]))
        item.stash[LINE] = _line(item, error)
    except pytest.fail.Exception:  # raised by a signal handler, as pytest-timeout's
        ranks = worlds.listener.take_interruption()
        if ranks is None:
            raise
        message = f"{ranks}\n\nrerun: {rerun_command(item, given)}"
        item.stash[LINE] = _line(item, ranks)
    else:
        return True
    pytest.fail(message, pytrace=False)


def _line(item: pytest.Item, error: Exception) -> FailureLine:
    return FailureLine(item.name, first_line(error), error.place if isinstance(error, WorldError) else "")


def _run_body(item: pytest.Function, worlds: FixtureWorlds, drawn: dict[str, Any]) -> None:
    packed = item.stash[PACKED_CALL].with_drawn({name: pack_drawn(name, value) for name, value in drawn.items()})
    options = item.config.option
    style = TracebackStyle("short" if options.tbstyle == "short" else "long", bool(options.showlocals))
    results = worlds.call(BODY, (packed, style, frozenset(UNANIMOUS_OUTCOMES)), {})
    returned = sorted({kind for kind in results if kind is not None})
    if returned:
        message = f"{item.nodeid} returned a {returned[0]}, but a test should return None; did you mean assert?"
        line = (item.location[1] or 0) + 1
        warnings.warn_explicit(pytest.PytestReturnNotNoneWarning(message), None, str(item.path), line)
