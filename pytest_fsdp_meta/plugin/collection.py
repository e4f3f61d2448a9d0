"""Collection: one item per check of a marked loader, and one clear line for every misuse."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pytest_fsdp_meta.catalogue import Catalogue, Check, built_in
from pytest_fsdp_meta.loader.call import body
from pytest_fsdp_meta.plugin._pytest_private import (
    parameters,
)
from pytest_fsdp_meta.plugin.markers import (
    MARK,
    SPMD,
    WORLD,
    ConformanceSpec,
    WorldMarkerSpec,
    read_conformance_spec,
    read_world_marker_spec,
)
from pytest_fsdp_meta.plugin.settings import Settings
from pytest_fsdp_meta.worlds import WorldSpec, choose

FIXTURES = "pytest_fsdp_meta.plugin.fixtures"
HIDDEN = getattr(pytest, "HIDDEN_PARAM", None)
"""Keeps the only case out of the test's name; before pytest 8.4 it is seen there."""
SKIPPED = pytest.StashKey[str]()
"""Why an item is skipped, where the place of the test should be told instead of that of ``pytest.skip``."""
ARGUMENT = "_fsdp_case"
"""The parametrized argument that makes one loader into many items."""


@dataclass(frozen=True)
class CheckCase:
    """One item's share: which check, of which order, in which world."""

    check: str
    order: ConformanceSpec
    spec: WorldSpec


@dataclass(frozen=True)
class WorldCase:
    """One test's world, and how long it is kept. ``spmd``: the whole body runs on the ranks."""

    spec: WorldSpec
    scope: str
    spmd: bool


def read_catalogue(config: pytest.Config) -> Catalogue:
    """The built-in checks and those of downstream. Raises UsageError for a hook that gives something else."""
    catalogue = built_in()
    for impl in config.hook.pytest_fsdp_checks.get_hookimpls():
        try:
            checks = impl.function()
            if isinstance(checks, (Check, str)) or not isinstance(checks, Iterable):
                raise ValueError(f"it should return a list of checks, but returned {checks!r:.60}")
            for check in checks:
                catalogue.add(check)
        except ValueError as error:
            raise pytest.UsageError(f"{place_of(impl.plugin, config)}: hook pytest_fsdp_checks: {error}") from None
    return catalogue


def place_of(plugin: object, config: pytest.Config) -> str:
    """The file of a plugin, relative to pytest's root folder, or its name where it has no file."""
    file = getattr(plugin, "__file__", None)
    return os.path.relpath(file, config.rootpath) if file else str(plugin)


def mark_of(metafunc: pytest.Metafunc) -> str | None:
    """The mark that says how the test's world shall be: a loader's, an SPMD test's, that of ``fsdp_world``, or none."""
    for mark in (MARK, SPMD):
        if metafunc.definition.get_closest_marker(mark) is not None:
            return mark
    return WORLD if WORLD in metafunc.fixturenames else None


def generate(metafunc: pytest.Metafunc, settings: Settings, catalogue: Catalogue, gpus: int | None) -> None:
    """Parametrizes a test that needs ranks with its cases. Raises ValueError for arguments that are wrong.

    ``gpus`` is None where nothing will run, so that devices need not be there.
    """
    mark = mark_of(metafunc)
    if mark == MARK:
        _generate_loader(metafunc, settings, catalogue, gpus)
    elif mark is not None:
        _generate_worlds(metafunc, mark, settings, gpus)


def _generate_worlds(metafunc: pytest.Metafunc, mark: str, settings: Settings, gpus: int | None) -> None:
    marker = metafunc.definition.get_closest_marker(mark)
    if mark == SPMD:
        require_plain_function(metafunc.function, "an SPMD test")
    args, kwargs = (marker.args, marker.kwargs) if marker else ((), {})
    order = read_world_marker_spec(args, kwargs, settings.world_sizes, settings.world_scope)
    specs = [_spec(order, mesh, settings, gpus) for mesh in order.meshes]
    metafunc.fixturenames.append(ARGUMENT)
    metafunc.parametrize(
        ARGUMENT,
        [
            pytest.param(
                WorldCase(spec, order.scope, mark == SPMD), id=f"world{spec.size}" if len(specs) > 1 else HIDDEN
            )
            for spec in specs
        ],
    )


def _generate_loader(metafunc: pytest.Metafunc, settings: Settings, catalogue: Catalogue, gpus: int | None) -> None:
    marker = metafunc.definition.get_closest_marker(MARK)
    assert marker is not None
    require_plain_function(metafunc.function, "a loader")
    order = read_conformance_spec(marker.args, marker.kwargs, settings.world_sizes, catalogue)
    several = len(order.meshes) > 1
    metafunc.fixturenames.append(ARGUMENT)
    metafunc.parametrize(
        ARGUMENT,
        [
            pytest.param(
                CheckCase(check, order, spec),
                id=f"world{spec.size}-{check}" if several else check,
                marks=[pytest.mark.skip(reason=order.skip[check])] if check in order.skip else [],
            )
            for spec in [_spec(order, mesh, settings, gpus) for mesh in order.meshes]
            for check in order.checks
        ],
    )


def _spec(
    order: ConformanceSpec | WorldMarkerSpec, mesh: Mapping[str, int], settings: Settings, gpus: int | None
) -> WorldSpec:
    spec = WorldSpec(mesh, timeout=order.timeout or settings.timeout, process_group=order.process_group)
    if gpus is None:
        return spec
    here = "this machine" if settings.engine == "local" else "the cluster"
    device, backend = choose(spec.size, settings.device, settings.backend, gpus, settings.require_gpu, here)
    devices = tuple(rank % gpus for rank in range(spec.size)) if device == "cuda" else ()
    return replace(spec, device_type=device, backend=backend, devices=devices)


def require_plain_function(function: Callable[..., Any], what: str) -> None:
    """Raises ValueError for ``what`` returns before it has run."""
    plain = body(function)
    if inspect.iscoroutinefunction(plain) or inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        raise ValueError(f"{what} is a plain function, not a coroutine or a generator")


def case_of(item: pytest.Item) -> CheckCase | None:
    found = parameters(item).get(ARGUMENT)
    return found if isinstance(found, CheckCase) else None


def world_case_of(item: pytest.Item) -> WorldCase | None:
    found = parameters(item).get(ARGUMENT)
    return found if isinstance(found, WorldCase) else None


def values_of(item: pytest.Item) -> tuple[tuple[str, int], ...]:
    """What the user's own parametrizations give to it. Names alone do not tell ("a", "b-c") from ("a-b", "c")."""
    return tuple((name, id(value)) for name, value in parameters(item).items() if name != ARGUMENT)


def runs_nothing(config: pytest.Config) -> bool:
    """Whether pytest only shows something, so that no check is going to run."""
    shown = ("collectonly", "setuponly", "setupplan", "showfixtures", "show_fixtures_per_test", "cacheshow")
    return any(config.getoption(option, False) for option in shown)
