"""Collection: one item per check of a marked loader, and one clear line for every misuse."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import pytest

from pytest_fsdp_meta._pytest_private import fixtures_asking_for, parameters, requested_fixtures, resolved_fixture
from pytest_fsdp_meta.calls import BODY
from pytest_fsdp_meta.catalogue import Catalogue, Check, built_in
from pytest_fsdp_meta.markers import MARK, Order, read_order
from pytest_fsdp_meta.settings import Settings
from pytest_fsdp_meta.words import first_of
from pytest_fsdp_meta.worlds import WorldSpec, choose

ARGUMENT = "_fsdp_case"
"""The parametrized argument that makes one loader into many items."""


@dataclass(frozen=True)
class Case:
    """One item's share: which check, of which order, in which world."""

    check: str
    order: Order
    spec: WorldSpec


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


@pytest.fixture
def fsdp() -> None:
    """On a rank: rank, local_rank, world_size, device (with its index), mesh, barrier(). For loaders only."""
    pytest.fail("the fixture 'fsdp' exists on the ranks only; a loader asks for it as an argument", pytrace=False)


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


def generate(metafunc: pytest.Metafunc, settings: Settings, catalogue: Catalogue, gpus: int | None) -> None:
    """Parametrizes a marked test with its cases. Raises ValueError for arguments that are wrong.

    ``gpus`` is None where nothing will run, so that devices need not be there.
    """
    marker = metafunc.definition.get_closest_marker(MARK)
    assert marker is not None
    _require_plain_function(metafunc.function)
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


def _spec(order: Order, mesh: Mapping[str, int], settings: Settings, gpus: int | None) -> WorldSpec:
    spec = WorldSpec(mesh, timeout=order.timeout or settings.timeout, process_group=order.process_group)
    if gpus is None:
        return spec
    device, backend = choose(spec.size, settings.device, settings.backend, gpus, settings.require_gpu)
    devices = tuple(rank % gpus for rank in range(spec.size)) if device == "cuda" else ()
    return replace(spec, device_type=device, backend=backend, devices=devices)


def _require_plain_function(function: object) -> None:
    body = getattr(function, BODY, function)
    if getattr(function, "is_hypothesis_test", False) or getattr(body, "is_hypothesis_test", False):
        raise ValueError("it does not stack with @given yet; draw examples with @pytest.mark.parametrize instead")
    if inspect.iscoroutinefunction(body) or inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise ValueError("a loader is a plain function, not a coroutine or a generator")


def case_of(item: pytest.Item) -> Case | None:
    found = parameters(item).get(ARGUMENT)
    return found if isinstance(found, Case) else None


def mistakes(items: Iterable[pytest.Item], told: Collection[str]) -> Iterator[Mistake]:
    """Loaders that cannot be judged, and where ``fsdp`` is asked for though there is none. ``told`` are left out."""
    for item in items:
        if isinstance(item, pytest.Function):
            assert item.parent is not None
            where, what = f"{item.parent.nodeid}::{item.originalname}", _mistake(item)
            if what is not None and where not in told:
                yield Mistake(where, what)


def _mistake(item: pytest.Function) -> str | None:
    loader = item.get_closest_marker(MARK) is not None
    fixture = resolved_fixture(item, "fsdp")
    ours = fixture is not None and fixture.__module__ == __name__
    if loader and case_of(item) is None:
        return f"@{MARK}: a loader is a function, or a method of a plain class; pytest cannot parametrize this test"
    if loader and not ours and "fsdp" in requested_fixtures(item):
        return "the loader would get another 'fsdp' than that of pytest-fsdp-meta, which it hides; rename the other one"
    if not ours:
        return None
    asking = fixtures_asking_for(item, "fsdp")
    if asking:
        return (
            f"fixture {asking[0]!r} asks for 'fsdp', which exists on the ranks only, while fixtures are evaluated in "
            "the pytest process; ask for fsdp in the loader"
        )
    return None if loader else "it asks for 'fsdp' without being a loader; decorate it with @fsdp_conformance"
