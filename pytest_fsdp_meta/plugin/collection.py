"""Collection: parametrizes marked tests, makes their items, and prepares for those that are selected."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import pytest

from pytest_fsdp_meta.catalogue import Catalogue, Selection
from pytest_fsdp_meta.loader.call import body
from pytest_fsdp_meta.plugin import preloading
from pytest_fsdp_meta.plugin._pytest_private import expectation, parameters, recreate
from pytest_fsdp_meta.plugin.items import SpmdItem, WorldItem
from pytest_fsdp_meta.plugin.loader_items import Loader, LoaderItem
from pytest_fsdp_meta.plugin.markers import (
    MARK,
    SPMD,
    WORLD,
    ConformanceSpec,
    WorldMarkerSpec,
    read_conformance_spec,
    read_world_marker_spec,
)
from pytest_fsdp_meta.plugin.node_ids import join_without_check
from pytest_fsdp_meta.plugin.session import PluginSession
from pytest_fsdp_meta.plugin.settings import Settings, runs_nothing
from pytest_fsdp_meta.worlds import WorldSpec, choose, choose_simulated

HIDDEN = getattr(pytest, "HIDDEN_PARAM", None)
"""Keeps the id of the only world out of the test's name; pytest before 8.4 shows it."""
MOST_SIMULATED = 2**17
"""Ranks of a simulated world; each of its processes has lists of all."""
ARGUMENT = "_fsdp_case"
"""The parametrized argument that makes several items of one test."""


@dataclass(frozen=True)
class CheckCase:
    """The parameter of a loader's item: one check in one world."""

    check: str
    spec: ConformanceSpec
    world: WorldSpec


@dataclass(frozen=True)
class WorldCase:
    """The parameter of the item of a test that uses ranks and is not a loader."""

    world: WorldSpec
    scope: str
    spmd: bool
    """Whether the whole body runs on the ranks."""


def marker_name(metafunc: pytest.Metafunc) -> str | None:
    """Return the name of the marker that describes the test's world, or None for a test without ranks."""
    for mark in (MARK, SPMD):
        if metafunc.definition.get_closest_marker(mark) is not None:
            return mark
    return WORLD if WORLD in metafunc.fixturenames else None


def parametrize(session: PluginSession, metafunc: pytest.Metafunc) -> None:
    """Give a test that uses ranks one item per world, and a loader one per world and check.

    An invalid argument of its marker is recorded as a usage problem.
    """
    mark = marker_name(metafunc)
    if mark is None:
        return
    try:
        # With --collect-only, for example, devices need not exist, and counting them takes seconds.
        gpus = None if runs_nothing(session.config) else session.devices.count_gpus()
        if mark == MARK:
            _parametrize_loader(metafunc, session.settings, session.catalogue, gpus)
        else:
            _parametrize_worlds(metafunc, mark, session.settings, gpus)
    except ValueError as error:
        session.usage_problems.append((metafunc.definition.nodeid, f"@{mark}: {error}"))


def _parametrize_worlds(metafunc: pytest.Metafunc, mark: str, settings: Settings, gpus: int | None) -> None:
    marker = metafunc.definition.get_closest_marker(mark)
    if mark == SPMD:
        require_plain_function(metafunc.function, "an SPMD test")
    args, kwargs = (marker.args, marker.kwargs) if marker else ((), {})
    spec = read_world_marker_spec(args, kwargs, settings.world_sizes)
    worlds = [_world(spec, mesh, settings, gpus) for mesh in spec.meshes]
    metafunc.fixturenames.append(ARGUMENT)
    metafunc.parametrize(
        ARGUMENT,
        [
            pytest.param(
                WorldCase(world, spec.scope, mark == SPMD), id=f"world{world.size}" if len(worlds) > 1 else HIDDEN
            )
            for world in worlds
        ],
    )


def _parametrize_loader(metafunc: pytest.Metafunc, settings: Settings, catalogue: Catalogue, gpus: int | None) -> None:
    marker = metafunc.definition.get_closest_marker(MARK)
    assert marker is not None
    require_plain_function(metafunc.function, "a loader")
    spec = read_conformance_spec(marker.args, marker.kwargs, settings.world_sizes, catalogue, settings.simulate)
    several = len(spec.meshes) > 1
    metafunc.fixturenames.append(ARGUMENT)
    metafunc.parametrize(
        ARGUMENT,
        [
            pytest.param(
                CheckCase(check, spec, world),
                id=f"{'simulated' if world.simulated else 'world'}{world.size}-{check}" if several else check,
                marks=[pytest.mark.skip(reason=spec.skip[check])] if check in spec.skip else [],
            )
            for world in [_world(spec, mesh, settings, gpus) for mesh in spec.meshes]
            for check in spec.checks
        ],
    )


