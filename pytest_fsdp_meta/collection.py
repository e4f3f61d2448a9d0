"""Collection: one item per check of a marked loader, and one clear line for every misuse."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from pytest_fsdp_meta._pytest_private import fixtures_asking_for, resolved_fixture
from pytest_fsdp_meta.catalogue import Catalogue
from pytest_fsdp_meta.markers import MARK, Order, read_order
from pytest_fsdp_meta.settings import Settings
from pytest_fsdp_meta.worlds import WorldSpec, choose

ARGUMENT = "_fsdp_case"
"""The parametrized argument that makes one loader into many items."""


@dataclass(frozen=True)
class Case:
    """One item's share: which check, of which order, in which world."""

    check: str
    order: Order
    spec: WorldSpec


@pytest.fixture
def fsdp(request: pytest.FixtureRequest) -> None:
    """On a rank: rank, local_rank, world_size, device (with its index), mesh, barrier(). For loaders only."""
    raise pytest.UsageError("the fixture 'fsdp' exists on ranks only; ask for it in a loader, not through getfixturevalue")


def generate(metafunc: pytest.Metafunc, settings: Settings, catalogue: Catalogue, gpus: int) -> None:
    """Parametrizes a marked test with its cases. Raises ValueError for arguments that are wrong."""
    marker = metafunc.definition.get_closest_marker(MARK)
    if marker is None:
        return
    _require_plain_function(metafunc.function)
    order = read_order(marker.args, marker.kwargs, settings.world_sizes, catalogue)
    cases = [_case(order, mesh, check, settings, gpus) for mesh in order.meshes for check in order.checks]
    several = len(order.meshes) > 1
    metafunc.fixturenames.append(ARGUMENT)
    metafunc.parametrize(
        ARGUMENT,
        [
            pytest.param(
                case,
                id=f"world{case.spec.size}-{case.check}" if several else case.check,
                marks=[pytest.mark.skip(reason=order.skip[case.check])] if case.check in order.skip else [],
            )
            for case in cases
        ],
    )


def _case(order: Order, mesh: dict[str, int], check: str, settings: Settings, gpus: int) -> Case:  # type: ignore[misc]
    spec = WorldSpec(mesh, timeout=order.timeout or settings.timeout, process_group=order.process_group)
    device, backend = choose(spec.size, settings.device, settings.backend, gpus, settings.require_gpu)
    devices = tuple(rank % gpus for rank in range(spec.size)) if device == "cuda" else ()
    spec = WorldSpec(mesh, device, backend, spec.timeout, spec.process_group, devices)
    return Case(check, order, spec)


def _require_plain_function(function: object) -> None:
    body = getattr(function, "__fsdp_body__", function)
    if getattr(function, "is_hypothesis_test", False) or getattr(body, "is_hypothesis_test", False):
        raise ValueError("it does not stack with @given yet; draw examples with @pytest.mark.parametrize instead")
    if inspect.iscoroutinefunction(body) or inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise ValueError("a loader is a plain function, not a coroutine or a generator")


def case_of(item: pytest.Item) -> Case | None:
    callspec = getattr(item, "callspec", None)
    found = callspec.params.get(ARGUMENT) if callspec is not None else None
    return found if isinstance(found, Case) else None


def misuses(items: list[pytest.Item]) -> Iterator[str]:
    """Where ``fsdp`` is asked for though there is none."""
    for item in items:
        if not isinstance(item, pytest.Function) or resolved_fixture(item, "fsdp") is not fsdp_function():
            continue
        asking = fixtures_asking_for(item, "fsdp")
        if asking:
            yield (
                f"{item.nodeid}: fixture {asking[0]!r} asks for 'fsdp', which exists on the ranks only, while fixtures are "
                "evaluated in the pytest process; ask for fsdp in the loader"
            )
        elif item.get_closest_marker(MARK) is None:
            yield f"{item.nodeid}: it asks for 'fsdp' without being a loader; decorate it with @fsdp_conformance"


def fsdp_function() -> object:
    return getattr(fsdp, "_get_wrapped_function", lambda: fsdp)()
