"""The two fixtures: ``fsdp`` is the rank, on the ranks; ``fsdp_world`` calls ranks from the pytest process."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import pytest

from pytest_fsdp_meta.plugin.fixture_worlds import FixtureWorlds
from pytest_fsdp_meta.plugin.pickling import Unsendable, pack_run
from pytest_fsdp_meta.plugin.session import SESSION
from pytest_fsdp_meta.plugin.spmd_rank import FUNCTION

RANK_ATTRIBUTES = ("rank", "local_rank", "world_size", "device", "mesh", "barrier")


class FsdpWorld:
    """The ranks of the test that requested this fixture; ``run`` calls a function on every one of them."""

    def __init__(self, worlds: FixtureWorlds) -> None:
        self._worlds = worlds

    @property
    def size(self) -> int:
        return self._worlds.spec.size

    @property
    def mesh(self) -> Mapping[str, int]:
        """Sizes by dimension name; the DeviceMesh itself is on the ranks: ``current().mesh``."""
        return dict(self._worlds.spec.mesh)

    @property
    def device_type(self) -> str:
        return self._worlds.spec.device_type

    @property
    def backend(self) -> str:
        return self._worlds.spec.backend

    def run(self, function: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``function`` on every rank and return the results in rank order.

        ``function`` is "module:name" or any callable that cloudpickle can pickle. Raises WorldError, with the
        traceback of every failed rank, when a rank raises, ends or does not answer in time; the ranks are ended then,
        and the next call gets fresh ones. Raises ValueError for arguments that cannot be pickled, for results that
        cannot be unpickled, outside of a test that requested the fixture, and while a call from another thread runs.
        A skip or xfail that all ranks raise becomes the test's.
        """
        __tracebackhide__ = True
        if isinstance(function, str) and re.fullmatch(r"[\w.]+:\w+", function):
            results = self._worlds.call(function, args, kwargs)
        elif callable(function):
            try:
                packed = pack_run(function, args, kwargs)
            except Unsendable as error:
                raise ValueError(str(error)) from None
            results = self._worlds.call(FUNCTION, packed, {})
        else:
            raise ValueError(f"fsdp_world.run: {function!r} should be a function, or its name as 'module:name'")
        self._worlds.listener.warn()  # here, so that pytest.warns around the call sees the ranks' warnings
        return results

    def outputs(self) -> list[str]:
        """Return what each rank has written to stdout and stderr."""
        return self._worlds.outputs()

    def __reduce__(self) -> NoReturn:
        raise TypeError("fsdp_world exists in the pytest process only; pass plain values to functions on ranks")

    def __repr__(self) -> str:
        return f"<fsdp_world of {self.size} ({self.backend} on {self.device_type})>"


class OnRanksOnly:
    """The value of ``fsdp`` in the pytest process: it has no attributes of a rank, and says so."""

    def __getattr__(self, name: str) -> NoReturn:
        __tracebackhide__ = True
        if name not in RANK_ATTRIBUTES:
            raise AttributeError(name)  # pytest, Hypothesis and pretty-printers probe any value for attributes
        pytest.fail(
            f"fsdp.{name}: 'fsdp' exists on the ranks only; request it as an argument of a loader or an SPMD test",
            pytrace=False,
        )

    def __repr__(self) -> str:
        return "fsdp"


# Session scope, though each test gets its own rank or world: Hypothesis warns of function-scoped fixtures in @given
# tests, because all examples share their values; these two values do not depend on the test.
@pytest.fixture(scope="session")
def fsdp() -> OnRanksOnly:
    """On a rank: rank, local_rank, world_size, device (with its index), mesh, barrier()."""
    return OnRanksOnly()


@pytest.fixture(scope="session")
def fsdp_world(pytestconfig: pytest.Config) -> FsdpWorld:
    """Call functions on ranks with fsdp_world.run(function, *args); @pytest.mark.fsdp_world sets size and mesh."""
    return FsdpWorld(pytestconfig.stash[SESSION].worlds)
