"""Tests that run on ranks: ``@fsdp_spmd``, whose body every rank runs, and those that ask for ``fsdp_world``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from pytest_fsdp_meta.loader.call import UNANIMOUS_OUTCOMES, Call
from pytest_fsdp_meta.plugin import hypothesis_given
from pytest_fsdp_meta.plugin.collection import WorldCase
from pytest_fsdp_meta.plugin.fixture_worlds import Disagreement, FixtureWorlds
from pytest_fsdp_meta.plugin.pickling import Unsendable, pack_call, pack_drawn
from pytest_fsdp_meta.plugin.rerun_command import again
from pytest_fsdp_meta.plugin.spmd_rank import BODY, Style
from pytest_fsdp_meta.worlds import LeaseError, WorldError

SENT = pytest.StashKey[Call]()


def before_fixtures(item: pytest.Item, case: WorldCase, keeper: FixtureWorlds) -> None:
    """Fixtures of the test may use ``fsdp_world`` already."""
    assert isinstance(item, pytest.Function)
    test = hypothesis_given.given_test(item.obj)
    if test is not None:
        hypothesis_given.relax(test)
    keeper.begin(item, case)


def after_fixtures(item: pytest.Item, case: WorldCase, keeper: FixtureWorlds) -> None:
    """Starts the ranks, so that a world that cannot start is an error and no failure of the test."""
    assert isinstance(item, pytest.Function)
    try:
        if case.spmd:
            item.stash[SENT] = pack_call(item)
        keeper.world()
    except (Unsendable, WorldError, LeaseError) as error:
        told = str(error)
    else:
        return
    pytest.fail(told, pytrace=False)


def call(item: pytest.Function, keeper: FixtureWorlds, given: tuple[str, ...]) -> None:
    """Runs the body of ``@fsdp_spmd`` on every rank. ``given`` are the options that a command must repeat."""
    values = {name: item.funcargs[name] for name in item.stash[SENT].names}
    test = hypothesis_given.given_test(item.obj)
    try:
        if test is None:
            _run(item, keeper, {})
        else:
            hypothesis_given.draw(test, values, lambda drawn: _run(item, keeper, drawn))
    except (WorldError, Disagreement, Unsendable) as error:
        told = "\n\n".join(
            filter(None, [str(error), hypothesis_given.notes(error), f"run it again: {again(item, given)}"])
        )
    else:
        return
    pytest.fail(told, pytrace=False)


def _run(item: pytest.Function, keeper: FixtureWorlds, drawn: dict[str, Any]) -> None:
    sent = item.stash[SENT].with_drawn({name: pack_drawn(name, value) for name, value in drawn.items()})
    options = item.config.option
    style = Style("short" if options.tbstyle == "short" else "long", bool(options.showlocals))
    returned = {
        kind for kind in keeper.call(BODY, (sent, style, frozenset(UNANIMOUS_OUTCOMES)), {}) if kind is not None
    }
    if returned:
        told = f"{item.nodeid} returned a {sorted(returned)[0]}, but a test returns nothing; did you mean assert?"
        line = (item.location[1] or 0) + 1
        warnings.warn_explicit(pytest.PytestReturnNotNoneWarning(told), None, str(item.path), line)
