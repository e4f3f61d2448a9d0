"""TODO."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import pytest

from pytest_fsdp_meta.plugin._pytest_private import (
    fixtures_asking_for,
    parameters,
    requested_fixtures,
    resolved_fixture,
)
from pytest_fsdp_meta.plugin.collection import ARGUMENT, FIXTURES, case_of, place_of, values_of
from pytest_fsdp_meta.plugin.markers import MARK, SPMD, WORLD
from pytest_fsdp_meta.text import first_of


@dataclass(frozen=True)
class UsageProblem:
    """Where, and what is wrong there; ``where`` may be empty."""

    where: str
    what: str


def tell(usage_problems: Iterable[UsageProblem]) -> str:
    """One line for each mistake, however many tests make it."""
    places: dict[str, dict[str, None]] = {}
    for mistake in usage_problems:
        places.setdefault(mistake.what, {})[mistake.where] = None
    return "\n".join(_line(list(wheres), what) for what, wheres in places.items())


def _line(wheres: list[str], what: str) -> str:
    return f"{first_of(wheres)}: {what}" if wheres[0] else what


def late_checks(config: pytest.Config, known: tuple[object, ...]) -> Iterator[UsageProblem]:
    """Hooks of a ``conftest.py`` that pytest found only while collecting, when the catalogue was in use already."""
    for impl in config.hook.pytest_fsdp_checks.get_hookimpls():
        if impl.plugin not in known:
            yield UsageProblem(
                place_of(impl.plugin, config),
                "pytest found hook pytest_fsdp_checks too late, while collecting; move it to the conftest.py of the "
                "root folder, or name this folder in testpaths or on the command line",
            )


def usage_problems(items: Iterable[pytest.Item], told: Collection[str]) -> Iterator[UsageProblem]:
    """Loaders that cannot be judged, and where ``fsdp`` is asked for though there is none. ``told`` are left out."""
    for item in items:
        if isinstance(item, pytest.Function):
            assert item.parent is not None
            where, what = f"{item.parent.nodeid}::{item.originalname}", _mistake(item)
            if what is not None and where not in told:
                yield UsageProblem(where, what)


def duplicate_names(items: Iterable[pytest.Item], scheduled: bool) -> Iterator[UsageProblem]:
    """Loaders that are called alike, of which a report could tell one; and tests, where our own distribution over
    workers (``scheduled``) would run one of them, as xdist's own by scope does."""
    items = list(items)
    all_count = scheduled and any(case_of(item) for item in items)
    seen: dict[str, tuple[tuple[str, int], ...]] = {}
    for item in items:
        values = values_of(item)
        if seen.setdefault(item.nodeid, values) != values and (all_count or case_of(item) is not None):
            yield UsageProblem(
                item.nodeid,
                "two parametrizations give it this one name; tell them apart with pytest.param(..., id=...)",
            )


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
