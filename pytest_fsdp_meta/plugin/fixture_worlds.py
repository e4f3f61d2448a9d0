"""The worlds of tests that run on ranks themselves: which one a test gets, for how long, and what its failure says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from pytest_fsdp_meta.loader.call import ASSUME, SKIPS, UNANIMOUS_OUTCOMES
from pytest_fsdp_meta.plugin.collection import SKIPPED, WorldCase
from pytest_fsdp_meta.plugin.preloading import refresh
from pytest_fsdp_meta.plugin.rank_io.listener import RankListener
from pytest_fsdp_meta.plugin.xdist_workers import Devices
from pytest_fsdp_meta.text import name_ranks
from pytest_fsdp_meta.worlds import Engine, Lease, Pool, RankFailure, World, WorldError, WorldSpec

PATIENCE = 5.0
"""Seconds for a thread to see that the ranks it has called have ended."""
PRIVATE = ("PYTEST_CURRENT_TEST",)
"""Another one for every phase of every test, in the parent."""


class Disagreement(Exception):
    """Some ranks left a test by skip, xfail or assume, and others did not."""


class FixtureWorlds:
    """One per pytest session: gives the test that is running its world, and ends worlds in their time."""

    def __init__(self, engine: Engine, ear: RankListener, devices: Devices) -> None:
        self.engine = engine
        self.ear = ear
        self._devices = devices
        self._leases: dict[World, Lease] = {}
        """Held only while a test runs that uses the world: one that is kept for the next test is idle meanwhile."""
        self._pool = Pool(self._make, private=PRIVATE)
        self._world: World | None = None
        """The running test's last one, and how much its ranks had written before the test."""
        self._mark: list[int] = []
        self._test: tuple[pytest.Item, WorldCase] | None = None
        self._turn = threading.RLock()
        """Held while ranks are started or called."""

    def begin(self, item: pytest.Item, case: WorldCase) -> None:
        self._test, self._world = (item, case), None

    @property
    def case(self) -> WorldCase:
        """That of the running test. Raises ValueError where it has none."""
        __tracebackhide__ = True
        return self._running[1]

    @property
    def _running(self) -> tuple[pytest.Item, WorldCase]:
        __tracebackhide__ = True
        if self._test is None:
            raise ValueError(
                "fsdp_world: no test is running that asked for it; the test, or a fixture of it, has to name it as an "
                "argument, and to be done with it when the test ends"
            )
        return self._test

    def world(self) -> World:
        """The running test's world; a fresh one where it has none yet, or lost it. Raises WorldError and LeaseError."""
        item, case = self._running
        with self._alone():
            world = self._pool.take(_owner(item, case.scope), case.spec)
            if world in self._leases:
                self._devices.resume(self._leases[world], item)
            if world is not self._world:
                self._world, self._mark = world, world.mark()
        return world

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two calls at a time would take each other's answers, and nobody should wait for a call that may hang."""
        if not self._turn.acquire(blocking=False):
            raise ValueError("fsdp_world: another thread's call runs, and ranks run one after the other; take turns")
        try:
            yield
        finally:
            self._turn.release()

    def call(self, function: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Calls the function on the running test's ranks. Raises pytest's own skip or xfail where all ranks do."""
        __tracebackhide__ = True
        item, _ = self._running
        try:
            with self._alone():
                return self.world().call(
                    function, args, kwargs, doing=f"running {item.name}", unanimous_outcomes=UNANIMOUS_OUTCOMES
                )
        except WorldError as error:
            error.outputs = tuple(self.outputs())
            failure = error
        raised = _translated(failure)
        if isinstance(raised, pytest.skip.Exception):
            item.stash[SKIPPED] = str(raised)
        raise raised

    def outputs(self) -> list[str]:
        """What the ranks have written in the running test, those of its last world."""
        return self._world.outputs(self._mark) if self._world is not None else []

    def show_outputs(self, item: pytest.Item, when: str) -> None:
        """With the report of this phase, what no earlier phase of the test has shown."""
        self.ear.show(item, when, self.outputs())
        if self._world is not None:
            self._mark = self._world.mark()

    def end(self, item: pytest.Item, following: pytest.Item | None) -> str:
        """After a test: ends what only it wanted, and tidies the rest. Says what it left that no other may meet."""
        test, self._test = self._test, None
        told = "" if test is None else self._tidied(*test)
        for scope in ("function", "module"):
            if following is None or _owner(item, scope) is not _owner(following, scope):
                self._pool.end(_owner(item, scope))
        self._give_back()
        if self._turn.acquire(timeout=PATIENCE):  # a thread that still calls ranks is about to see that they have ended
            self._turn.release()
        return told

    def _tidied(self, item: pytest.Item, case: WorldCase) -> str:
        owner = _owner(item, case.scope)
        try:
            with self._alone():
                return self._pool.tidy(owner)
        except ValueError:
            self._pool.end(owner)
            if case.scope == "function":
                return ""  # nobody else was to have these ranks
            return "the test has ended while a thread of it still called the ranks, so they were ended; join it before"

    def _give_back(self) -> None:
        for world, lease in list(self._leases.items()):
            if world.spec.device_type != "cpu" and self._devices.wanted:
                world.close()  # it holds memory of its GPUs also while it is idle
            lease.release()
            if not world.alive:
                del self._leases[world]

    def close(self) -> None:
        self._pool.close()
        self._give_back()

    def _make(self, spec: WorldSpec) -> World:
        refresh(self.engine)
        placed, lease = self._devices.take(spec, self._running[0])
        world = World(placed, self.engine, listener=self.ear)
        if lease is not None:
            self._leases[world] = lease
        self._world, self._mark = world, []  # it may say why it cannot start
        return world


def _owner(item: pytest.Item, scope: str) -> pytest.Item | pytest.Collector:
    """Whose world it is: the test's, its module's or the session's. Not by name: a test may be there twice."""
    nodes = {"function": item, "module": item.getparent(pytest.Module) or item, "session": item.session}
    return nodes[scope]


def _translated(error: WorldError) -> BaseException:
    """What the ranks' failure means for the test."""
    if error.unanimous in UNANIMOUS_OUTCOMES:
        reason = "; ".join(dict.fromkeys(failure.message for failure in error.failures))
        return _vote(error.unanimous, reason)
    failed = [failure for failure in error.failures if failure.exception not in UNANIMOUS_OUTCOMES]
    if not failed:
        return Disagreement(_disagreement(error))
    if len(failed) < len(error.failures):
        return WorldError(failed, error.doing, error.outputs, error.label)
    return error.with_traceback(None)


def _vote(kind: str, reason: str) -> BaseException:
    if kind in SKIPS:
        return pytest.skip.Exception(reason)
    if kind == ASSUME:
        from hypothesis.errors import UnsatisfiedAssumption

        return UnsatisfiedAssumption(reason)
    return pytest.xfail.Exception(reason)


def _disagreement(error: WorldError) -> str:
    said: dict[str, list[RankFailure]] = {}
    for failure in error.failures:
        reason = f" ({failure.message})" if failure.message else ""
        said.setdefault(UNANIMOUS_OUTCOMES[failure.exception] + reason, []).append(failure)
    parts = [f"{name_ranks(one.rank for one in failures)} {words}" for words, failures in said.items()]
    others = set(range(len(error.outputs))) - {failure.rank for failure in error.failures}
    if others:
        parts.append(f"{name_ranks(others)} did not")
    return f"{', but '.join(parts)}; all ranks have to agree, on what every rank knows alike"
