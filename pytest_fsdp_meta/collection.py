"""Collection: one item per check of a marked loader, and one clear line for every misuse."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pytest_fsdp_meta._pytest_private import fixtures_asking_for, parameters, requested_fixtures, resolved_fixture
from pytest_fsdp_meta.calls import body
from pytest_fsdp_meta.catalogue import Catalogue, Check, built_in
from pytest_fsdp_meta.markers import MARK, SPMD, WORLD, Order, WorldOrder, read_order, read_world_order
from pytest_fsdp_meta.settings import Settings
from pytest_fsdp_meta.words import first_of
from pytest_fsdp_meta.worlds import WorldSpec, choose

FIXTURES = "pytest_fsdp_meta.fixtures"
HIDDEN = getattr(pytest, "HIDDEN_PARAM", None)
"""Keeps the only case out of the test's name; before pytest 8.4 it is seen there."""
SKIPPED = pytest.StashKey[str]()
"""Why an item is skipped, where the place of the test should be told instead of that of ``pytest.skip``."""
CHECKED = re.compile(r"[-\[](\w+)\]$")
"""Of a loader's item, what it is called after its loader: the check."""
ARGUMENT = "_fsdp_case"
"""The parametrized argument that makes one loader into many items."""


@dataclass(frozen=True)
class Case:
    """One item's share: which check, of which order, in which world."""

    check: str
    order: Order
    spec: WorldSpec


@dataclass(frozen=True)
class WorldCase:
    """One test's world, and how long it is kept. ``spmd``: the whole body runs on the ranks."""

    spec: WorldSpec
    scope: str
    spmd: bool


@dataclass(frozen=True)
class Mistake:
    """Where, and what is wrong there; ``where`` may be empty."""

    where: str
    what: str


def tell(mistakes: Iterable[Mistake]) -> str:
    """One line for each mistake, however many tests make it."""
    places: dict[str, dict[str, None]] = {}
    for mistake in mistakes:
        places.setdefault(mistake.what, {})[mistake.where] = None
    return "\n".join(_line(list(wheres), what) for what, wheres in places.items())


def _line(wheres: list[str], what: str) -> str:
    return f"{first_of(wheres)}: {what}" if wheres[0] else what


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
            raise pytest.UsageError(f"{_place(impl.plugin, config)}: hook pytest_fsdp_checks: {error}") from None
    return catalogue


def late_checks(config: pytest.Config, known: tuple[object, ...]) -> Iterator[Mistake]:
    """Hooks of a ``conftest.py`` that pytest found only while collecting, when the catalogue was in use already."""
    for impl in config.hook.pytest_fsdp_checks.get_hookimpls():
        if impl.plugin not in known:
            yield Mistake(
                _place(impl.plugin, config),
                "pytest found hook pytest_fsdp_checks too late, while collecting; move it to the conftest.py of the "
                "root folder, or name this folder in testpaths or on the command line",
            )


def _place(plugin: object, config: pytest.Config) -> str:
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
    order = read_world_order(args, kwargs, settings.world_sizes, settings.world_scope)
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
    order = read_order(marker.args, marker.kwargs, settings.world_sizes, catalogue)
    several = len(order.meshes) > 1
    metafunc.fixturenames.append(ARGUMENT)
    metafunc.parametrize(
        ARGUMENT,
        [
            pytest.param(
                Case(check, order, spec),
                id=f"world{spec.size}-{check}" if several else check,
                marks=[pytest.mark.skip(reason=order.skip[check])] if check in order.skip else [],
            )
            for spec in [_spec(order, mesh, settings, gpus) for mesh in order.meshes]
            for check in order.checks
        ],
    )


def _spec(order: Order | WorldOrder, mesh: Mapping[str, int], settings: Settings, gpus: int | None) -> WorldSpec:
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


def case_of(item: pytest.Item) -> Case | None:
    found = parameters(item).get(ARGUMENT)
    return found if isinstance(found, Case) else None


def world_case_of(item: pytest.Item) -> WorldCase | None:
    found = parameters(item).get(ARGUMENT)
    return found if isinstance(found, WorldCase) else None


def mistakes(items: Iterable[pytest.Item], told: Collection[str]) -> Iterator[Mistake]:
    """Loaders that cannot be judged, and where ``fsdp`` is asked for though there is none. ``told`` are left out."""
    for item in items:
        if isinstance(item, pytest.Function):
            assert item.parent is not None
            where, what = f"{item.parent.nodeid}::{item.originalname}", _mistake(item)
            if what is not None and where not in told:
                yield Mistake(where, what)


def twins(items: Iterable[pytest.Item], scheduled: bool) -> Iterator[Mistake]:
    """Loaders that are called alike, of which a report could tell one; and tests, where our own distribution over
    workers (``scheduled``) would run one of them, as xdist's own by scope does."""
    items = list(items)
    all_count = scheduled and any(case_of(item) for item in items)
    seen: dict[str, tuple[tuple[str, int], ...]] = {}
    for item in items:
        values = values_of(item)
        if seen.setdefault(item.nodeid, values) != values and (all_count or case_of(item) is not None):
            yield Mistake(
                item.nodeid,
                "two parametrizations give it this one name; tell them apart with pytest.param(..., id=...)",
            )