def _world(
    spec: ConformanceSpec | WorldMarkerSpec, mesh: Mapping[str, int], settings: Settings, gpus: int | None
) -> WorldSpec:
    world = WorldSpec(mesh, timeout=spec.timeout or settings.timeout, process_group=spec.process_group)
    if isinstance(spec, ConformanceSpec) and spec.simulate:
        return replace(world, backend="fake", simulated=_simulated_ranks(mesh, spec.simulate_ranks, settings))
    if gpus is None:
        return world
    here = "this machine" if settings.engine == "local" else "the cluster"
    device, backend = choose(world.size, settings.device, settings.backend, gpus, settings.require_gpu, here)
    devices = tuple(rank % gpus for rank in range(world.size)) if device == "cuda" else ()
    return replace(world, device_type=device, backend=backend, devices=devices)


def _simulated_ranks(mesh: Mapping[str, int], ranks: tuple[int, ...], settings: Settings) -> tuple[int, ...]:
    size = prod(mesh.values())
    if settings.engine != "local":
        raise ValueError(f"simulated ranks run on this machine only; remove --fsdp-engine={settings.engine}")
    if size > MOST_SIMULATED:
        raise ValueError(f"a simulated world has at most {MOST_SIMULATED} ranks, not {size}; torch lists all of them")
    if beyond := [rank for rank in ranks if rank >= size]:
        raise ValueError(f"simulate_ranks: there is no rank {beyond[0]} in a world of {size}")
    return tuple(sorted({0, *ranks})) if ranks else choose_simulated(mesh)


def require_plain_function(function: Callable[..., Any], what: str) -> None:
    """Raise ValueError for a coroutine or a generator, which returns before its body has run."""
    plain = body(function)
    if inspect.iscoroutinefunction(plain) or inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        raise ValueError(f"{what} should be a plain function, not a coroutine or a generator")


def make_items(made: object) -> object:
    """Return what pytest has made of a name in a module, with this plugin's items in place of those that use ranks."""
    loaders: dict[str, Loader] = {}
    if isinstance(made, list):
        return [_make_item(one, loaders) for one in made]
    return _make_item(made, loaders)


def _make_item(made: object, loaders: dict[str, Loader]) -> object:
    if not isinstance(made, pytest.Function):
        return made
    case = parameters(made).get(ARGUMENT)
    if isinstance(case, WorldCase):
        test = recreate(SpmdItem if case.spmd else WorldItem, made)
        test.world, test.scope = case.world, case.scope
        return test
    if not isinstance(case, CheckCase):
        return made
    item = recreate(LoaderItem, made)
    item.check, item.spec, item.world = case.check, case.spec, case.world
    # Parameters of other plugins, such as pytest-repeat, may follow the check in the name.
    before, _, after = item.name.rpartition(case.check)
    assert item.parent is not None
    where = item.parent.nodeid
    key, name = "\0".join((where, before, after)), f"{where}::{join_without_check(before, after)}"
    item.shown = loaders.setdefault(key, Loader(key=key, name=name))
    return item


def plan(session: PluginSession, items: Iterable[pytest.Item]) -> None:
    """Prepare for the selected items: which checks each loader needs, and what ranks import in the background.

    A check leaves defects only to checks that report them.
    """
    if runs_nothing(session.config):
        return
    modules: dict[str, str] = {}
    worlds: set[str] = set()
    loaders: dict[str, Loader] = {}
    failing, xfailing = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for item in items:
        if isinstance(item, LoaderItem) and item.check not in item.spec.skip:
            loader = loaders[item.loader.key] = item.loader
            loader.checks.append(item.check)
            worlds.update(f"{loader.key} {number}" for number in range(preloading.WORLDS_OF_A_LOADER))
            marked = expectation(item)
            if marked != "skip":
                expected = item.check in item.spec.xfail or marked == "xfail"
                (xfailing if expected else failing)[loader.key].add(item.check)
        elif isinstance(item, WorldItem):
            worlds.add(item.nodeid if item.scope == "function" else f"{item.scope} {item.world}")
        else:
            continue
        modules[item.module.__name__] = str(item.path)
    for key, loader in loaders.items():
        loader.selection = Selection(frozenset(failing[key]), frozenset(xfailing[key]))
    if modules:
        session.engine.worlds = len(worlds)
        preloading.begin(session.engine, modules, session.config, bool(loaders))
