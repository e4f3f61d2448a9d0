"""The worlds of tests that run on ranks themselves: which one a test gets, for how long, and what its failure says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pytest_fsdp_meta.calls import ASSUME, SKIP, VOTES
from pytest_fsdp_meta.collection import SKIPPED, WorldCase
from pytest_fsdp_meta.reports.listener import Ear
from pytest_fsdp_meta.words import name_ranks
from pytest_fsdp_meta.workers import Devices
from pytest_fsdp_meta.worlds import Engine, Lease, Pool, RankFailure, World, WorldError, WorldSpec


class Disagreement(Exception):
    """Some ranks left a test by skip, xfail or assume, and others did not."""


class Keeper:
    """One per pytest session: gives the test that is running its world, and ends worlds in their time."""

    def __init__(self, engine: Engine, ear: Ear, devices: Devices) -> None:
        self.engine = engine
        self.ear = ear
        self._devices = devices
        self._leases: dict[World, Lease] = {}
        """Held only while a test runs that uses the world: one that is kept for the next test is idle meanwhile."""
        self._pool = Pool(self._make)
        self._world: World | None = None
        """The running test's last one, and how much its ranks had written before the test."""
        self._mark: list[int] = []
        self._item: pytest.Item | None = None
        self._case: WorldCase | None = None

    def begin(self, item: pytest.Item, case: WorldCase) -> None:
        self._item, self._case, self._world = item, case, None

    @property
    def case(self) -> WorldCase:
        """That of the running test. Raises ValueError where it has none."""
        if self._case is None:
            raise ValueError("fsdp_world is there for the test that asks for it, and not after its end")
        return self._case

    def world(self) -> World:
        """The running test's world; a fresh one where it has none yet, or lost it. Raises WorldError and LeaseError."""
        assert self._item is not None
        world = self._pool.take(_owner(self._item, self.case.scope), self.case.spec)
        if world in self._leases:
            self._devices.resume(self._leases[world], self._item)
        if world is not self._world:
            self._world, self._mark = world, world.mark()
        return world

    def call(self, function: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Calls the function on the running test's ranks. Raises pytest's own skip or xfail where all ranks do."""
        __tracebackhide__ = True
        assert self._item is not None
        try:
            return self.world().call(function, args, kwargs, doing=f"running {self._item.name}", votes=VOTES)
        except WorldError as error:
            error.outputs = tuple(self.outputs())
            failure = error
        raised = _translated(failure)
        if isinstance(raised, pytest.skip.Exception):
            self._item.stash[SKIPPED] = str(raised)
        raise raised

    def outputs(self) -> list[str]:
        """What the ranks have written in the running test, those of its last world."""
        return self._world.outputs(self._mark) if self._world is not None else []

    def end(self, item: pytest.Item, following: pytest.Item | None) -> str:
        """After a test: ends what only it wanted, and tidies the rest. Says what it left that no other may meet."""
        case, self._item, self._case = self._case, None, None
        told = "" if case is None or case.scope == "function" else self._pool.tidy(_owner(item, case.scope))
        for scope in ("function", "module"):
            if following is None or _owner(item, scope) != _owner(following, scope):
                self._pool.end(_owner(item, scope))
        self._give_back()
        return told

    def _give_back(self) -> None:
        for world, lease in list(self._leases.items()):
            if world.spec.device_type != "cpu" and self._devices.wanted:
                world.close()  # it holds memory of its GPUs also while it is idle
            lease.release()
            if not world.alive:
                del self._leases[world]

    def close(self) -> None:
        self._pool.close()

    def _make(self, spec: WorldSpec) -> World:
        # Fixtures may have extended the search path since collection.
        self.engine.sources = replace(self.engine.sources, path=tuple(sys.path))
        assert self._item is not None
        placed, lease = self._devices.take(spec, self._item)
        world = World(placed, self.engine, listener=self.ear)
        if lease is not None:
            self._leases[world] = lease
        return world


def _owner(item: pytest.Item, scope: str) -> tuple[str, str]:
    """Whose world it is: the test's, its module's or the session's."""
    module = item.getparent(pytest.Module)
    nodes = {"function": item, "module": module or item, "session": item.session}
    return scope, nodes[scope].nodeid


def _translated(error: WorldError) -> BaseException:
    """What the ranks' failure means for the test."""
    if error.unanimous in VOTES:
        reason = "; ".join(dict.fromkeys(failure.message for failure in error.failures))
        return _vote(error.unanimous, reason)
    failed = [failure for failure in error.failures if failure.exception not in VOTES]
    if not failed:
        return Disagreement(_disagreement(error))
    if len(failed) < len(error.failures):
        return WorldError(failed, error.doing, error.outputs, error.label)
    return error.with_traceback(None)


def _vote(kind: str, reason: str) -> BaseException:
    if kind == SKIP:
        return pytest.skip.Exception(reason)
    if kind == ASSUME:
        from hypothesis.errors import UnsatisfiedAssumption

        return UnsatisfiedAssumption(reason)
    return pytest.xfail.Exception(reason)


def _disagreement(error: WorldError) -> str:
    said: dict[str, list[RankFailure]] = {}
    for failure in error.failures:
        reason = f" ({failure.message})" if failure.message else ""
        said.setdefault(VOTES[failure.exception] + reason, []).append(failure)
    parts = [f"{name_ranks(one.rank for one in failures)} {words}" for words, failures in said.items()]
    others = set(range(len(error.outputs))) - {failure.rank for failure in error.failures}
    if others:
        parts.append(f"{name_ranks(others)} did not")
    return f"{', but '.join(parts)}; all ranks have to agree, on what every rank knows alike"
