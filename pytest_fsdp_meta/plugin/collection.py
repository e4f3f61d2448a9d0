"""Collection: parametrizes marked tests, makes their items, and prepares for those that are selected."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import pytest

from pytest_fsdp_meta.catalogue import Catalogue, Selection
from pytest_fsdp_meta.evidence.records import MOST_RUN, MOST_SIMULATED
from pytest_fsdp_meta.loader.call import body
from pytest_fsdp_meta.plugin import markers, preloading
from pytest_fsdp_meta.plugin._pytest_private import expectation, parameters, recreate
from pytest_fsdp_meta.plugin.items import SpmdItem, WorldItem
from pytest_fsdp_meta.plugin.loader_items import Loader, LoaderItem
from pytest_fsdp_meta.plugin.markers import MARK, SPMD, WORLD, ConformanceSpec, WorldMarkerSpec
from pytest_fsdp_meta.plugin.session import PluginSession
from pytest_fsdp_meta.plugin.settings import Settings, runs_nothing
from pytest_fsdp_meta.worlds import WorldSpec, choose, choose_simulated

HIDDEN = getattr(pytest, "HIDDEN_PARAM", None)
"""Keeps the id of the only world out of the test's name; pytest before 8.4 shows it."""
ARGUMENT = "_fsdp_case"
"""The parametrized argument that makes several items of one test."""


@dataclass(frozen=True)
class Case:
    """The parameter that makes an item of a test: its world, and for a loader its check."""

    world: WorldSpec
    spec: ConformanceSpec | WorldMarkerSpec
    check: str = ""
    lacking: str = ""
    """Why this machine cannot run the world, or ""; a usage error if the test is selected."""


def parametrize(session: PluginSession, metafunc: pytest.Metafunc) -> None:
    """Give a test that uses ranks one item per world, and a loader one per world and check.

    An invalid argument of its marker is recorded as a usage problem.
    """
    settings, find = session.settings, metafunc.definition.get_closest_marker
    mark = MARK if find(MARK) else SPMD if find(SPMD) else WORLD
    if mark == WORLD and WORLD not in metafunc.fixturenames:
        return
    args, kwargs = (marker.args, marker.kwargs) if (marker := find(mark)) else ((), {})
    spec: ConformanceSpec | WorldMarkerSpec
    try:
        # With --collect-only, for example, devices need not exist, and counting them takes seconds.
        gpus = None if runs_nothing(session.config) else session.devices.count_gpus()
        if mark == MARK:
            require_plain_function(metafunc.function, "a loader")
            spec = markers.read_conformance_spec(
                args, kwargs, settings.world_sizes, session.catalogue, settings.simulate
            )
        else:
            if mark == SPMD:
                require_plain_function(metafunc.function, "an SPMD test")
            spec = markers.read_world_marker_spec(args, kwargs, settings.world_sizes)
        worlds = [_world(spec, mesh, settings) for mesh in spec.meshes]
    except ValueError as error:
        session.usage_problems.append((metafunc.definition.nodeid, f"@{mark}: {error}"))
        return
    cases = []
    for world in worlds:
        placed, lacking = (world, "") if gpus is None or world.simulated else _on_devices(world, settings, gpus)
        cases += _cases(spec, placed, lacking and f"@{mark}: {lacking}", several=len(worlds) > 1)
    metafunc.fixturenames.append(ARGUMENT)
    metafunc.parametrize(ARGUMENT, cases)


def _cases(spec: ConformanceSpec | WorldMarkerSpec, world: WorldSpec, lacking: str, several: bool) -> list[Any]:
    if isinstance(spec, WorldMarkerSpec):
        return [pytest.param(Case(world, spec, "", lacking), id=f"world{world.size}" if several else HIDDEN)]
    return [
        pytest.param(
            Case(world, spec, check, lacking),
            id=f"{'simulated' if world.simulated else 'world'}{world.size}-{check}" if several else check,
            marks=[pytest.mark.skip(reason=spec.skip[check])] if check in spec.skip else [],
        )
        for check in spec.checks
    ]


