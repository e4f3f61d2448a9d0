"""Collection: parametrizes marked tests, and stashes on each item which check, loader or world it is for."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import pytest

from pytest_fsdp_meta.catalogue import Catalogue, Check, built_in
from pytest_fsdp_meta.loader.call import body
from pytest_fsdp_meta.plugin._pytest_private import parameters
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
from pytest_fsdp_meta.plugin.settings import Settings
from pytest_fsdp_meta.reports.terminal import describe_checks
from pytest_fsdp_meta.worlds import WorldSpec, choose, choose_simulated

HIDDEN = getattr(pytest, "HIDDEN_PARAM", None)
"""Keeps the id of the only world out of the test's name; pytest before 8.4 shows it."""
SKIPPED = pytest.StashKey[str]()
"""The reason of a skip that pytest should report at the test, not at the call of ``pytest.skip``."""
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
class LoaderItem:
    """The identity of a loader's item, made once when pytest collects it."""

    check: str
    spec: ConformanceSpec
    world: WorldSpec
    name: str
    """The loader in its world as reports show it: the node id without the check."""
    key: str
    """The same for all items of one loader in one world, and for no other item; stable from run to run."""


@dataclass(frozen=True)
class WorldItem:
    """The world of a test that uses ranks and is not a loader."""

    world: WorldSpec
    scope: str
    """How long the ranks live: "function", "module" or "session"."""
    spmd: bool
    """Whether the whole body runs on the ranks."""


LOADER_ITEM = pytest.StashKey[LoaderItem]()
WORLD_ITEM = pytest.StashKey[WorldItem]()


def read_catalogue(config: pytest.Config) -> Catalogue:
    """Return the built-in checks and those of ``pytest_fsdp_checks`` hooks. Raises UsageError for a bad hook."""
    catalogue = built_in()
    for impl in config.hook.pytest_fsdp_checks.get_hookimpls():
        try:
            checks = impl.function()
            if isinstance(checks, (Check, str)) or not isinstance(checks, Iterable):
                raise ValueError(f"should return a list of checks, but returned {checks!r:.60}")
            for check in checks:
                catalogue.add(check)
        except ValueError as error:
            raise pytest.UsageError(f"{place_of(impl.plugin, config)}: hook pytest_fsdp_checks: {error}") from None
    return catalogue


def list_checks(config: pytest.Config) -> int | None:
    """Print the catalogue and return the exit status where ``--fsdp-list-checks`` asks for it, else None."""
    if not config.getoption("--fsdp-list-checks"):
        return None
    print(describe_checks(read_catalogue(config)))
    return 0


def place_of(plugin: object, config: pytest.Config) -> str:
    """Return the file of a plugin relative to pytest's root folder, or its name where it has no file."""
    file = getattr(plugin, "__file__", None)
    return os.path.relpath(file, config.rootpath) if file else str(plugin)


def marker_name(metafunc: pytest.Metafunc) -> str | None:
    """Return the name of the marker that describes the test's world, or None for a test without ranks."""
    for mark in (MARK, SPMD):
        if metafunc.definition.get_closest_marker(mark) is not None:
            return mark
    return WORLD if WORLD in metafunc.fixturenames else None


def parametrize(metafunc: pytest.Metafunc, settings: Settings, catalogue: Catalogue, gpus: int | None) -> None:
    """Give a test that uses ranks one item per world, and a loader one per world and check.

    ``gpus`` is None where nothing will run: then missing devices are not an error. Raises ValueError for arguments of
    the marker that are wrong.
    """
    mark = marker_name(metafunc)
    if mark == MARK:
        _parametrize_loader(metafunc, settings, catalogue, gpus)
    elif mark is not None:
        _parametrize_worlds(metafunc, mark, settings, gpus)


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
                WorldItem(world, spec.scope, mark == SPMD), id=f"world{world.size}" if len(worlds) > 1 else HIDDEN
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


def stash_identity(item: pytest.Item) -> None:
    """Stash what the item is for: a LoaderItem, a WorldItem, or nothing for an ordinary test."""
    case = parameters(item).get(ARGUMENT)
    if isinstance(case, CheckCase):
        assert item.parent is not None
        # Parameters of other plugins, such as pytest-repeat, may follow the check in the name.
        before, _, after = item.name.rpartition(case.check)
        where = item.parent.nodeid
        name = f"{where}::{join_without_check(before, after)}"
        item.stash[LOADER_ITEM] = LoaderItem(case.check, case.spec, case.world, name, "\0".join((where, before, after)))
    elif isinstance(case, WorldItem):
        item.stash[WORLD_ITEM] = case


def place_skip(item: pytest.Item, report: pytest.TestReport) -> None:
    """Report a skip that the plugin raised at the line of the test, not at a line of the plugin."""
    reason = item.stash.get(SKIPPED, None)
    if reason is not None and report.skipped:
        report.longrepr = (str(item.path), (item.location[1] or 0) + 1, f"Skipped: {reason}")


def runs_nothing(config: pytest.Config) -> bool:
    """Return whether pytest was asked to show something instead of running tests, as ``--collect-only`` does."""
    shown = ("collectonly", "setuponly", "setupplan", "showfixtures", "show_fixtures_per_test", "cacheshow")
    return any(config.getoption(option, False) for option in shown)
