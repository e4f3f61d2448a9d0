"""Report usage errors in test files: one line each, with the test, the problem and the fix."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import pytest

from pytest_fsdp_meta.plugin import _pytest_private, xdist_workers
from pytest_fsdp_meta.plugin.collection import ARGUMENT, Case
from pytest_fsdp_meta.plugin.items import RanksItem
from pytest_fsdp_meta.plugin.loader_items import LoaderItem
from pytest_fsdp_meta.plugin.markers import MARK, SPMD, WORLD
from pytest_fsdp_meta.plugin.session import PluginSession, place_of
from pytest_fsdp_meta.text import first_of, grouped

LAUNCHERS = {"torchrun": ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"), "srun": ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")}
"""Programs that start several processes -> a variable that only they set, and the one with the number."""
FIXTURES = "pytest_fsdp_meta.plugin.fixtures"
"""The module of this plugin's own fixtures."""
LATE = (
    "pytest found the hook pytest_fsdp_checks only during collection, which is too late; move it to the conftest.py of "
    "the root folder, or name this folder in testpaths or on the command line"
)


def check_usage(session: PluginSession, items: list[pytest.Item]) -> None:
    """Raise one UsageError if collected tests cannot work, for example because they combine two markers.

    It has one line per problem, however many tests or files have it.
    An xdist worker raises nothing, because the controller would replace it; the controller raises instead.
    """
    found = session.usage_problems
    reported = {where for where, _ in found}
    tests = [(_test_of(item), _problem(item)) for item in items if isinstance(item, pytest.Function)]
    problems = [(where, what) for where, what in tests if what is not None and where not in reported]
    duplicates = _duplicate_names(items, scheduled=hasattr(session.config, "workerinput"))
    late = [plugin for plugin in session.check_plugins() if plugin not in session.known_plugins]
    late_checks = [(place_of(plugin, session.config), LATE) for plugin in late]
    _report(session.config, items, [*found, *late_checks, *problems, *duplicates])


def check_devices(session: PluginSession, selected: list[pytest.Item]) -> None:
    """Raise one UsageError, as ``check_usage`` does, for worlds that lack GPUs, or if pytest itself is a rank."""
    problems = []
    for item in selected:
        case = _pytest_private.parameters(item).get(ARGUMENT)
        if isinstance(item, pytest.Function) and isinstance(case, Case) and case.lacking:
            problems.append((_test_of(item), case.lacking))
    if any(isinstance(item, RanksItem) for item in selected):
        problems += _started_as_rank()
    _report(session.config, selected, problems)


def _started_as_rank() -> Iterator[tuple[str, str]]:
    for launcher, (own, size) in LAUNCHERS.items():
        if own in os.environ and os.environ.get(size, "1") != "1":
            found = f"found {size}={os.environ[size]} of {launcher}"
            yield "pytest-fsdp-meta", f"run pytest once, without {launcher}; it starts the ranks itself ({found})"


def _report(config: pytest.Config, items: list[pytest.Item], problems: Iterable[tuple[str, str]]) -> None:
    is_worker = hasattr(config, "workerinput")
    # A value, such as an array, may have several lines.
    places = grouped((" ".join(what.split()), where) for where, what in problems)
    message = "\n".join(f"{first_of(list(dict.fromkeys(wheres)))}: {what}" for what, wheres in places.items())
    if message and is_worker:
        config.workeroutput[xdist_workers.USAGE_ERROR] = message  # type: ignore[attr-defined]
        items.clear()
    elif message:
        raise pytest.UsageError(message)


def _test_of(item: pytest.Function) -> str:
    assert item.parent is not None
    return f"{item.parent.nodeid}::{item.originalname}"


def _duplicate_names(items: Sequence[pytest.Item], scheduled: bool) -> Iterator[tuple[str, str]]:
    """Yield items that share a node id though their parameters differ.

    A report could show only one of two such loaders. Only one of two such tests would run if this plugin distributes
    items over xdist's workers (``scheduled``), which it does if any item is a loader's.
    """
    all_count = scheduled and any(isinstance(item, LoaderItem) for item in items)
    seen: dict[str, tuple[tuple[str, int], ...]] = {}
    for item in items:
        values = tuple(
            (name, id(value)) for name, value in _pytest_private.parameters(item).items() if name != ARGUMENT
        )
        if seen.setdefault(item.nodeid, values) != values and (all_count or isinstance(item, LoaderItem)):
            yield (
                item.nodeid,
                "two parametrizations have this node id; give them different ids with pytest.param(..., id=...)",
            )


def _problem(item: pytest.Function) -> str | None:
    loader, spmd = (item.get_closest_marker(mark) is not None for mark in (MARK, SPMD))
    if loader and spmd:
        return f"@{MARK} and @{SPMD} cannot be combined: a test is either a loader or a body for every rank; remove one"
    on_ranks = MARK if loader else SPMD if spmd else ""
    own = [mark.name for mark in item.own_markers]
    twice = [mark for mark in (MARK, SPMD, WORLD) if own.count(mark) > 1]
    if twice:
        return f"@{twice[0]} is applied twice; merge the two (for several sizes: world_size=(2, 4))"
    return _not_parametrized(item, on_ranks) or _misplaced_world(item, on_ranks) or _misplaced_rank(item, on_ranks)


def _not_parametrized(item: pytest.Function, on_ranks: str) -> str | None:
    requests = WORLD in item.fixturenames and _is_ours(item, WORLD)
    if isinstance(item, RanksItem) or not (on_ranks or requests):
        return None
    who = {MARK: f"@{MARK}: a loader", SPMD: f"@{SPMD}: an SPMD test"}.get(
        on_ranks, f"a test that requests fixture {WORLD!r}"
    )
    return (
        f"{who} should be a function or a method of a plain class; pytest cannot parametrize methods of "
        "unittest.TestCase"
    )


def _misplaced_world(item: pytest.Function, on_ranks: str) -> str | None:
    marked = any(mark.name == WORLD for mark in item.own_markers)
    if on_ranks and marked:
        return f"@pytest.mark.{WORLD} configures fixture {WORLD!r} only; pass its arguments to @{on_ranks}"
    if marked and WORLD not in item.fixturenames:
        return (
            f"@pytest.mark.{WORLD} configures fixture {WORLD!r}, which the test does not request, so nothing would "
            f"run on ranks; request the fixture, or use @{SPMD}"
        )
    if on_ranks and WORLD in item.fixturenames:
        return (
            f"fixture {WORLD!r} exists in the pytest process only, but @{on_ranks} runs the test on ranks; remove the "
            "fixture"
        )
    return None


def _misplaced_rank(item: pytest.Function, on_ranks: str) -> str | None:
    if not _is_ours(item, "fsdp"):
        hidden = on_ranks and "fsdp" in _pytest_private.requested_fixtures(item)
        what = "another fixture or parameter 'fsdp' overrides the fixture of pytest-fsdp-meta; rename the other one"
        return what if hidden else None
    requesting = _pytest_private.fixtures_asking_for(item, "fsdp")
    if requesting:
        return (
            f"fixture {requesting[0]!r} requests 'fsdp', which exists on the ranks only, while fixtures run in the "
            "pytest process; request fsdp in the test itself"
        )
    if on_ranks:
        return None
    return f"the test requests 'fsdp', which exists on the ranks only; decorate it with @{MARK} or @{SPMD}"


def _is_ours(item: pytest.Function, name: str) -> bool:
    """Return whether the item gets this plugin's fixture under this name."""
    fixture = _pytest_private.resolved_fixture(item, name)
    return fixture is not None and fixture.__module__ == FIXTURES