def _world(spec: ConformanceSpec | WorldMarkerSpec, mesh: Mapping[str, int], settings: Settings) -> WorldSpec:
    world = WorldSpec(mesh, timeout=spec.timeout or settings.timeout, process_group=spec.process_group)
    if isinstance(spec, ConformanceSpec) and spec.simulate:
        return replace(
            world,
            backend="fake",
            simulated=_simulated_ranks(mesh, spec.simulate_ranks, settings),
            device_memory=settings.device_memory,
            memory_reserve=settings.memory_reserve,
        )
    return world


def _on_devices(world: WorldSpec, settings: Settings, gpus: int) -> tuple[WorldSpec, str]:
    """Return the world on the devices that it is to run on, or as it is, with why it cannot run."""
    here = "this machine" if settings.engine == "local" else "the cluster"
    try:
        device, backend = choose(world.size, settings.device, settings.backend, gpus, settings.require_gpu, here)
    except ValueError as error:
        return world, str(error)
    devices = tuple(rank % gpus for rank in range(world.size)) if device == "cuda" else ()
    return replace(world, device_type=device, backend=backend, devices=devices), ""


def _simulated_ranks(mesh: Mapping[str, int], ranks: tuple[int, ...], settings: Settings) -> tuple[int, ...]:
    size = prod(mesh.values())
    if settings.engine != "local":
        raise ValueError(f"simulated ranks run on this machine only; remove --fsdp-engine={settings.engine}")
    if size > MOST_SIMULATED:
        raise ValueError(f"a simulated world has at most {MOST_SIMULATED} ranks, not {size}; torch lists all of them")
    if len({0, *ranks}) > MOST_RUN:
        raise ValueError(f"simulate_ranks: at most {MOST_RUN} ranks can run, with rank 0, not {len({0, *ranks})}")
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
    return [_make_item(one, loaders) for one in made] if isinstance(made, list) else made


def _make_item(made: object, loaders: dict[str, Loader]) -> object:
    case = parameters(made).get(ARGUMENT) if isinstance(made, pytest.Function) else None
    if not isinstance(made, pytest.Function) or not isinstance(case, Case):
        return made
    if isinstance(case.spec, WorldMarkerSpec):
        is_spmd = made.get_closest_marker(SPMD) is not None
        test = recreate(SpmdItem if is_spmd else WorldItem, made)
        test.world, test.scope = case.world, case.spec.scope
        return test
    item = recreate(LoaderItem, made)
    item.check, item.spec, item.world = case.check, case.spec, case.world
    # Parameters of other plugins, such as pytest-repeat, may follow the check in the name.
    before, _, after = item.name.rpartition(case.check)
    assert item.parent is not None
    where = item.parent.nodeid
    key, name = "\0".join((where, before, after)), f"{where}::{join_without_check(before, after)}"
    item.loader = loaders.setdefault(key, Loader(key=key, name=name))
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


CHECK_AT_END = re.compile(r"[-\[](\w+)\]$")


def loader_of(nodeid: str, catalogue: Catalogue) -> str | None:
    """Return the node id up to the check, which all items of a loader in one world share; None for other items."""
    found = CHECK_AT_END.search(nodeid)
    return nodeid[: found.start(1)] if found and found[1] in catalogue else None


def split_node_id(nodeid: str, catalogue: Catalogue) -> tuple[str, str] | None:
    """Return the display name of the loader in its world and the check id; None for other items."""
    prefix = loader_of(nodeid, catalogue)
    if prefix is None and "]@" in nodeid:  # an xdist_group mark appends "@group"
        nodeid = nodeid.rpartition("@")[0]
        prefix = loader_of(nodeid, catalogue)
    return None if prefix is None else (join_without_check(prefix, "]"), nodeid[len(prefix) : -1])


def join_without_check(before: str, after: str) -> str:
    """Return a name without its check, from the parts before and after it, and without the separator left over."""
    if before.endswith("[") and after == "]":
        return before[:-1]
    return before + after[1:] if after.startswith("-") else before.removesuffix("-") + after