def values_of(item: pytest.Item) -> tuple[tuple[str, int], ...]:
    """What the user's own parametrizations give to it. Names alone do not tell ("a", "b-c") from ("a-b", "c")."""
    return tuple((name, id(value)) for name, value in parameters(item).items() if name != ARGUMENT)


def _mistake(item: pytest.Function) -> str | None:
    loader, spmd = (item.get_closest_marker(mark) is not None for mark in (MARK, SPMD))
    if loader and spmd:
        return f"@{MARK} and @{SPMD}: a test is a loader that is judged, or a body that every rank runs; take one off"
    on_ranks = MARK if loader else SPMD if spmd else ""
    own = [mark.name for mark in item.own_markers]
    twice = [mark for mark in (MARK, SPMD, WORLD) if own.count(mark) > 1]
    if twice:
        return f"@{twice[0]} is there twice; say all in one (several sizes: world_size=(2, 4))"
    return _missing_case(item, on_ranks) or _world_on_ranks(item, on_ranks) or _misplaced_rank(item, on_ranks)


def _missing_case(item: pytest.Function, on_ranks: str) -> str | None:
    asks = WORLD in item.fixturenames and _is_ours(item, WORLD)
    if parameters(item).get(ARGUMENT) is not None or not (on_ranks or asks):
        return None
    who = {MARK: f"@{MARK}: a loader", SPMD: f"@{SPMD}: such a test"}.get(
        on_ranks, f"it asks for {WORLD!r}: such a test"
    )
    return f"{who} is a function, or a method of a plain class; pytest cannot parametrize one of unittest.TestCase"


def _world_on_ranks(item: pytest.Function, on_ranks: str) -> str | None:
    marked = any(mark.name == WORLD for mark in item.own_markers)
    if on_ranks and marked:
        return f"@pytest.mark.{WORLD} is about the fixture of this name; give what it says to @{on_ranks}"
    if marked and WORLD not in item.fixturenames:
        return (
            f"@pytest.mark.{WORLD} is about the fixture of this name, for which the test does not ask, so nothing "
            f"would run on ranks; ask for it as an argument, or use @{SPMD}"
        )
    if on_ranks and WORLD in item.fixturenames:
        return f"it asks for {WORLD!r}, which exists in the pytest process only, but it runs on ranks of its own"
    return None


def _misplaced_rank(item: pytest.Function, on_ranks: str) -> str | None:
    if not _is_ours(item, "fsdp"):
        hidden = on_ranks and "fsdp" in requested_fixtures(item)
        what = "the test would get another 'fsdp' than that of pytest-fsdp-meta, which it hides; rename the other one"
        return what if hidden else None
    asking = fixtures_asking_for(item, "fsdp")
    if asking:
        return (
            f"fixture {asking[0]!r} asks for 'fsdp', which exists on the ranks only, while fixtures are evaluated in "
            "the pytest process; ask for fsdp in the test itself"
        )
    if on_ranks:
        return None
    return f"it asks for 'fsdp', which exists on the ranks only; decorate it with @{MARK} or @{SPMD}"


def _is_ours(item: pytest.Function, name: str) -> bool:
    """Whether it is this plugin's fixture that the item gets under this name."""
    fixture = resolved_fixture(item, name)
    return fixture is not None and fixture.__module__ == FIXTURES


def loader_of(nodeid: str, catalogue: Catalogue) -> str | None:
    """What all items of one loader in one world share: the node id up to the check. None for any other item."""
    found = CHECKED.search(nodeid)
    return nodeid[: found.start(1)] if found and found[1] in catalogue else None


def take_apart(nodeid: str, catalogue: Catalogue) -> tuple[str, str] | None:
    """The loader in its world, as it is told, and the check. None where the item is no loader's."""
    shared = loader_of(nodeid, catalogue)
    if shared is None and "]@" in nodeid:  # xdist's group
        nodeid = nodeid.rpartition("@")[0]
        shared = loader_of(nodeid, catalogue)
    return None if shared is None else (_without_check(shared, "]"), nodeid[len(shared) : -1])


def told_as(item: pytest.Item, case: Case) -> str:
    """As ``take_apart``, wherever the name of the item has its check."""
    where, before, after = shared_name(item, case)
    return f"{where}::{_without_check(before, after)}"


def shared_name(item: pytest.Item, case: Case) -> tuple[str, str, str]:
    """What the names of all items of one loader share: where it is, and what stands before the check and after it."""
    assert item.parent is not None
    before, _, after = item.name.rpartition(case.check)
    return item.parent.nodeid, before, after


def _without_check(before: str, after: str) -> str:
    if before.endswith("[") and after == "]":
        return before[:-1]
    return before + after[1:] if after.startswith("-") else before.removesuffix("-") + after


def runs_nothing(config: pytest.Config) -> bool:
    """Whether pytest only shows something, so that no check is going to run."""
    shown = ("collectonly", "setuponly", "setupplan", "showfixtures", "show_fixtures_per_test", "cacheshow")
    return any(config.getoption(option, False) for option in shown)
