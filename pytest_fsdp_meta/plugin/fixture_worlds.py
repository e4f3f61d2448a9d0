"""The worlds of ``@fsdp_spmd`` tests and ``fsdp_world``: which world a test gets, and when its ranks end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from pytest_fsdp_meta.loader.call import ASSUME, SKIPS, UNANIMOUS_OUTCOMES
from pytest_fsdp_meta.plugin import _pytest_private
from pytest_fsdp_meta.plugin.preloading import refresh
from pytest_fsdp_meta.plugin.rank_io.listener import RankListener
from pytest_fsdp_meta.plugin.xdist_workers import Devices
from pytest_fsdp_meta.text import grouped, name_ranks
from pytest_fsdp_meta.worlds import Engine, Lease, Pool, RankFailure, World, WorldError, WorldSpec

PATIENCE = 5.0
"""Seconds to wait, after a test, for a thread of it to notice that the ranks it calls have ended."""
PRIVATE = ("PYTEST_CURRENT_TEST",)
"""Environment variables that differ between tests: ranks that are reused need not follow them."""


class Disagreement(Exception):
    """Some ranks left a test by skip, xfail or assume, and others did not."""


class FixtureWorlds:
    """Gives the running test its world, and ends worlds after their last test. One per pytest session."""

    def __init__(self, engine: Engine, listener: RankListener, devices: Devices) -> None:
        self.listener = listener
        self._engine = engine
        self._devices = devices
        self._leases: dict[World, Lease] = {}
        """Held only while a test uses the world, so that other workers can use the devices of an idle one."""
        self._pool = Pool(self._make, private=PRIVATE)
        self._world: World | None = None
        """The last world of the running test."""
        self._mark: list[int] = []
        """How much each rank of that world had written before the test."""
        self._running: tuple[pytest.Item, WorldSpec, str] | None = None
        """The running test, with the spec and the scope of its world."""
        self._turn = threading.RLock()
        """Held while ranks are started or called."""

    def begin(self, item: pytest.Item, world: WorldSpec, scope: str) -> None:
        """Start with a test, before its fixtures."""
        self._running, self._world = (item, world, scope), None

    @property
    def spec(self) -> WorldSpec:
        """The spec of the running test's world. Raises ValueError outside of a test that requested a world."""
        __tracebackhide__ = True
        return self._running_test()[1]

    def _running_test(self) -> tuple[pytest.Item, WorldSpec, str]:
        __tracebackhide__ = True
        if self._running is None:
            raise ValueError(
                "fsdp_world: no test that requested it is running; a test, or one of its fixtures, should take it as "
                "an argument, and not use it after the test"
            )
        return self._running

    def world(self) -> World:
        """Return the running test's world, started if the test has none yet or its ranks have ended.

        Raises WorldError where ranks cannot start, and LeaseError where devices cannot be leased.
        """
        item, spec, scope = self._running_test()
        with self._turn_taken():
            world = self._pool.take(_owner(item, scope), spec)
            if world in self._leases:
                self._devices.resume(self._leases[world], item)
            if world is not self._world:
                self._world, self._mark = world, world.mark()
        return world

    @contextmanager
    def _turn_taken(self) -> Iterator[None]:
        """Refuse a second call instead of waiting: two would mix up answers, and the first call may hang."""
        if not self._turn.acquire(blocking=False):
            raise ValueError("fsdp_world: a call from another thread is running; make one call at a time")
        try:
            yield
        finally:
            self._turn.release()

    def call(self, function: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call the function on the running test's ranks and return their results.

        Raises pytest's skip or xfail where all ranks do, Disagreement where only some do, and WorldError for failures.
        """
        __tracebackhide__ = True
        item = self._running_test()[0]
        try:
            with self._turn_taken():
                return self.world().call(
                    function, args, kwargs, doing=f"running {item.name}", unanimous_outcomes=UNANIMOUS_OUTCOMES
                )
        except WorldError as error:
            error.outputs = tuple(self.outputs())
            failure = error
        raise _exception_for(failure)

    def outputs(self) -> list[str]:
        """Return what each rank of the last world has written during the running test."""
        return self._world.outputs(self._mark) if self._world is not None else []

    def show_outputs(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Add what ranks wrote to the report of a phase that did not pass, without what earlier phases showed."""
        if call.excinfo is None:
            return
        self.listener.show(item, call.when, enumerate(self.outputs()))
        if self._world is not None:
            self._mark = self._world.mark()

    @contextmanager
    def tearing_down(self, item: pytest.Item, following: pytest.Item | None) -> Iterator[None]:
        """Clean up after the fixtures' own teardown, which may use the world; an error of theirs takes precedence."""
        try:
            yield
        except BaseException:
            self._end_test(item, following)
            raise
        if problem := self._end_test(item, following):
            pytest.fail(problem, pytrace=False)

    def _end_test(self, item: pytest.Item, following: pytest.Item | None) -> str:
        """End the worlds that no later test uses and reset the others; return why one could not be reset."""
        running, self._running = self._running, None
        problem = "" if running is None else self._reset_world(running[0], running[2])
        for scope in ("function", "module"):
            if following is None or _owner(item, scope) is not _owner(following, scope):
                self._pool.end(_owner(item, scope))
        self._release_leases()
        if self._turn.acquire(timeout=PATIENCE):  # a thread that is still in a call is about to see the ranks end
            self._turn.release()
        return problem

    def _reset_world(self, item: pytest.Item, scope: str) -> str:
        owner = _owner(item, scope)
        try:
            with self._turn_taken():
                return self._pool.end_test(owner)
        except ValueError:
            self._pool.end(owner)
            if scope == "function":
                return ""  # no other test was to use these ranks
            return (
                "the test ended while one of its threads was calling the ranks, so they were ended; join the thread "
                "before the test returns"
            )

    def _release_leases(self) -> None:
        for world, lease in list(self._leases.items()):
            if world.spec.on_gpus and lease.wanted():
                world.close()  # an idle world keeps GPU memory, which another worker is waiting for
            lease.release()
            if not world.alive:
                del self._leases[world]

    def close(self) -> None:
        """End all worlds, at the end of the session."""
        self._pool.close()
        self._release_leases()

    def _make(self, spec: WorldSpec) -> World:
        refresh(self._engine)
        placed_spec, lease = self._devices.take(spec, self._running_test()[0])
        world = World(placed_spec, self._engine, listener=self.listener)
        if lease is not None:
            self._leases[world] = lease
        self._world, self._mark = world, []  # set before it starts: its output may say why it cannot
        return world


def _owner(item: pytest.Item, scope: str) -> pytest.Item | pytest.Collector:
    """Return the node that owns a world of this scope: the test, its module or the session.

    Nodes are compared by identity, not by name: with ``--keep-duplicates`` a test may be collected twice.
    """
    nodes = {"function": item, "module": item.getparent(pytest.Module) or item, "session": item.session}
    return nodes[scope]


def _exception_for(error: WorldError) -> BaseException:
    if error.unanimous in UNANIMOUS_OUTCOMES:
        reason = "; ".join(dict.fromkeys(failure.message for failure in error.failures))
        if error.unanimous in SKIPS:
            return _pytest_private.skipped(reason)
        if error.unanimous != ASSUME:
            return pytest.xfail.Exception(reason)
        from hypothesis.errors import UnsatisfiedAssumption

        return UnsatisfiedAssumption(reason)
    failed = [failure for failure in error.failures if failure.exception not in UNANIMOUS_OUTCOMES]
    if not failed:
        return Disagreement(_describe_disagreement(error))
    if len(failed) < len(error.failures):
        return WorldError(failed, error.doing, error.outputs, error.label)
    return error.with_traceback(None)


def _describe_disagreement(error: WorldError) -> str:
    def outcome(failure: RankFailure) -> str:
        return UNANIMOUS_OUTCOMES[failure.exception] + (f" ({failure.message})" if failure.message else "")

    by_outcome = grouped((outcome(failure), failure.rank) for failure in error.failures)
    parts = [f"{name_ranks(ranks)} {outcome}" for outcome, ranks in by_outcome.items()]
    others = set(range(len(error.outputs))) - {failure.rank for failure in error.failures}
    if others:
        parts.append(f"{name_ranks(others)} did not")
    return f"{', but '.join(parts)}; all ranks should agree, so decide by something that is the same on every rank"
